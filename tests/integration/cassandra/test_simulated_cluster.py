"""The simulated cluster and a real Cassandra return the same rows after the same statements.

What a simulation shows is only true of Cassandra if the simulated cluster behaves like the real one. So both execute
every statement of the store, and further forms that it does not use, with timestamps that are often equal; their
results must be the same.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

import pytest

from tests.open_adapters import OpenCassandra
from tests.simulation.cluster import Batch, Cluster, Driver
from tests.simulation.cql import Bind, Condition, CreateTable, Delete, DropTable, Insert, Select, Table, Update, parse
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.migrations import BOOTSTRAP, MIGRATIONS
from tidebook.store.cassandra.mutations import CqlStatement
from tidebook.store.cassandra.session import CassandraSession

pytestmark = [pytest.mark.cassandra, pytest.mark.timeout(300)]

#: So few that most writes have the same timestamp as others.
STAMPS = range(1, 7)
#: With equal timestamps the value with the greater bytes wins; a negative number has greater bytes than a positive one.
VALUES: dict[str, list[Any]] = {
    "int": [-2, -1, 0, 1, 2, 300],
    "bigint": [-1, 0, 1, 2, 3, 1 << 40],
    "boolean": [True, False],
    "blob": [b"", b"\0", b"a", b"ab", b"\xff"],
    "text": ["", "a", "ab", "b", "é"],
}
#: Columns of partition keys: few values, so that statements often affect the same rows.
KEYS: dict[str, list[Any]] = {"int": [0, 1], "bigint": [0, 1], "text": ["", "b"]}

_ROW = "topic = ? AND id = ? AND epoch = ? AND log_offset = ? AND seq_nr = ?"
#: Forms beyond the store's own, on a table with three clustering columns, all of them descending.
FURTHER = [
    "INSERT INTO snapshot (topic, id, epoch, log_offset, seq_nr) VALUES (?, ?, ?, ?, ?) USING TIMESTAMP ?",
    "INSERT INTO snapshot (topic, id, epoch, log_offset, seq_nr, payload, payload_type, timestamp_ms) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?",
    f"UPDATE snapshot USING TIMESTAMP ? SET payload = ?, payload_type = ? WHERE {_ROW}",
    f"UPDATE snapshot USING TIMESTAMP ? SET payload = null WHERE {_ROW}",
    f"DELETE payload, timestamp_ms FROM snapshot USING TIMESTAMP ? WHERE {_ROW}",
    f"DELETE FROM snapshot USING TIMESTAMP ? WHERE {_ROW}",
    "DELETE FROM snapshot USING TIMESTAMP ? WHERE topic = ? AND id = ? AND epoch = ?",
    "DELETE FROM snapshot USING TIMESTAMP ? WHERE topic = ? AND id = ? AND epoch = ? AND log_offset > ?",
    "DELETE FROM snapshot USING TIMESTAMP ? WHERE topic = ? AND id = ? AND epoch >= ? AND epoch < ?",
    "DELETE FROM snapshot USING TIMESTAMP ? WHERE topic = ? AND id = ?",
    "SELECT epoch, log_offset, seq_nr, payload, payload_type, timestamp_ms FROM snapshot WHERE topic = ? AND id = ?",
    "SELECT seq_nr, payload FROM snapshot WHERE topic = ? AND id = ? AND epoch = ? ORDER BY epoch ASC LIMIT ?",
    "SELECT epoch, payload FROM snapshot WHERE topic = ? AND id = ? AND (epoch, log_offset) > (?, ?) LIMIT ?",
    "SELECT epoch, payload_type FROM snapshot WHERE topic = ? AND id IN ? AND epoch IN ?",
]


def store_statements() -> list[str]:
    return [value for name, value in vars(cql).items() if name.isupper() and not name.startswith("_")]


class Bindings:
    """Random values for the bind markers of a statement, each of the type of its column."""

    def __init__(self, dice: random.Random, schema: dict[str, Table], prefix: str) -> None:
        self._dice = dice
        self._schema = schema
        self._prefix = prefix

    def values(self, text: str) -> list[Any]:
        parsed = parse(text)
        assert not isinstance(parsed, CreateTable | DropTable)
        table = self._schema[parsed.table]  # type: ignore[union-attr]
        found: dict[int, Any] = {}
        if isinstance(parsed, Select):
            self._of_conditions(table, parsed.where, found)
            if isinstance(parsed.limit, Bind):
                found[parsed.limit.place] = self._dice.randint(1, 4)
        else:
            assert isinstance(parsed, Insert | Update | Delete)
            if isinstance(parsed, Insert | Update):
                for column, term in zip(parsed.columns, parsed.terms, strict=True):
                    if isinstance(term, Bind):
                        found[term.place] = self._of_column(table, column, null=True)
            if isinstance(parsed, Update | Delete):
                self._of_conditions(table, (*parsed.where, *parsed.conditions), found)
            if isinstance(parsed.using.timestamp, Bind):
                found[parsed.using.timestamp.place] = self._dice.choice(STAMPS)
            if isinstance(parsed.using.ttl, Bind):
                found[parsed.using.ttl.place] = 60
        return [found[place] for place in range(len(found))]

    def _of_conditions(self, table: Table, conditions: tuple[Condition, ...], found: dict[int, Any]) -> None:
        for condition in conditions:
            for column, term in zip(condition.columns, condition.terms, strict=False):
                if not isinstance(term, Bind):
                    continue
                if condition.is_token:
                    found[term.place] = -(2**63) if condition.operator == ">" else 2**63 - 1
                elif condition.operator == "IN":
                    some = [self._of_column(table, column) for _ in range(2)]
                    found[term.place] = list(dict.fromkeys(some))
                else:
                    found[term.place] = self._of_column(table, column)

    def _of_column(self, table: Table, column: str, *, null: bool = False) -> Any:
        type_ = table.types[column]
        if column in table.partition_key:
            value = self._dice.choice(KEYS[type_])
            return self._prefix + value if type_ == "text" else value
        if null and column not in table.clustering and self._dice.random() < 0.2:
            return None
        return self._dice.choice(VALUES[type_])


def is_bounded(text: str) -> bool:
    """Return whether a SELECT reads only rows of this test: other tests use the same tables."""
    parsed = parse(text)
    assert isinstance(parsed, Select)
    return bool(parsed.where)


async def rows_of(session: CassandraSession, text: str, values: list[Any], *, page_size: int) -> list[tuple[Any, ...]]:
    parsed = parse(text)
    assert isinstance(parsed, Select)
    rows = [row.as_tuple() async for page in session.pages(text, values, page_size=page_size) for row in page]
    # The order of several partitions is undefined, and a row does not name its partition: compare them sorted.
    of_one = all(each.operator == "=" and not each.is_token for each in parsed.where if each.columns[0] != "epoch")
    return rows if of_one else sorted(rows, key=repr)


@pytest.mark.parametrize("seed", range(2))
async def test_the_simulated_cluster_answers_as_the_real_cassandra_does(
    open_store: OpenCassandra, settings: CassandraSettings, seed: int, long_form: bool
) -> None:
    real = (await open_store())._session
    dice = random.Random(seed)
    cluster = Cluster(random.Random(seed))
    for ddl in (*BOOTSTRAP, *(ddl for migration in MIGRATIONS for ddl in migration.statements)):
        cluster.define(parse(ddl))  # type: ignore[arg-type]
    driver = Driver(cluster)
    simulated = CassandraSession(driver, driver, settings, Metrics(), new_batch=Batch)
    bindings = Bindings(dice, cluster.schema, f"{uuid4().hex}-")
    every = [*store_statements(), *FURTHER * 3]
    reads = [text for text in every if text.startswith("SELECT") and is_bounded(text)]
    conditional = [text for text in every if " IF " in text]
    writes = [
        text
        for text in every
        # Without an explicit timestamp a statement gets the current time, which differs between the two clusters.
        if not text.startswith("SELECT") and text not in conditional and "USING TIMESTAMP" in text
    ]
    for number in range(1500 if long_form else 150):
        for _ in range(dice.randint(1, 3)):
            batch = [
                CqlStatement(text, bindings.values(text)) for text in dice.choices(writes, k=dice.choice((1, 1, 3)))
            ]
            await real.write(batch)
            await simulated.write(batch)
        text = dice.choice(reads)
        values, page_size = bindings.values(text), dice.choice((1, 2, 100))
        why = (number, text, values, page_size)
        answers = [await rows_of(session, text, values, page_size=page_size) for session in (real, simulated)]
        assert answers[1] == answers[0], why
        if number % 5 == 0:
            text = dice.choice(conditional)
            values = bindings.values(text)
            reported = [await session.compare_and_set(text, values) for session in (real, simulated)]
            assert reported[1] == reported[0], (text, values)
