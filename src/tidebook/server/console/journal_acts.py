"""The acts on a journal: append by hand, delete up to a number, and purge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.core.payload import decode_json
from tidebook.core.replication_plan import EventRow
from tidebook.core.seq_nr import LAST
from tidebook.journal.journal import Journal
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.formatting import counted
from tidebook.server.console.journal import Number
from tidebook.server.console.render import link
from tidebook.server.console.view import View


class JournalForm(msgspec.Struct, frozen=True):
    topic: str
    id: str


class AppendForm(msgspec.Struct, frozen=True):
    """An event to append by hand."""

    topic: str
    id: str
    payload: str = ""
    kind: str = "json"
    tags: str = ""
    type: str | None = None
    metadata: str = ""
    #: The last number that the journal must have.
    expected: Annotated[int, Meta(ge=0)] | None = None


class DeleteForm(msgspec.Struct, frozen=True):
    """The last event to delete."""

    topic: str
    id: str
    to: Number


async def append(view: View) -> ActResult:
    form = view.fields
    payload = form.payload if form.kind == "text" else _json(form.payload, "the payload")
    metadata = _json(form.metadata, "the metadata") if form.metadata.strip() else None
    tags = {tag.strip() for tag in form.tags.split(",")} - {""}
    event = Event(payload, tags=tags, metadata=metadata, type=form.type)
    done = await view.book.journal(form.topic).append(form.id, [event], expected=form.expected)
    where = link("/journal", topic=form.topic, id=form.id)
    return ActResult(message=f"Event {done.first} is appended.", to=where)


def _json(text: str, what: str) -> Any:
    try:
        return decode_json(text.encode())
    except (ValueError, UnicodeEncodeError) as error:
        raise InvalidInput(f"{what} is not JSON: {error}") from error


class _Numbered(msgspec.Struct, frozen=True, gc=False):
    seq_nr: int


def _numbers(rows: Iterable[EventRow], partition: int) -> Sequence[_Numbered]:
    return [_Numbered(row.seq_nr) for row in rows]


async def count_events(journal: Journal, id: str, to: int = LAST) -> int:
    """Return how many events there are up to a number, without decoding them."""
    count = 0
    found: AsyncIterator[_Numbered] = journal.read_decoded(id, _numbers, end=to, barrier="offset")
    async for _ in found:
        count += 1
    return count


async def preview_delete(view: View) -> Preview:
    """Count the events that would be deleted."""
    form, journal = view.fields, view.book.journal(view.fields.topic)
    count = await count_events(journal, form.id, form.to)
    which = f"{counted(count, 'event')} of journal {form.topic}/{form.id}"
    text = f"This deletes {which}: those up to number {form.to:,}. It cannot be undone."
    return Preview(text=text, count=count, word=form.id, members=await _bounds(journal, form.id, form.to))


async def _bounds(journal: Journal, id: str, to: int = LAST) -> list[int]:
    """Return what identifies the events up to a number: the incarnation of the journal, and the numbers around them."""
    head = await journal.head(id, barrier="offset")
    if head is None:
        return []
    return [head.incarnation.epoch, head.incarnation.offset, head.delete_to, min(head.seq_nr, to)]


async def delete(view: View) -> ActResult:
    """Delete the events that were counted; events appended since then stay."""
    form = view.fields
    where = link("/journal", topic=form.topic, id=form.id)
    if not view.confirmed.count:  # a delete would create a journal that does not exist
        return ActResult(message="There was no event to delete.", to=where, changed=False)
    *_, to = view.confirmed.members
    await view.book.journal(form.topic).delete(form.id, to=to)
    return ActResult(message=f"The events up to number {to:,} are deleted.", to=where)


async def preview_purge(view: View) -> Preview:
    """Count the events that a purge would remove."""
    form, journal = view.fields, view.book.journal(view.fields.topic)
    count = await count_events(journal, form.id)
    text = f"This removes journal {form.topic}/{form.id} with its {counted(count, 'event')}. It cannot be undone."
    return Preview(text=text, count=count, word=form.id, members=await _bounds(journal, form.id))


async def purge(view: View) -> ActResult:
    form = view.fields
    await view.book.journal(form.topic).purge(form.id)
    return ActResult(message=f"Journal {form.id} is purged.", to=link("/topic", topic=form.topic))


ACTS = (
    api_act("journals.append", "Append", append, AppendForm),
    api_act("journals.delete", "Delete events", delete, DeleteForm, preview_delete),
    api_act("journals.purge", "Purge journal", purge, JournalForm, preview_purge),
)
