"""The import of Deimos' waiting messages: topic by topic, in the order of their ids, with verified counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.key import topic_name
from tidebook.importing.deimos_tables import DeimosTables, DeimosTopic
from tidebook.importing.message_target import MessageTarget


class TopicResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one topic."""

    topic: str
    #: The messages that were waiting in Deimos' table, and how many of them were copied now.
    messages: int
    copied: int = 0
    #: Why the topic was not copied, or how the counts differ.
    problem: str | None = None


class MessageImport:
    """Copies messages from Deimos' tables into a target; without a target, as in a dry run, it only counts them."""

    def __init__(
        self, tables: DeimosTables, target: MessageTarget | None, *, topics: Sequence[str] | None = None
    ) -> None:
        self._tables = tables
        self._target = target
        self._topics = None if topics is None else {*topics}

    async def run(self, on_progress: Callable[[str, int], object]) -> list[TopicResult]:
        """Copy every topic and return the results; report the number of copied messages of a topic after each page."""
        await self._tables.refuse_running()
        chosen = [each for each in await self._tables.topics() if self._topics is None or each.topic in self._topics]
        return [await self._import_topic(each, on_progress) for each in chosen]

    async def _import_topic(self, waiting: DeimosTopic, on_progress: Callable[[str, int], object]) -> TopicResult:
        result = TopicResult(topic=waiting.topic, messages=waiting.messages)
        try:
            topic_name(waiting.topic)
        except TidebookError as error:
            return msgspec.structs.replace(result, problem=str(error))
        if self._target is None:
            return result
        target, source = self._target, self._tables.source
        mark = await target.mark(source, waiting.topic)
        copied = 0
        while messages := await self._tables.messages(waiting.topic, mark.last_id):
            mark = await target.take(source, waiting.topic, mark, messages)
            copied += len(messages)
            on_progress(waiting.topic, copied)
        found = await self._tables.count(waiting.topic, mark.last_id)
        problem = None
        if found != mark.messages:
            problem = (
                f"{mark.messages} messages up to id {mark.last_id} were copied and the table has {found}: a "
                "transaction of the application committed late, or an executor of Deimos deleted some; "
                "compare them by hand"
            )
        return msgspec.structs.replace(result, copied=copied, problem=problem)
