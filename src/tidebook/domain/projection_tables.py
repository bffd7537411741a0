"""The tables of projections in the target database: builds, slices with their offsets and leases, parked events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec
from sqlalchemy import (
    Column,
    Connection,
    Double,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    and_,
    delete,
    func,
    insert,
    inspect,
    literal_column,
    not_,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError

from tidebook.core.errors import Fenced, InvalidInput, NotFound
from tidebook.domain.event_source import SourcePosition, encode_position

NAME_CHARS_MAX: Final = 200
ERROR_CHARS_MAX: Final = 2_000
#: Longer than any lease. One that seems longer was taken before the database's clock was set back: it counts as ended.
LEASE_S_MAX: Final = 120.0
#: The owner of slices that a rebuild has frozen for its swap.
SWAP_OWNER: Final = "swap:"

METADATA: Final = MetaData()
#: MySQL and MariaDB would compare names and positions without regard to case.
_OPTIONS: Final[Mapping[str, Any]] = {
    f"{dialect}_{key}": value
    for dialect in ("mysql", "mariadb")
    for key, value in (("charset", "utf8mb4"), ("collate", "utf8mb4_bin"), ("engine", "InnoDB"))
}

PROJECTION: Final = Table(
    "tidebook_projection",
    METADATA,
    Column("name", String(NAME_CHARS_MAX), primary_key=True),
    Column("slices", Integer, nullable=False),
    Column("build", Integer, nullable=False),  # the live build
    Column("last_build", Integer, nullable=False),  # the highest number that any build had
    Column("paused", Integer, nullable=False),
    Column("swapping", Integer),  # the build that is being swapped in, where DDL has no transactions
    Column("source", Text),  # the topics and tags of the live build; unknown to a projection of an earlier release
    **_OPTIONS,
)
SLICE: Final = Table(
    "tidebook_projection_slice",
    METADATA,
    Column("projection", String(NAME_CHARS_MAX), primary_key=True),
    Column("build", Integer, primary_key=True),
    Column("slice", Integer, primary_key=True),
    Column("position", Text, nullable=False),
    Column("owner", String(64)),
    Column("lease_until", Double, nullable=False),  # in seconds since 1970, by the clock of the database
    Column("error", Text),  # set if the slice is stopped
    Column("failed_position", Text),  # the position of the event that stopped it
    Column("failed_event", Text),  # topic/id/seq_nr of that event
    **_OPTIONS,
)
MEMBER: Final = Table(
    "tidebook_projection_member",
    METADATA,
    Column("projection", String(NAME_CHARS_MAX), primary_key=True),
    Column("build", Integer, primary_key=True),
    Column("member", String(64), primary_key=True),
    Column("lease_until", Double, nullable=False),
    **_OPTIONS,
)
PARKED: Final = Table(
    "tidebook_projection_parked",
    METADATA,
    Column("projection", String(NAME_CHARS_MAX), primary_key=True),
    Column("build", Integer, primary_key=True),
    # A hash of event and position: an index on the event itself would be too long for InnoDB.
    Column("event_hash", String(32), primary_key=True),
    Column("event", Text, nullable=False),  # topic/id/seq_nr
    Column("slice", Integer, nullable=False),
    Column("position", Text, nullable=False),
    Column("error", Text, nullable=False),
    Column("parked_at", Double, nullable=False),
    **_OPTIONS,
)


class BuildState(msgspec.Struct, frozen=True):
    """The row of a projection."""

    name: str
    slices: int
    build: int
    last_build: int
    paused: bool
    swapping: int | None


class SliceState(msgspec.Struct, frozen=True):
    """The row of a slice."""

    slice: int
    position: str
    owner: str | None
    #: Whether the owner's lease is in force.
    leased: bool
    error: str | None
    failed_position: str | None
    failed_event: str | None


class ParkedEvent(msgspec.Struct, frozen=True):
    """An event that a projection skipped because its handler failed."""

    event: str
    slice: int
    error: str
    parked_at_s: float


_START: Final = encode_position(SourcePosition())


def database_now(dialect: str) -> Any:
    """Return the SQL expression for the database's time in seconds since 1970."""
    match dialect:
        case "postgresql":
            return literal_column("EXTRACT(EPOCH FROM clock_timestamp())")
        case "mysql" | "mariadb":
            return literal_column("UNIX_TIMESTAMP(SYSDATE(6))")
        case "sqlite":
            return literal_column("((julianday('now') - 2440587.5) * 86400.0)")
        case _:
            raise InvalidInput(f"projections support PostgreSQL, MySQL, MariaDB and SQLite, not {dialect}")


class ProjectionTables:
    """The rows of one projection. Every method runs in the transaction of the connection that it is given."""

    def __init__(self, name: str, dialect: str) -> None:
        if type(name) is not str or not 0 < len(name) <= NAME_CHARS_MAX or "\x00" in name:
            raise InvalidInput(f"the name of a projection must be a string of 1 to {NAME_CHARS_MAX} characters")
        self.name = name
        self._dialect = dialect
        self._now = database_now(dialect)

    def create(self, connection: Connection) -> None:
        """Create the tables that are missing; two processes may do so at the same time."""
        found = set(inspect(connection).get_table_names())
        missing = [table for table in METADATA.sorted_tables if table.name not in found]
        METADATA.create_all(connection, tables=missing, checkfirst=True)
        if not self._has_source(connection):
            connection.execute(text(f"ALTER TABLE {PROJECTION.name} ADD COLUMN {PROJECTION.c.source.name} TEXT"))

    def _has_source(self, connection: Connection) -> bool:
        """Return whether the table of projections has the column `source`, which earlier releases lack."""
        columns = inspect(connection).get_columns(PROJECTION.name)
        return any(each["name"] == PROJECTION.c.source.name for each in columns)

    def exists(self, connection: Connection) -> bool:
        """Return whether the tables exist."""
        return inspect(connection).has_table(PROJECTION.name)

    def register(self, connection: Connection, slices: int, source: str) -> BuildState:
        """Return the projection's row; create it, and the slices of its first build, if it is missing."""
        found = self.state(connection)
        if found is None:
            connection.execute(
                insert(PROJECTION).values(name=self.name, slices=slices, build=1, last_build=1, paused=0, source=source)
            )
            self.add_build(connection, 1, slices)
            found = BuildState(self.name, slices, 1, 1, False, None)
        elif self.source(connection) is None:
            self.set_source(connection, source)
        return found

    def source(self, connection: Connection) -> str | None:
        """Return the description of the source that the live build follows; None if it was not stored."""
        if not self._has_source(connection):
            return None
        query = select(PROJECTION.c.source).where(PROJECTION.c.name == self.name)
        return connection.execute(query).scalar_one_or_none()

    def set_source(self, connection: Connection, source: str) -> None:
        """Store the description of the source that the live build follows."""
        connection.execute(update(PROJECTION).where(PROJECTION.c.name == self.name).values(source=source))

    def state(self, connection: Connection, *, lock: bool = False) -> BuildState | None:
        """Return the projection's row, or None."""
        # Without `source`: a table of an earlier release lacks that column until a process of this release starts.
        columns = [each for each in PROJECTION.c if each is not PROJECTION.c.source]
        query = select(*columns).where(PROJECTION.c.name == self.name)
        row = connection.execute(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            return None
        return BuildState(row.name, row.slices, row.build, row.last_build, bool(row.paused), row.swapping)

    def required_state(self, connection: Connection, *, lock: bool = False) -> BuildState:
        """Return the projection's row; raise NotFound if it was never started."""
        found = self.state(connection, lock=lock) if self.exists(connection) else None
        if found is None:
            raise NotFound(f"projection {self.name!r} was never started in this database")
        return found

    def add_build(self, connection: Connection, build: int, slices: int) -> None:
        """Add the slices of a build, at the beginning of the stream."""
        rows = [
            {"projection": self.name, "build": build, "slice": n, "position": _START, "lease_until": 0.0}
            for n in range(slices)
        ]
        connection.execute(insert(SLICE), rows)

    def remove_build(self, connection: Connection, build: int) -> None:
        """Remove the rows of a build."""
        for table in (SLICE, MEMBER, PARKED):
            connection.execute(delete(table).where(table.c.projection == self.name, table.c.build == build))

    def set_paused(self, connection: Connection, paused: bool) -> None:
        """Pause or resume the projection in all processes."""
        self.required_state(connection)
        connection.execute(update(PROJECTION).where(PROJECTION.c.name == self.name).values(paused=int(paused)))

    # Slices

    def _slices(self, build: int, *conditions: Any) -> Any:
        return and_(SLICE.c.projection == self.name, SLICE.c.build == build, *conditions)

    def _owned_at(self, build: int, member: str, slices: Sequence[int], position: str, *conditions: Any) -> Any:
        is_owned = SLICE.c.owner == member
        return self._slices(build, SLICE.c.slice.in_(slices), is_owned, SLICE.c.position == position, *conditions)

    def _members(self, build: int, *conditions: Any) -> Any:
        return and_(MEMBER.c.projection == self.name, MEMBER.c.build == build, *conditions)

    def _in_force(self, lease_until: Any) -> Any:
        """Return the condition that a lease has not ended. Leases only decide which member works: writes are fenced."""
        return lease_until.between(self._now, self._now + LEASE_S_MAX)

    def slices(self, connection: Connection, build: int) -> list[SliceState]:
        """Return the slices of a build in order."""
        leased = self._in_force(SLICE.c.lease_until).label("leased")
        query = select(SLICE, leased).where(self._slices(build)).order_by(SLICE.c.slice)
        return [
            SliceState(
                row.slice, row.position, row.owner, bool(row.leased), row.error, row.failed_position, row.failed_event
            )
            for row in connection.execute(query)
        ]

    def rebalance(self, connection: Connection, build: int, member: str, lease_s: float) -> list[SliceState]:
        """Renew the member's lease, release slices that belong to others, take its own; return those it owns.

        The slices are assigned to the live members in turn, in the order of their names. A slice that another live
        member still owns is taken once that member has released it.
        """
        self._renew_member(connection, build, member, lease_s)
        # Not this member: waiting for a lock may have taken longer than its lease.
        ended = self._members(build, MEMBER.c.member != member, not_(self._in_force(MEMBER.c.lease_until)))
        connection.execute(delete(MEMBER).where(ended))
        members = sorted(connection.execute(select(MEMBER.c.member).where(self._members(build))).scalars())
        slices = self.slices(connection, build)
        mine = {each.slice for each in slices if members[each.slice % len(members)] == member}
        release = [each.slice for each in slices if each.owner == member and each.slice not in mine]
        if release:
            released = self._slices(build, SLICE.c.slice.in_(release), SLICE.c.owner == member)
            connection.execute(update(SLICE).where(released).values(owner=None, lease_until=0.0))
        if mine:
            free = or_(SLICE.c.owner.is_(None), SLICE.c.owner == member, not_(self._in_force(SLICE.c.lease_until)))
            taken = self._slices(build, SLICE.c.slice.in_(sorted(mine)), free)
            connection.execute(update(SLICE).where(taken).values(owner=member, lease_until=self._now + lease_s))
        return [each for each in self.slices(connection, build) if each.owner == member]

    def _renew_member(self, connection: Connection, build: int, member: str, lease_s: float) -> None:
        until, own = self._now + lease_s, self._members(build, MEMBER.c.member == member)
        if not connection.execute(update(MEMBER).where(own).values(lease_until=until)).rowcount:
            row = insert(MEMBER).values(projection=self.name, build=build, member=member, lease_until=until)
            connection.execute(row)

    def renew(self, connection: Connection, build: int, member: str, lease_s: float) -> None:
        """Renew the leases of the member and of its slices, without taking or releasing slices."""
        self._renew_member(connection, build, member, lease_s)
        owned = self._slices(build, SLICE.c.owner == member)
        connection.execute(update(SLICE).where(owned).values(lease_until=self._now + lease_s))

    def leave(self, connection: Connection, build: int, member: str) -> None:
        """Release everything that a member owns."""
        owned = self._slices(build, SLICE.c.owner == member)
        connection.execute(update(SLICE).where(owned).values(owner=None, lease_until=0.0))
        connection.execute(delete(MEMBER).where(self._members(build, MEMBER.c.member == member)))

    def advance(
        self, connection: Connection, build: int, member: str, slices: Sequence[int], before: str, after: str
    ) -> None:
        """Move slices from one position to the next; raise Fenced if one is no longer there or not the member's.

        This is the first statement of every batch. It locks the rows, so if two members believe that they own a slice,
        one waits and is then refused.
        """
        owned = self._owned_at(build, member, slices, before, SLICE.c.error.is_(None))
        if connection.execute(update(SLICE).where(owned).values(position=after)).rowcount != len(slices):
            raise self._fenced(slices)

    def _fenced(self, slices: Sequence[int]) -> Fenced:
        return Fenced(f"projection {self.name!r}: another process owns some of the slices {list(slices)} now")

    def is_at(self, connection: Connection, build: int, member: str, slices: Sequence[int], position: str) -> bool:
        """Return whether slices are at a position and owned by the member."""
        query = select(func.count()).where(self._owned_at(build, member, slices, position))
        return bool(connection.execute(query).scalar_one() == len(slices))

    def check_owner(
        self, connection: Connection, build: int, member: str, slices: Sequence[int], position: str
    ) -> None:
        """Raise Fenced if slices are no longer at a position, or no longer the member's."""
        if not self.is_at(connection, build, member, slices, position):
            raise self._fenced(slices)

    def stop(
        self, connection: Connection, build: int, member: str, slice_: int, before: str, *,
        error: str, failed_position: str, failed_event: str,
    ) -> None:  # fmt: skip
        """Stop a slice at its position, with the event that it failed at; raise Fenced as `advance` does."""
        stopped = connection.execute(
            update(SLICE)
            .where(self._owned_at(build, member, [slice_], before))
            .values(error=error[:ERROR_CHARS_MAX], failed_position=failed_position, failed_event=failed_event)
        )
        if stopped.rowcount != 1:
            raise self._fenced([slice_])

    def park(self, connection: Connection, build: int, slice_: int, event: str, position: str, error: str) -> None:
        """Record an event that is skipped."""
        # With the position, because a journal that was purged has the same numbers again, at other positions.
        event_hash = blake2b(f"{event}\0{position}".encode(), digest_size=16).hexdigest()
        connection.execute(
            insert(PARKED).values(
                projection=self.name, build=build, event_hash=event_hash, event=event, slice=slice_,
                position=position, error=error[:ERROR_CHARS_MAX], parked_at=self._now,
            )
        )  # fmt: skip

    def parked(self, connection: Connection, build: int) -> list[ParkedEvent]:
        """Return the events that were skipped."""
        query = select(PARKED).where(PARKED.c.projection == self.name, PARKED.c.build == build)
        return [
            ParkedEvent(row.event, row.slice, row.error, float(row.parked_at))
            for row in connection.execute(query.order_by(PARKED.c.parked_at))
        ]

    def parked_at(self, connection: Connection, build: int, events: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return the event, position and error of each skip; after a purge, the same event number may occur again."""
        query = select(PARKED.c.event, PARKED.c.position, PARKED.c.error).where(
            PARKED.c.projection == self.name, PARKED.c.build == build, PARKED.c.event.in_(events)
        )
        return [(row.event, row.position, row.error) for row in connection.execute(query)]

    def resume(self, connection: Connection, build: int, *, skip: bool) -> list[str]:
        """Continue stopped slices, with `skip` after the events that stopped them; return these events."""
        stopped = [each for each in self.slices(connection, build) if each.error is not None]
        for each in stopped:
            position = each.failed_position if skip and each.failed_position is not None else each.position
            if skip and each.failed_event is not None:
                self.park(connection, build, each.slice, each.failed_event, position, each.error or "")
            connection.execute(
                update(SLICE)
                .where(self._slices(build, SLICE.c.slice == each.slice, SLICE.c.position == each.position))
                .values(position=position, error=None, failed_position=None, failed_event=None)
            )
        return [each.failed_event or "" for each in stopped]

    # Rebuilds

    def begin_build(self, connection: Connection, member: str, lease_s: float) -> BuildState:
        """Reserve the number of a new build and add its slices; return the state with that number as `last_build`.

        Raise Fenced while another process rebuilds: a rebuild is a member of its build, with a lease.
        """
        state = self.required_state(connection, lock=True)
        build = state.last_build + 1
        changed = connection.execute(
            update(PROJECTION)
            .where(PROJECTION.c.name == self.name, PROJECTION.c.last_build == state.last_build)
            .values(last_build=build)
        )
        if changed.rowcount != 1 or self.is_rebuilding(connection, state):
            raise Fenced(f"projection {self.name!r} is already being rebuilt: wait for that rebuild, or try again")
        self.add_build(connection, build, state.slices)
        self._renew_member(connection, build, member, lease_s)
        return msgspec.structs.replace(state, last_build=build)

    def is_rebuilding(self, connection: Connection, state: BuildState) -> bool:
        """Return whether a process rebuilds the projection; one that was killed counts until its lease ends."""
        is_newer = and_(MEMBER.c.projection == self.name, MEMBER.c.build > state.build)
        query = select(func.count()).select_from(MEMBER).where(is_newer, self._in_force(MEMBER.c.lease_until))
        return bool(connection.execute(query).scalar_one())

    def abandoned_builds(self, connection: Connection, state: BuildState) -> list[int]:
        """Return the builds left by earlier rebuilds whose processes were killed."""
        numbers = select(SLICE.c.build).where(SLICE.c.projection == self.name).distinct()
        kept = (state.build, state.last_build, state.swapping)
        return sorted(each for each in connection.execute(numbers).scalars() if each not in kept)

    def freeze(self, connection: Connection, build: int, swap: str, lease_s: float) -> list[SliceState]:
        """Take all slices of the live build from their owners for the duration of a swap; return them."""
        connection.execute(update(SLICE).where(self._slices(build)).values(owner=swap, lease_until=self._now + lease_s))
        return self.slices(connection, build)

    def check_frozen(self, connection: Connection, build: int, swap: str, new: int) -> None:
        """Lock the slices that were frozen, and the projection; raise Fenced if `new` may not replace the live build.

        Another process may have taken or replaced a slice since, or begun a later rebuild, which removes this one.
        """
        count = connection.execute(select(func.count()).select_from(SLICE).where(self._slices(build))).scalar_one()
        locked = connection.execute(update(SLICE).where(self._slices(build, SLICE.c.owner == swap)).values(owner=swap))
        if not count or locked.rowcount != count:
            raise Fenced(f"projection {self.name!r}: the live build has continued or was replaced: try again")
        if self.required_state(connection, lock=True).last_build != new:
            raise Fenced(f"projection {self.name!r}: another rebuild has replaced this one: wait for it")

    def set_swapping(self, connection: Connection, build: int, source: str) -> None:
        """Announce a swap of tables that the database cannot do in a transaction."""
        values = {"swapping": build, "source": source}
        connection.execute(update(PROJECTION).where(PROJECTION.c.name == self.name).values(values))

    def make_live(self, connection: Connection, build: int, source: str | None = None) -> None:
        """Make a build the live one, and remove the rows of the one before; an announced swap has set its source."""
        before = self.required_state(connection).build
        connection.execute(update(PROJECTION).where(PROJECTION.c.name == self.name).values(build=build, swapping=None))
        connection.execute(update(SLICE).where(self._slices(build)).values(owner=None, lease_until=0.0))
        # Its only member was the rebuild, which would otherwise be assigned slices until its lease ends.
        connection.execute(delete(MEMBER).where(self._members(build)))
        if source is not None:
            self.set_source(connection, source)
        if before != build:
            self.remove_build(connection, before)


def create_tables(connection: Connection, tables: Iterable[Table]) -> None:
    """Create tables that are missing."""
    for table in tables:
        table.create(connection, checkfirst=True)


#: Errors that may occur if two processes create the same tables or rows at once: the second one tries again.
RACES: Final = (IntegrityError, OperationalError, ProgrammingError)
