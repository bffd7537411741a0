"""The fences of the outbox: mechanisms that stop a relay from sending messages after it has lost its lock."""

from __future__ import annotations

from enum import StrEnum


class Fence(StrEnum):
    """The mechanism that stops a relay from sending messages after it has lost its lock; each session stores its fence.

    >>> Fence("none").may_arrive_late, Fence("lock").may_arrive_late
    (True, False)
    """

    #: The broker rejects records that are older than `fence_ms`.
    TIMESTAMP = "timestamp"
    #: Kafka's producer epoch: a new channel of the topic fences every older one.
    TRANSACTION = "transaction"
    #: The embedded log's file lock: a process that is suspended still holds it.
    LOCK = "lock"
    #: No mechanism is needed: a journal applies each append id once, so a session can safely be sent again.
    APPEND_ID = "append_id"
    #: No mechanism: a late message may be a duplicate.
    NONE = "none"

    @property
    def may_arrive_late(self) -> bool:
        """Whether messages of the former relay can arrive until the lock limit has passed; a scan waits until then."""
        return self in {Fence.TIMESTAMP, Fence.NONE}
