"""The regions of write-ahead logs: their tables, what pins the log, snapshots and cleaning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidebook.api.routes import BY_NAME
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.formatting import counted, size
from tidebook.server.console.page import Page
from tidebook.server.console.pagination import PageNumber, paginate
from tidebook.server.console.render import link
from tidebook.server.console.routes import WAL_PAGE
from tidebook.server.console.survey import WAL_TOPIC, RegionSurvey
from tidebook.server.console.view import View
from tidebook.wal.meta import TableMeta
from tidebook.wal.region import Region, RegionStatus

ROWS_MAX: Final = 50

RegionNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class WalPageQuery(msgspec.Struct, frozen=True):
    """Which page of the regions."""

    page: PageNumber = 1


class WalData(msgspec.Struct, frozen=True, kw_only=True):
    """A page of regions; those beyond the survey's bound have no numbers."""

    regions: list[RegionSurvey]
    total: int
    page: int
    pages: int
    as_of_ms: int


async def regions(view: View) -> WalData:
    """List the regions; their numbers are those of the last survey."""
    survey = await view.context.surveyor.read()
    known = {(each.namespace, each.region): each for each in survey.regions}
    found = (WAL_TOPIC.fullmatch(topic) for topic in await view.book.log.topics())
    names = sorted((match[1], int(match[2])) for match in found if match and view.principal.may_see(match[1]))
    shown, page, pages = paginate(names, view.fields.page, rows_max=ROWS_MAX)
    rows = [known.get(name, RegionSurvey(namespace=name[0], region=name[1])) for name in shown]
    return WalData(regions=rows, total=len(names), page=page, pages=pages, as_of_ms=survey.at_ms)


class RegionQuery(msgspec.Struct, frozen=True):
    namespace: str
    region: RegionNumber


class TableView(msgspec.Struct, frozen=True, kw_only=True):
    """One table of a region, and how many bytes of the log it pins."""

    table: int
    entries: int
    next_number: int
    marked_deleted: int
    first_number: int | None
    first_offset: int | None
    held_bytes: int
    #: Whether a flush was requested that the owner has not done yet.
    awaits_flush: bool


class RegionData(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    status: RegionStatus
    tables: list[TableView]


async def region(view: View) -> RegionData:
    opened = await _open(view)
    pinned = {each.table: each for each in opened.meta.pinned_tables()}
    tables = []
    for id, meta in sorted(opened.meta.tables.items()):
        pin = pinned.get(id)
        tables.append(
            TableView(
                table=id,
                entries=len(meta.mapping),
                next_number=meta.next_seq_num,
                marked_deleted=meta.latest_marked_deleted,
                first_number=None if pin is None else pin.first_seq,
                first_offset=None if pin is None else pin.offset,
                held_bytes=0 if pin is None else pin.held_bytes,
                awaits_flush=meta.awaits_flush,
            )
        )
    tables.sort(key=lambda each: -each.held_bytes)
    return RegionData(namespace=view.fields.namespace, status=await opened.status(), tables=tables)


async def _open(view: View) -> Region:
    """Open a region for reading, which claims nothing."""
    return await view.book.wal(view.fields.namespace).open_region(view.fields.region, writable=False)


class TableForm(msgspec.Struct, frozen=True):
    namespace: str
    region: RegionNumber
    table: Annotated[int, Meta(ge=0)]


class MarkForm(msgspec.Struct, frozen=True):
    """The entries of a table below a number."""

    namespace: str
    region: RegionNumber
    table: Annotated[int, Meta(ge=0)]
    seq: Annotated[int, Meta(ge=1)]


def _region_address(view: View) -> str:
    return link("/region", namespace=view.fields.namespace, region=view.fields.region)


async def snapshot(view: View) -> ActResult:
    taken = await (await _open(view)).snapshot()
    return ActResult(message=f"A snapshot as of offset {taken.data_offset:,} is written.", to=_region_address(view))


async def clean(view: View) -> ActResult:
    """Remove the records that no table needs."""
    done = await (await _open(view)).clean()
    pinned = "" if done.pinned_by is None else f", pinned by table {done.pinned_by}"
    text = f"Cleaned: {counted(done.removed, 'offset')} removed, {size(done.held_bytes)} held{pinned}."
    return ActResult(message=text, to=_region_address(view))


class FlushForm(msgspec.Struct, frozen=True):
    """A region, and one of its tables; without it all that have entries."""

    namespace: str
    region: RegionNumber
    table: Annotated[int, Meta(ge=0)] | None = None


async def flush(view: View) -> ActResult:
    """Ask the owner of the region to flush."""
    asked = await (await _open(view)).request_flush(view.fields.table)
    if not asked:
        return ActResult(message="No table has entries: nothing pins the log.", to=_region_address(view), changed=False)
    which = f"table {asked[0]}" if len(asked) == 1 else counted(len(asked), "table")
    text = f"The owner is asked to flush {which}: it does so when it next cleans the log."
    return ActResult(message=text, to=_region_address(view))


async def preview_mark(view: View) -> Preview:
    """Count the entries that a mark would release."""
    form, opened = view.fields, await _open(view)
    table = opened.meta.tables.get(form.table)
    first = 0 if table is None else table.mapping.start
    count = 0 if table is None else max(0, min(form.seq, table.next_seq_num) - first)
    text = (
        f"This marks {counted(count, 'entry', 'entries')} of table {form.table} as deleted, those below number "
        f"{form.seq:,}, as a flush does. They can no longer be replayed."
    )
    return Preview(text=text, count=count, word=str(form.table), members=[first])


async def mark(view: View) -> ActResult:
    """Mark a table's older entries as deleted."""
    form = view.fields
    await (await _open(view)).mark_deleted(form.table, form.seq)
    return ActResult(message=f"Entries of table {form.table} below {form.seq:,} are marked.", to=_region_address(view))


async def preview_drop(view: View) -> Preview:
    """Count the entries of a table that would be dropped."""
    id, tables = view.fields.table, (await _open(view)).meta.tables
    chosen = {id: tables[id]} if id in tables else {}
    count, members = _entries(chosen)
    text = f"This drops table {id} with {counted(count, 'entry', 'entries')}. It cannot be undone."
    return Preview(text=text, count=count, word=str(id), members=members)


def _entries(tables: Mapping[int, TableMeta]) -> tuple[int, list[list[int]]]:
    """Return how many entries tables have, and what identifies them: the first number of each table, and the next."""
    bounds = [[id, each.mapping.start, each.next_seq_num] for id, each in sorted(tables.items())]
    return sum(len(each.mapping) for each in tables.values()), bounds


async def drop(view: View) -> ActResult:
    await (await _open(view)).drop_table(view.fields.table)
    return ActResult(message=f"Table {view.fields.table} is dropped.", to=_region_address(view))


async def preview_delete(view: View) -> Preview:
    """Count what deleting a region would remove."""
    opened = await _open(view)
    count, members = _entries(opened.meta.tables)
    held = size(opened.meta.held_bytes)
    where = f"{view.fields.namespace}/{view.fields.region}"
    text = f"This deletes region {where} with {counted(count, 'entry', 'entries')}, {held}. It cannot be undone."
    return Preview(text=text, count=count, word=where, members=members)


async def delete(view: View) -> ActResult:
    form = view.fields
    await view.state.regions.close_region(form.namespace, form.region)
    await view.book.wal(form.namespace).delete_region(form.region)
    return ActResult(message=f"Region {form.namespace}/{form.region} is deleted.", to="/wal")


PAGES = (
    Page("wal", WAL_PAGE, regions, WalPageQuery),
    Page("region", BY_NAME["wal.status"], region, RegionQuery),
)
ACTS = (
    api_act("wal.snapshot", "Write a snapshot", snapshot, RegionQuery),
    api_act("wal.clean", "Clean", clean, RegionQuery),
    api_act("wal.request_flush", "Force flush", flush, FlushForm),
    api_act("wal.mark_deleted", "Mark deleted", mark, MarkForm, preview_mark),
    api_act("wal.drop_table", "Drop table", drop, TableForm, preview_drop),
    api_act("wal.delete_region", "Delete region", delete, RegionQuery, preview_delete),
)
