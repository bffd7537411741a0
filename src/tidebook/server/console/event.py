"""The console's page of one event: its payload as a tree, text or bytes, its log record, and its row in the store."""

from __future__ import annotations

from typing import Annotated, Literal, assert_never

import msgspec
from msgspec import Meta

from tidebook.api.routes import BY_NAME
from tidebook.core.action import Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.errors import NotFound, TidebookError
from tidebook.core.event import ReadEvent, unpack_events
from tidebook.core.key import Key
from tidebook.core.payload import encode_payload
from tidebook.core.record import read_record
from tidebook.core.seq_nr import LAST
from tidebook.server.console.formatting import counted
from tidebook.server.console.journal import last_number_before, read_page
from tidebook.server.console.page import Page
from tidebook.server.console.payload_view import ClippedText, Dump, TreeNode, as_document, dump, tree
from tidebook.server.console.view import View

Form = Literal["tree", "text", "hex"]
#: How many bytes of the record and of the row are shown, side by side, and how many of them per line.
SIDE_BYTES_MAX = 256
SIDE_ROW_BYTES = 8


class EventQuery(msgspec.Struct, frozen=True):
    """An event, and how its payload is shown."""

    topic: str
    id: str
    number: Annotated[int, Meta(ge=1, le=LAST)]
    form: Form = "tree"
    #: The index of the first byte of a dump.
    byte: Annotated[int, Meta(ge=0)] = 0
    unmask: bool = False


class RecordSide(msgspec.Struct, frozen=True, kw_only=True):
    """The record of the log that holds the event, or why it cannot be shown."""

    missing: str | None = None
    partition: int = 0
    offset: int = 0
    timestamp_ms: int = 0
    #: None if a mask hides the bytes, because their number would reveal how long a hidden value is.
    size_bytes: int | None = None
    key: str = ""
    headers: list[str] = []
    action: str = ""
    bytes: Dump | None = None


class RowSide(msgspec.Struct, frozen=True, kw_only=True):
    """The row of the store that holds the event, or why there is none."""

    missing: str | None = None
    position: str = ""
    index: int = 0
    timestamp_ms: int = 0
    time_ms: int = 0
    size_bytes: int | None = None
    bytes: Dump | None = None


class EventData(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    id: str
    number: int
    timestamp_ms: int
    type: str | None
    version: int
    tags: list[str]
    partition: int
    offset: int
    size_bytes: int
    kind: str
    #: The payload in the form that the query selects; the others are None. A mask, if any, was applied.
    tree: TreeNode | None
    text: ClippedText | None
    hex: Dump | None
    metadata: TreeNode | None
    record: RecordSide
    row: RowSide
    #: Whether record and row have the same bytes of the event; None if that is not known.
    same: bool | None
    previous: int | None
    next: int | None
    #: Whether a mask applies to the topic, and whether it hides fields in this request.
    masked: bool
    hidden: bool


async def event(view: View) -> EventData:
    """Return the data of the page; raise `NotFound` if there is no such journal or event."""
    query = view.fields
    journal = view.book.journal(query.topic)
    head = await journal.head(query.id, barrier="offset")
    key = Key(query.topic, query.id)
    if head is None:
        raise NotFound(f"{key}: there is no such journal")
    found, _ = await read_page(journal, query.id, query.number, head, 2)
    if not found or found[0].seq_nr != query.number:
        raise NotFound(f"{key}: there is no event {query.number:,}; it was deleted, skipped, or not appended yet")
    shown, mask = found[0], view.mask(query.topic)
    payload = shown.payload if mask is None else mask(shown.payload)
    metadata = shown.metadata if mask is None or shown.metadata is None else mask(shown.metadata)
    _, encoded = encode_payload(payload)
    row, row_bytes = await _row(view, key, shown, hidden=mask is not None)
    index = None if row_bytes is None else row.index
    record, record_bytes = await _record(view, shown, index, hidden=mask is not None)
    return EventData(
        topic=query.topic,
        id=query.id,
        number=shown.seq_nr,
        timestamp_ms=shown.timestamp_ms,
        type=shown.type,
        version=shown.version,
        tags=sorted(shown.tags),
        partition=shown.partition,
        offset=shown.offset,
        size_bytes=len(encoded),
        kind="bytes" if isinstance(payload, bytes) else "text" if isinstance(payload, str) else "JSON",
        tree=tree(payload) if query.form == "tree" else None,
        text=as_document(payload) if query.form == "text" else None,
        hex=dump(encoded, query.byte) if query.form == "hex" else None,
        metadata=None if metadata is None else tree(metadata),
        record=record,
        row=row,
        same=None if record_bytes is None or row_bytes is None else record_bytes == row_bytes,
        previous=await last_number_before(journal, query.id, query.number, head),
        next=found[1].seq_nr if len(found) > 1 else None,
        masked=view.is_masked(query.topic),
        hidden=mask is not None,
    )


async def _record(view: View, shown: ReadEvent, index: int | None, *, hidden: bool) -> tuple[RecordSide, bytes | None]:
    """Return the record of the log, and the event's bytes in it."""
    topic, at = view.fields.topic, shown.offset
    try:
        page = await view.book.log.read(topic, shown.partition, start=at, stop=at + 1, limit=1)
        config = await view.book.store.topic_config(topic)
    except TidebookError as error:
        return RecordSide(missing=str(error)), None
    if not page.records or page.records[0].value is None or config is None:
        return RecordSide(missing="The log no longer has the record."), None
    record = page.records[0]
    value = record.value or b""
    action = read_record(value, limit_bytes=max(config.limit_bytes, len(value)))
    side = RecordSide(
        partition=shown.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        size_bytes=None if hidden else len(value),
        key=(record.key or b"").decode(errors="backslashreplace"),
        headers=[name for name, _ in record.headers],
        action=_describe(action),
        bytes=None if hidden else dump(value, limit=SIDE_BYTES_MAX, row_bytes=SIDE_ROW_BYTES),
    )
    events = unpack_events(action.body) if isinstance(action, Append) else []
    return side, events[index] if index is not None and index < len(events) else None


def _describe(action: Append | Delete | Purge | Mark | Seal | Damaged) -> str:
    match action:
        case Append():
            condition = "" if action.expected is None else f", expected {action.expected:,}"
            return f"append of {counted(action.count, 'event')}{condition}"
        case Delete():
            return f"delete to {action.to:,}"
        case Purge():
            return "purge"
        case Mark():
            return "mark"
        case Seal():
            return "seal"
        case Damaged():
            return f"damaged: {action.reason}"
        case _:
            assert_never(action)


async def _row(view: View, key: Key, shown: ReadEvent, *, hidden: bool) -> tuple[RowSide, bytes | None]:
    """Return the row of the store, and the event's bytes in it."""
    store = view.book.store
    try:
        head = await store.head(key)
        rows = [] if head is None else await store.events(key, head, after=shown.seq_nr - 1, to=shown.seq_nr, limit=1)
    except TidebookError as error:
        return RowSide(missing=str(error)), None
    if not rows or rows[0].position.offset != shown.offset:
        return RowSide(missing="Not replicated yet: the store has no row."), None
    row = rows[0]
    side = RowSide(
        position=f"{row.position.epoch}/{row.position.offset}",
        index=row.index,
        timestamp_ms=row.timestamp_ms,
        time_ms=row.time_ms,
        size_bytes=None if hidden else len(row.encoded),
        bytes=None if hidden else dump(row.encoded, limit=SIDE_BYTES_MAX, row_bytes=SIDE_ROW_BYTES),
    )
    return side, bytes(row.encoded)


PAGES = (Page("event", BY_NAME["journals.read"], event, EventQuery),)
