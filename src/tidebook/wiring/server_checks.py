"""Checks of the servers of a book: version, permissions, clock, replicas, and retention against replication.

The servers are those that `tidebook.toml` names, or the Tidebook server of a remote book. Checks change nothing, and
the detail of a failed check names the remedy.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import cassandra_settings, extra, kafka_settings, scheme
from tidebook.wiring.book import Book
from tidebook.wiring.queue import QueueOptions
from tidebook.wiring.settings import Settings
from tidebook.wiring.topics import TopicDescription

if TYPE_CHECKING:
    from tidebook.wiring.remote_book import RemoteBook

#: If clocks differ by more than this, dates of queues, expiry and the fencing of relays are unreliable.
CLOCK_SKEW_S_MAX = 2.0
#: A record that has waited longer for its replication than this share of the log's retention is a failed check.
RETENTION_SHARE_MAX = 0.5
CASSANDRA_MIN = (4, 0)
POSTGRES_MIN = 14
MARIADB_MIN = (10, 6)
MYSQL_MIN = (8, 0)
SPARK_S_MAX = 3.0
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
        except InvalidInput as error:  # a setting, or a package that is not installed: the error names the remedy
            yield ServerCheck(part, False, str(error))
            continue
        except TidebookError as error:
            remedy = f"check that the server runs, and url, user and password in [{part}]"
            yield ServerCheck(part, False, f"{error}: {remedy}")
            continue
        for each in found:
            yield each
    master = str(settings.section("pipeline").options.get("master", ""))
    if master.startswith("spark://"):
        yield await check_spark(master)


async def check_spark(master: str) -> ServerCheck:
    """Check that one of the masters of the Spark cluster accepts connections; it may be a standby."""
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        try:
            parts = urlsplit(f"//{address}")
            opening = asyncio.open_connection(parts.hostname, parts.port)
            _, writer = await asyncio.wait_for(opening, SPARK_S_MAX)
        except (OSError, ValueError, TimeoutError) as error:
            reasons.append(f"{address} does not answer: {str(error) or 'no answer in time'}")
            continue
        writer.close()
        return ServerCheck("spark", True, f"the master at {address} answers")
    return ServerCheck("spark", False, f"{'; '.join(reasons)}: check that the master runs, and [pipeline] master")


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
        detail = (
            f"keyspace {options.keyspace} does not exist: the first write creates it, if the user has the permission"
        )
        return [*found, ServerCheck("store keyspace", None, detail)]
    return [*found, check_replicas(options.keyspace, dict(keyspaces[0][0]), nodes)]


def check_replicas(keyspace: str, replication: dict[str, str], nodes: int) -> ServerCheck:
    """Check that a keyspace has no more replicas than the cluster has nodes; recommend three if it has three nodes."""
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
    """Check version, clock, role and permissions of PostgreSQL, MariaDB or MySQL."""
    url = settings.section("sql").url or ""
    if scheme(url) in {"postgresql", "postgres"}:
        schema = settings.section("queue").options.get("schema", QueueOptions().schema)
        return judge_postgres(*await _ask_postgres(url, schema))
    if scheme(url) in {"mysql", "mariadb"}:
        return judge_mysql(*await asyncio.to_thread(_ask_mysql, url))
    return [ServerCheck("sql", None, f"{scheme(url)}: a file that the outbox opens")]


class PostgresFacts(NamedTuple):
    """What PostgreSQL reports about itself and its user."""

    number: int
    version: str
    now_s: float
    standby: bool
    user: str
    schema: str | None
    may_create: bool
    #: The schema of the outbox's tables; None if they do not exist.
    outbox_schema: str | None
    queue_schema: str
    has_queues: bool
    may_use_queues: bool
    may_create_schema: bool


def judge_postgres(found: PostgresFacts, began_s: float, ended_s: float) -> list[ServerCheck]:
    """Return the findings about a PostgreSQL server that was queried between `began_s` and `ended_s`."""
    known = found.number // 10_000 >= POSTGRES_MIN
    remedy = "" if known else f": Tidebook needs {POSTGRES_MIN} or newer: upgrade the server"
    checks = [ServerCheck("sql", known, f"PostgreSQL {found.version}{remedy}")]
    checks.append(check_clock("sql clock", found.now_s, began_s, ended_s))
    if found.standby:
        detail = "this is a standby, which cannot write: name the primary in [sql] url"
        checks.append(ServerCheck("sql role", False, detail))
    user, queues = found.user, found.queue_schema
    if found.outbox_schema is not None:
        ok, detail = True, f"the outbox's tables exist in schema {found.outbox_schema}"
    elif found.may_create:
        ok, detail = True, f"{user} may create the outbox's tables in schema {found.schema}"
    else:
        ok, detail = False, f"{user} may not create tables in schema {found.schema or '(none)'}: "
        detail += f"GRANT CREATE ON SCHEMA … TO {user}, or let an administrator run 'tidebook outbox migrate'"
    checks.append(ServerCheck("sql permissions", ok, detail))
    if found.has_queues and not found.may_use_queues:
        detail = (
            f"{user} may not use schema {queues}: GRANT USAGE ON SCHEMA {queues} TO {user}, and rights on its tables"
        )
        checks.append(ServerCheck("sql queues", False, detail))
    elif not found.has_queues and not found.may_create_schema:
        detail = f"{user} may not create schema {queues}, which queues need: GRANT CREATE ON DATABASE … TO {user}"
        checks.append(ServerCheck("sql queues", None, f"{detail}, or let an administrator create it"))
    return checks


async def _ask_postgres(url: str, queue_schema: str) -> tuple[PostgresFacts, float, float]:
    """Return the facts, and the times before and after the query."""
    psycopg = extra("psycopg", "postgres")
    connect = extra("tidebook.postgres.connect", "postgres").connect_first
    try:
        async with await connect(url, application="tidebook doctor", settings="") as connection:
            began_s = time.time()
            answer = await connection.execute(
                "SELECT current_setting('server_version_num')::int, current_setting('server_version'),"
                " extract(epoch FROM clock_timestamp())::float8, pg_is_in_recovery(), current_user::text,"
                " current_schema(), coalesce(has_schema_privilege(current_schema(), 'CREATE'), false),"
                " (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('kafka_outbox')),"
                " %(queues)s, to_regnamespace(%(queues)s) IS NOT NULL,"
                " coalesce(has_schema_privilege(to_regnamespace(%(queues)s)::oid, 'USAGE'), false),"
                " has_database_privilege(current_database(), 'CREATE')",
                {"queues": queue_schema},
            )
            return PostgresFacts(*await answer.fetchone()), began_s, time.time()
    except psycopg.Error as error:
        raise extra("tidebook.postgres.errors", "postgres").from_psycopg(error, writes=False) from error


class MysqlFacts(NamedTuple):
    """What MariaDB or MySQL reports about itself and its user."""

    version: str
    now_s: float
    read_only: bool
    user: str
    database: str | None
    has_outbox: bool
    may_create: bool


def judge_mysql(found: MysqlFacts, began_s: float, ended_s: float) -> list[ServerCheck]:
    """Return the findings about a MariaDB or MySQL server that was queried between `began_s` and `ended_s`."""
    name, least = ("MariaDB", MARIADB_MIN) if "mariadb" in found.version.lower() else ("MySQL", MYSQL_MIN)
    numbers = re.match(r"(\d+)\.(\d+)", found.version)
    known = numbers is not None and (int(numbers[1]), int(numbers[2])) >= least
    remedy = "" if known else f": Tidebook needs {'.'.join(map(str, least))} or newer: upgrade the server"
    checks = [ServerCheck("sql", known, f"{name} {found.version}{remedy}")]
    checks.append(check_clock("sql clock", found.now_s, began_s, ended_s))
    if found.read_only:
        detail = "this server is read-only, as a replica is: name the primary in [sql] url"
        checks.append(ServerCheck("sql role", False, detail))
    ok: bool | None = True
    if found.database is None:
        ok, detail = False, "[sql] url names no database: add /NAME to it"
    elif found.has_outbox:
        detail = f"the outbox's tables exist in {found.database}"
    elif found.may_create:
        detail = f"{found.user} may create the outbox's tables in {found.database}"
    else:  # a role may grant it: the rights of roles are not listed
        ok, detail = None, f"no grant lets {found.user} create tables in {found.database}: "
        detail += f"GRANT CREATE ON {found.database}.* TO …, or let an administrator run 'tidebook outbox migrate'"
    checks.append(ServerCheck("sql permissions", ok, detail))
    return checks


def _ask_mysql(url: str) -> tuple[MysqlFacts, float, float]:
    """Return the facts, and the times before and after the query."""
    mysql = extra("tidebook.outbox.mysql", "mysql")
    began_s = time.time()
    version, now_s, read_only, user, database, has_outbox, may_create = mysql.first_row(
        url,
        "SELECT VERSION(), UNIX_TIMESTAMP() + MICROSECOND(NOW(6)) / 1000000, @@global.read_only, CURRENT_USER(),"
        " DATABASE(), EXISTS(SELECT 1 FROM information_schema.TABLES"
        " WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'kafka_outbox'),"
        " EXISTS(SELECT 1 FROM (SELECT GRANTEE, '%' AS place, PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES"
        " UNION ALL SELECT GRANTEE, TABLE_SCHEMA, PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES) AS granted"
        " WHERE PRIVILEGE_TYPE = 'CREATE' AND DATABASE() LIKE place"
        " AND GRANTEE = CONCAT('''', REPLACE(CURRENT_USER(), '@', '''@'''), ''''))",
    )
    facts = MysqlFacts(version, float(now_s), bool(read_only), user, database, bool(has_outbox), bool(may_create))
    return facts, began_s, time.time()


async def check_remote(book: RemoteBook, version: str) -> list[ServerCheck]:
    """Check a server of Tidebook: whether it has this version, its clock, and the parts that it needs."""
    began_s = time.time()
    live = await book.liveness()
    ended_s = time.time()
    same = live.version == version
    remedy = "" if same else f", and this command {version}: install the same version"
    checks = [ServerCheck("server version", same or None, f"Tidebook {live.version}{remedy}")]
    if live.time_ms is not None:  # an older server does not report it
        checks.append(check_clock("server clock", live.time_ms / 1000, began_s, ended_s))
    for name, reason in (await book.readiness()).items():
        checks.append(ServerCheck(f"server: {name}", reason is None, reason or "ready"))
    return checks


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
    found += check_in_sync(name, int(config.get("min.insync.replicas") or 1), replicas)
    waited_ms = await _oldest_unreplicated_ms(book, status, now_ms)
    found.append(check_retention(name, int(config.get("retention.ms") or -1), waited_ms))
    if (bytes_max := int(config.get("retention.bytes") or -1)) >= 0:
        detail = f"retention.bytes is {bytes_max:,}: a burst can remove records before they are replicated"
        found.append(ServerCheck(f"{name} retention.bytes", None, f"{detail}: set it to -1 with kafka-configs"))
    return found


class Replicas(NamedTuple):
    """How many replicas a partition has, and how many of them are in sync."""

    partition: int
    all: int
    in_sync: int


def check_in_sync(name: str, least: int, partitions: Sequence[Replicas]) -> list[ServerCheck]:
    """Compare the replicas of each partition with `min.insync.replicas`, and with those that are in sync."""
    fewest = min(each.all for each in partitions)
    if least > fewest:
        detail = f"min.insync.replicas is {least} and there are {fewest} replicas: no append is accepted"
        return [ServerCheck(f"{name} replicas", False, f"{detail}: lower it, or add replicas")]
    behind = [each for each in partitions if each.in_sync < each.all]
    if not behind:
        return []
    worst = min(behind, key=lambda each: each.in_sync)
    detail = f"partition {worst.partition} has {worst.in_sync} of {worst.all} replicas in sync"
    others = f", and {len(behind) - 1:,} more partitions lack some" if len(behind) > 1 else ""
    effect = f" and accepts no append, because min.insync.replicas is {least}" if worst.in_sync < least else ""
    return [ServerCheck(f"{name} replicas", False, f"{detail}{effect}{others}: start the brokers that are missing")]


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


def _kafka_topic(options: Any, topic: str) -> tuple[dict[str, str], list[Replicas], set[str]]:
    """Return a topic's configuration, the replicas of its partitions, and the operations that this user may do."""
    kafka, admin = extra("confluent_kafka", "kafka"), extra("confluent_kafka.admin", "kafka")
    client = _kafka_admin(options)
    [described] = _kafka_answer(
        client.describe_topics, kafka.TopicCollection([topic]), include_authorized_operations=True
    ).values()
    [entries] = _kafka_answer(client.describe_configs, [admin.ConfigResource(admin.ResourceType.TOPIC, topic)]).values()
    replicas = [Replicas(each.id, len(each.replicas), len(each.isr)) for each in described.partitions]
    granted = {each.name for each in described.authorized_operations or ()}
    return {name: entry.value for name, entry in entries.items()}, replicas, granted


def _span(milliseconds: int) -> str:
    """Return a duration in its largest unit: `3 days`, `2.5 h`."""
    seconds = milliseconds / 1000
    for unit, length_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
