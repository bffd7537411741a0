"""The tags, the horizon of their streams and what holds it back, one tag's stream, and consumer groups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Final
from urllib.parse import unquote

import msgspec

from tidebook.api.routes import BY_NAME
from tidebook.core.errors import InvalidInput
from tidebook.core.key import Key
from tidebook.server.console import payload_view
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.formatting import counted, parse_time
from tidebook.server.console.live import LiveView, RenderRow
from tidebook.server.console.page import Page
from tidebook.server.console.view import View
from tidebook.server.responses import Chunk
from tidebook.tags.event import TaggedEvent, check_tag, decode_offset, encode_offset, position_before, start_position
from tidebook.tags.horizon import HorizonStatus
from tidebook.tags.settings import TagSettings
from tidebook.tags.subscription import decode_group

TAGS_MAX: Final = 200
SCAN_MAX: Final = 10_000
EVENTS_MAX: Final = 50
GROUPS_MAX: Final = 50
#: With more topics, a page of a stream ends at the horizon of the last survey: reading a newer one takes too long.
TOPICS_READ_MAX: Final = 500
GROUP_SETTING: Final = "tags/group/"


class TagsPageQuery(msgspec.Struct, frozen=True):
    """Tags that begin with this text."""

    prefix: str = ""


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A consumer group: its members, and the progress of the slowest share."""

    group: str
    tag: str
    members: dict[str, int]
    shares: int
    owned: int
    #: The time of the slowest share; None if one has not started.
    slowest_ms: int | None
    lag_s: float | None


class TagsData(msgspec.Struct, frozen=True, kw_only=True):
    tags: list[str]
    more: bool
    horizon: HorizonStatus
    groups: list[GroupView]
    groups_left_out: int


async def tags(view: View) -> TagsData:
    """List tags; a bounded number of them is examined."""
    found, more, scanned = list[str](), False, 0
    async with aclosing(view.book.tags.list()) as listed:  # type: ignore[type-var]
        async for tag in listed:
            scanned += 1
            if tag.startswith(view.fields.prefix):
                found.append(tag)
            if len(found) > TAGS_MAX or scanned >= SCAN_MAX:
                more = True
                break
    groups, left_out = await _groups(view)
    return TagsData(
        tags=found[:TAGS_MAX], more=more, horizon=await _horizon(view), groups=groups, groups_left_out=left_out
    )


class TagQuery(msgspec.Struct, frozen=True):
    """A tag, and where its stream begins."""

    tag: str
    #: The place of an event in the stream, after which the page begins.
    after: str | None = None
    since: str | None = None
    live: bool = False
    unmask: bool = False


class TaggedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event of the stream."""

    topic: str
    id: str
    number: int
    #: Its number among the events of its journal with this tag.
    tag_number: int
    timestamp_ms: int
    type: str | None
    summary: str
    place: str


class JournalProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The page's progress in one journal: the last tag number that it shows, and how many there are."""

    topic: str
    id: str
    last: int
    total: int | None


class TagGap(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a journal's events with the tag that are missing between two events of the page."""

    topic: str
    id: str
    first: int
    last: int


class TagData(msgspec.Struct, frozen=True, kw_only=True):
    tag: str
    horizon: HorizonStatus
    events: list[TaggedRow]
    next: str | None
    progress: list[JournalProgress]
    gaps: list[TagGap]
    groups: list[GroupView]
    groups_left_out: int
    masked: bool


async def tag(view: View) -> TagData:
    query = view.fields
    check_tag(query.tag)
    found, more, last = list[TaggedEvent](), False, ""
    if not query.live:
        scanned = 0
        async with aclosing(await _stream(view)) as events:  # type: ignore[type-var]
            async for event in events:
                if len(found) == EVENTS_MAX or scanned == SCAN_MAX:
                    more = True
                    break
                scanned, last = scanned + 1, event.tag_offset
                if view.may_see_topic(event.topic):
                    found.append(event)
    groups, left_out = await _groups(view, query.tag)
    return TagData(
        tag=query.tag,
        horizon=await _horizon(view),
        events=[_row(view, event) for event in found],
        next=last if more else None,
        progress=await _progress(view, found),
        gaps=find_gaps(found),
        groups=groups,
        groups_left_out=left_out,
        masked=any(view.is_masked(event.topic) for event in found),
    )


async def _stream(view: View) -> AsyncIterator[TaggedEvent]:
    """Return the events of a tag from the start of the page on."""
    query, survey = view.fields, await view.context.surveyor.read()
    options = view.book.settings.options("tags", TagSettings)
    if len(survey.topics) <= TOPICS_READ_MAX or survey.horizon is None or options.consistency != "horizon":
        return view.book.tags.read(query.tag, after=_start(query))
    until = survey.horizon.horizon
    return _events_below(view, 0 if until is None else round(until.timestamp() * 1000))


async def _events_below(view: View, until_ms: int) -> AsyncIterator[TaggedEvent]:
    """Yield the events of a tag below an earlier horizon: no event can arrive there any more."""
    tag, options = view.fields.tag, view.book.settings.options("tags", TagSettings)
    after, from_ms = start_position(tag, _start(view.fields), parse_time(options.first_time_bucket))
    while rows := await view.book.store.tag_rows(
        tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=EVENTS_MAX + 1
    ):
        after = rows[-1].place
        for row in rows:
            yield TaggedEvent(row)


async def _horizon(view: View) -> HorizonStatus:
    """Return the horizon of the last survey; what holds it back is left out if the token may not see it."""
    found = (await view.context.surveyor.read()).horizon
    if found is None:
        return HorizonStatus(horizon=None, age_s=None, topic=None, partition=None, lag=None)
    if found.topic is None or view.may_see_topic(found.topic):
        return found
    return msgspec.structs.replace(found, topic=None, partition=None, lag=None, remedy=None)


def _start(query: TagQuery) -> str | datetime | None:
    if query.after is not None and query.since is not None:
        raise InvalidInput("give either a place or a time, not both")
    if query.since is not None:
        return datetime.fromtimestamp(parse_time(query.since) / 1000, UTC)
    return query.after


def _row(view: View, event: TaggedEvent) -> TaggedRow:
    mask = view.mask(event.topic)
    return TaggedRow(
        topic=event.topic,
        id=event.id,
        number=event.seq_nr,
        tag_number=event.tag_seq_nr,
        timestamp_ms=event.timestamp_ms,
        type=event.type,
        summary=payload_view.summary(event.payload if mask is None else mask(event.payload)),
        place=event.tag_offset,
    )


async def _progress(view: View, events: list[TaggedEvent]) -> list[JournalProgress]:
    last: dict[Key, int] = {}
    for event in events:
        last[Key(event.topic, event.id)] = event.tag_seq_nr
    found = []
    for key, number in last.items():
        head = await view.book.store.head(key)
        total = None if head is None else head.tag_counts.get(view.fields.tag)
        found.append(JournalProgress(topic=key.topic, id=key.id, last=number, total=total))
    return found


def find_gaps(events: list[TaggedEvent]) -> list[TagGap]:
    """Return the numbers that are missing between consecutive events of a journal on the page."""
    last: dict[tuple[str, str, int, int], int] = {}
    gaps = []
    for event in events:
        row = event.row
        incarnation = (row.topic, row.id, row.incarnation_epoch, row.incarnation_offset)
        before = last.get(incarnation)
        if before is not None and row.tag_seq_nr > before + 1:
            gaps.append(TagGap(topic=row.topic, id=row.id, first=before + 1, last=row.tag_seq_nr - 1))
        last[incarnation] = row.tag_seq_nr
    return gaps


async def _groups(view: View, tag: str | None = None) -> tuple[list[GroupView], int]:
    """Return consumer groups of a tag, or of all tags, and how many are left out.

    A token that may not see all topics sees no group.
    """
    if view.principal.prefix:
        return [], 0
    horizon = (await _horizon(view)).horizon
    horizon_ms = None if horizon is None else round(horizon.timestamp() * 1000)
    names = list[tuple[str, str, str]]()
    for name in await view.book.store.setting_names(GROUP_SETTING):
        group, _, quoted = name.removeprefix(GROUP_SETTING).rpartition("/")
        if tag in (None, unquote(quoted)):
            names.append((name, group, unquote(quoted)))
    shown = names[:GROUPS_MAX]
    views = [group_view(group, of, await view.book.store.setting(name), horizon_ms) for name, group, of in shown]
    return views, len(names) - len(shown)


def group_view(group: str, tag: str, text: str | None, horizon_ms: int | None) -> GroupView:
    """Return a consumer group, as its setting describes it."""
    found = decode_group(text)
    times = [None if each.offset is None else decode_offset(tag, each.offset).time_ms for each in found.shares]
    started = [each for each in times if each is not None]
    slowest_ms = min(started) if len(started) == len(times) else None
    return GroupView(
        group=group,
        tag=tag,
        members=found.members,
        shares=len(found.shares),
        owned=sum(each.owner is not None for each in found.shares),
        slowest_ms=slowest_ms,
        lag_s=None if slowest_ms is None or horizon_ms is None else max(0, horizon_ms - slowest_ms) / 1000,
    )


async def follow(view: View, render: RenderRow) -> AsyncGenerator[Chunk, None]:
    """Follow a tag from now on, or from the place that a browser had reached."""
    tag = view.fields.tag
    check_tag(tag)
    after: str | None = view.last_event_id
    if after is None:
        now = position_before(tag, (await view.book.tags.horizon()).time_ms)
        after = encode_offset(now) if now.time_ms >= 0 else None
    return _live_rows(view, view.book.tags.read(tag, after=after, follow=True), render)


async def _live_rows(view: View, events: AsyncIterator[TaggedEvent], render: RenderRow) -> AsyncGenerator[Chunk, None]:
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if view.may_see_topic(event.topic):
                yield [(event.tag_offset, render(_row(view, event)))]


class TagForm(msgspec.Struct, frozen=True):
    tag: str


async def preview_rebuild(view: View) -> Preview:
    """Describe a rebuild, which changes no event."""
    text = f"This writes the rows of tag {view.fields.tag} again from all journals, and removes rows without an event."
    return Preview(text=text, count=1)


async def rebuild(view: View) -> ActResult:
    """Write a tag's rows again."""
    done = await view.book.tags.rebuild(view.fields.tag)
    return ActResult(message=f"{counted(done.written, 'row')} written, {done.removed:,} removed.")


PAGES = (
    Page("tags", BY_NAME["tags.list"], tags, TagsPageQuery),
    Page("tag", BY_NAME["tags.read"], tag, TagQuery),
)
ACTS = (api_act("tags.rebuild", "Rebuild tag", rebuild, TagForm, preview_rebuild),)
LIVES = (
    LiveView(
        name="tag.live",
        path="/tag/live",
        route=BY_NAME["tags.read"],
        follow=follow,
        template="tag_row.html",
        query=TagQuery,
    ),
)
