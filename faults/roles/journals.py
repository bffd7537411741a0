"""Writers and readers of journals, in a folder, on servers or over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import tidebook
from faults.plan import TAGS, TOPIC
from faults.roles.context import WITHOUT_EFFECT, Context, is_unknown
from tidebook.core.errors import Conflict, Fenced, NotFound, OutcomeUnknown, Truncated
from tidebook.core.event import Event

TASKS = 3
RETRIES_MAX = 4
#: Errors that only a snapshot raises: the journal was purged since, or is shorter.
SNAPSHOT_FAILURES = (*WITHOUT_EFFECT, NotFound)


async def write(context: Context, *, remote: bool = False) -> None:
    """Append, read, delete, purge and snapshot, in several tasks, until stopped."""
    async with tidebook.open(context.plan.url) if remote else context.open_book() as book:
        journal = book.journal(TOPIC)
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(_work(context, journal))


async def _work(context: Context, journal: Any) -> None:
    while not context.stopping.is_set():
        id = context.plan.key(context.chance.random())
        await _step(context, journal, id, f"{TOPIC}/{id}")
        await context.rest()


async def _step(context: Context, journal: Any, id: str, key: str) -> None:
    chance = context.chance
    match chance.randrange(20):
        case 0:
            to = chance.randrange(1, 12)
            await context.record("delete", lambda: journal.delete(id, to=to), key=key, to=to)
        case 1:
            if chance.random() < 0.5:
                await context.record("purge", lambda: journal.purge(id), key=key)
        case 2:
            await _snapshot(context, journal, id, key)
        case 3:
            await context.record("pointer", lambda: journal.pointer(id), lambda found: found, key=key)
        case 4 | 5 | 6 | 7 | 8:
            await read(context, journal, id, key)
        case 9 | 10 | 11:
            last = await context.record("pointer", lambda: journal.pointer(id), lambda found: found, key=key)
            if last is None or isinstance(last, int):
                await _append(context, journal, id, key, expected=last or 0)
        case 12:
            await _append(context, journal, id, key, at=chance.randrange(1, 30))
        case _:
            await _append(context, journal, id, key)


async def read(context: Context, journal: Any, id: str, key: str) -> list[list[Any]] | None:
    """Read a journal and record the read; return its events, or None if the read failed."""

    async def collect() -> list[list[Any]]:
        return [[event.seq_nr, event.payload] async for event in journal.read(id)]

    found = await context.record(
        "read", collect, lambda events: {"events": events}, failures=(*WITHOUT_EFFECT, Truncated), key=key
    )
    return found if isinstance(found, list) else None


async def _append(
    context: Context, journal: Any, id: str, key: str, *, expected: int | None = None, at: int | None = None
) -> None:
    values = [context.value() for _ in range(context.chance.choice((1, 1, 1, 3)))]
    events = [Event(value, tags={context.chance.choice(TAGS)}) for value in values]
    append_id = context.chance.randbytes(16)
    options = {name: value for name, value in (("expected", expected), ("at", at)) if value is not None}
    failures = (*WITHOUT_EFFECT, Conflict, Fenced)
    retry: OutcomeUnknown | None = None
    for _ in range(RETRIES_MAX):
        found = await context.record(
            "append",
            lambda retry=retry: journal.append(  # type: ignore[misc]
                id, events, append_id=None if retry else append_id, retry=retry, **options
            ),
            lambda appended: {"first": appended.first, "last": appended.last},
            failures=failures,
            key=key,
            values=values,
            append_id=append_id.hex(),
            **options,
        )
        if not is_unknown(found) or context.stopping.is_set():
            return
        retry = found
        await context.pause()


async def _snapshot(context: Context, journal: Any, id: str, key: str) -> None:
    def loaded(found: Any) -> Any:
        return None if found is None else {"seq_nr": found.seq_nr, "payload": found.payload}

    events = await read(context, journal, id, key)
    if events:
        seq_nr, payload = events[-1][0], f"{context.value()} of {events[-1][1]}"
        await context.record(
            "save_snapshot",
            lambda: journal.save_snapshot(id, seq_nr=seq_nr, payload=payload),
            failures=SNAPSHOT_FAILURES,
            key=key,
            seq_nr=seq_nr,
            payload=payload,
        )
    await context.record("load_snapshot", lambda: journal.load_snapshot(id), loaded, key=key)
