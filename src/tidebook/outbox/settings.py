"""The `[outbox]` section of `tidebook.toml`."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidebook.core.errors import InvalidInput

BackendName = Literal["db", "kafka", "kafka_async", "test"]
FENCE_S_MIN = 0.01
DAY_S = 86_400


class OutboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages are published and relayed.

    >>> OutboxSettings(lock_limit_s=60).fence_ms
    20000
    """

    #: The backend of `book.outbox.publish`: `db`, `kafka`, `kafka_async` or `test`.
    backend: BackendName = "db"

    #: How Kafka fences a relay that was stopped and continues too late.
    fence: Literal["timestamp", "transaction", "none"] = "timestamp"
    #: A relay loses the lock of its topic after this time without a heartbeat.
    lock_limit_s: float = 60.0
    #: `timestamp`: how old a batch may be when Kafka accepts it; by default a third of the lock limit. The clocks of
    #: database and brokers may differ by at most the difference of the two.
    fence_s: float | None = None
    #: Whether the relay may set `message.timestamp.before.max.ms` of the topics it sends to.
    configure_topics: bool = True
    #: Whether the relay creates a missing topic; otherwise its messages wait until the topic exists.
    create_topics: bool = True

    #: The maximum number of topics that a relay relays concurrently.
    threads: int = 1
    #: The maximum number of messages in a batch.
    batch_rows: int = 1000
    #: The maximum number of bytes in a batch.
    batch_bytes: int = 16_000_000
    #: The relay releases a topic after this many full batches, so that others are relayed too.
    hold_batches_max: int = 100
    #: How long a topic rests after an error.
    rest_s: float = 60.0
    #: The interval at which a relay polls the database when nothing wakes it.
    poll_s: float = 0.5
    #: How long a relay that is asked to stop may take to complete the batch in flight.
    stop_s: float = 15.0

    #: How many times a message that Kafka refuses is tried before it is parked.
    park_after_tries: int = 1
    #: Whether later messages of a parked message's key are held, or sent.
    parked: Literal["hold_key", "skip"] = "hold_key"
    #: Whether missing tables are created when a book's outbox is first used.
    create_tables: bool = True

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:  # NaN is refused too
                raise InvalidInput(f"[outbox] {name} must be from {least:,} to {most:,}")
        if self.fence_s is not None and not FENCE_S_MIN <= self.fence_s <= self.lock_limit_s / 2:
            raise InvalidInput(f"[outbox] fence_s must be from {FENCE_S_MIN:g} to half of lock_limit_s")

    @property
    def lock_limit_ms(self) -> int:
        return round(self.lock_limit_s * 1000)

    @property
    def fence_ms(self) -> int:
        return round((self.fence_s or self.lock_limit_s / 3) * 1000)


#: The bounds of each setting: with a lock limit below a round trip, a relay would never complete a batch.
_BOUNDS: dict[str, tuple[float, float]] = {
    "lock_limit_s": (0.1, DAY_S),
    "threads": (1, 1_000),
    "batch_rows": (1, 1_000_000),
    "batch_bytes": (1, 1_000_000_000),
    "hold_batches_max": (1, 1_000_000),
    "rest_s": (0.001, DAY_S),
    "poll_s": (0.001, DAY_S),
    "stop_s": (0.001, DAY_S),
    "park_after_tries": (1, 30_000),
}
