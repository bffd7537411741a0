"""Create the keyspace and migrate its tables; processes that open it concurrently are serialized by a lock."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable, UnknownVersion
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.session import SCHEMA_TIMEOUT_S, CassandraSession
from tidebook.store.cassandra.settings import CassandraSettings, reads_see_writes, replicas_of


class Migration(NamedTuple):
    """One step of the schema. Its statements must be idempotent: they may run twice after a crash."""

    name: str
    statements: tuple[str, ...]


#: The tables that the lock and the schema's version need, so they are created before all others.
BOOTSTRAP: Final = (
    # One partition per row, because compare-and-sets and serial reads contend within a partition.
    "CREATE TABLE IF NOT EXISTS setting (section text, name text, value text, PRIMARY KEY ((section, name)))",
    "CREATE TABLE IF NOT EXISTS locks (name text PRIMARY KEY, holder text)",
)

#: Stamps come from log positions, so time-window compaction would mix old and new data.
_LEVELED: Final = "compaction = {'class': 'LeveledCompactionStrategy'}"
_TIERED: Final = "compaction = {'class': 'SizeTieredCompactionStrategy'}"
#: Ten days: tombstones must outlive every stalled replicator that could still write the rows that they cover.
_GRACE: Final = "gc_grace_seconds = 864000"

MIGRATIONS: Final = (
    Migration(
        "journals and tags",
        (
            "CREATE TABLE IF NOT EXISTS metajournal ("
            "topic text, segment int, id text, head blob, live boolean, seq_nr bigint, delete_to bigint, "
            "epoch int, log_offset bigint, expires_at_ms bigint, "
            f"PRIMARY KEY ((topic, segment), id)) WITH {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS journal ("
            "id text, topic text, segment bigint, seq_nr bigint, event blob, "
            f"PRIMARY KEY ((id, topic, segment), seq_nr)) WITH {_TIERED} AND {_GRACE}",
            # Epoch and offset are the incarnation: an earlier incarnation must not affect the next one.
            "CREATE TABLE IF NOT EXISTS journal_segments ("
            "id text, topic text, epoch int, log_offset bigint, segment bigint, "
            f"PRIMARY KEY ((id, topic, epoch, log_offset), segment)) WITH {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS pointer ("
            "topic text, partition int, epoch int, log_offset bigint, time_ms bigint, "
            f"PRIMARY KEY ((topic), partition)) WITH {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS snapshot ("
            "topic text, id text, epoch int, log_offset bigint, seq_nr bigint, "
            "payload_type int, payload blob, timestamp_ms bigint, "
            "PRIMARY KEY ((topic, id), epoch, log_offset, seq_nr)) "
            "WITH CLUSTERING ORDER BY (epoch DESC, log_offset DESC, seq_nr DESC) "
            f"AND {_LEVELED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS parked ("
            "topic text, partition int, epoch int, log_offset bigint, "
            "timestamp_ms bigint, id text, reason text, value blob, size_bytes int, "
            f"PRIMARY KEY ((topic, partition), epoch, log_offset)) WITH {_TIERED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS tag_views ("
            "tag text, bucket bigint, log_ms bigint, topic text, partition int, log_offset bigint, idx int, epoch int, "
            "event blob, PRIMARY KEY ((tag, bucket), log_ms, topic, partition, log_offset, idx, epoch)) "
            f"WITH {_TIERED} AND {_GRACE}",
            "CREATE TABLE IF NOT EXISTS tag_buckets ("
            f"tag text, bucket bigint, PRIMARY KEY ((tag), bucket)) WITH {_LEVELED} AND {_GRACE}",
            # The partitions are those of `metajournal`, so that a write to both is one mutation.
            "CREATE TABLE IF NOT EXISTS tag_views_progress ("
            "topic text, segment int, id text, tag text, tag_seq_nr bigint, seq_nr bigint, epoch int, "
            f"log_offset bigint, PRIMARY KEY ((topic, segment), id, tag)) WITH {_LEVELED} AND {_GRACE}",
        ),
    ),
)


SCHEMA: Final = "schema"
VERSION: Final = "version"
#: The tables of `BOOTSTRAP`.
MARKERS: Final = frozenset({"setting", "locks"})
#: The lease of the lock: a dead holder blocks it for this long. A live one renews it before each statement, and no
#: statement may take longer than the lease.
LOCK_S: Final = SCHEMA_TIMEOUT_S + 30
LOCK_WAIT_S_MAX: Final = 3 * LOCK_S
LOCK_POLL_S: Final = 0.2
#: How long the nodes may take to agree on the schema: less than the lease, because the lock is held meanwhile.
AGREEMENT_S_MAX: Final = 30
REPLICAS_DEFAULT: Final = 3
VISIBLE_S_MAX: Final = 10

_SETTING, _LOCKS = BOOTSTRAP

T = TypeVar("T")


async def use_keyspace(session: CassandraSession, settings: CassandraSettings) -> None:
    """Select the keyspace, creating it if allowed; reject consistency levels at which a read could miss a write."""
    replication = await _replication(session, settings.keyspace)
    if replication is None:
        if not settings.create_keyspace:
            raise InvalidInput(f"keyspace {settings.keyspace} is missing and create_keyspace is off: create it first")
        await session.define(await _create_keyspace(session, settings), address=await _first_address(session))
        await _await_agreement(session)
        replication = await _replication(session, settings.keyspace)
        if replication is None:
            raise Unavailable(
                f"keyspace {settings.keyspace} was created, and dropped by another process: open it again"
            )
    replicas = replicas_of(replication)
    if not reads_see_writes(settings.reading, settings.writing, replicas, settings.local_dc):
        raise InvalidInput(
            f"reads at {settings.reading} can miss what was written at {settings.writing} with the replicas "
            f"{replicas} of keyspace {settings.keyspace}: choose levels that overlap, such as LOCAL_QUORUM for both"
        )
    await _retry_until_visible(lambda: session.use(settings.keyspace))


async def _replication(session: CassandraSession, keyspace: str) -> dict[str, str] | None:
    rows = await session.query(f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'")
    return dict(rows[0][0]) if rows else None


async def _create_keyspace(session: CassandraSession, settings: CassandraSettings) -> str:
    replication = settings.replication
    if replication is None:
        nodes = 1 + len(await session.query("SELECT peer FROM system.peers"))
        replication = min(REPLICAS_DEFAULT, nodes)
    counts = {"replication_factor": replication} if isinstance(replication, int) else replication
    options = "".join(f", '{name}': {count}" for name, count in counts.items())
    return (
        f"CREATE KEYSPACE IF NOT EXISTS {settings.keyspace} "
        f"WITH replication = {{'class': 'NetworkTopologyStrategy'{options}}}"
    )


async def is_created(session: CassandraSession, keyspace: str) -> bool:
    """Return whether the schema exists in some version; if its creation was interrupted, it counts as missing."""
    version = f"SELECT value FROM {keyspace}.setting WHERE section = '{SCHEMA}' AND name = '{VERSION}'"
    listed = await _tables(session, keyspace) >= MARKERS
    return listed and bool(await _retry_until_visible(lambda: session.query(version)))


async def _tables(session: CassandraSession, keyspace: str) -> set[str]:
    listed = f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{keyspace}'"
    return {name for (name,) in await session.query(listed)}


async def migrate(session: CassandraSession, keyspace: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Migrate the tables to the current version. A failed migration leaves the version as it was.

    Cassandra does not serialize DDL that different nodes execute: two nodes may create one table under two ids and lose
    the rows written to one of them. So all DDL runs under the lock, except for the table of the lock itself, which the
    same node creates for all processes. The lock is only taken after the nodes agree on that table.
    """
    names = await _tables(session, keyspace)
    if names >= MARKERS and (await _retry_until_visible(lambda: _version(session, migrations)) == len(migrations)):
        return
    if "locks" not in names:
        await session.define(_LOCKS, address=await _first_address(session))
    await _await_agreement(session)
    async with _Lock(session) as lock:
        if "setting" not in names:
            await _define(session, lock, _SETTING)
        # Another process may have migrated while this one waited for the lock.
        version = await _retry_until_visible(lambda: _version(session, migrations))
        for number in range(version, len(migrations)):
            await _run_migration(session, lock, number + 1, migrations[number])


class _Node(NamedTuple):
    host_id: str
    address: str
    data_center: str
    schema_version: str | None


_NODE: Final = "SELECT host_id, rpc_address, data_center, schema_version FROM system."


async def _nodes(session: CassandraSession) -> list[_Node]:
    """Return every node of the cluster, by host id, with its last known schema version."""
    found = {node.host_id: node for node in (_Node(*row) for row in await session.query(f"{_NODE}peers"))}
    count = len(found) + 1
    # A node lists itself in another table, and each query may go to another node.
    for _ in range(2 * count):
        [row] = await session.query(f"{_NODE}local")
        found[row[0]] = _Node(*row)
        if len(found) == count:
            break
    return sorted(found.values())


async def _first_address(session: CassandraSession) -> str:
    """Return the address of the node that executes DDL outside the lock: the same one for every process."""
    nodes = await _nodes(session)
    local_nodes = [node for node in nodes if session.local_dc in (None, node.data_center)]
    return (local_nodes or nodes)[0].address


async def _await_agreement(session: CassandraSession) -> None:
    """Wait until all nodes have the same schema; raise `Unavailable` if they do not agree in time."""
    deadline_s = asyncio.get_running_loop().time() + AGREEMENT_S_MAX
    while True:
        nodes = await _nodes(session)
        if len({node.schema_version for node in nodes if node.schema_version is not None}) <= 1:
            return
        if asyncio.get_running_loop().time() > deadline_s:
            versions = ", ".join(f"{node.address} has {node.schema_version}" for node in nodes)
            raise Unavailable(
                f"the nodes of Cassandra do not agree on the schema, which must be changed: {versions}: "
                "bring up or remove the nodes that are down, and open the store again"
            )
        await asyncio.sleep(LOCK_POLL_S)


async def _retry_until_visible(operation: Callable[[], Awaitable[T]]) -> T:
    """Retry `operation` while a schema object is listed but not usable yet, because another process is creating it."""
    deadline_s = asyncio.get_running_loop().time() + VISIBLE_S_MAX
    while True:
        try:
            return await operation()
        except UnknownVersion:
            raise
        except Corrupt:
            if asyncio.get_running_loop().time() > deadline_s:
                raise
        await asyncio.sleep(LOCK_POLL_S)


async def _version(session: CassandraSession, migrations: Sequence[Migration]) -> int:
    row = (await session.read_serial(cql.SETTING, [SCHEMA, VERSION])).first()
    version = 0 if row is None else int(row.as_tuple()[0])
    if version > len(migrations):
        raise UnknownVersion("the keyspace", version=version, known=len(migrations))
    return version


async def _run_migration(session: CassandraSession, lock: _Lock, number: int, migration: Migration) -> None:
    for ddl in migration.statements:
        try:
            await _define(session, lock, ddl)
        except TidebookError as error:
            error.add_note(
                f"migration {number} ({migration.name}) failed at {ddl[:80]!r}; the schema's version stays "
                f"{number - 1}: fix the cause and open the store again"
            )
            raise
    await lock.renew()
    if number == 1:
        result = await session.compare_and_set(cql.NEW_SETTING, [SCHEMA, VERSION, "1"])
    else:
        result = await session.compare_and_set(cql.CHANGE_SETTING, [str(number), SCHEMA, VERSION, str(number - 1)])
    if not result["[applied]"]:
        raise OutcomeUnknown(f"another process changed the schema's version during migration {number}: open it again")


async def _define(session: CassandraSession, lock: _Lock, ddl: str) -> None:
    """Execute DDL after all nodes know the statement before it, whichever process executed that one."""
    await _await_agreement(session)
    await lock.renew()
    await session.define(ddl)


class _Lock:
    """The lock on schema changes. A holder that dies loses it when its lease expires."""

    def __init__(self, session: CassandraSession) -> None:
        self._session = session
        self._holder = uuid.uuid4().hex

    async def __aenter__(self) -> _Lock:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LOCK_WAIT_S_MAX
        while not await _retry_until_visible(self._acquire):
            if loop.time() > deadline_s:
                raise Unavailable(
                    f"other processes have held the schema's lock for {LOCK_WAIT_S_MAX} s: see the table `locks`"
                )
            await asyncio.sleep(LOCK_POLL_S)
        return self

    async def _acquire(self) -> bool:
        try:
            result = await self._session.compare_and_set(cql.LOCK, [SCHEMA, self._holder, LOCK_S])
        except OutcomeUnknown:
            return False  # the next attempt shows whether this process holds it
        return bool(result["[applied]"] or result.get("holder") == self._holder)

    async def renew(self) -> None:
        """Extend the lease; raise `Unavailable` if the lock was lost."""
        result = await self._session.compare_and_set(cql.RENEW_LOCK, [LOCK_S, self._holder, SCHEMA, self._holder])
        if not result["[applied]"]:
            raise Unavailable("the schema's lock was lost to another process: open the store again")

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._session.compare_and_set(cql.UNLOCK, [SCHEMA, self._holder])
        except TidebookError:
            pass  # the lease expires anyway, and an exception that is being raised matters more
