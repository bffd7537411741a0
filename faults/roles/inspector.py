"""The inspector: waits until everything has caught up, then writes down what the book holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from faults.plan import GROUP, GROUP_TAG, MAIL, NAMESPACE, QUEUE, REGION, TAGS, TOPIC, Plan
from faults.roles import journals, streams, wal
from faults.roles.context import Context
from tidebook.core.action import Append, Delete, Purge
from tidebook.core.event import event_tags, read_payload, unpack_events
from tidebook.core.key import Key, journal_of
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.log.port import Record, read_all
from tidebook.testing.histories.line import read_lines

CATCH_UP_S_MAX = 60.0
SERVER_CATCH_UP_S_MAX = 180.0


async def inspect(context: Context) -> None:
    """Wait for all consumers within the bound, then observe log, store, effects, messages, queue and region."""
    async with context.open_book() as book:
        began, bound_s = time.monotonic(), catch_up_s_max(context.plan)
        lacking = await _wait(lambda: _lacking(context, book), bound_s)
        context.history.observe(
            "caught_up", {"took_s": time.monotonic() - began, "bound_s": bound_s, "lacking": lacking}
        )
        await _dump_journals(context, book)
        for tag in TAGS:
            context.history.observe("dump_tag", [event.payload async for event in book.tags.read(tag)], tag=tag)
        _dump_effects(context)
        await _dump_messages(context, book)
        await _dump_queue(context, book)
        region = await book.wal(NAMESPACE).open_region(REGION, create=True, writable=False)
        await wal.replay(context, region)


def catch_up_s_max(plan: Plan) -> float:
    """Return within which time all consumers must have caught up."""
    return CATCH_UP_S_MAX if plan.brokers is None else SERVER_CATCH_UP_S_MAX


async def _wait(lacking: Callable[[], Awaitable[list[str]]], bound_s: float) -> list[str]:
    deadline = time.monotonic() + bound_s
    while found := await lacking():
        if time.monotonic() > deadline:
            return found
        await asyncio.sleep(bound_s / 200)
    return []


async def _lacking(context: Context, book: Any) -> list[str]:
    """Return what has not caught up yet."""
    if lag := await _lag(book):
        return [f"{lag} records are not replicated"]
    found: list[str] = []
    events = {tag: [event.payload async for event in book.tags.read(tag)] for tag in TAGS}
    surviving = [
        event.payload async for id in book.journal(TOPIC).ids() async for event in book.journal(TOPIC).read(id)
    ]
    if late := set(surviving) - {value for values in events.values() for value in values}:
        found.append(f"{len(late)} events are not below the horizon")
    delivered: dict[tuple[str, str], set[str]] = {}
    for line in read_lines(context.plan.histories.glob("consumer-*.ndjson")):
        if line.op == "deliver":
            delivered.setdefault((line.args["stream"], line.args["tag"]), set()).add(line.result["value"])
    for (stream, tag), values in delivered.items():
        if late := set(events[tag]) - values:
            found.append(f"{stream} lacks {len(late)} events of {tag}")
    effects = _effects(context)
    if late := set(events[GROUP_TAG]) - {row["value"] for row in effects[GROUP]}:
        found.append(f"the group lacks {len(late)} events")
    if late := set(surviving) - {row["value"] for row in effects[streams.PROJECTION]}:
        found.append(f"the projection lacks {len(late)} events")
    status = await book.queue(QUEUE).status()
    if status.waiting or status.processing:
        found.append(f"the queue has {status.waiting} waiting and {status.processing} running entries")
    found += [f"{each.waiting} messages of {each.topic} wait" for each in await book.outbox.status() if each.waiting]
    return found


async def _lag(book: Any) -> int:
    config = await book.store.topic_config(TOPIC)
    lag = 0
    for partition in range(config.partitions):
        pointer = await book.store.pointer(TOPIC, partition)
        done = -1 if pointer is None else pointer.position.offset
        # The records after the last append are ticks, which never end.
        end = await book.log.end(TOPIC, partition)
        records = await read_all(book.log, TOPIC, partition, start=done + 1, stop=end)
        lag += sum(journal_of(each.key, partition, config.partitions) is not None for each in records)
    return lag


async def _dump_journals(context: Context, book: Any) -> None:
    config = await book.store.topic_config(TOPIC)
    ids: set[str] = set()
    for partition in range(config.partitions):
        stop = await book.log.end(TOPIC, partition)
        start = await book.log.start(TOPIC, partition)
        rows = []
        for record in await read_all(book.log, TOPIC, partition, start=start, stop=stop):
            id = journal_of(record.key, partition, config.partitions)
            if id is not None:
                ids.add(id)
                rows.append(_record_row(record, f"{TOPIC}/{id}", config))
        context.history.observe("dump_log", rows, topic=TOPIC, partition=partition)
    stored = {}
    for id in sorted(ids):
        await journals.read(context, book.journal(TOPIC), id, f"{TOPIC}/{id}")
        key = Key(TOPIC, id)
        head = await book.store.head(key)
        if head is not None and head.live:
            events = await book.store.events(key, head, after=head.delete_to, to=head.seq_nr, limit=100_000)
            stored[f"{TOPIC}/{id}"] = {
                "last": head.seq_nr,
                "deleted": head.delete_to,
                "incarnation": _place(head.incarnation),
                "events": [[row.seq_nr, read_payload(row.encoded)] for row in events],
            }
    context.history.observe("dump_store", stored, topic=TOPIC)


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
                "values": [read_payload(event) for event in events],
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
    """Read the messages of a Kafka topic from its start to its present end."""
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
