"""A book on a server: the same API as `Book`, every call a request to `tidebook serve`."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, cast

import msgspec

from tidebook.api.health import LiveResponse
from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.journal.journal import Journal
from tidebook.log.port import Log
from tidebook.outbox.outbox import AsyncOutbox, Outbox
from tidebook.queue.queues import Queues
from tidebook.remote.connection import Connection
from tidebook.remote.journal import RemoteJournal
from tidebook.remote.outbox import RemoteOutbox, SyncRemoteOutbox
from tidebook.remote.queue import RemoteQueues
from tidebook.remote.tags import RemoteTags
from tidebook.remote.wal import RemoteWal
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.store.port import StoreWriter
from tidebook.tags.tags import Tags
from tidebook.wal.wal import Wal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings
from tidebook.wiring.topics import TopicDescription


def _refuse(name: str, remedy: str) -> NoReturn:
    raise InvalidInput(f"a remote book has no {name}: {remedy}")


class RemoteBook(Book):
    """A book that a server has open; methods that need its log, store or database raise `InvalidInput`.

    `Book` documents the methods. A request that gets no response is sent again for up to half a minute, so that callers
    do not notice a restart of the server.
    """

    def __init__(self, url: str, *, token: str | None = None, tls_ca: str | None = None) -> None:
        super().__init__(Settings(Path(), server=url))
        self._connection = Connection(url, token=token, tls_ca=tls_ca)

    @property
    def url(self) -> str:
        """The address of the server."""
        return self._connection.url

    @property
    def log(self) -> Log:
        """Raise `InvalidInput`: only the server has the log open."""
        _refuse("log", "use the methods of the book, or open its folder or .toml")

    @property
    def store(self) -> StoreWriter:
        """Raise `InvalidInput`: only the server has the store open."""
        _refuse("store", "use the methods of the book, or open its folder or .toml")

    def _journal(self, topic: str) -> Journal:
        found = self._journals.find(topic_name(topic))
        if found is None:
            made = RemoteJournal(topic, self._connection, self.ids, on_open=self._keep_journal)
            found = self._journals.add(topic, made)
        return found

    def _keep_journal(self, journal: Journal) -> None:
        self._journals.keep(journal.topic, journal)  # a remote journal has nothing to close

    @property
    def tags(self) -> Tags:
        """Events by tag, across all journals: read them and follow them."""
        if self._tags is None:
            self._tags = RemoteTags(self._connection)
        return self._tags

    def wal(self, namespace: str) -> Wal:
        found = self._wals.find(namespace)
        if found is None:
            made = RemoteWal(namespace, self._connection, on_open=lambda wal: self._keep_wal(cast(Wal, wal)))
            found = self._wals.add(namespace, cast(Wal, made))
        return found

    def _keep_wal(self, wal: Wal) -> None:
        self._wals.keep(wal.namespace, wal)

    @property
    def queues(self) -> Queues:
        if self._queues is None:
            self._queues = RemoteQueues(self._connection, **self._shared())
        return self._queues

    @property
    def outbox(self) -> AsyncOutbox:
        """The status and the parked messages of the outbox."""
        if self._outbox is None:
            self._outbox = cast(AsyncOutbox, RemoteOutbox(self._connection))
        return self._outbox

    def _blocking_outbox(self, portal: BlockingPortal) -> Outbox:
        return cast(Outbox, SyncRemoteOutbox(portal, cast(RemoteOutbox, self.outbox)))

    def feed(self, tag: str, queue: str, **options: Any) -> NoReturn:
        """Raise `InvalidInput`: a feed needs direct access to the store and the queue store."""
        _refuse("feed()", "run the feed where the folder or .toml of the book is open")

    def log_topic(self, topic: str) -> NoReturn:
        """Raise `InvalidInput`: reading messages needs direct access to the log."""
        _refuse("log_topic()", "read the messages where the folder or .toml of the book is open")

    @property
    def forked(self) -> bool:
        return self._connection.forked

    async def topics(self) -> list[str]:
        topics: list[str] = (await self._connection.call("topics.list")).topics
        return topics

    async def describe_topic(self, topic: str) -> TopicDescription:
        found = await self._connection.call("topics.describe", topic_name(topic))
        return msgspec.convert(found, TopicDescription, from_attributes=True)

    async def delete_topic(self, topic: str) -> None:
        await self._connection.call("topics.delete", topic_name(topic))
        self._journals.remove(topic)

    async def liveness(self) -> LiveResponse:
        """Return the version of the server, and its clock."""
        answer: LiveResponse = await self._connection.ask("health.live")
        return answer

    async def readiness(self) -> dict[str, str | None]:
        """Return the parts that the server needs, each with the reason why it is not ready, or None."""
        answer = await self._connection.ask("health.ready")
        return {each.name: each.reason if not each.ok else None for each in answer.checks}

    async def health(self) -> NoReturn:
        """Raise `InvalidInput`: the server reports its own health, see `readiness`."""
        _refuse("health()", "use readiness(), or request /v1/health/ready")

    async def settle(self, *, timeout_s: float = 30.0) -> NoReturn:
        """Raise `InvalidInput`: only a process that has the folder or .toml of the book open can settle it."""
        _refuse("settle()", "call it where the folder or .toml of the book is open")

    async def create(self) -> None:
        """Do nothing: the server's book exists."""

    async def __aenter__(self) -> RemoteBook:
        await self._connection.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.forked:
                for wal in self._wals:
                    await wal.close()
        finally:
            await self._connection.close()
            self._forget_parts()
