"""Mends: one transaction each, refused where the partition's pointer has moved since the log was folded."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.core.errors import Fenced
from tidebook.core.mend import Mend
from tidebook.core.replication import PutEvents, PutHead, PutTags
from tidebook.folder.inbox import Session
from tidebook.store.embedded.slices import ANY_POINTER, POINTER, pointer_of, put_keys

_EXTRA_TAG = """DELETE FROM tag_views WHERE tag = ? AND log_ms = ? AND topic = ? AND partition = ? AND "offset" = ?
    AND "index" = ? AND epoch = ?"""


def mend(session: Session, mends: Sequence[Mend]) -> list[Fenced | None]:
    """Carry out mends one after another."""
    return [_mend(session, each) for each in mends]


def _mend(session: Session, mend: Mend) -> Fenced | None:
    at = (mend.key.topic, mend.partition)
    stands = pointer_of(session.connection.execute(POINTER, at).fetchone())
    if stands != mend.pointer:
        return Fenced(f"{mend.key}: the store was replicated further while the journal was compared: compare it again")
    for seq_nr in mend.extra_rows:
        session.connection.execute("DELETE FROM journal WHERE topic = ? AND id = ? AND seq_nr = ?", (*mend.key, seq_nr))
    for place in mend.extra_tags:
        session.connection.execute(
            _EXTRA_TAG,
            (place.tag, place.time_ms, place.topic, place.partition, place.offset, place.index, place.epoch),
        )
    key, head = mend.key, mend.head
    put_keys(session, [(PutEvents(key, head, mend.rows), PutTags(key, head, mend.tags), PutHead(key, head))])
    session.channels.add(ANY_POINTER)
    return None
