"""Test cases of a log: creating and deleting topics."""

from __future__ import annotations

import asyncio

import pytest

from tidebook.core.errors import NotFound
from tidebook.log.port import Log
from tidebook.testing.conformance.log_base import (
    CASE_TIMEOUT_S,
    PARTITIONS,
    LogBase,
    OpenLog,
    Sending,
    all_records,
    new_topic,
    outgoing,
)


class TopicCases(LogBase):
    """Test cases of creating, finding and deleting topics, and of unknown topics."""

    async def test_a_created_topic_is_found_with_its_partitions(self, log: Log, topic: str) -> None:
        state = await log.topic(topic)
        assert state is not None
        assert (state.topic, state.partitions) == (topic, PARTITIONS)
        assert state.topic_id

    async def test_an_unknown_topic_is_none(self, log: Log) -> None:
        assert await log.topic(new_topic()) is None

    async def test_topics_lists_the_created_topics(self, log: Log, topic: str) -> None:
        assert topic in await log.topics()

    async def test_creating_a_topic_again_returns_it_unchanged(self, log: Log, topic: str) -> None:
        await log.append(outgoing(topic, b"kept"))
        before = await log.topic(topic)
        assert await log.create_topic(topic, PARTITIONS) == before
        assert await log.create_topic(topic, PARTITIONS + 2) == before
        assert [r.value for r in await all_records(log, topic)] == [b"kept"]

    async def test_two_instances_that_create_a_topic_at_once_get_the_same_one(
        self, log: Log, open_log: OpenLog
    ) -> None:
        name = new_topic()
        async with open_log() as other:
            one, two = await asyncio.gather(log.create_topic(name, PARTITIONS), other.create_topic(name, PARTITIONS))
        assert one == two
        await log.delete_topic(name)

    async def test_a_deleted_topic_is_gone(self, log: Log, topic: str) -> None:
        await log.delete_topic(topic)
        assert await log.topic(topic) is None
        assert topic not in await log.topics()

    async def test_deleting_an_unknown_topic_is_not_found(self, log: Log) -> None:
        with pytest.raises(NotFound):
            await log.delete_topic(new_topic())

    async def test_a_recreated_topic_has_another_id_and_no_old_records(self, log: Log, topic: str) -> None:
        before = await log.topic(topic)
        await log.append(outgoing(topic, b"first incarnation"))
        await log.delete_topic(topic)
        after = await log.create_topic(topic, PARTITIONS)
        assert before is not None
        assert after.topic_id != before.topic_id
        assert await all_records(log, topic) == []
        await log.append(outgoing(topic, b"second incarnation"))
        assert [r.value for r in await all_records(log, topic)] == [b"second incarnation"]

    async def test_another_instance_sees_a_recreated_topic(self, log: Log, open_log: OpenLog, topic: str) -> None:
        async with open_log() as other:
            await other.append(outgoing(topic, b"first incarnation"))
            await log.delete_topic(topic)
            state = await log.create_topic(topic, PARTITIONS)
            assert await other.topic(topic) == state
            await other.append(outgoing(topic, b"second incarnation"))
            assert [r.value for r in await all_records(other, topic)] == [b"second incarnation"]

    async def test_every_call_on_an_unknown_topic_raises_not_found(self, log: Log) -> None:
        unknown = new_topic()
        with pytest.raises(NotFound):
            await log.append(outgoing(unknown, b"x"))
        with pytest.raises(NotFound):
            await log.read(unknown, 0, start=0, stop=1)
        with pytest.raises(NotFound):
            await log.start(unknown, 0)
        with pytest.raises(NotFound):
            await log.end(unknown, 0)
        with pytest.raises(NotFound):
            await log.truncate(unknown, 0, before=0)
        with pytest.raises(NotFound):
            await log.wait(unknown, 0, offset=0, timeout_s=CASE_TIMEOUT_S)

    async def test_an_unknown_partition_is_not_found(self, log: Log, topic: str) -> None:
        with pytest.raises(NotFound):
            await log.append(outgoing(topic, b"x", partition=PARTITIONS))
        with pytest.raises(NotFound):
            await log.end(topic, PARTITIONS)
        with pytest.raises(NotFound):
            await log.read(topic, PARTITIONS, start=0, stop=1)

    async def test_a_send_to_an_unknown_topic_calls_back_with_the_error(self, log: Log) -> None:
        sending = Sending(log)
        sending.send(outgoing(new_topic(), b"x"))
        assert isinstance((await sending.results())[0], NotFound)
