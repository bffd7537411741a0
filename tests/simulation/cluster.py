"""A simulated cluster of three replicas, and the driver's session of a client that uses it.

Every mutation travels to every replica separately: it may arrive at once, after its client got a timeout, long after
the client has died, or never. A read queries a quorum and merges the answers, with or without read repair. Changes of
one partition key that are sent in one batch are one mutation, as on a node: a replica has all of them or none.
Compare-and-sets and serial reads are linearizable; Paxos itself is not simulated.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import acsylla
from acsylla import errors

from tests.simulation.cql import (
    AddColumn,
    Change,
    Condition,
    CreateTable,
    Definition,
    Delete,
    DropTable,
    Insert,
    Parsed,
    Select,
    Table,
    UnknownForm,
    Update,
    parse,
    value_of,
)
from tests.simulation.replica import (
    ALL,
    Mutation,
    Partition,
    Query,
    Replica,
    Values,
    mutation_of,
    query_of,
    token_of,
)

REPLICAS = 3
#: The wall clock when a history begins. Stamps derived from log positions are above every wall clock.
CLOCK_US = 1_790_000_000_000_000
SERVER_TIMEOUT_S = 2.0
LATENCY_S = 0.01
_QUORUM = REPLICAS // 2 + 1
_NEEDED = {
    acsylla.Consistency.ONE: 1,
    acsylla.Consistency.LOCAL_ONE: 1,
    acsylla.Consistency.TWO: 2,
    acsylla.Consistency.QUORUM: _QUORUM,
    acsylla.Consistency.LOCAL_QUORUM: _QUORUM,
    acsylla.Consistency.ALL: REPLICAS,
}
_SERIAL = {acsylla.Consistency.SERIAL, acsylla.Consistency.LOCAL_SERIAL}


class Faults(NamedTuple):
    """The probability of each fault."""

    #: A mutation to one replica arrives late, perhaps after the client's timeout; much later; or never.
    late: float = 0.0
    much_later: float = 0.0
    lost: float = 0.0
    #: A request fails before it is sent; its answer is lost.
    refused: float = 0.0
    unanswered: float = 0.0
    #: The replicas of a read are read at different times; differences are not repaired; a page ends early.
    torn: float = 0.5
    unrepaired: float = 0.5
    short_page: float = 0.2


NONE = Faults(torn=0.0, short_page=0.0)
LATE_S = 4.0
MUCH_LATER_S = 200.0


class Cluster:
    """Three replicas of one keyspace."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.schema: dict[str, Table] = {}
        self.replicas = [Replica(self.schema) for _ in range(REPLICAS)]
        self.faults = NONE
        #: Mutations that are in flight.
        self.in_flight = 0
        self._clock_us = CLOCK_US

    def define(self, definition: Definition) -> None:
        """Execute DDL. It takes effect on all replicas at once."""
        match definition:
            case CreateTable(table, if_not_exists):
                if table.name not in self.schema:
                    self.schema[table.name] = table
                elif not if_not_exists:
                    raise errors.CassErrorServerAlreadyExists(table.name)
            case DropTable(name, if_exists):
                if self.schema.pop(name, None) is None and not if_exists:
                    raise errors.CassErrorServerInvalidQuery(name)
                for replica in self.replicas:
                    replica.drop(name)
            case AddColumn(name, column, type_):
                self.schema[name].types[column] = type_

    def table(self, name: str) -> Table:
        try:
            return self.schema[name]
        except KeyError:
            raise errors.CassErrorServerInvalidQuery(f"unconfigured table {name}") from None

    def clock_us(self) -> int:
        """Return the coordinators' clock, which always advances: of two writes by the clock the later one wins."""
        self._clock_us = max(self._clock_us + 1, CLOCK_US + int(asyncio.get_running_loop().time() * 1_000_000))
        return self._clock_us

    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.up]

    def send(self, mutations: Sequence[Mutation], needed: int) -> asyncio.Future[None]:
        """Send mutations to all replicas; the future resolves when enough replicas have acknowledged each of them."""
        units: dict[Values, list[Mutation]] = {}
        for mutation in mutations:
            units.setdefault(mutation.partition, []).append(mutation)
        write = _Write(self, len(units), needed)
        for unit in units.values():
            acks = [0]
            for replica in self.replicas:
                delay_s = self._delay_s(replica)
                if delay_s is not None:
                    self.in_flight += 1
                    write.loop.call_later(delay_s, self._arrive, replica, unit, write, acks)
        return write.done

    def _delay_s(self, replica: Replica) -> float | None:
        faults, dice = self.faults, self.dice
        chance = dice.random()
        if not replica.up:  # either a hint is stored for it, or the mutation is lost
            return dice.random() * MUCH_LATER_S if chance < 0.5 else None
        if chance < faults.lost:
            return None
        chance -= faults.lost
        if chance < faults.much_later:
            return dice.random() * MUCH_LATER_S
        chance -= faults.much_later
        if chance < faults.late:
            return dice.random() * LATE_S
        return dice.random() * LATENCY_S

    def _arrive(self, replica: Replica, unit: list[Mutation], write: _Write, acks: list[int]) -> None:
        self.in_flight -= 1
        replica.apply(unit)
        acks[0] += 1
        if acks[0] == write.needed:
            write.acknowledged()

    def change_now(self, mutations: Sequence[Mutation]) -> None:
        """Change all replicas at once, because all later reads see a completed compare-and-set."""
        for replica in self.replicas:
            for mutation in mutations:
                replica.apply([mutation])

    def read_all(self, query: Query) -> dict[Values, Partition]:
        """Return the merged state of all replicas."""
        return self.merged(query, [replica.read(query) for replica in self.replicas])

    def merged(self, query: Query, answers: Sequence[dict[Values, Partition]]) -> dict[Values, Partition]:
        """Merge the answers of replicas."""
        types = self.schema[query.table].types
        found: dict[Values, Partition] = {}
        for answer in answers:
            for key, partition in answer.items():
                mine = found.setdefault(key, partition)
                if mine is not partition:
                    mine.merge(partition, types)
        return found


class _Write:
    def __init__(self, cluster: Cluster, units: int, needed: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.needed = needed
        self.done: asyncio.Future[None] = self.loop.create_future()
        self._units = units
        self._timer = self.loop.call_later(SERVER_TIMEOUT_S, self._time_out)

    def acknowledged(self) -> None:
        self._units -= 1
        if not self._units:
            self._timer.cancel()
            if not self.done.done():
                self.done.set_result(None)

    def _time_out(self) -> None:
        if not self.done.done():
            self.done.set_exception(errors.CassErrorServerWriteTimeout("too few replicas in time"))


class Prepared:
    """A prepared statement."""

    def __init__(self, parsed: Parsed) -> None:
        self.parsed = parsed

    def bind(self, values: Sequence[Any], **options: Any) -> Bound:
        return Bound(self.parsed, values, options)


class Bound:
    """A statement with its values."""

    __slots__ = ("options", "parsed", "values")

    def __init__(self, parsed: Parsed, values: Sequence[Any], options: dict[str, Any]) -> None:
        self.parsed = parsed
        self.values = values
        self.options = options

    def set_is_idempotent(self, _: bool) -> None:
        """Do nothing: the client itself retries after a timeout."""

    def set_retry_policy(self, _: str) -> None:
        """Ignored."""


class Batch:
    """An unlogged batch."""

    def __init__(self, timeout: float | None = None) -> None:
        self.statements: list[Bound] = []
        self.level: Any = None

    def set_consistency(self, level: Any) -> None:
        self.level = level

    def set_is_idempotent(self, _: bool) -> None:
        """Ignored."""

    def add_statement(self, statement: Bound) -> None:
        self.statements.append(statement)


class ResultRow:
    __slots__ = ("_names", "_values")

    def __init__(self, names: tuple[str, ...], values: Values) -> None:
        self._names = names
        self._values = values

    def as_tuple(self) -> Values:
        return self._values

    def as_dict(self) -> dict[str, Any]:
        return dict(zip(self._names, self._values, strict=True))

    def column_value_by_index(self, index: int) -> Any:
        return self._values[index]


class Result:
    """A page of rows."""

    def __init__(self, names: tuple[str, ...], rows: list[Values], page_state: bytes | None = None) -> None:
        self._names = names
        self._rows = rows
        self._page_state = page_state

    def __iter__(self) -> Iterator[ResultRow]:
        row = ResultRow(self._names, ())
        for values in self._rows:
            row._values = values  # as in the driver, the next row overwrites this one
            yield row

    def first(self) -> ResultRow | None:
        return ResultRow(self._names, self._rows[0]) if self._rows else None

    def has_more_pages(self) -> bool:
        return self._page_state is not None

    def page_state(self) -> bytes | None:
        return self._page_state


class Driver:
    """The driver's session of one client: it prepares, executes, and fails like the driver."""

    def __init__(self, cluster: Cluster, *, asks: Sequence[int] | None = None) -> None:
        self._cluster = cluster
        #: The replicas to read, for a test that checks the state of exactly these.
        self._asks = asks
        #: After this many requests the client is paused, while others do all the work.
        self.stops_after: int | None = None

    def destroy(self) -> None:
        """Do nothing: the client's cluster object is closed with its session."""

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""

    async def create_prepared(self, cql: str, timeout: float | None = None) -> Prepared:
        return Prepared(parse(cql))

    async def query(self, cql: str, timeout: float | None = None) -> Result:
        parsed = parse(cql)
        if isinstance(parsed, CreateTable | DropTable | AddColumn):
            self._cluster.define(parsed)
            return Result((), [])
        return await self.execute(Bound(parsed, (), {"consistency": acsylla.Consistency.LOCAL_QUORUM}))

    async def execute(self, statement: Bound) -> Result:
        parsed = statement.parsed
        await self._before_request()
        if isinstance(parsed, Select):
            return await self._select(parsed, statement.values, statement.options)
        if isinstance(parsed, CreateTable | DropTable | AddColumn):
            raise UnknownForm(f"DDL as a prepared statement: {parsed}")
        if (isinstance(parsed, Insert) and parsed.if_not_exists) or (
            isinstance(parsed, Update | Delete) and parsed.conditions
        ):
            return await self._compare_and_set(parsed, statement.values)
        await self._write([statement], statement.options["consistency"])
        return Result((), [])

    async def execute_batch(self, batch: Batch) -> None:
        await self._before_request()
        await self._write(batch.statements, batch.level)

    async def _before_request(self) -> None:
        cluster = self._cluster
        faults, dice = cluster.faults, cluster.dice
        if self.stops_after is not None:
            self.stops_after -= 1
            if self.stops_after < 0:
                self.stops_after = None
                await asyncio.sleep(dice.random() * MUCH_LATER_S)
        if faults.refused and dice.random() < faults.refused:
            raise errors.CassErrorLibNoHostsAvailable("no host is available")

    async def _write(self, statements: Sequence[Bound], level: Any) -> None:
        cluster = self._cluster
        needed = _NEEDED[level]
        if len(cluster.up()) < needed:
            raise errors.CassErrorServerUnavailable("too few replicas are up")
        now_s, clock_us = asyncio.get_running_loop().time(), cluster.clock_us()
        mutations = []
        for statement in statements:
            change = statement.parsed
            if not isinstance(change, Insert | Update | Delete):
                raise UnknownForm(f"in a batch: {change}")
            if getattr(change, "conditions", ()) or getattr(change, "if_not_exists", False):
                raise UnknownForm(f"a condition in a batch: {change}")
            table = cluster.table(change.table)
            mutations.append(mutation_of(change, table, statement.values, clock_us=clock_us, now_s=now_s))
        await cluster.send(mutations, needed)
        if cluster.faults.unanswered and cluster.dice.random() < cluster.faults.unanswered:
            raise errors.CassErrorLibRequestTimedOut("no answer in time")

    async def _select(self, select: Select, values: Sequence[Any], options: dict[str, Any]) -> Result:
        cluster, dice = self._cluster, self._cluster.dice
        query = query_of(select, cluster.table(select.table), values)
        level = options["consistency"]
        if level in _SERIAL:
            if self._asks is None:
                await asyncio.sleep(dice.random() * LATENCY_S)
            found = cluster.read_all(query)
        else:
            found = await self._read(query, _NEEDED[level])
        if cluster.faults.unanswered and dice.random() < cluster.faults.unanswered:
            raise errors.CassErrorServerReadTimeout("no answer in time")
        return self._page(select, query, found, options)

    async def _read(self, query: Query, needed: int) -> dict[Values, Partition]:
        cluster, dice = self._cluster, self._cluster.dice
        faults = cluster.faults
        if self._asks is not None:
            return cluster.merged(query, [cluster.replicas[number].read(query) for number in self._asks])
        up = cluster.up()
        if len(up) < needed:
            raise errors.CassErrorServerUnavailable("too few replicas are up")
        chosen = dice.sample(up, needed)
        await asyncio.sleep(dice.random() * LATENCY_S)
        answers: list[dict[Values, Partition]] = []
        for replica in chosen:
            if answers and faults.torn and dice.random() < faults.torn:
                await asyncio.sleep(dice.random() * LATENCY_S)
            answers.append(replica.read(query))
        found = cluster.merged(query, answers)
        if dice.random() >= faults.unrepaired:
            for replica in chosen:
                replica.repair(query, found)
        return found

    def _page(self, select: Select, query: Query, found: dict[Values, Partition], options: dict[str, Any]) -> Result:
        """Return the rows in the table's order, from the end of the previous page."""
        table = self._cluster.table(select.table)
        now_s = asyncio.get_running_loop().time()
        rows: list[tuple[Any, Values, Values, dict[str, Any]]] = []
        for key, partition in sorted(found.items(), key=lambda each: token_of(each[0])):
            of_partition = [(_order(table, at, query.reverse), key, at, values) for at, values in partition.live(now_s)]
            of_partition.sort(key=lambda each: each[0])
            rows += [(token_of(key), *each[1:]) for each in (of_partition[:1] if select.distinct else of_partition)]
        if select.distinct and (select.columns != table.partition_key or select.where or select.limit):
            raise UnknownForm(f"DISTINCT {select.columns} of {table.name}")
        state = options.get("page_state")
        taken = 0
        if state is not None:
            token, at, taken = pickle.loads(state)
            order = _order(table, at, query.reverse)
            rows = [
                row
                for row in rows
                if row[0] > token or (row[0] == token and _order(table, row[2], query.reverse) > order)
            ]
        if query.limit is not None:
            rows = rows[: max(query.limit - taken, 0)]
        page_size = options.get("page_size") or 5000
        cluster = self._cluster
        if page_size > 1 and cluster.faults.short_page and cluster.dice.random() < cluster.faults.short_page:
            page_size = cluster.dice.randint(1, page_size)
        page = rows[:page_size]
        left = pickle.dumps((page[-1][0], page[-1][2], taken + len(page))) if len(rows) > page_size else None
        return Result(select.columns, [_columns(table, select.columns, row) for row in page], left)

    async def _compare_and_set(self, change: Change, values: Sequence[Any]) -> Result:
        cluster = self._cluster
        faults, dice = cluster.faults, cluster.dice
        if change.using.timestamp is not None:
            raise UnknownForm(f"a timestamp in a compare-and-set: {change}")
        await asyncio.sleep(dice.random() * LATENCY_S)
        if len(cluster.up()) < _QUORUM:
            raise errors.CassErrorServerUnavailable("too few replicas are up")
        if faults.unanswered and dice.random() < faults.unanswered:
            raise errors.CassErrorServerWriteTimeout("given up before it was proposed")
        table = cluster.table(change.table)
        now_s = asyncio.get_running_loop().time()
        mutation = mutation_of(change, table, values, clock_us=cluster.clock_us(), now_s=now_s)
        query = Query(table.name, [mutation.partition], (), (), ALL, False, None)
        if table.clustering:
            raise UnknownForm(f"a compare-and-set in {table.name}, which has clustering columns")
        partition = cluster.read_all(query).get(mutation.partition)
        row = None if partition is None else next((each for _, each in partition.live(now_s)), None)
        applied, returned = _evaluate(change, table, mutation.partition, row, values)
        if applied:
            cluster.change_now([mutation])
        if faults.unanswered and dice.random() < faults.unanswered:
            raise errors.CassErrorServerWriteTimeout("committed, and not answered")
        return Result(("[applied]", *returned), [(applied, *returned.values())])


def _evaluate(
    change: Change, table: Table, key: Values, row: dict[str, Any] | None, values: Sequence[Any]
) -> tuple[bool, dict[str, Any]]:
    """Return whether a conditional statement applies, and the values that it returns if not."""
    if isinstance(change, Insert):
        if row is None:
            return True, {}
        known = dict(zip(table.partition_key, key, strict=True)) | row
        return False, {column: known.get(column) for column in table.types}
    conditions: tuple[Condition, ...] = change.conditions
    if row is None:
        return False, {}
    found = {each.columns[0]: row.get(each.columns[0]) for each in conditions}
    expected = {each.columns[0]: value_of(values, each.terms[0]) for each in conditions}
    return (True, {}) if found == expected else (False, found)


class _Descending:
    """Orders text and bytes in descending order."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __lt__(self, other: _Descending) -> bool:
        return bool(other._value < self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and bool(other._value == self._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __gt__(self, other: _Descending) -> bool:
        return bool(other._value > self._value)


def _order(table: Table, clustering: Values, reverse: bool) -> tuple[Any, ...]:
    return tuple(
        _Descending(value) if descending is not reverse else value
        for value, descending in zip(clustering, table.descending, strict=True)
    )


def _columns(table: Table, wanted: tuple[str, ...], row: tuple[Any, Values, Values, dict[str, Any]]) -> Values:
    _, key, clustering, values = row
    found = []
    for column in wanted:
        if column in table.partition_key:
            found.append(key[table.partition_key.index(column)])
        elif column in table.clustering:
            found.append(clustering[table.clustering.index(column)])
        elif column in table.types:
            found.append(values.get(column))
        else:
            raise UnknownForm(f"column {column} of {table.name}")
    return tuple(found)
