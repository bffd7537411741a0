"""The inspector, the last process: waits until everything has caught up, then records the contents of the book."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from typing import Any

from faults.plan import (
    ACCOUNTS,
    CAUSED,
    CONSUMERS,
    GROUP,
    GROUP_TAG,
    MAIL,
    MIRROR,
    NAMESPACE,
    QUEUE,
    REGION,
    TAGS,
    TOPIC,
    Plan,
)
from faults.roles import deciders, journals, streams, wal
from faults.roles.context import Context
from tidebook.core.action import Append, Delete, Purge
from tidebook.core.event import event_tags, read_payload, unpack_events
from tidebook.core.key import Key, journal_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.log.port import Record, read_all
from tidebook.testing.histories.line import read_lines

CATCH_UP_S_MAX = 90.0
SERVER_CATCH_UP_S_MAX = 180.0
AT_ONCE = 16
DRAINED_AT_ONCE, DRAIN_LEASE_S = 200, 3600.0


async def inspect(context: Context) -> None:
    """Wait until all consumers have caught up, at most for the bound, then record the contents of all parts."""
    async with context.open_book() as book:
        began, bound_s = time.monotonic(), catch_up_s_max(context.plan)
        wanted = WantedEvents(context, book)
        lacking = await _wait(lambda: _lacking(context, book, wanted), bound_s)
        context.history.observe(
            "caught_up", {"took_s": time.monotonic() - began, "bound_s": bound_s, "lacking": lacking}
        )
        for topic in (TOPIC, ACCOUNTS):
            await _dump_journals(context, book, topic)
        for tag in TAGS:
            context.history.observe("dump_tag", [event.payload async for event in book.tags.read(tag)], tag=tag)
        _dump_effects(context)
        for effect, rows in (
            ("command", await deciders.caused_commands(book)),
            ("entry", await _drain(book.queue(CAUSED))),
        ):
            context.history.observe("dump_caused", rows, process="mirror", effect=effect)
        await _dump_messages(context, book)
        await _dump_queue(context, book)
        region = await book.wal(NAMESPACE).open_region(REGION, create=True, writable=False)
        await wal.replay(context, region)


def catch_up_s_max(plan: Plan) -> float:
    """Return the time within which all consumers must have caught up."""
    return CATCH_UP_S_MAX if plan.brokers is None else SERVER_CATCH_UP_S_MAX


async def _wait(lacking: Callable[[], Awaitable[list[str]]], bound_s: float) -> list[str]:
    began = time.monotonic()
    while found := await lacking():
        print(f"{time.monotonic() - began:.1f} s: {'; '.join(found)}", flush=True)  # goes to the log of the process
        if time.monotonic() > began + bound_s:
            return found
        await asyncio.sleep(bound_s / 200)
    return []


class WantedEvents:
    """The events that all consumers must have; they are read once, because there are no more appends."""

    def __init__(self, context: Context, book: Any) -> None:
        self._context = context
        self._book = book
        self._surviving: set[str] | None = None
        self._executed: set[str] | None = None

    async def surviving(self) -> set[str]:
        """Return the values of the events in the journals."""
        if self._surviving is None:
            self._surviving = await _payloads(self._book.journal(TOPIC), lambda id: True)
        return self._surviving

    async def executed(self) -> set[str]:
        """Return the values of the events that commands of the workload have appended."""
        if self._executed is None:
            journal = self._book.journal(ACCOUNTS)
            self._executed = await _payloads(journal, lambda id: not id.startswith(MIRROR))
        return self._executed


async def _payloads(journal: Any, wanted: Callable[[str], bool]) -> set[str]:
    """Return the values of the events of some journals."""
    found: set[str] = set()

    async def read(id: str) -> None:
        found.update([_named(event.payload) async for event in journal.read(id)])

    await _each([id async for id in journal.ids() if wanted(id)], read)
    return found


async def _each(ids: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
    """Do the work for each id, with bounded concurrency, because a long run has thousands of journals."""
    waiting = iter(ids)

    async def run() -> None:
        for id in waiting:
            await work(id)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(run())


async def _lacking(context: Context, book: Any, wanted: WantedEvents) -> list[str]:
    """Return a description of each consumer that has not caught up yet."""
    if lag := sum([await _lag(book, topic) for topic in (TOPIC, ACCOUNTS)]):
        return [f"{lag} records are not replicated"]
    found: list[str] = []
    events = {tag: [event.payload async for event in book.tags.read(tag)] for tag in TAGS}
    surviving = await wanted.surviving()
    if late := surviving - {value for values in events.values() for value in values}:
        found.append(f"{len(late)} events are not below the horizon")
    for (stream, tag), values in delivered_values(context.plan).items():
        if late := set(events[tag]) - values:
            found.append(f"{stream} lacks {len(late)} events of {tag}")
    effects = _effects(context)
    if late := set(events[GROUP_TAG]) - {row["value"] for row in effects[GROUP]}:
        found.append(f"the group lacks {len(late)} events")
    if late := surviving - {row["value"] for row in effects[streams.PROJECTION]}:
        found.append(f"the projection lacks {len(late)} events")
    executed = await wanted.executed()
    if late := executed - {row["value"] for row in await deciders.caused_commands(book)}:
        found.append(f"the process manager lacks the commands of {len(late)} events")
    caused = await book.queue(CAUSED).status()
    if caused.waiting < len(executed):
        found.append(f"the process manager lacks the entries of {len(executed) - caused.waiting} events")
    status = await book.queue(QUEUE).status()
    if status.waiting or status.processing:
        found.append(f"the queue has {status.waiting} waiting and {status.processing} running entries")
    found += [f"{each.waiting} messages of {each.topic} wait" for each in await book.outbox.status() if each.waiting]
    return found


def delivered_values(plan: Plan) -> dict[tuple[str, str], set[str]]:
    """Return what each stream has delivered, by consumer and tag; a stream without a delivery has an empty set."""
    found = {(f"consumer-{number}", tag): set[str]() for number in range(1, CONSUMERS + 1) for tag in TAGS}
    for line in read_lines(plan.histories.glob("consumer-*.ndjson")):
        if line.op == "deliver":
            found[line.args["stream"], line.args["tag"]].add(line.result["value"])
    return found


async def _drain(queue: Any) -> list[dict[str, str]]:
    """Return the data of all entries of a queue that has no workers."""
    rows: list[dict[str, str]] = []
    while jobs := await queue.claim(limit=DRAINED_AT_ONCE, lease=DRAIN_LEASE_S):
        rows += [{"key": queue.name, "value": job.data} for job in jobs]
    return rows


async def _lag(book: Any, topic: str) -> int:
    config = await book.store.topic_config(topic)
    lag = 0
    for partition in range(config.partitions):
        pointer = await book.store.pointer(topic, partition)
        done = -1 if pointer is None else pointer.position.offset
        # Ticks are not counted, because new ones are appended all the time.
        end = await book.log.end(topic, partition)
        records = await read_all(book.log, topic, partition, start=done + 1, stop=end)
        lag += sum(journal_of(each.key, partition, config.partitions) is not None for each in records)
    return lag


async def _dump_journals(context: Context, book: Any, topic: str) -> None:
    config = await book.store.topic_config(topic)
    ids: set[str] = set()
    for partition in range(config.partitions):
        stop = await book.log.end(topic, partition)
        start = await book.log.start(topic, partition)
        rows = []
        for record in await read_all(book.log, topic, partition, start=start, stop=stop):
            id = journal_of(record.key, partition, config.partitions)
            if id is not None:
                ids.add(id)
                rows.append(_record_row(record, f"{topic}/{id}", config))
        context.history.observe("dump_log", rows, topic=topic, partition=partition)
    ids.update([id async for id in book.store.ids(topic)])  # also journals that the log does not have
    stored = {}
    accounts = deciders.accounts_of(book)

    async def dump(id: str) -> None:
        if topic == TOPIC:
            await journals.read(context, book.journal(topic), id, f"{topic}/{id}")
        elif not id.startswith(MIRROR):
            await deciders.balance(context, accounts, id)
        key = Key(topic, id)
        head = await book.store.head(key)
        if head is not None and head.live:
            events = await book.store.events(key, head, after=head.delete_to, to=head.seq_nr, limit=100_000)
            stored[f"{topic}/{id}"] = {
                "last": head.seq_nr,
                "deleted": head.delete_to,
                "incarnation": _place(head.incarnation),
                "events": [[row.seq_nr, _value(row.encoded)] for row in events],
            }

    await _each(sorted(ids), dump)
    context.history.observe("dump_store", stored, topic=topic)


def _value(encoded: Any) -> str:
    """Return the value that identifies an event: its payload, or the field of a command's event."""
    return _named(read_payload(encoded))


def _named(payload: Any) -> str:
    return str(payload["value"] if isinstance(payload, dict) else payload)


def _place(position: Position | None) -> list[int] | None:
    return None if position is None else [position.epoch, position.offset]


def _record_row(record: Record, key: str, config: Any) -> dict[str, Any]:
    action = read_record(record.value, limit_bytes=config.limit_bytes)
    row: dict[str, Any] = {"key": key, "offset": record.offset, "epoch_of_log": config.epoch, "kind": "other"}
    match action:
        case Append():
            events = unpack_events(action.body)
            return row | {
                "kind": "append",
                "epoch": action.epoch,
                "append_id": action.append_id.hex(),
                "values": [_value(event) for event in events],
                "tags": [list(event_tags(event)) for event in events],
                "expected": action.expected,
                "at": action.at,
                "floor": action.floor,
                "incarnation": _place(action.incarnation),
            }
        case Delete():
            place = _place(action.incarnation)
            return row | {"kind": "delete", "epoch": action.epoch, "to": action.to, "incarnation": place}
        case Purge():
            return row | {"kind": "purge", "epoch": action.epoch, "if_position": _place(action.if_position)}
        case _:
            return row


def _effects(context: Context) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {GROUP: [], streams.PROJECTION: []}
    with closing(streams.connect(context)) as connection:
        for consumer, key, value in connection.execute("SELECT consumer, key, value FROM effects ORDER BY id"):
            found[consumer].append({"key": key, "value": value})
    return found


def _dump_effects(context: Context) -> None:
    effects = _effects(context)
    context.history.observe("dump_effects", effects[GROUP], consumer=GROUP, tag=GROUP_TAG)
    context.history.observe("dump_effects", effects[streams.PROJECTION], consumer=streams.PROJECTION, topic=TOPIC)


async def _dump_messages(context: Context, book: Any) -> None:
    if context.plan.brokers is not None:
        rows = await asyncio.to_thread(_consume, context.plan.brokers)
        context.history.observe("dump_messages", rows, topic=MAIL)
        return
    rows = [
        {
            "key": (each.key or b"").decode(),
            "value": (each.payload or b"").decode(),
            "partition": each.partition,
            "offset": each.offset,
        }
        async for each in book.log_topic(MAIL).read()
    ]
    context.history.observe("dump_messages", rows, topic=MAIL)


def _consume(brokers: str) -> list[dict[str, Any]]:
    """Read the messages of a Kafka topic from its start to its current end."""
    from confluent_kafka import Consumer, KafkaException, TopicPartition

    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "inspector", "enable.auto.commit": False})
    rows: list[dict[str, Any]] = []
    try:
        topics = consumer.list_topics(MAIL, timeout=30).topics
        for partition in topics[MAIL].partitions:
            start, end = consumer.get_watermark_offsets(TopicPartition(MAIL, partition), timeout=30)
            consumer.assign([TopicPartition(MAIL, partition, start)])
            while consumer.position([TopicPartition(MAIL, partition)])[0].offset < end and start < end:
                message = consumer.poll(10)
                if message is None:
                    raise RuntimeError(f"partition {partition} of {MAIL} gives nothing before its end {end}")
                if message.error():
                    raise KafkaException(message.error())
                value, key = message.value() or b"", message.key() or b""
                rows.append(
                    {"key": key.decode(), "value": value.decode(), "partition": partition, "offset": message.offset()}
                )
    finally:
        consumer.close()
    return rows


async def _dump_queue(context: Context, book: Any) -> None:
    entries = await book.queue(QUEUE).entries(limit=1000)
    context.history.observe("dump_queue", [{"value": entry.data} for entry in entries], queue=QUEUE)
