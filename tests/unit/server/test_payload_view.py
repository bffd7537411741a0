"""A page shows a bounded part of a payload, whatever the payload is."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tidebook.server.console.payload_view import (
    NODES_MAX,
    SUMMARY_CHARS_MAX,
    TEXT_CHARS_MAX,
    VALUE_CHARS_MAX,
    TreeNode,
    as_document,
    dump,
    summary,
    tree,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def count(node: TreeNode) -> int:
    return 1 + sum(map(count, node.children))


def test_a_large_document_is_shown_in_part_with_the_size_of_the_rest() -> None:
    wide = tree([{"a": n} for n in range(10_000)])
    assert count(wide) <= NODES_MAX + 1
    assert wide.left_out == 10_000 - len(wide.children)
    long = tree("x" * 10_000_000)
    assert (len(long.text), long.left_out) == (VALUE_CHARS_MAX, 10_000_000 - VALUE_CHARS_MAX)
    document = as_document("x" * 10_000_000)
    assert (len(document.text), document.left_out) == (TEXT_CHARS_MAX, 10_000_000 - TEXT_CHARS_MAX)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert count(tree(deep)) < 30


def test_bytes_are_dumped_in_pages() -> None:
    data = bytes(range(256)) * 20
    first = dump(data)
    assert first.rows[1].at == "00000010"
    assert first.rows[4].text == "@ABCDEFGHIJKLMNO"
    assert (first.previous, first.next) == (None, 2_048)
    assert (dump(data, 1_024).previous, dump(data, 4_096).previous) == (0, 2_048)
    last = dump(data, 5_000)
    assert last.next is None
    assert last.start == 4_992
    assert dump(b"").rows == []


@given(JSON)
def test_a_summary_is_short_and_printable(value: Any) -> None:
    text = summary(value)
    assert len(text) <= SUMMARY_CHARS_MAX + 1
    assert text.isprintable()
