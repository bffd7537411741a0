"""After a delete, the rest of a packed row is written with a greater stamp than the tombstones have."""

from __future__ import annotations

import pytest

pytest.importorskip("acsylla")

from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.replication_plan import ClearEvents, Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import batch_rounds
from tidebook.store.cassandra.rows import decode_rows
from tidebook.testing.conformance.journal_records import append, delete, expected_journals

KEY = Key("orders", "o-1")
CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=10)


def test_the_rest_of_a_packed_row_is_stamped_above_the_tombstones_of_the_delete() -> None:
    """A tombstone at the same stamp would win over the row."""
    truth = expected_journals([(KEY.id, append(5)), (KEY.id, delete(2))], CONFIG)[KEY.id]
    assert truth.head is not None
    # The events of a record share its position object, by which rows of one record are recognized.
    position = Position(1, 0)
    left = [
        type(row)(row.seq_nr, row.encoded, row.timestamp_ms, position, row.index, row.time_ms) for row in truth.rows
    ]
    writes = SliceWrites("orders", 0, None, Pointer(truth.head.position, 5), ((ClearEvents(KEY, truth.head, 0),),))
    batches, _ = (list(each) for each in batch_rounds(writes, 1, {KEY: left}))
    values = {statement.cql: statement.values for batch in batches for statement in batch}
    assert decode_rows([values[cql.PUT_EVENT][4]]) == left
    assert values[cql.PUT_EVENT][-1] == write_stamp(truth.head.position)
    assert values[cql.CLEAR_EVENTS][0] == tombstone_stamp(truth.head.position) < write_stamp(truth.head.position)
