"""From the settings to a book's queues.

    [queue]                                              [queue.mail]
    schema = "tidebook_queue"                            max_timeouts = 3
    flag_webhook = "https://…"                           period = "hour"

A table below [queue] is the settings of the queue of that name; its `fields` are the declaration of the queue's data.
"""

from __future__ import annotations

import msgspec

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.queue.hooks import Hooks
from tidebook.queue.queues import Queues
from tidebook.queue.service import Service
from tidebook.sql.port.queue import QueueSettings, QueueStore
from tidebook.wiring.adapters import extra, scheme
from tidebook.wiring.settings import Section, Settings, options_as


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What [queue] may say beside the tables of single queues."""

    #: PostgreSQL's schema that the tables are in.
    schema: str = "tidebook_queue"
    connections_max: int = 4
    #: Told of every flag, on its standard input.
    flag_command: tuple[str, ...] = ()
    #: Told of every flag, by a POST.
    flag_webhook: str | None = None


def make_queues(settings: Settings, *, clock: Clock, ids: Ids, metrics: Metrics) -> Queues:
    """The queues that the settings name; nothing is opened yet."""
    section = settings.section("queue")
    plain = {name: value for name, value in section.options.items() if not isinstance(value, dict)}
    options = options_as(Section(options=plain), "queue", QueueOptions)
    tables = {name: dict(value) for name, value in section.options.items() if isinstance(value, dict)}
    declared = {name: table.pop("fields") for name, table in tables.items() if "fields" in table}
    single = {
        name: options_as(Section(options=table), f"queue.{name}", QueueSettings) for name, table in tables.items()
    }

    async def open_store() -> QueueStore:
        return await _open_store(settings, options, metrics=metrics)

    hooks = Hooks(command=options.flag_command, webhook=options.flag_webhook)
    queues = Queues(Service(open_store, clock=clock, ids=ids, metrics=metrics, settings=single, hooks=hooks))
    for name, fields in declared.items():
        queues.queue(name, fields=fields)
    return queues


async def _open_store(settings: Settings, options: QueueOptions, *, metrics: Metrics) -> QueueStore:
    section = settings.section("sql")
    if section.url is None:
        from tidebook.sql.sqlite.queue import SqliteQueues

        return SqliteQueues(settings.folder, metrics=metrics)  # the machine's clock is the store's, not the client's
    if scheme(section.url) in {"postgresql", "postgres"}:
        adapter = extra("tidebook.sql.postgres.queue", "postgres")
        store: QueueStore = await adapter.PostgresQueues.open(
            section.url, schema=options.schema, connections_max=options.connections_max
        )
        return store
    raise InvalidInput(f"[sql] url: a queue lives on postgresql:// or in the folder, not on {scheme(section.url)}://")
