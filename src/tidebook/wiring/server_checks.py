"""Checks of the servers of a book: version, permissions, clock, replicas, and retention against replication.

They only read. A check that fails names its remedy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import cassandra_settings, extra, kafka_settings, scheme
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings
from tidebook.wiring.topics import TopicDescription

#: A clock that differs by more than this confuses dates of queues, expiry, and the fence of a relay.
CLOCK_SKEW_S_MAX = 2.0
#: The share of the log's retention that an unreplicated record may have waited.
RETENTION_SHARE_MAX = 0.5
CASSANDRA_MIN = (4, 0)
POSTGRES_MIN = 14
KAFKA_S_MAX = 10.0
#: The operations that Tidebook needs on each of its topics.
KAFKA_OPERATIONS = ("READ", "WRITE", "DESCRIBE", "DESCRIBE_CONFIGS")


class ServerCheck(msgspec.Struct, frozen=True):
    """The result of one check; `ok` is None if it is only information."""

    check: str
    ok: bool | None
    detail: str


async def check_servers(settings: Settings) -> AsyncIterator[ServerCheck]:
    """Check each server that the settings name, even if another one cannot be reached."""
    for part, check in (("log", check_kafka), ("store", check_cassandra), ("sql", check_sql)):
        if settings.section(part).embedded:
            continue
        try:
            found = await check(settings)
        except TidebookError as error:
            remedy = f"check that the server runs, and url, user and password in [{part}]"
            yield ServerCheck(part, False, f"{error}: {remedy}")
            continue
        for each in found:
            yield each


async def check_kafka(settings: Settings) -> list[ServerCheck]:
    """Check the brokers and this user's permissions. Kafka reports neither its version nor its time."""
    options = kafka_settings(settings)
    admin = await asyncio.to_thread(_kafka_admin, options)
    cluster = await asyncio.to_thread(_kafka_answer, admin.describe_cluster, include_authorized_operations=True)
    brokers = len(cluster.nodes)
    detail = f"Kafka, {brokers} broker{'s' if brokers > 1 else ''}, protocol {options.protocol}"
    found = [ServerCheck("log", True, detail)]
    granted = {each.name for each in cluster.authorized_operations or ()}
    if granted and not granted & {"CREATE", "ALL"}:
        detail = "may not create topics: create them yourself, or grant CREATE on the cluster to the user"
        found.append(ServerCheck("log permissions", None, detail))
    return found


async def check_cassandra(settings: Settings) -> list[ServerCheck]:
    """Check the version and the clock of the node that answers, and the replicas of the keyspace."""
    options = cassandra_settings(settings)
    session = await extra("tidebook.store.cassandra.store", "cassandra").connect(options, Metrics())
    try:
        began_s = time.time()
        cql = "SELECT release_version, toUnixTimestamp(now()) FROM system.local"
        [(version, now_ms)] = await session.query(cql)
        ended_s = time.time()
        nodes = 1 + len(await session.query("SELECT host_id FROM system.peers"))
        keyspaces = await session.query(
            f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{options.keyspace}'"
        )
    finally:
        await session.close()
    known = tuple(int(part) for part in version.split("-")[0].split(".")[:2]) >= CASSANDRA_MIN
    detail = f"Cassandra {version}, {nodes} node{'s' if nodes > 1 else ''}"
    remedy = "" if known else f": Tidebook needs {'.'.join(map(str, CASSANDRA_MIN))} or newer: upgrade the cluster"
    found = [ServerCheck("store", known, detail + remedy), check_clock("store clock", now_ms / 1000, began_s, ended_s)]
    if not keyspaces:
        detail = f"keyspace {options.keyspace} does not exist: the first write creates it, if the user may"
        return [*found, ServerCheck("store keyspace", None, detail)]
    return [*found, check_replicas(options.keyspace, dict(keyspaces[0][0]), nodes)]


def check_replicas(keyspace: str, replication: dict[str, str], nodes: int) -> ServerCheck:
    """Check that a cluster keeps more than one copy of a keyspace, and not more copies than it has nodes."""
    from tidebook.store.cassandra.settings import replicas_of

    counts = replicas_of(replication)
    most, text = max(counts.values()), ", ".join(f"{dc} {n}".strip() for dc, n in counts.items())
    if most > nodes:
        detail = f"keyspace {keyspace} needs {text} replicas on {nodes} nodes: add nodes, or lower the replication"
        return ServerCheck("store keyspace", False, detail)
    if most < 3 <= nodes:
        detail = f"keyspace {keyspace} has {text} replicas on {nodes} nodes: with 3, a node may fail"
        return ServerCheck("store keyspace", None, f"{detail} (ALTER KEYSPACE, then nodetool repair)")
    return ServerCheck("store keyspace", True, f"{keyspace}, replicas: {text}")


async def check_sql(settings: Settings) -> list[ServerCheck]:
    """Check version, clock and permissions of PostgreSQL; other databases are checked by the outbox that uses them."""
    url = settings.section("sql").url or ""
    if scheme(url) not in {"postgresql", "postgres"}:
        return [ServerCheck("sql", None, f"{scheme(url)}: not checked here: see 'tidebook outbox status'")]
    psycopg = extra("psycopg", "postgres")
    try:
        row, began_s, ended_s = await _ask_postgres(url)
    except psycopg.Error as error:
        raise extra("tidebook.postgres.errors", "postgres").from_psycopg(error, writes=False) from error
    number, version, now_s, standby, user, may_create, schema = row
    known = number // 10_000 >= POSTGRES_MIN
    remedy = "" if known else f": Tidebook needs {POSTGRES_MIN} or newer: upgrade the server"
    found = [ServerCheck("sql", known, f"PostgreSQL {version}{remedy}")]
    found.append(check_clock("sql clock", now_s, began_s, ended_s))
    if standby:
        detail = "this is a standby, which cannot write: name the primary in [sql] url"
        found.append(ServerCheck("sql role", False, detail))
    if may_create:
        found.append(ServerCheck("sql permissions", True, f"{user} may create tables in schema {schema}"))
    else:
        detail = f"{user} may not create tables in schema {schema or '(none)'}: GRANT CREATE ON SCHEMA … TO {user}"
        found.append(ServerCheck("sql permissions", False, f"{detail}, or let an administrator create them"))
    return found


async def _ask_postgres(url: str) -> tuple[Any, float, float]:
    """Return the row with everything that is checked, and the times before and after the query."""
    connect = extra("tidebook.postgres.connect", "postgres").connect_first
    async with await connect(url, application="tidebook doctor", settings="") as connection:
        began_s = time.time()
        answer = await connection.execute(
            "SELECT current_setting('server_version_num')::int, current_setting('server_version'),"
            " extract(epoch FROM clock_timestamp())::float8, pg_is_in_recovery(), current_user::text,"
            " coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), current_schema()"
        )
        return await answer.fetchone(), began_s, time.time()


def check_clock(name: str, theirs_s: float, began_s: float, ended_s: float) -> ServerCheck:
    """Compare a server's clock with this machine's, which sent a query at `began_s` and had a result at `ended_s`."""
    skew_s = max(began_s - theirs_s, theirs_s - ended_s, 0.0)
    if skew_s <= CLOCK_SKEW_S_MAX:
        return ServerCheck(name, True, f"within {max(skew_s, ended_s - began_s):.1f} s of this machine's")
    ahead = "ahead of" if theirs_s > ended_s else "behind"
    detail = f"{skew_s:.1f} s {ahead} this machine's: synchronize both clocks with NTP (chrony, systemd-timesyncd)"
    return ServerCheck(name, False, detail)


async def check_topic(book: Book, status: TopicDescription, *, now_ms: int) -> list[ServerCheck]:
    """Check a topic on Kafka: permissions, replicas, and its retention against the oldest unreplicated record."""
    if book.settings.section("log").embedded:
        return []
    try:
        config, replicas, granted = await asyncio.to_thread(_kafka_topic, kafka_settings(book.settings), status.topic)
    except TidebookError as error:
        return [ServerCheck(f"topic {status.topic}", False, str(error))]
    found = []
    name = f"topic {status.topic}"
    lacking = [each for each in KAFKA_OPERATIONS if granted and each not in granted and "ALL" not in granted]
    if lacking:
        detail = f"this user lacks {', '.join(lacking)}: grant them with kafka-acls"
        found.append(ServerCheck(f"{name} permissions", False, detail))
    in_sync = int(config.get("min.insync.replicas") or 1)
    if in_sync > replicas:
        detail = f"min.insync.replicas is {in_sync} and there are {replicas} replicas: no append is accepted"
        found.append(ServerCheck(f"{name} replicas", False, f"{detail}: lower it, or add replicas"))
    waited_ms = await _oldest_unreplicated_ms(book, status, now_ms)
    return [*found, check_retention(name, int(config.get("retention.ms") or -1), waited_ms)]


def check_retention(name: str, retention_ms: int, waited_ms: int | None) -> ServerCheck:
    """Compare how long the oldest unreplicated record has waited (None: there is none) with the log's retention."""
    if retention_ms < 0:
        return ServerCheck(f"{name} retention", True, "kept forever: the log is never truncated by time")
    waited = "nothing waits" if waited_ms is None else f"the oldest unreplicated record has waited {_span(waited_ms)}"
    if waited_ms is not None and waited_ms > RETENTION_SHARE_MAX * retention_ms:
        detail = f"{waited} of {_span(retention_ms)}, after which it is lost: run 'tidebook pipeline replicate' now"
        return ServerCheck(f"{name} retention", False, f"{detail}, or raise retention.ms with kafka-configs")
    return ServerCheck(f"{name} retention", True, f"{_span(retention_ms)}, {waited}")


async def _oldest_unreplicated_ms(book: Book, status: TopicDescription, now_ms: int) -> int | None:
    ages = []
    for partition, (start, end, pointer) in enumerate(zip(status.starts, status.ends, status.pointers, strict=True)):
        first = max(start, 0 if pointer is None else pointer + 1)
        if first < end:
            page = await book.log.read(status.topic, partition, start=first, stop=end, limit=1)
            ages += [now_ms - record.timestamp_ms for record in page.records]
    return max(ages, default=None)


def _kafka_admin(options: Any) -> Any:
    admin, client = extra("confluent_kafka.admin", "kafka"), extra("tidebook.kafka.client", "kafka")
    return client.connect(admin.AdminClient, client.common_config(options))


def _kafka_answer(ask: Any, *arguments: Any, **options: Any) -> Any:
    """Return the answer to a request of the admin client; raise `Unavailable` or the broker's error."""
    kafka = extra("confluent_kafka", "kafka")
    try:
        answer = ask(*arguments, request_timeout=KAFKA_S_MAX, **options)
        return answer.result() if hasattr(answer, "result") else {name: each.result() for name, each in answer.items()}
    except kafka.KafkaException as error:
        raise extra("tidebook.kafka.errors", "kafka").failed(error, "checking the brokers") from error


def _kafka_topic(options: Any, topic: str) -> tuple[dict[str, str], int, set[str]]:
    """Return a topic's configuration, the number of its replicas, and the operations that this user may do."""
    kafka, admin = extra("confluent_kafka", "kafka"), extra("confluent_kafka.admin", "kafka")
    client = _kafka_admin(options)
    [described] = _kafka_answer(
        client.describe_topics, kafka.TopicCollection([topic]), include_authorized_operations=True
    ).values()
    [entries] = _kafka_answer(client.describe_configs, [admin.ConfigResource(admin.ResourceType.TOPIC, topic)]).values()
    replicas = min(len(each.replicas) for each in described.partitions)
    granted = {each.name for each in described.authorized_operations or ()}
    return {name: entry.value for name, entry in entries.items()}, replicas, granted


def _span(milliseconds: int) -> str:
    """Return a duration in its largest unit: `3 days`, `2.5 h`."""
    seconds = milliseconds / 1000
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
