"""The interface of every queue that is compared."""

from __future__ import annotations

from typing import Protocol

BATCH = 100
PAYLOAD = b"x" * 100


class Side(Protocol):
    """A queue that is compared with others on one PostgreSQL server, with the same durability."""

    name: str

    async def open(self) -> None:
        """Create empty tables."""
        ...

    async def put(self, count: int, *, tasks: int) -> None:
        """Put this many entries in batches of BATCH, by this many concurrent tasks."""
        ...

    async def drain(self, *, connections: int) -> int:
        """Claim and finish all entries in batches of BATCH."""
        ...

    async def singles(self, *, workers: int) -> int:
        """Claim and finish all entries one at a time."""
        ...

    async def close(self) -> None:
        """Drop the tables."""
        ...
