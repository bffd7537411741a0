"""Handlers of topics."""

from __future__ import annotations

import msgspec

from tidebook.api.journals import TopicConfigResponse, TopicResponse, TopicsResponse
from tidebook.server.call import Call, Handler


async def list_topics(call: Call) -> TopicsResponse:
    """List the topics that the token may see."""
    return TopicsResponse([topic for topic in await call.book.topics() if call.principal.may_see(topic)])


async def describe(call: Call) -> TopicResponse:
    """Describe a topic."""
    found = msgspec.structs.asdict(await call.book.describe_topic(call.parameters[0]))
    return msgspec.convert(found, TopicResponse)


async def config(call: Call) -> TopicConfigResponse:
    """Return the configuration of a topic."""
    return TopicConfigResponse.of(await call.book.journal(call.parameters[0]).topic_config())


async def create(call: Call) -> TopicConfigResponse:
    """Create a topic of journals; one that exists is left unchanged."""
    return TopicConfigResponse.of(await call.book.journal(call.parameters[0]).create())


async def delete(call: Call) -> None:
    """Delete a topic and all its data."""
    await call.book.delete_topic(call.parameters[0])


HANDLERS: dict[str, Handler] = {
    "topics.list": list_topics,
    "topics.describe": describe,
    "topics.config": config,
    "topics.create": create,
    "topics.delete": delete,
}
