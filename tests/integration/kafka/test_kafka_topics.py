"""Topics that the log creates, and topics that it refuses."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.integration.kafka.conftest import OpenKafkaLog
from tidebook.core.errors import InvalidInput
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.topics import FRAME_BYTES, Topics
from tidebook.log.port import Outgoing

pytestmark = pytest.mark.kafka

GOOD = {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"}


async def config_of(bootstrap: str, topic: str) -> dict[str, str]:
    topics = Topics(KafkaSettings.read(f"kafka://{bootstrap}"))
    found = await topics._describe(topic)
    assert found is not None
    await topics.close()
    return found[1]


def make_topic(bootstrap: str, topic: str, config: dict[str, str]) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    [made] = admin.create_topics([NewTopic(topic, 1, 1, config=config)]).values()
    made.result(30)
    while admin.list_topics(topic, timeout=30).topics[topic].error is not None:
        pass  # the controller has the topic; the broker that receives the request learns of it a moment later


async def test_a_new_topic_has_the_settings_that_a_log_needs(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", retention_ms=3_600_000, retention_bytes=10**9) as log:
        await log.create_topic(topic, 2, limit_bytes=500_000)
        config = await config_of(kafka_bootstrap, topic)
        await log.delete_topic(topic)
    assert config["cleanup.policy"] == "delete"
    assert config["message.timestamp.type"] == "LogAppendTime"
    assert config["unclean.leader.election.enable"] == "false"
    assert (config["retention.ms"], config["retention.bytes"]) == ("3600000", "1000000000")
    assert int(config["max.message.bytes"]) == 500_000 + FRAME_BYTES


async def test_a_topic_kept_for_ever_has_no_retention(kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1, keep_forever=True)
        config = await config_of(kafka_bootstrap, topic)
        await log.delete_topic(topic)
    assert (config["retention.ms"], config["retention.bytes"]) == ("-1", "-1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanup.policy", "compact"),
        ("cleanup.policy", "compact,delete"),
        ("message.timestamp.type", "CreateTime"),
        ("unclean.leader.election.enable", "true"),
    ],
)
async def test_a_topic_on_which_records_would_be_lost_is_refused(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str, name: str, value: str
) -> None:
    make_topic(kafka_bootstrap, topic, GOOD | {name: value})
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        for opening in (log.topic(topic), log.create_topic(topic, 1), log.append(Outgoing(topic, 0, b"k", b"v"))):
            with pytest.raises(InvalidInput, match=rf"{name} is .* and must be"):
                await opening
        await log.delete_topic(topic)


async def test_a_topic_with_retention_is_refused_if_records_must_be_kept_for_ever(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1)
        with pytest.raises(InvalidInput, match="forever"):
            await log.create_topic(topic, 1, keep_forever=True)
        await log.delete_topic(topic)


async def test_a_topic_with_a_smaller_limit_is_refused(
    kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str
) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        await log.create_topic(topic, 1, limit_bytes=10_000)
        await log.create_topic(topic, 1, limit_bytes=9_000)
        with pytest.raises(InvalidInput, match=r"max\.message\.bytes"):
            await log.create_topic(topic, 1, limit_bytes=20_000)
        await log.delete_topic(topic)


async def test_a_name_that_kafka_would_refuse_is_refused(kafka_bootstrap: str, open_log: OpenKafkaLog) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}") as log:
        with pytest.raises(InvalidInput):
            await log.create_topic("no such/name", 1)
        with pytest.raises(InvalidInput):
            await log.create_topic("nothing", 0)


async def test_more_replicas_than_brokers_are_refused(kafka_bootstrap: str, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(f"kafka://{kafka_bootstrap}", replication=3) as log:
        with pytest.raises(InvalidInput, match=r"[Rr]eplication"):
            await log.create_topic(topic, 1)
        assert await log.topic(topic) is None
