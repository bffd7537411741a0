"""One simulated replica: partitions of rows of cells, with last-write-wins as in Cassandra.

The cell with the greater timestamp wins. At equal timestamps a tombstone wins over data, and of two values the one with
the greater bytes. A deletion removes everything with its timestamp or a lower one. A row exists while its marker, which
an INSERT writes, or one of its cells is live.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from operator import ge, gt, le, lt
from typing import Any, NamedTuple

from tests.simulation.cql import (
    Change,
    Condition,
    Delete,
    Insert,
    Operator,
    Select,
    Table,
    UnknownForm,
    Update,
    value_of,
)

Values = tuple[Any, ...]
NEVER = -(2**63)
_COMPARE = {"<": lt, "<=": le, ">": gt, ">=": ge}
_INTEGERS = {"int": 31, "bigint": 63}


class Cell(NamedTuple):
    """A value, or None for a tombstone, with its timestamp and expiry."""

    stamp: int
    value: Any
    expires_at_s: float | None = None


class Row(NamedTuple):
    """A row of one replica. Immutable, including `cells`, so that replicas and reads may share it."""

    #: The marker that an INSERT writes; its value is True.
    marker: Cell | None
    deleted: int
    cells: dict[str, Cell]


EMPTY = Row(None, NEVER, {})


class Restriction(NamedTuple):
    """The values of clustering columns from `start` on; with IN, `values` are the choices for one column."""

    start: int
    operator: Operator
    values: Values

    def admits(self, clustering: Values) -> bool:
        if self.operator == "IN":
            return clustering[self.start] in self.values
        some = clustering[self.start : self.start + len(self.values)]
        return some == self.values if self.operator == "=" else _COMPARE[self.operator](some, self.values)


#: The rows of one partition that all restrictions admit; without restrictions, the whole partition.
Slice = frozenset[Restriction]
ALL: Slice = frozenset()


def within(rows: Slice, clustering: Values) -> bool:
    """Return whether a row belongs to a slice."""
    return all(restriction.admits(clustering) for restriction in rows)


class PutRow(NamedTuple):
    clustering: Values
    marker: Cell | None
    cells: dict[str, Cell]


class DeleteRow(NamedTuple):
    clustering: Values
    stamp: int


class DeleteSlice(NamedTuple):
    rows: Slice
    stamp: int


class Mutation(NamedTuple):
    """One change of one partition of one table."""

    table: str
    partition: Values
    change: PutRow | DeleteRow | DeleteSlice


class Partition:
    """The rows and range tombstones of a partition."""

    __slots__ = ("deletions", "rows")

    def __init__(self) -> None:
        self.rows: dict[Values, Row] = {}
        self.deletions: dict[Slice, int] = {}

    def apply(self, change: PutRow | DeleteRow | DeleteSlice, types: dict[str, str]) -> None:
        if isinstance(change, DeleteSlice):
            if self.deletions.get(change.rows, NEVER) < change.stamp:
                self.deletions[change.rows] = change.stamp
            return
        row = self.rows.get(change.clustering, EMPTY)
        if isinstance(change, DeleteRow):
            self.rows[change.clustering] = row._replace(deleted=max(row.deleted, change.stamp))
        else:
            self.rows[change.clustering] = _merge(row, Row(change.marker, NEVER, change.cells), types)

    def copy(self, rows: Slice) -> Partition:
        """Return a replica's answer to a read of this slice."""
        copy = Partition()
        copy.rows = {at: row for at, row in self.rows.items() if within(rows, at)} if rows else dict(self.rows)
        copy.deletions = dict(self.deletions)
        return copy

    def merge(self, other: Partition, types: dict[str, str]) -> None:
        """Merge the state of another replica."""
        for at, row in other.rows.items():
            mine = self.rows.get(at)
            if mine is not row:
                self.rows[at] = row if mine is None else _merge(mine, row, types)
        for deleted, stamp in other.deletions.items():
            if self.deletions.get(deleted, NEVER) < stamp:
                self.deletions[deleted] = stamp

    def live(self, now_s: float) -> Iterator[tuple[Values, dict[str, Any]]]:
        """Yield the rows that exist, with the values of their cells."""
        deletions = list(self.deletions.items())
        for at, row in self.rows.items():
            deleted = row.deleted
            for rows, stamp in deletions:
                if stamp > deleted and within(rows, at):
                    deleted = stamp
            values = {name: cell.value for name, cell in row.cells.items() if _is_live(cell, deleted, now_s)}
            if values or (row.marker is not None and _is_live(row.marker, deleted, now_s)):
                yield at, values


class Replica:
    """The partitions of one node."""

    def __init__(self, schema: dict[str, Table]) -> None:
        self._schema = schema
        self._partitions: dict[str, dict[Values, Partition]] = {}
        #: Whether the replica answers requests.
        self.up = True

    def apply(self, mutations: Iterable[Mutation]) -> None:
        """Apply changes of one partition key atomically."""
        for table, key, change in mutations:
            self._partition(table, key).apply(change, self._schema[table].types)

    def read(self, query: Query) -> dict[Values, Partition]:
        """Return this replica's state of the rows that a query selects."""
        partitions = self._partitions.get(query.table, {})
        keys = [key for key in partitions if query.selects(key)] if query.keys is None else query.keys
        return {key: partitions[key].copy(query.rows) for key in keys if key in partitions}

    def repair(self, query: Query, found: dict[Values, Partition]) -> None:
        """Write back the merged result of a read, limited to the slice that was read."""
        for key, partition in found.items():
            mine = self._partition(query.table, key)
            for at, row in partition.rows.items():
                if mine.rows.get(at) != row:
                    mine.rows[at] = _merge(mine.rows.get(at, EMPTY), row, self._schema[query.table].types)
            for rows, stamp in partition.deletions.items():
                if mine.deletions.get(rows, NEVER) < stamp:
                    mine.apply(DeleteSlice(rows | query.rows, stamp), {})

    def drop(self, table: str) -> None:
        self._partitions.pop(table, None)

    def _partition(self, table: str, key: Values) -> Partition:
        of_table = self._partitions.get(table)
        if of_table is None:
            of_table = self._partitions[table] = {}
        found = of_table.get(key)
        if found is None:
            found = of_table[key] = Partition()
        return found


class Query(NamedTuple):
    """A SELECT with its values."""

    table: str
    #: The partitions; None if they are found by their tokens.
    keys: list[Values] | None
    tokens: tuple[tuple[Operator, int], ...]
    key_equals: tuple[tuple[int, Any], ...]
    rows: Slice
    reverse: bool
    limit: int | None

    def selects(self, key: Values) -> bool:
        token = token_of(key)
        return all(key[index] == value for index, value in self.key_equals) and all(
            token == value if operator == "=" else _COMPARE[operator](token, value) for operator, value in self.tokens
        )


@lru_cache(10_000)
def token_of(key: Values) -> int:
    """Return a partition's token. It is not Cassandra's hash, but any hash serves here."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big", signed=True)


def query_of(select: Select, table: Table, values: Sequence[Any]) -> Query:
    """Bind a SELECT."""
    tokens: list[tuple[Operator, int]] = []
    of_key: dict[str, list[Any]] = {}
    of_rows: list[Condition] = []
    for each in select.where:
        if each.is_token:
            if each.columns != table.partition_key:
                raise UnknownForm(f"token of {each.columns} in {table.name}")
            tokens.append((each.operator, value_of(values, each.terms[0])))
        elif each.columns[0] in table.partition_key:
            if len(each.columns) != 1 or each.operator not in ("=", "IN") or each.columns[0] in of_key:
                raise UnknownForm(f"{each} on the partition key of {table.name}")
            value = value_of(values, each.terms[0])
            of_key[each.columns[0]] = list(value) if each.operator == "IN" else [value]
        else:
            of_rows.append(each)
    for column, choices in of_key.items():
        for value in choices:
            check(table, column, value)
    keys: list[Values] | None = None
    equals: list[tuple[int, Any]] = []
    if of_key.keys() == set(table.partition_key) and not tokens:
        keys = list(dict.fromkeys(product(*(of_key[column] for column in table.partition_key))))
    else:
        if any(len(choices) != 1 for choices in of_key.values()):
            raise UnknownForm(f"IN on a part of the partition key of {table.name}")
        equals = [(table.partition_key.index(column), choices[0]) for column, choices in of_key.items()]
    limit = None if select.limit is None else value_of(values, select.limit)
    if limit is not None and limit < 1:
        raise UnknownForm(f"LIMIT {limit}")
    reverse = False
    if select.order_by:
        expected = tuple(zip(table.clustering, table.descending, strict=True))[: len(select.order_by)]
        reverse = select.order_by != expected
        if (
            keys is None
            or len(keys) != 1
            or (reverse and select.order_by != tuple((column, not descending) for column, descending in expected))
        ):
            raise UnknownForm(f"ORDER BY {select.order_by} in {table.name}")
    return Query(
        table.name, keys, tuple(tokens), tuple(equals), _slice(table, of_rows, values, complete=False), reverse, limit
    )


def _slice(table: Table, conditions: Sequence[Condition], values: Sequence[Any], *, complete: bool) -> Slice:
    """Return the restrictions of clustering columns: equalities of a prefix, then IN or inequalities."""
    found: set[Restriction] = set()
    prefix = 0
    inequalities: list[tuple[int, Condition]] = []
    for each in sorted(conditions, key=lambda each: _index(table, each.columns[0])):
        start = _index(table, each.columns[0])
        if each.columns != table.clustering[start : start + len(each.columns)]:
            raise UnknownForm(f"{each} in {table.name}")
        if each.operator not in ("=", "IN"):
            inequalities.append((start, each))
            continue
        if start != prefix or inequalities:
            raise UnknownForm(f"{each} after a gap or a range in {table.name}")
        bound = tuple(value_of(values, term) for term in each.terms)
        if each.operator == "IN":
            bound = tuple(bound[0])
            for value in bound:
                check(table, each.columns[0], value)
        else:
            _check_all(table, each.columns, bound)
        prefix += len(each.columns)
        found.add(Restriction(start, each.operator, bound))
    for start, each in inequalities:
        orders = set(table.descending[start : start + len(each.columns)])
        if start != prefix or len(orders) != 1:
            raise UnknownForm(f"{each} in {table.name}")
        bound = tuple(value_of(values, term) for term in each.terms)
        _check_all(table, each.columns, bound)
        found.add(Restriction(start, each.operator, bound))
    if complete and (inequalities or prefix != len(table.clustering)):
        raise UnknownForm(f"the clustering key of {table.name} is not complete")
    return frozenset(found)


def _index(table: Table, column: str) -> int:
    if column not in table.clustering:
        raise UnknownForm(f"a condition on column {column} of {table.name}")
    return table.clustering.index(column)


def mutation_of(change: Change, table: Table, values: Sequence[Any], *, clock_us: int, now_s: float) -> Mutation:
    """Bind an INSERT, UPDATE or DELETE; without USING TIMESTAMP it gets the clock's time."""
    using = change.using
    stamp = clock_us if using.timestamp is None else value_of(values, using.timestamp)
    if not isinstance(stamp, int) or not 0 <= stamp < 2**63:
        raise UnknownForm(f"timestamp {stamp!r}")
    expires_at_s = None if using.ttl is None else now_s + value_of(values, using.ttl)
    if isinstance(change, Insert):
        given = {column: value_of(values, term) for column, term in zip(change.columns, change.terms, strict=True)}
        if missing := {*table.partition_key, *table.clustering} - given.keys():
            raise UnknownForm(f"{missing} of {table.name} are missing")
        key = tuple(given.pop(column) for column in table.partition_key)
        clustering = tuple(given.pop(column) for column in table.clustering)
        _check_all(table, table.partition_key, key)
        _check_all(table, table.clustering, clustering)
        marker = Cell(stamp, True, expires_at_s)
        return Mutation(table.name, key, PutRow(clustering, marker, _cells(table, given, stamp, expires_at_s)))
    of_key = {each.columns[0]: each for each in change.where if each.columns[0] in table.partition_key}
    if of_key.keys() != set(table.partition_key) or any(
        len(each.columns) != 1 or each.operator != "=" or each.is_token for each in of_key.values()
    ):
        raise UnknownForm(f"the partition key of {table.name} is not complete: {change.where}")
    key = tuple(value_of(values, of_key[column].terms[0]) for column in table.partition_key)
    _check_all(table, table.partition_key, key)
    others = [each for each in change.where if each.columns[0] not in table.partition_key]
    if isinstance(change, Delete) and not change.columns:
        rows = _slice(table, others, values, complete=False)
        if table.clustering and len(rows) == len(table.clustering) and all(each.operator == "=" for each in rows):
            return Mutation(table.name, key, DeleteRow(_clustering(table, rows), stamp))
        if any(each.operator == "IN" for each in rows):
            raise UnknownForm(f"DELETE with IN from {table.name}")
        return Mutation(table.name, key, DeleteSlice(rows, stamp))
    clustering = _clustering(table, _slice(table, others, values, complete=True))
    if isinstance(change, Update):
        given = {column: value_of(values, term) for column, term in zip(change.columns, change.terms, strict=True)}
    else:
        given = dict.fromkeys(change.columns)
    return Mutation(table.name, key, PutRow(clustering, None, _cells(table, given, stamp, expires_at_s)))


def _clustering(table: Table, rows: Slice) -> Values:
    found: list[Any] = [None] * len(table.clustering)
    for each in rows:
        if each.operator != "=":
            raise UnknownForm(f"{each} where one row of {table.name} is meant")
        found[each.start : each.start + len(each.values)] = each.values
    return tuple(found)


def _cells(table: Table, given: dict[str, Any], stamp: int, expires_at_s: float | None) -> dict[str, Cell]:
    for column, value in given.items():
        if value is not None:
            check(table, column, value)
        elif column not in table.types:
            raise UnknownForm(f"column {column} of {table.name}")
    return {column: Cell(stamp, value, None if value is None else expires_at_s) for column, value in given.items()}


def _check_all(table: Table, columns: Sequence[str], values: Values) -> None:
    for column, value in zip(columns, values, strict=True):
        check(table, column, value)


def check(table: Table, column: str, value: Any) -> None:
    """Reject a value that the driver or the server would reject."""
    match table.types.get(column):
        case "text":
            right = isinstance(value, str)
        case "blob":
            right = isinstance(value, bytes)
        case "boolean":
            right = isinstance(value, bool)
        case "int" | "bigint" as type_:
            bits = _INTEGERS[type_]
            right = isinstance(value, int) and not isinstance(value, bool) and -(1 << bits) <= value < 1 << bits
        case _:
            right = False
    if not right:
        raise UnknownForm(f"{value!r} for column {column} of {table.name}")


def serialized(value: Any, type_: str) -> bytes:
    """Return the bytes of a value, which decide between values with the same timestamp."""
    match type_:
        case "text":
            return str(value).encode()
        case "int":
            return struct.pack(">i", value)
        case "bigint":
            return struct.pack(">q", value)
        case "boolean":
            return b"\1" if value else b"\0"
        case _:
            return bytes(value)


def _is_live(cell: Cell, deleted: int, now_s: float) -> bool:
    return cell.stamp > deleted and cell.value is not None and (cell.expires_at_s is None or now_s < cell.expires_at_s)


def _merge(left: Row, right: Row, types: dict[str, str]) -> Row:
    cells = dict(left.cells)
    for name, cell in right.cells.items():
        mine = cells.get(name)
        cells[name] = cell if mine is None else _winner(mine, cell, types[name])
    if left.marker is None or right.marker is None:
        marker = left.marker or right.marker
    else:
        marker = _winner(left.marker, right.marker, "boolean")
    return Row(marker, max(left.deleted, right.deleted), cells)


def _winner(left: Cell, right: Cell, type_: str) -> Cell:
    if left.stamp != right.stamp:
        return left if left.stamp > right.stamp else right
    if left == right:
        return left
    # A tombstone wins over a cell with a TTL, which wins over one without.
    ranks = [2 if cell.value is None else 1 if cell.expires_at_s is not None else 0 for cell in (left, right)]
    if ranks[0] != ranks[1]:
        return left if ranks[0] > ranks[1] else right
    if left.expires_at_s != right.expires_at_s and left.expires_at_s is not None and right.expires_at_s is not None:
        return left if left.expires_at_s > right.expires_at_s else right
    return left if serialized(left.value, type_) >= serialized(right.value, type_) else right
