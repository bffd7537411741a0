"""Build the queues of a book from its settings.

    [queue]                                              [queue.mail]
    schema = "tidebook_queue"                            max_timeouts = 3
    dead_letter_webhook = "https://…"                  period = "hour"

A table below [queue] holds the settings of the queue of that name; its `fields` declare the data of the entries.
"""

from __future__ import annotations

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.queue.browse import BrowsableStore
from tidebook.queue.hooks import Hooks
from tidebook.queue.port import QueueSettings
from tidebook.queue.queues import Queues
from tidebook.queue.runtime import QueueRuntime
from tidebook.runtime.clock import Clock, Ids
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import extra, scheme
from tidebook.wiring.settings import Settings, options_as


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of section [queue] that apply to all queues."""

    #: The PostgreSQL schema of the tables.
    schema: str = "tidebook_queue"
    #: The largest number of connections on which a process puts at once. It opens up to two more: one, so that waiting
    #: puts never block leases, and one that listens for notifications.
    connections_max: int = 4
    #: A command that receives every dead letter on its standard input.
    dead_letter_command: tuple[str, ...] = ()
    #: A URL that receives every dead letter as a POST request.
    dead_letter_webhook: str | None = None


def make_queues(
    settings: Settings, *, clock: Clock, ids: Ids, metrics: Metrics, folder_clock: Clock | None = None
) -> Queues:
    """Return the queues of a book; the store opens when a queue is first used."""
    section = settings.section("queue")
    shared = {name: value for name, value in section.options.items() if not isinstance(value, dict)}
    options = options_as(msgspec.structs.replace(section, options=shared), "queue", QueueOptions)
    tables = {name: section.table(name) for name, value in section.options.items() if isinstance(value, dict)}
    declared = {name: table.options.pop("fields") for name, table in tables.items() if "fields" in table.options}
    queue_settings = {name: options_as(table, f"queue.{name}", QueueSettings) for name, table in tables.items()}

    async def open_store() -> BrowsableStore:
        url = settings.section("sql").url
        if url is None:
            from tidebook.queue.sqlite.store import SqliteQueues

            return SqliteQueues(settings.folder, clock=folder_clock, metrics=metrics)  # None: the machine's own
        if scheme(url) not in {"postgresql", "postgres"}:
            raise InvalidInput(
                f"[sql] url: queues are stored on postgresql:// or in the folder, not on {scheme(url)}://"
            )
        adapter = extra("tidebook.queue.postgres.store", "postgres")
        store: BrowsableStore = await adapter.PostgresQueues.open(
            url, schema=options.schema, connections_max=options.connections_max
        )
        return store

    def missing() -> bool:
        from tidebook.queue.sqlite.tables import FILE

        # A SQLite write-ahead file without its database is damage; opening the store reports it.
        files = (settings.folder.expanduser() / f"{FILE}{end}" for end in ("", "-wal"))
        return settings.section("sql").embedded and not any(file.exists() for file in files)

    hooks = Hooks(command=options.dead_letter_command, webhook=options.dead_letter_webhook)
    runtime = QueueRuntime(
        open_store, clock=clock, ids=ids, metrics=metrics, settings=queue_settings, hooks=hooks, missing=missing
    )
    queues = Queues(runtime)
    for name, fields in declared.items():
        queues.queue(name, fields=fields)
    return queues
