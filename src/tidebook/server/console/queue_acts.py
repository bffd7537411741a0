"""The acts on queues and their entries: on the selected entries, or on all that match a filter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError
from tidebook.core.payload import decode_json
from tidebook.queue.browse import BoundBrowser, BrowsedEntry, EntryFilter, EntryPlace
from tidebook.server.console.act import Act, ActResult, Preview, api_act
from tidebook.server.console.bulk import BulkAct, BulkResponse, Steps
from tidebook.server.console.formatting import counted, parse_time
from tidebook.server.console.page import Page
from tidebook.server.console.queues import (
    SAMPLE_MAX,
    Priority,
    Status,
    entry_at,
    entry_filter,
    find_queue,
    letter_filter,
    parse_number,
    parse_place,
    shown_reason,
)
from tidebook.server.console.render import link
from tidebook.server.console.routes import QUEUE_CANCEL, QUEUE_PURGE
from tidebook.server.console.view import View

T = TypeVar("T")

#: An act on more entries than this runs in the background; a smaller one ends before the response is sent.
AT_ONCE_MAX: Final = 1_000
#: The maximum number of rows that can be selected one by one; an act on all that match has no limit.
SELECTED_MAX: Final = 1_000
#: How many entries one transaction of an act takes.
RETRY_PAGE, DROP_PAGE, PURGE_PAGE = 100, 500, 500
LETTER, ENTRY = ("dead letter", "dead letters"), ("entry", "entries")


class PutForm(msgspec.Struct, frozen=True):
    """An entry to put by hand."""

    queue: str
    data: str = ""
    kind: str = "json"
    key: str | None = None
    priority: Priority = 100
    #: Process and expiry dates.
    process_at: str | None = None
    expires_at: str | None = None


async def put(view: View) -> ActResult:
    form = view.fields
    done = await view.book.queue(form.queue).put(
        _typed(form.data, form.kind),
        key=form.key,
        priority=form.priority,
        process_at=None if form.process_at is None else parse_time(form.process_at),
        expires_at=None if form.expires_at is None else parse_time(form.expires_at),
    )
    message = (
        "The entry is put." if done.inserted else "An entry with this key waits, and the new one is merged into it."
    )
    return ActResult(message=message, to=link("/queue", queue=form.queue))


def _typed(text: str, kind: str) -> Any:
    if kind == "text":
        return text
    try:
        return decode_json(text.encode())
    except (ValueError, UnicodeEncodeError) as error:
        raise InvalidInput(f"the data is not JSON: {error}") from error


class QueueForm(msgspec.Struct, frozen=True):
    queue: str


async def pause(view: View) -> ActResult:
    """Pause a queue: its claims return nothing until it is resumed."""
    await view.book.queue(view.fields.queue).pause()
    return ActResult(message=f"Queue {view.fields.queue} is paused: no worker gets its entries. Puts continue.")


async def resume(view: View) -> ActResult:
    """Resume a queue: claims return its entries again."""
    await view.book.queue(view.fields.queue).resume()
    return ActResult(message=f"Queue {view.fields.queue} is resumed.")


class SelectionForm(msgspec.Struct, frozen=True):
    """Entries to act on: those at the given places, separated by commas, or all that match the filter."""

    queue: str
    status: Status = "dead"
    places: str | None = None
    key: str | None = None
    priority: Priority | None = None
    after: str | None = None
    until: str | None = None
    reason: str = ""


async def _selected_letters(view: View, browser: BoundBrowser) -> list[int]:
    """Return the ids of the selected dead letters, oldest first, so that a retry keeps their order."""
    form = view.fields
    if form.places is not None:
        ids = set(map(parse_number, _selected(form.places)))
        return sorted([id for id in ids if await browser.letter(id) is not None])
    found: list[int] = []
    before: int | None = None
    while True:
        ids_of_page, before = await browser.letter_ids(letter_filter(form), before=before)
        found += ids_of_page
        if before is None:
            return found[::-1]
        await asyncio.sleep(0)  # let other requests run: an embedded store never suspends


async def _waiting_at(browser: BoundBrowser, form: SelectionForm, places: list[EntryPlace]) -> list[BrowsedEntry]:
    """Return the entries that still wait at the given places."""
    rows: list[BrowsedEntry] = []
    for place in dict.fromkeys(places):
        found = await entry_at(browser, _waiting_state(form), place)
        if found is not None and found.place == place:
            rows.append(found)
    return rows


def _waiting_state(form: SelectionForm) -> Literal["due", "later"]:
    if form.status not in ("due", "later"):
        raise InvalidInput("only waiting entries can be deleted: a worker has claimed the others")
    return form.status


def _selected(places: str) -> list[str]:
    """Return the selected places; raise `InvalidInput` if there are too many."""
    found = places.split(",")
    if len(found) > SELECTED_MAX:
        raise InvalidInput(f"{len(found):,} rows are selected: select at most {SELECTED_MAX:,}, or all that match")
    return found


def _samples(rows: Sequence[tuple[str | None, object]], count: int) -> list[str]:
    """Return some rows, each with its key and a text, and how many more there are."""
    shown = [f"{key or '(no key)'} · {text}" for key, text in rows[:SAMPLE_MAX]]
    return [*shown, *([f"and {count - len(shown):,} more"] if count > len(shown) else [])]


async def _letters_preview(view: View, does: str, after: str, word: str | None = None) -> Preview:
    browser = await find_queue(view, view.fields.queue)
    ids = await _selected_letters(view, browser)
    letters = [each for id in ids[:SAMPLE_MAX] if (each := await browser.letter(id)) is not None]
    sample = [(each.key, shown_reason(view, each) or each.id) for each in letters]
    text = f"This {does} {counted(len(ids), *LETTER)} {after}"
    return Preview(text=text, count=len(ids), word=word, sample=_samples(sample, len(ids)), members=ids)


async def preview_retry(view: View) -> Preview:
    """Count the dead letters that a retry would put back."""
    return await _letters_preview(view, "puts", f"back into queue {view.fields.queue}, the oldest first.")


async def retry(view: View) -> ActResult:
    """Put dead letters back, the oldest first."""
    browser, ids = await find_queue(view, view.fields.queue), view.confirmed.members
    return await _act(view, len(ids), _in_pages(ids, RETRY_PAGE, browser.retry_all), LETTER, "put back")


async def _in_pages(ids: Sequence[T], size: int, act: Callable[[Sequence[T]], Awaitable[int]]) -> Steps:
    for start in range(0, len(ids), size):
        yield await act(ids[start : start + size])


async def _act(view: View, total: int, steps: Steps, noun: tuple[str, str], done: str) -> ActResult:
    """Act on a few entries immediately, and on many in the background, with a page that shows the progress."""
    if total <= AT_ONCE_MAX:
        count = 0
        async for changed in steps:
            count += changed
        to = link("/queue", queue=view.fields.queue, status=view.fields.status)
        return ActResult(message=f"{counted(count, *noun)} {done}.", to=to, changed=bool(count))
    act = view.target
    assert isinstance(act, Act)

    async def audit(ended: BulkAct) -> None:
        target = link(act.path, queue=ended.queue, act=ended.id, state=ended.state, changed=ended.changed)
        status = 200 if ended.state == "done" else 504
        await view.state.audit.record_durably(view.principal, view.client, act.route.name, target, status)

    started = view.context.bulk.start(act.label, view.fields.queue, total, steps, audit)
    to = link("/queue-act", queue=view.fields.queue, act=started.id)
    return ActResult(message=f"{counted(total, *noun)}: the act runs in the background.", to=to)


async def preview_drop(view: View) -> Preview:
    """Count the dead letters that would be deleted."""
    queue = view.fields.queue
    return await _letters_preview(view, "deletes", f"of queue {queue}. It cannot be undone.", queue)


async def drop(view: View) -> ActResult:
    browser, ids = await find_queue(view, view.fields.queue), view.confirmed.members
    return await _act(view, len(ids), _in_pages(ids, DROP_PAGE, browser.drop_all), LETTER, "dropped")


class EditForm(msgspec.Struct, frozen=True):
    """New data of a dead letter; with `retry` it is then put back."""

    queue: str
    letter: Annotated[int, Meta(ge=0)]
    data: str = ""
    kind: str = "json"
    retry: bool = False


async def edit(view: View) -> ActResult:
    """Replace the data of a dead letter, and retry it if asked to."""
    form, queue = view.fields, view.book.queue(view.fields.queue)
    await queue.edit(form.letter, _typed(form.data, form.kind))
    if not form.retry:
        return ActResult(message="The data is replaced.")
    try:
        await queue.retry(form.letter)
    except OutcomeUnknown:
        raise
    except TidebookError as error:  # the data is replaced nonetheless, which the audit has to record
        return ActResult(message=f"The data is replaced, but the dead letter is not put back: {error}")
    to = link("/queue", queue=form.queue, status="dead")
    return ActResult(message="The data is replaced, and the dead letter is put back.", to=to)


async def preview_purge(view: View) -> Preview:
    """Count the waiting entries that would be deleted; up to a bound, their places are confirmed too."""
    form, browser = view.fields, await find_queue(view, view.fields.queue)
    wanted = _waiting_filter(view)
    if form.places is not None:
        found = await _waiting_at(browser, form, list(map(parse_place, _selected(form.places))))
        count = len(found)
    elif (count := await browser.count_up_to(wanted, limit=2**62)) > AT_ONCE_MAX:
        found = await browser.browse(wanted, limit=SAMPLE_MAX)
    else:
        found = await browser.browse(wanted, limit=AT_ONCE_MAX)
        count = len(found)
    which = counted(count, "waiting entry", "waiting entries")
    return Preview(
        text=f"This deletes {which} of queue {form.queue}. It cannot be undone.",
        count=count,
        word=form.queue,
        sample=_samples([(each.row.key, each.row.id) for each in found], count),
        members=[each.place for each in found] if len(found) == count else [],
    )


def _waiting_filter(view: View) -> EntryFilter:
    """Return the filter of a form for entries that wait; those that became due after the dry run were not counted."""
    state, wanted = _waiting_state(view.fields), entry_filter(view.fields)
    last_ms = min(wanted.to_ms, view.as_of_ms)
    return msgspec.structs.replace(wanted, to_ms=last_ms) if state == "due" else wanted


async def purge(view: View) -> ActResult:
    """Delete waiting entries; those that a worker claims meanwhile are left alone."""
    browser, total = await find_queue(view, view.fields.queue), view.confirmed.count
    places = view.confirmed.members
    steps = _in_pages(places, PURGE_PAGE, browser.remove) if places else _purge_pages(view, browser, total)
    return await _act(view, total, steps, ENTRY, "deleted")


async def _purge_pages(view: View, browser: BoundBrowser, total: int) -> Steps:
    """Delete page by page, and never more than was confirmed: entries put meanwhile were not counted."""
    wanted, after = _waiting_filter(view), None
    while total > 0 and (page := await browser.browse(wanted, after=after, limit=min(PURGE_PAGE, total))):
        total -= len(page)
        after = page[-1].place
        yield await browser.remove([each.place for each in page])


# ---- an act on many entries


class BulkQuery(msgspec.Struct, frozen=True):
    """An act on many entries of a queue."""

    queue: str
    act: str


async def bulk(view: View) -> BulkResponse:
    """Show the progress of an act."""
    acts = view.context.bulk
    return acts.response(acts.find(view.fields.act, view.fields.queue))


async def cancel_bulk(view: View) -> ActResult:
    """Cancel an act; changes already made remain."""
    act = view.context.bulk.find(view.fields.act, view.fields.queue)
    was_running = act.state == "running"
    await act.cancel()
    is_cancelled = was_running and act.state == "cancelled"
    message = "Cancelled after" if is_cancelled else "It had ended already, after"
    to = link("/queue-act", queue=act.queue, act=act.id)
    return ActResult(message=f"{message} {act.changed:,} of {act.total:,}.", to=to, changed=is_cancelled)


PAGES = (Page("queue_act", BY_NAME["queues.entries"], bulk, BulkQuery),)
ACTS = (
    api_act("queues.pause", "Pause", pause, QueueForm),
    api_act("queues.resume", "Resume", resume, QueueForm),
    api_act("queues.put", "Put", put, PutForm),
    api_act("queues.retry", "Retry", retry, SelectionForm, preview_retry),
    api_act("queues.drop", "Drop", drop, SelectionForm, preview_drop),
    Act("queues.cancel_act", "Cancel", QUEUE_CANCEL, cancel_bulk, BulkQuery),
    api_act("queues.edit", "Save", edit, EditForm),
    Act("queues.purge", "Delete entries", QUEUE_PURGE, purge, SelectionForm, preview_purge),
)
