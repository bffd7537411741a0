"""The keyspace, its tables and their version: made and brought up to date once, whoever comes first."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable, UnknownVersion
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.consistency import reads_see_writes, replicas_of
from tidebook.store.cassandra.schema import BOOTSTRAP, MIGRATIONS, Migration
from tidebook.store.cassandra.session import SCHEMA_TIMEOUT_S, Session
from tidebook.store.cassandra.settings import CassandraSettings

SCHEMA: Final = "schema"
VERSION: Final = "version"
#: A holder that died is waited for this long; one that lives renews its lock before each statement, and none of those
#: may take as long.
LOCK_S: Final = SCHEMA_TIMEOUT_S + 30
LOCK_WAIT_S_MAX: Final = 3 * LOCK_S
LOCK_POLL_S: Final = 0.2
REPLICAS_DEFAULT: Final = 3
VISIBLE_S_MAX: Final = 10

T = TypeVar("T")


async def use_keyspace(session: Session, settings: CassandraSettings) -> None:
    """Choose the keyspace, make it where that is wanted, and refuse levels at which a read could miss a write."""
    replication = await _replication(session, settings.keyspace)
    if replication is None:
        if not settings.create_keyspace:
            raise InvalidInput(f"keyspace {settings.keyspace} is missing and create_keyspace is off: make it first")
        await session.define(await _create_keyspace(session, settings))
        replication = await _replication(session, settings.keyspace) or {}
    replicas = replicas_of(replication)
    if not reads_see_writes(settings.reading, settings.writing, replicas, settings.local_dc):
        raise InvalidInput(
            f"reads at {settings.reading} can miss what was written at {settings.writing} with the replicas "
            f"{replicas} of keyspace {settings.keyspace}: choose levels that overlap, such as LOCAL_QUORUM for both"
        )
    await _when_visible(lambda: session.use(settings.keyspace))


async def _replication(session: Session, keyspace: str) -> dict[str, str] | None:
    rows = await session.query(f"SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = '{keyspace}'")
    return dict(rows[0][0]) if rows else None


async def _create_keyspace(session: Session, settings: CassandraSettings) -> str:
    wanted = settings.replication
    if wanted is None:
        nodes = 1 + len(await session.query("SELECT peer FROM system.peers"))
        wanted = min(REPLICAS_DEFAULT, nodes)
    counts = {"replication_factor": wanted} if isinstance(wanted, int) else wanted
    options = "".join(f", '{name}': {count}" for name, count in counts.items())
    return (
        f"CREATE KEYSPACE IF NOT EXISTS {settings.keyspace} "
        f"WITH replication = {{'class': 'NetworkTopologyStrategy'{options}}}"
    )


async def migrate(session: Session, keyspace: str, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the tables to the version that this Tidebook knows. A migration that fails leaves the version as it was."""
    names = {name for (name,) in await session.query(
        f"SELECT table_name FROM system_schema.tables WHERE keyspace_name = '{keyspace}'"
    )}  # fmt: skip
    if not {"setting", "locks"} <= names:
        for ddl in BOOTSTRAP:
            await session.define(ddl)
    if await _when_visible(lambda: _version(session, migrations)) == len(migrations):
        return
    async with _Lock(session) as lock:
        # Another may have done it while we waited.
        for number in range(await _version(session, migrations), len(migrations)):
            await _run(session, lock, number + 1, migrations[number])


async def _when_visible(act: Callable[[], Awaitable[T]]) -> T:
    """What another process is just making is listed a moment before it can be used."""
    give_up = asyncio.get_running_loop().time() + VISIBLE_S_MAX
    while True:
        try:
            return await act()
        except UnknownVersion:
            raise
        except Corrupt:
            if asyncio.get_running_loop().time() > give_up:
                raise
        await asyncio.sleep(LOCK_POLL_S)


async def _version(session: Session, migrations: Sequence[Migration]) -> int:
    row = (await session.read_serial(cql.SETTING, [SCHEMA, VERSION])).first()
    version = 0 if row is None else int(row.as_tuple()[0])
    if version > len(migrations):
        raise UnknownVersion("the keyspace", version=version, known=len(migrations))
    return version


async def _run(session: Session, lock: _Lock, number: int, migration: Migration) -> None:
    for ddl in migration.statements:
        await lock.renew()
        try:
            await session.define(ddl)
        except TidebookError as error:
            error.add_note(
                f"migration {number} ({migration.name}) failed at {ddl[:80]!r}; the schema's version stays "
                f"{number - 1}: mend the cause and open the store again"
            )
            raise
    await lock.renew()
    if number == 1:
        told = await session.compare_and_set(cql.NEW_SETTING, [SCHEMA, VERSION, "1"])
    else:
        told = await session.compare_and_set(cql.CHANGE_SETTING, [str(number), SCHEMA, VERSION, str(number - 1)])
    if not told["[applied]"]:
        raise OutcomeUnknown(f"another process has set the schema's version beside migration {number}: open it again")


class _Lock:
    """The right to change the schema, for one process at a time. One that dies loses it when its lease runs out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._holder = uuid.uuid4().hex

    async def __aenter__(self) -> _Lock:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + LOCK_WAIT_S_MAX
        while not await _when_visible(self._take):
            if loop.time() > give_up:
                raise Unavailable(
                    f"another process has held the schema's lock for {LOCK_WAIT_S_MAX} s: look at `locks`"
                )
            await asyncio.sleep(LOCK_POLL_S)
        return self

    async def _take(self) -> bool:
        try:
            told = await self._session.compare_and_set(cql.LOCK, [SCHEMA, self._holder, LOCK_S])
        except OutcomeUnknown:
            return False  # the next attempt finds out whether it is ours
        return bool(told["[applied]"] or told.get("holder") == self._holder)

    async def renew(self) -> None:
        """Hold on for another lease; Unavailable where it was lost."""
        told = await self._session.compare_and_set(cql.RENEW_LOCK, [LOCK_S, self._holder, SCHEMA, self._holder])
        if not told["[applied]"]:
            raise Unavailable("the schema's lock was lost to another process: open the store again")

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._session.compare_and_set(cql.UNLOCK, [SCHEMA, self._holder])
        except TidebookError:
            pass  # the lease runs out by itself, and an error that is on its way matters more
