"""All queues of a book."""

from __future__ import annotations

from typing import Any, overload

from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.queue.browse import BoundBrowser
from tidebook.queue.fields import fields_of
from tidebook.queue.job import D
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue
from tidebook.queue.runtime import QueueRuntime
from tidebook.queue.views import DeadLetter, QueueStatus, check_list_limit
from tidebook.runtime.named_parts import NamedParts


class Queues:
    """The queues of a book, by name."""

    def __init__(self, runtime: QueueRuntime) -> None:
        self._runtime = runtime
        self._queues: NamedParts[Queue] = NamedParts()

    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: type[D]) -> Queue[D]: ...
    @overload
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]: ...
    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue[Any]:
        """Return a queue by name; settings and declared fields are stored with it when it is first used."""
        found = self._queues.opened.get(queue_name(name))
        if found is None:
            found = self._queues.find(name) or self._queues.add(name, Queue(name, self._runtime))
            if self._runtime.is_open(name):
                self._queues.keep(name, found)
        if settings is not None:
            self._runtime.configure(name, settings)
        if fields is not None:
            self._runtime.declare(name, fields_of(fields))
        return found

    async def names(self) -> list[str]:
        """Return the names of all queues."""
        return [ref.name for ref in await self._runtime.existing()]

    async def browser(self, name: str) -> BoundBrowser | None:
        """Return the bounded reads of a queue, for consoles; None if there is no such queue."""
        ref = await self._runtime.find(queue_name(name))
        return None if ref is None else BoundBrowser(await self._runtime.store(), ref)

    async def status(self) -> list[QueueStatus]:
        """Return the status of all queues."""
        refs = await self._runtime.existing()
        return [QueueStatus.of(ref, await (await self._runtime.store()).counts(ref)) for ref in refs]

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Return the dead letters of all queues, newest first."""
        limit = check_list_limit(limit)
        if self._runtime.is_missing:
            return []
        store = await self._runtime.store()
        return [DeadLetter.of(each) for each in await store.dead_letters(limit=limit)]

    async def close(self) -> None:
        """Finish the calls in flight, then release the store."""
        for queue in self._queues:
            await queue.close()
        await self._runtime.close()


def queue_name(value: object) -> str:
    """Return the name of a queue; raise InvalidInput unless it follows the rules of topic names."""
    try:
        return topic_name(value)
    except InvalidInput as error:
        raise InvalidInput(f"the name of a queue follows the rules of topic names: {error}") from error
