"""One request for every route, on a book that is prepared for these requests."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from tidebook import Book, Event
from tidebook.api.queues import encode_lease
from tidebook.api.route import Route
from tidebook.queue.port import QueueSettings


class Example(msgspec.Struct, frozen=True):
    """The parts of a request; `status` is that of its answer."""

    path: tuple[Any, ...] = ()
    query: dict[str, Any] = {}
    body: Any = None
    status: int | None = None


_EVENT = {"payload": {"total": 3, "card": "4111111111111111"}, "tags": ["paid"]}
_FLAG, _REGION = "{flag}", 7
EXAMPLES: dict[str, Example] = {
    "health.live": Example(),
    "health.ready": Example(),
    "openapi.document": Example(),
    "monitoring.metrics": Example(),
    "monitoring.history": Example((), {"since_ms": 0}),
    "topics.list": Example(),
    "topics.describe": Example(("orders",)),
    "topics.config": Example(("orders",)),
    "topics.create": Example(("orders",)),
    "journals.ids": Example(("orders",), {"prefix": "o"}),
    "journals.append_batch": Example(("orders",), body={"appends": [{"id": "o-9", "events": [_EVENT]}]}),
    "journals.pointer": Example(("orders", "o-1")),
    "journals.append": Example(("orders", "o-2"), body={"events": [_EVENT]}),
    "journals.read": Example(("orders", "o-1")),
    "journals.save_snapshot": Example(("orders", "o-1", 2), body={"payload": {"n": 2}}),
    "journals.load_snapshot": Example(("orders", "o-1")),
    "journals.delete_snapshots": Example(("orders", "o-1")),
    "journals.delete": Example(("orders", "o-1"), {"to": 1}),
    "journals.purge": Example(("orders", "o-1")),
    "tags.list": Example(),
    "tags.read": Example(("paid",)),
    "tags.horizon": Example(),
    "tags.rebuild": Example(("paid",), body={"topics": ["orders"]}),
    "queues.list": Example(),
    "queues.status": Example(("mail",)),
    "queues.report_worker": Example(("mail", "0" * 32), body={"name": "host:1"}),
    "queues.workers": Example(("mail",)),
    "queues.remove_worker": Example(("mail", "0" * 32)),
    "queues.pause": Example(("mail",)),
    "queues.resume": Example(("mail",)),
    "queues.put": Example(("mail",), body={"entries": [{"data": {"to": "x"}, "key": "k"}]}),
    "queues.entries": Example(("mail",)),
    "queues.claim": Example(("mail",), body={"limit": 1}),
    "queues.heartbeat": Example(("mail",), body={"leases": ["{lease}"]}),
    "queues.done": Example(("mail",), body={"leases": ["{lease}"]}),
    "queues.fail": Example(("mail",), body={"leases": ["{other_lease}"], "reason": "no"}),
    "queues.listen": Example(("mail",)),
    "queues.dead_letters": Example(("mail",)),
    "queues.edit": Example(("mail", _FLAG), body={"data": {"to": "y"}}),
    "queues.retry": Example(("mail", _FLAG)),
    "queues.drop": Example(("mail", "{other_flag}")),
    "outbox.status": Example(),
    "outbox.parked": Example(),
    "outbox.retry": Example(body={"topic": "orders"}),
    "outbox.drop": Example(body={"topic": "orders"}),
    "wal.open_session": Example(("metrics", _REGION), body={"create": True}),
    "wal.write": Example(
        ("metrics", _REGION),
        body={
            "session": "{session}",
            "writes": [{"table": 1, "payloads": [{"payload": 1}, {"payload_base64": "AAE="}]}],
        },
    ),
    "wal.regions": Example(("metrics",)),
    "wal.status": Example(("metrics", _REGION)),
    "wal.read": Example(("metrics", _REGION)),
    "wal.mark_deleted": Example(("metrics", _REGION), body={"table": 1, "seq": 2}),
    "wal.request_flush": Example(("metrics", _REGION), body={"table": 1}),
    "wal.snapshot": Example(("metrics", _REGION)),
    "wal.clean": Example(("metrics", _REGION)),
    "wal.drop_table": Example(("metrics", _REGION, 1)),
    "wal.close_session": Example(("metrics", _REGION, "{session}")),
    "wal.delete_region": Example(("metrics", _REGION)),
    "pipeline.status": Example(),
    "pipeline.parked": Example(),
    "pipeline.start": Example(body={"kind": "verify", "topics": ["none"]}),
    "pipeline.jobs": Example(),
    "pipeline.job": Example(("{job}",)),
    "pipeline.cancel": Example(("{job}",)),
    "access.sign_in": Example(body={"token": "{token}"}),
    "access.session": Example(),
    "access.sign_out": Example(),
    "access.tokens": Example(),
    "access.create_token": Example(body={"name": "new", "role": "viewer"}),
    "access.revoke_token": Example(("{new_token}",)),
    "access.audit_verify": Example(),
    "topics.delete": Example(("orders",)),
}


async def prepare(book: Book) -> dict[str, str]:
    """Write the data of the examples; return the values of their placeholders."""
    orders = book.journal("orders")
    await orders.append("o-1", [Event(_EVENT["payload"], tags={"paid"}), Event(b"\0")])
    queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))  # a failure makes a dead letter
    await queue.put_many([{"to": n} for n in range(6)])
    jobs = await queue.claim(2, 600, together=False)
    leases = [encode_lease(job.held, job.id, job.key) for job in jobs]
    await queue.fail(await queue.claim(2, 600, together=False))
    flags = [str(letter.id) for letter in await queue.dead_letters()]
    return {"lease": leases[0], "other_lease": leases[1], "flag": flags[0], "other_flag": flags[1]}


def request_of(http: httpx.AsyncClient, route: Route, known: dict[str, str], **options: Any) -> httpx.Request:
    """Return the request of a route's example; `known` fills its placeholders."""
    example = EXAMPLES[route.name]

    def fill(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("{"):
            return known.get(value.strip("{}"), "0")
        if isinstance(value, dict):
            return {name: fill(item) for name, item in value.items()}
        return [fill(item) for item in value] if isinstance(value, list) else value

    path = route.path
    for name, value in zip(route.parameters, example.path, strict=True):
        path = path.replace(f"{{{name}}}", str(fill(value)))
    return http.build_request(route.method, path, params=example.query, json=fill(example.body), **options)
