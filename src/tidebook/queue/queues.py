"""All queues of a book."""

from __future__ import annotations

from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.queue.fields import fields_of
from tidebook.queue.flag import DeadLetter
from tidebook.queue.listed import Status, list_limit
from tidebook.queue.queue import Queue
from tidebook.queue.service import Service
from tidebook.sql.port.queue import QueueSettings


class Queues:
    """The queues of a book, by name."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._queues: dict[str, Queue] = {}

    def queue(self, name: str, *, settings: QueueSettings | None = None, fields: object = None) -> Queue:
        """A queue by name; settings and a declaration of fields are kept with it when it is first used."""
        found = self._queues.get(queue_name(name))
        if found is None:
            found = self._queues[name] = Queue(name, self._service)
        if settings is not None:
            self._service.configure(name, settings)
        if fields is not None:
            self._service.declare(name, fields_of(fields))
        return found

    async def names(self) -> list[str]:
        """The names of all queues."""
        return [ref.name for ref in await (await self._service.store()).queues()]

    async def status(self) -> list[Status]:
        """All queues in numbers."""
        store = await self._service.store()
        return [Status.of(ref, await store.counts(ref)) for ref in await store.queues()]

    async def flags(self, limit: int = 100) -> list[DeadLetter]:
        """The dead letters of all queues, newest first."""
        store, limit = await self._service.store(), list_limit(limit)
        return [DeadLetter.of(each) for each in await store.flags(limit=limit)]

    async def close(self) -> None:
        """Wait for what is under way, then let go."""
        for queue in self._queues.values():
            await queue.close()
        await self._service.close()


def queue_name(value: object) -> str:
    """Check a queue's name: the same letters as a topic's."""
    try:
        return topic_name(value)
    except InvalidInput as error:
        raise InvalidInput(f"a queue is named like a topic: {error}") from error
