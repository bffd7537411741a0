"""The queues, one queue with its entries by status, priority, date and key, one entry, and one dead letter."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, assert_never

import msgspec
from msgspec import Meta

from tidebook.api.access import Role
from tidebook.api.errors import PermissionDenied
from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.payload import decode_payload
from tidebook.queue.browse import (
    BoundBrowser,
    BrowsedEntry,
    ClaimSummary,
    EntryFilter,
    EntryPlace,
    EntryState,
    LetterFilter,
)
from tidebook.queue.port import HOLDER_BYTES, DeadLetterRow, QueueSettings, WorkerRow
from tidebook.queue.views import optional_datetime
from tidebook.server.console import payload_view
from tidebook.server.console.bulk import BulkResponse
from tidebook.server.console.counts import Count, QueueNumbers, count_queue
from tidebook.server.console.formatting import parse_time
from tidebook.server.console.page import Page
from tidebook.server.console.pagination import PageNumber, paginate
from tidebook.server.console.view import View

ROWS_MAX: Final = 50
QUEUES_MAX: Final = 100
WORKERS_MAX: Final = 100
#: How many claims are read, and how many of those by other programs are shown.
CLAIMS_MAX: Final = 1_000
CLAIMS_SHOWN_MAX: Final = 20
SAMPLE_MAX: Final = 5

Status = Literal["due", "later", "processing", "dead"]
Priority = Annotated[int, Meta(ge=0, le=255)]
WorkerId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]


class QueuesQuery(msgspec.Struct, frozen=True):
    """Queues with this text in their name."""

    prefix: str = ""
    page: PageNumber = 1


class QueuesData(msgspec.Struct, frozen=True, kw_only=True):
    queues: list[QueueNumbers]
    total: int
    page: int
    pages: int


async def queues(view: View) -> QueuesData:
    query = view.fields
    names = [
        name
        for name in await view.book.queues.names()
        if view.principal.may_see(name) and query.prefix.casefold() in name.casefold()
    ]
    shown, page, pages = paginate(names, query.page, rows_max=QUEUES_MAX)
    rows = []
    for name in shown:
        browser = await view.book.queues.browser(name)
        if browser is not None:
            rows.append(await count_queue(name, browser))
    return QueuesData(queues=rows, total=len(names), page=page, pages=pages)


# ---- one queue


class QueueQuery(msgspec.Struct, frozen=True):
    """A queue, and which of its entries to show."""

    queue: str
    status: Status = "due"
    key: str | None = None
    priority: Priority | None = None
    #: Process dates.
    after: str | None = None
    until: str | None = None
    #: A part of the reason of a dead letter.
    reason: str = ""
    #: The entries that this worker holds.
    worker: WorkerId | None = None
    #: The place after which the page begins.
    place: str | None = None
    #: The places of the selected entries, separated by commas.
    selected: str = ""
    unmask: bool = False


class EntryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the list, or one dead letter."""

    id: int
    place: str
    key: str | None
    priority: int
    timeouts: int
    inserted_at_ms: int
    summary: str
    #: The process date; of a dead letter, when it was raised.
    date_ms: int
    lease_until_ms: int | None = None
    #: The token of the claim that holds it, and the name of the worker, if it is known.
    holder: str | None = None
    worker: str | None = None
    reason: str | None = None


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, and how many entries it holds now."""

    id: str
    name: str
    gone: bool
    started_at_ms: int
    reported_at_ms: int
    entries: int
    concurrency: int
    done: int
    failed: int


class ClaimRow(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of one claim by a program that is not a reporting worker."""

    holder: str
    entries: int
    started_at_ms: int
    lease_until_ms: int
    expired: bool


class QueueData(msgspec.Struct, frozen=True, kw_only=True):
    numbers: QueueNumbers
    settings: QueueSettings
    rows: list[EntryRow]
    next: str | None
    workers: list[WorkerLine]
    #: Whether there may be more workers; those with the latest reports are listed.
    workers_more: bool
    claims: list[ClaimRow]
    claims_left_out: Count
    #: The entries that become due next.
    soon: list[EntryRow]
    #: The acts on many entries that run.
    acts: list[BulkResponse]
    now_ms: int
    masked: bool


async def queue(view: View) -> QueueData:
    query = view.fields
    browser = await find_queue(view, query.queue)
    now_ms = view.now_ms
    known, claims = await browser.workers(limit=WORKERS_MAX), await browser.claims(limit=CLAIMS_MAX)
    names = {_holder(each.id): each.name for each in known}
    rows, next_place = await _rows(view, browser, query)
    rows = [_named(each, names) for each in rows]
    others = [each for each in claims if _holder(each.token) not in names]
    return QueueData(
        numbers=await count_queue(query.queue, browser),
        settings=browser.queue.settings,
        rows=rows,
        next=next_place,
        workers=[_worker_line(each, claims) for each in known],
        workers_more=len(known) == WORKERS_MAX,
        claims=[_claim_row(each, now_ms) for each in others[:CLAIMS_SHOWN_MAX]],
        claims_left_out=Count(max(0, len(others) - CLAIMS_SHOWN_MAX), exact=len(claims) < CLAIMS_MAX),
        soon=[_entry_row(view, each) for each in await browser.browse(EntryFilter(state="later"), limit=SAMPLE_MAX)],
        acts=view.context.bulk.running(query.queue),
        now_ms=now_ms,
        masked=view.is_masked(query.queue),
    )


async def find_queue(view: View, name: str) -> BoundBrowser:
    """Return the browser of a queue; raise `NotFound` if there is no such queue."""
    browser = await view.book.queues.browser(name)
    if browser is None:
        raise NotFound(f"there is no queue {name[:100]!r}: the first put creates it")
    return browser


async def _rows(view: View, browser: BoundBrowser, query: QueueQuery) -> tuple[list[EntryRow], str | None]:
    if query.status == "dead":
        if query.reason and view.mask(query.queue) is not None and view.principal.role < Role.OPERATOR:
            raise PermissionDenied(
                "a reason may quote masked fields: only an operator may search it", required="operator"
            )
        before = None if query.place is None else parse_number(query.place)
        page = await browser.letters(letter_filter(query), before=before, limit=ROWS_MAX)
        return [_letter_row(view, each) for each in page.letters], None if page.before is None else str(page.before)
    after = None if query.place is None else parse_place(query.place)
    found = await browser.browse(entry_filter(query), after=after, limit=ROWS_MAX)
    return [_entry_row(view, each) for each in found], write_place(found[-1].place) if len(found) == ROWS_MAX else None


def entry_filter(query: Any) -> EntryFilter:
    """Return the filter of a query or form for entries; raise `InvalidInput` for what only dead letters have."""
    if query.reason:
        raise InvalidInput("only dead letters have a reason: show those, or leave reason out")
    match query.status:
        case "due" | "later" | "processing":
            return EntryFilter(
                state=query.status,
                key=query.key,
                priority=query.priority,
                from_ms=0 if query.after is None else parse_time(query.after),
                to_ms=2**63 - 1 if query.until is None else parse_time(query.until),
                worker=_worker_filter(query),
            )
        case "dead":
            raise InvalidInput("dead letters are not entries: choose due, later or processing")
        case _:
            assert_never(query.status)


def _worker_filter(query: Any) -> bytes | None:
    worker = getattr(query, "worker", None)
    if worker is not None and query.status != "processing":
        raise InvalidInput("only entries in process have a worker: show those, or leave worker out")
    return None if worker is None else bytes.fromhex(worker)


def letter_filter(query: Any) -> LetterFilter:
    """Return the filter of a query or form for dead letters; raise `InvalidInput` for what only entries have."""
    if query.priority is not None or query.after is not None or query.until is not None:
        raise InvalidInput("dead letters are not found by priority or date: leave priority, after and until out")
    return LetterFilter(key=query.key, reason=query.reason)


def parse_place(text: str) -> EntryPlace:
    """Return the place that `write_place` has written."""
    parts = text.split("-")
    if len(parts) != 3:
        raise InvalidInput(f"{text[:60]!r} is not a place in a queue: follow the links of the page")
    return EntryPlace(*map(parse_number, parts))


def parse_number(text: str) -> int:
    """Return a number of a place; raise `InvalidInput` if the string is not one."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < 2**63):
        raise InvalidInput(f"{text[:60]!r} is not a place in a queue: follow the links of the page")
    return int(text)


def write_place(place: EntryPlace) -> str:
    """Return a place as a parameter."""
    return "-".join(map(str, place))


async def entry_at(browser: BoundBrowser, state: EntryState, place: EntryPlace) -> BrowsedEntry | None:
    """Return the entry of this state at a place; None if it is no longer there."""
    wanted = EntryFilter(state=state, priority=None if state == "processing" else place.priority)
    before = EntryPlace(place.priority, place.date_ms, place.id - 1)
    found = await browser.browse(wanted, after=before, limit=1)
    return found[0] if found and found[0].row.id == place.id else None


def _entry_row(view: View, found: BrowsedEntry) -> EntryRow:
    row = found.row
    return EntryRow(
        id=row.id,
        place=write_place(found.place),
        key=row.key,
        priority=row.priority,
        timeouts=row.timeouts,
        inserted_at_ms=row.inserted_at,
        summary=payload_view.summary(shown_data(view, row.kind, row.data)),
        date_ms=row.process_at,
        lease_until_ms=row.lease_until,
        holder=None if found.token is None else found.token.hex(),
    )


def _letter_row(view: View, row: DeadLetterRow) -> EntryRow:
    return EntryRow(
        id=row.id,
        place=str(row.id),
        key=row.key,
        priority=row.priority,
        timeouts=row.timeouts,
        inserted_at_ms=row.inserted_at,
        summary=payload_view.summary(shown_data(view, row.kind, row.data)),
        date_ms=row.raised_at,
        reason=shown_reason(view, row),
    )


def shown_reason(view: View, row: DeadLetterRow) -> str:
    """Return the reason of a dead letter as the token may see it: the text of an error often quotes the data."""
    mask = view.mask(view.fields.queue)
    return row.reason if mask is None else mask.text(row.reason, decode_payload(row.kind, row.data))


def shown_data(view: View, kind: int, data: bytes) -> Any:
    """Return the data of an entry as the token may see it."""
    value, mask = decode_payload(kind, data), view.mask(view.fields.queue)
    return value if mask is None else mask(value)


def _holder(id: bytes) -> str:
    """Return the prefix, as hex, that the id of a worker and the tokens of its claims share."""
    return id[:HOLDER_BYTES].hex()


def _named(row: EntryRow, names: dict[str, str]) -> EntryRow:
    """Return a row with the name of the worker that holds it, if it is known."""
    name = None if row.holder is None else names.get(row.holder[: 2 * HOLDER_BYTES])
    return row if name is None else msgspec.structs.replace(row, worker=name)


def _worker_line(worker: WorkerRow, claims: list[ClaimSummary]) -> WorkerLine:
    id = _holder(worker.id)
    return WorkerLine(
        id=id,
        name=worker.name,
        gone=worker.gone,
        started_at_ms=worker.started_at,
        reported_at_ms=worker.reported_at,
        entries=sum(each.entries for each in claims if _holder(each.token) == id),
        concurrency=worker.concurrency,
        done=worker.done,
        failed=worker.failed,
    )


def _claim_row(claim: ClaimSummary, now_ms: int) -> ClaimRow:
    return ClaimRow(
        holder=claim.token.hex(),
        entries=claim.entries,
        started_at_ms=claim.started_at,
        lease_until_ms=claim.lease_until,
        expired=claim.lease_until <= now_ms,
    )


# ---- one entry


class EntryQuery(msgspec.Struct, frozen=True):
    """One entry, by its place, or one dead letter, by its id."""

    queue: str
    status: Status
    place: str
    unmask: bool = False


class EntryData(msgspec.Struct, frozen=True, kw_only=True):
    queue: str
    #: The status now: an entry that was listed as later may be due.
    status: Status
    entry: EntryRow
    expires_at: str | None
    started_at_ms: int | None
    data: payload_view.TreeNode
    #: The data as text, to edit it; None if it is not shown completely.
    text: str | None
    kind: str
    attempts_max: int
    now_ms: int
    masked: bool


async def entry(view: View) -> EntryData:
    query = view.fields
    browser = await find_queue(view, query.queue)
    status: Status = query.status
    started_at: int | None = None
    if status == "dead":
        letter = await browser.letter(parse_number(query.place))
        if letter is None:
            raise NotFound(f"queue {query.queue!r} has no dead letter {query.place}: it was retried or dropped")
        row, kind, data, expires_at = _letter_row(view, letter), letter.kind, letter.data, letter.expires_at
    else:
        status, found = await _find_entry(browser, query)
        names = {_holder(each.id): each.name for each in await browser.workers(limit=WORKERS_MAX)}
        row, kind, data = _named(_entry_row(view, found), names), found.row.kind, found.row.data
        expires_at, started_at = found.row.expires_at, found.row.started_at
    value = shown_data(view, kind, data)
    document = payload_view.as_document(value)
    expires = optional_datetime(expires_at)
    whole = not document.left_out and not isinstance(value, bytes) and (view.unmask or not view.is_masked(query.queue))
    return EntryData(
        queue=query.queue,
        status=status,
        entry=row,
        expires_at=None if expires is None else expires.isoformat(),
        started_at_ms=started_at,
        data=payload_view.tree(value),
        text=document.text if whole else None,
        kind="text" if isinstance(value, str) else "json",
        attempts_max=browser.queue.settings.max_timeouts,
        now_ms=view.now_ms,
        masked=view.is_masked(query.queue),
    )


async def _find_entry(browser: BoundBrowser, query: EntryQuery) -> tuple[EntryState, BrowsedEntry]:
    """Return the entry at a place and its state; raise `NotFound` if it has left the place."""
    assert query.status != "dead"
    place = parse_place(query.place)
    states: tuple[EntryState, ...] = (query.status, "due", "later")
    for state in dict.fromkeys(states):
        if (found := await entry_at(browser, state, place)) is not None:
            return state, found
    raise NotFound(f"the entry is no longer {query.status} in queue {query.queue!r}: it was claimed, finished or moved")


PAGES = (
    Page("queues", BY_NAME["queues.list"], queues, QueuesQuery),
    Page("queue", BY_NAME["queues.entries"], queue, QueueQuery),
    Page("entry", BY_NAME["queues.entries"], entry, EntryQuery),
)
