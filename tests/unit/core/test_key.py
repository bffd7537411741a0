"""Topics, ids, and the partition of an id."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import InvalidInput
from tidebook.core.key import (
    ID_BYTES_MAX,
    TOPIC_LENGTH_MAX,
    Key,
    home_of,
    journal_id,
    journal_of,
    partition_of,
    topic_name,
)


@pytest.mark.parametrize("topic", ["a", "orders", "Orders.v2", "a_b-c.d", "...", "x" * TOPIC_LENGTH_MAX])
def test_a_topic_of_letters_digits_and_three_signs_is_accepted(topic: str) -> None:
    assert topic_name(topic) == topic


@pytest.mark.parametrize(
    "topic",
    ["", ".", "..", "a b", "a/b", "ä", "a\n", "a\x00", "x" * (TOPIC_LENGTH_MAX + 1), None, 5, b"orders", ["orders"]],
)
def test_any_other_topic_is_refused(topic: object) -> None:
    with pytest.raises(InvalidInput, match="topic"):
        topic_name(topic)


@pytest.mark.parametrize(
    "id", ["a", " ", "o-1", "ä", "日本", "a/b", "\n", "x" * ID_BYTES_MAX, "ä" * (ID_BYTES_MAX // 2)]
)
def test_an_id_is_any_text(id: str) -> None:
    assert journal_id(id) == id


@pytest.mark.parametrize(
    ("id", "why"),
    [
        ("", "empty"),
        ("x" * (ID_BYTES_MAX + 1), f"{ID_BYTES_MAX} bytes"),
        ("ä" * (ID_BYTES_MAX // 2 + 1), f"{ID_BYTES_MAX} bytes"),
        ("\ud800", "Unicode"),
        ("a\x00b", "NUL"),
        (None, "NoneType"),
        (7, "int"),
        (b"o-1", "bytes"),
    ],
)
def test_an_id_that_cannot_be_one_is_refused_with_the_reason(id: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        journal_id(id)


def test_a_key_reads_as_topic_and_id() -> None:
    assert str(Key("orders", "o-1")) == "orders/o-1"


@pytest.mark.parametrize(
    ("id", "partitions", "partition"), [("o-1", 4, 2), ("o-2", 4, 0), ("a", 4, 3), ("ä", 7, 1), ("日本", 10, 6)]
)
def test_the_partition_of_an_id_never_changes(id: str, partitions: int, partition: int) -> None:
    assert partition_of(id, partitions) == partition


@given(st.text(min_size=1), st.integers(1, 1000))
def test_the_partition_is_the_crc_of_the_utf8_bytes(id: str, partitions: int) -> None:
    assert partition_of(id, partitions) == crc32(id.encode()) % partitions


@pytest.mark.parametrize(
    ("record_key", "home"),
    [(b"o-1", ("o-1", 2)), (b"a", ("a", 3)), (None, (None, None)), (b"", (None, None)), (b"\xff", (None, None))],
)
def test_a_record_key_names_a_journal_and_its_partition_or_none(
    record_key: bytes | None, home: tuple[str | None, int | None]
) -> None:
    assert home_of(record_key, 4) == home
    for partition in range(4):
        assert journal_of(record_key, partition, 4) == (home[0] if partition == home[1] else None)
