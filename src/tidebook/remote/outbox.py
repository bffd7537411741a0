"""The outbox of a server's book: its status and its parked messages, for async and for blocking callers."""

from __future__ import annotations

from typing import NoReturn

from tidebook.api.outbox import PARKED_LISTED_MAX, ParkedBody
from tidebook.core.errors import InvalidInput
from tidebook.outbox.port import OutboxTopicStatus, ParkedMessage
from tidebook.remote.connection import Connection
from tidebook.runtime.blocking_facade import BlockingFacade, blocking


class RemoteOutbox:
    """The outbox as a remote book shows it; messages are published in the application's own SQL transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def status(self) -> list[OutboxTopicStatus]:
        """Return the status of every topic."""
        response = await self._connection.call("outbox.status")
        topics: list[OutboxTopicStatus] = response.topics
        return topics

    async def parked(self, topic: str | None = None, *, limit: int = PARKED_LISTED_MAX) -> list[ParkedMessage]:
        """Return parked messages, of one topic or of all."""
        query = {"topic": topic, "limit": limit}
        response = await self._connection.call("outbox.parked", query=query)
        messages: list[ParkedMessage] = response.messages
        return messages

    async def parked_retry(self, topic: str, id: int | None = None) -> int:
        """Retry the parked messages of a topic, or one of them; return how many."""
        count: int = (await self._connection.call("outbox.retry", body=ParkedBody(topic, id))).count
        return count

    async def parked_drop(self, topic: str, id: int | None = None) -> int:
        """Delete the parked messages of a topic, or one of them; return how many."""
        count: int = (await self._connection.call("outbox.drop", body=ParkedBody(topic, id))).count
        return count

    def __getattr__(self, name: str) -> object:
        return _refuse_attribute(name)


class SyncRemoteOutbox(BlockingFacade[RemoteOutbox]):
    """The blocking form of `RemoteOutbox`."""

    status = blocking(RemoteOutbox.status)
    parked = blocking(RemoteOutbox.parked)
    parked_retry = blocking(RemoteOutbox.parked_retry)
    parked_drop = blocking(RemoteOutbox.parked_drop)

    def __getattr__(self, name: str) -> object:
        return _refuse_attribute(name)


def _refuse_attribute(name: str) -> NoReturn:
    """Raise `InvalidInput` for a method that only an outbox in a database has."""
    if name.startswith("_"):
        raise AttributeError(name)
    raise InvalidInput(f"outbox.{name} needs the application's database: open the book with [sql] url instead")
