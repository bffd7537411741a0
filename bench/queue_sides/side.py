"""What the benchmark asks of every queue."""

from __future__ import annotations

from typing import Protocol

BATCH = 100
PAYLOAD = b"x" * 100


class Side(Protocol):
    """A queue on the same PostgreSQL, with the same durability."""

    name: str

    async def open(self) -> None:
        """Make its tables, empty."""
        ...

    async def put(self, count: int, *, tasks: int) -> None:
        """Put this many entries in batches of BATCH, by this many tasks at one time."""
        ...

    async def drain(self, *, connections: int) -> int:
        """Claim and finish everything in batches of BATCH."""
        ...

    async def singles(self, *, workers: int) -> int:
        """Claim and finish everything one at a time."""
        ...

    async def close(self) -> None:
        """Remove its tables."""
        ...
