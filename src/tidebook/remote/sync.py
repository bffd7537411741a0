"""The outbox of a server's book for threads without an event loop."""

from __future__ import annotations

from tidebook.remote.outbox import RemoteOutbox, refuse_attribute
from tidebook.runtime.blocking_facade import BlockingFacade, blocking


class SyncRemoteOutbox(BlockingFacade[RemoteOutbox]):
    """The blocking form of `RemoteOutbox`."""

    status = blocking(RemoteOutbox.status)
    parked = blocking(RemoteOutbox.parked)
    parked_retry = blocking(RemoteOutbox.parked_retry)
    parked_drop = blocking(RemoteOutbox.parked_drop)

    def __getattr__(self, name: str) -> object:
        return refuse_attribute(name)
