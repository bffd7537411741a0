"""A book with something on every page of the console, and an address for every page, act and live view."""

from __future__ import annotations

from typing import Any

from tidebook import Book, Event
from tidebook.outbox.message import message
from tidebook.queue.entry import Entry
from tidebook.queue.port import QueueSettings

TAG, TOPIC, ID, QUEUE = "paid", "orders", "o-1", "mail"


async def fill(book: Book) -> dict[str, Any]:
    """Write one of everything; return what the addresses need."""
    orders = book.journal(TOPIC)
    events = [Event({"total": n, "card": "4111111111111111"}, tags={TAG}, metadata={"user": "ada"}) for n in range(3)]
    await orders.append(ID, events)
    await orders.append(ID, [Event(b"\0\1"), Event("text", type="Noted", version=2)])
    queue = book.queue(QUEUE, settings=QueueSettings(max_timeouts=0))
    await queue.put_many([Entry(data={"to": n, "card": "4111111111111111"}, key=f"k-{n}") for n in range(6)])
    await queue.put({"to": "later"}, key="later", process_at=4_000_000_000_000)
    await queue.fail(await queue.claim(2, 600, together=False), reason="smtp 550")
    await queue.claim(1, 600, together=False)
    region = await book.wal("metrics").open_region(7, create=True)
    await region.write(1, [b"a", b"b"])
    await book.outbox.publish_alone([message(topic="mails", payload=b"hello", key=b"k")])
    letters = await queue.dead_letters()
    return {"letter": letters[0].id}


#: The parameters of every page.
PAGES: dict[str, dict[str, Any]] = {
    "overview": {},
    "journals": {},
    "topic": {"topic": TOPIC},
    "journal": {"topic": TOPIC, "id": ID},
    "event": {"topic": TOPIC, "id": ID, "number": 1},
    "tags": {},
    "tag": {"tag": TAG},
    "queues": {},
    "queue": {"queue": QUEUE, "status": "dead"},
    "queue_act": {"queue": QUEUE, "act": "0"},
    "entry": {"queue": QUEUE, "status": "dead", "place": "{letter}"},
    "outbox": {},
    "wal": {},
    "region": {"namespace": "metrics", "region": 7},
    "pipeline": {},
    "job": {"job": "0" * 16},
    "audit": {},
    "tokens": {},
    "settings": {},
    "doctor": {},
    "sign_in": {},
}
#: The fields of every act.
ACTS: dict[str, dict[str, Any]] = {
    "journals.append": {"topic": TOPIC, "id": ID, "payload": "{}", "expected": ""},
    "journals.delete": {"topic": TOPIC, "id": ID, "to": 1},
    "journals.purge": {"topic": TOPIC, "id": ID},
    "topics.delete": {"topic": TOPIC},
    "tags.rebuild": {"tag": TAG},
    "queues.pause": {"queue": QUEUE},
    "queues.resume": {"queue": QUEUE},
    "queues.put": {"queue": QUEUE, "data": "{}"},
    "queues.cancel_act": {"queue": QUEUE, "act": "0"},
    "queues.edit": {"queue": QUEUE, "letter": "{letter}", "data": "{}"},
    "queues.retry": {"queue": QUEUE, "status": "dead"},
    "queues.drop": {"queue": QUEUE, "status": "dead"},
    "queues.purge": {"queue": QUEUE, "status": "due"},
    "outbox.retry": {"topic": "mails"},
    "outbox.drop": {"topic": "mails"},
    "wal.snapshot": {"namespace": "metrics", "region": 7},
    "wal.clean": {"namespace": "metrics", "region": 7},
    "wal.request_flush": {"namespace": "metrics", "region": 7},
    "wal.mark_deleted": {"namespace": "metrics", "region": 7, "table": 1, "seq": 2},
    "wal.drop_table": {"namespace": "metrics", "region": 7, "table": 1},
    "wal.delete_region": {"namespace": "metrics", "region": 7},
    "pipeline.start": {"kind": "verify"},
    "pipeline.replay": {"topic": TOPIC, "partition": 0, "offset": 1},
    "pipeline.cancel": {"job": "0" * 16},
    "access.create_token": {"name": "new"},
    "access.revoke_token": {"token": "0"},
    "access.sign_in": {"token": "tb_wrong"},
    "access.sign_out": {},
}
LIVES: dict[str, dict[str, Any]] = {"journal.live": {"topic": TOPIC, "id": ID}, "tag.live": {"tag": TAG}}


def filled(fields: dict[str, Any], known: dict[str, Any]) -> dict[str, str]:
    """Return parameters with their placeholders filled."""
    return {
        name: str(known[value.strip("{}")]) if isinstance(value, str) and value.startswith("{l") else str(value)
        for name, value in fields.items()
    }
