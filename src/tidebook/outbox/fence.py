"""The fences of the outbox: mechanisms that keep a relay that lost its lock from sending late."""

from __future__ import annotations

from enum import StrEnum


class Fence(StrEnum):
    """The mechanism that keeps a relay that lost its lock from sending late; a session stores its fence.

    >>> Fence("none").may_arrive_late, Fence("lock").may_arrive_late
    (True, False)
    """

    #: The broker rejects records that are older than `fence_ms`.
    TIMESTAMP = "timestamp"
    #: Kafka's producer epoch: a new channel of the topic fences every older one.
    TRANSACTION = "transaction"
    #: The embedded log's file lock, which a stopped process keeps.
    LOCK = "lock"
    #: No mechanism, but a journal applies each append id once, so that a session can be sent again.
    APPEND_ID = "append_id"
    #: No mechanism: a late message may be a duplicate.
    NONE = "none"

    @property
    def may_arrive_late(self) -> bool:
        """Whether messages can arrive until the lock limit has passed, so that a scan has to wait for that."""
        return self in {Fence.TIMESTAMP, Fence.NONE}
