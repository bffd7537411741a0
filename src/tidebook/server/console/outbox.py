"""The outbox by topic, and its parked messages."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidebook.api.routes import BY_NAME
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.counts import EXACT_MAX
from tidebook.server.console.formatting import counted
from tidebook.server.console.page import Page
from tidebook.server.console.view import View

PARKED_MAX: Final = 100
#: How many parked messages a dry run counts.
COUNTED_MAX: Final = 1_000_000
SAMPLE_MAX: Final = 5
#: States that an operator may retry or drop; a held message waits for one of those.
REFUSED: Final = ("parked", "retrying")


class OutboxQuery(msgspec.Struct, frozen=True):
    """The topic whose parked messages are shown; by default all."""

    topic: str | None = None


class ParkedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One message that the target refused, or one that waits for such a message."""

    topic: str
    id: int
    state: str
    key: str | None
    size_bytes: int
    tries: int
    age_s: float
    reason: str


class OutboxData(msgspec.Struct, frozen=True, kw_only=True):
    topics: list[OutboxTopicStatus]
    parked: list[ParkedRow]
    more: bool


async def outbox(view: View) -> OutboxData:
    found = await view.book.outbox.parked(view.fields.topic, limit=PARKED_MAX + 1)
    return OutboxData(
        topics=await view.book.outbox.status(count_max=EXACT_MAX),
        parked=[
            ParkedRow(
                topic=each.topic,
                id=each.id,
                state=each.state,
                key=None if each.key is None else each.key.decode(errors="backslashreplace"),
                size_bytes=each.size_bytes,
                tries=each.tries,
                age_s=each.parked_age_ms / 1000,
                reason=each.reason,
            )
            for each in found[:PARKED_MAX]
        ],
        more=len(found) > PARKED_MAX,
    )


class ParkedForm(msgspec.Struct, frozen=True):
    """Parked messages: one, or all of a topic."""

    topic: str
    id: Annotated[int, Meta(ge=0)] | None = None


async def _preview(view: View, does: str, after: str, word: str | None = None) -> Preview:
    form = view.fields
    found = await view.book.outbox.parked(form.topic, limit=COUNTED_MAX)
    chosen = [each for each in found if each.state in REFUSED and form.id in (None, each.id)]
    return Preview(
        text=f"This {does} {counted(len(chosen), 'parked message')} of topic {form.topic}{after}",
        count=len(chosen),
        word=word,
        sample=[f"{each.id} · {each.reason}" for each in chosen[:SAMPLE_MAX]],
        members=[each.id for each in chosen],
    )


async def preview_retry(view: View) -> Preview:
    """Count the messages that a retry would send."""
    return await _preview(view, "sends", " again, in their original order.")


async def retry(view: View) -> ActResult:
    count = await view.book.outbox.parked_retry(view.fields.topic, view.fields.id)
    return ActResult(message=f"{counted(count, 'message')} retried.", to="/outbox", changed=bool(count))


async def preview_drop(view: View) -> Preview:
    """Count the messages that would be deleted."""
    return await _preview(view, "deletes", ", and releases the messages that were waiting for them.", view.fields.topic)


async def drop(view: View) -> ActResult:
    count = await view.book.outbox.parked_drop(view.fields.topic, view.fields.id)
    return ActResult(message=f"{counted(count, 'message')} deleted.", to="/outbox", changed=bool(count))


PAGES = (Page("outbox", BY_NAME["outbox.status"], outbox, OutboxQuery),)
ACTS = (
    api_act("outbox.retry", "Retry", retry, ParkedForm, preview_retry),
    api_act("outbox.drop", "Drop", drop, ParkedForm, preview_drop),
)
