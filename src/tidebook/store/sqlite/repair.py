"""Apply repairs, each in one transaction. A repair is fenced if the pointer has moved since it was planned."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.core.errors import Fenced
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import PutEvents, PutHead, PutTags
from tidebook.sqlite.writer import WriteTransaction
from tidebook.store.sqlite.apply_slice import ANY_POINTER, POINTER, pointer_of, put_keys

_EXTRA_TAG = """DELETE FROM tag_views WHERE tag = ? AND log_ms = ? AND topic = ? AND partition = ? AND "offset" = ?
    AND "index" = ? AND epoch = ?"""


def repair_journals(transaction: WriteTransaction, repairs: Sequence[Repair]) -> list[Fenced | None]:
    """Apply repairs in order; return Fenced for each that is outdated, and otherwise None."""
    return [_repair(transaction, each) for each in repairs]


def _repair(transaction: WriteTransaction, planned: Repair) -> Fenced | None:
    partition = (planned.key.topic, planned.partition)
    current = pointer_of(transaction.connection.execute(POINTER, partition).fetchone())
    if current != planned.pointer:
        return Fenced(
            f"{planned.key}: the store was replicated further while the journal was compared: compare it again"
        )
    for seq_nr in planned.extra_rows:
        transaction.connection.execute(
            "DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr = ?", (*planned.key, seq_nr)
        )
    for place in planned.extra_tags:
        transaction.connection.execute(
            _EXTRA_TAG,
            (place.tag, place.time_ms, place.topic, place.partition, place.offset, place.index, place.epoch),
        )
    key, head = planned.key, planned.head
    put_keys(transaction, [(PutEvents(key, head, planned.rows), PutTags(key, head, planned.tags), PutHead(key, head))])
    transaction.channels.add(ANY_POINTER)
    return None
