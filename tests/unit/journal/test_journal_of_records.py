"""Which journal a record belongs to: one rule for the tail, the index of unreplicated records and the list of ids."""

from __future__ import annotations

import pytest

from tests.unit.journal.rig import Rig
from tidebook.core.key import ID_BYTES_MAX, home_of, journal_of


@pytest.mark.parametrize("id", ["o-1", "é", "x" * ID_BYTES_MAX])
def test_the_key_of_a_record_is_the_id_of_its_journal(id: str) -> None:
    assert journal_of(id.encode(), 0, 1) == id


def test_a_record_outside_its_journals_partition_belongs_to_no_journal() -> None:
    _, home = home_of(b"o-1", 4)
    assert [journal_of(b"o-1", number, 4) for number in range(4)] == [
        "o-1" if number == home else None for number in range(4)
    ]


@pytest.mark.parametrize(
    "key", [None, b"", b"\xff", b"a\x00b", b"x" * (ID_BYTES_MAX + 1)], ids=lambda key: repr(key)[:9]
)
def test_a_record_whose_key_is_no_valid_id_belongs_to_no_journal(key: bytes | None) -> None:
    assert journal_of(key, 0, 1) is None


async def test_records_of_no_journal_are_not_indexed(rig: Rig) -> None:
    await rig.append("a", 1)
    await rig.write_raw(b"\xff", b"x")
    await rig.append("a", 2)
    assert await rig.read("a") == [1, 2]
    assert [id async for id in rig.journal.ids()] == ["a"]
    topic = rig.journal._open
    assert topic is not None
    indexed = topic.partitions[0].cache._unreplicated._newest
    assert list(indexed) == ([] if rig.kind == "indexed" else ["a"])
