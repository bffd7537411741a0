"""A payload as a page shows it: as a tree of bounded size, as text, or as a dump of its bytes."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from tidebook.core.payload import JSON, TEXT, encode_payload
from tidebook.server.console.formatting import counted

#: The maximum number of nodes of a tree, its depth, and the characters of one value.
NODES_MAX: Final = 1_000
DEPTH_MAX: Final = 20
VALUE_CHARS_MAX: Final = 2_000
TEXT_CHARS_MAX: Final = 100_000
SUMMARY_CHARS_MAX: Final = 160
DUMP_BYTES_MAX: Final = 2_048
DUMP_ROW_BYTES: Final = 16


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a JSON document: a name, and either text or inner nodes."""

    name: str | None
    kind: str
    text: str = ""
    children: list[TreeNode] = []
    #: How many items or characters are not shown.
    left_out: int = 0


class DumpRow(msgspec.Struct, frozen=True):
    """A row of a dump: the place of its bytes, the bytes in hexadecimal, and as text."""

    at: str
    hex: str
    text: str


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """A part of some bytes, as rows, and its place among them."""

    rows: list[DumpRow]
    start: int
    size_bytes: int
    #: Where the parts before and after it begin.
    previous: int | None
    next: int | None


class ClippedText(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a string, and how many characters were left out."""

    text: str
    left_out: int = 0


def tree(value: Any) -> TreeNode:
    """Return a value as a tree of at most `NODES_MAX` nodes."""
    return _Budget(NODES_MAX).node(None, value, 0)


class _Budget:
    def __init__(self, left: int) -> None:
        self._left = left

    def node(self, name: str | None, value: Any, depth: int) -> TreeNode:
        self._left -= 1
        match value:
            case dict():
                items = [(str(key), item) for key, item in value.items()]
                return self._container(name, "object", items, depth)
            case list():
                return self._container(name, "array", [(str(n), item) for n, item in enumerate(value)], depth)
            case str():
                return TreeNode(
                    name=name,
                    kind="text",
                    text=value[:VALUE_CHARS_MAX],
                    left_out=max(0, len(value) - VALUE_CHARS_MAX),
                )
            case bytes():
                return TreeNode(name=name, kind="bytes", text=f"{len(value):,} bytes")
            case bool() | None:
                return TreeNode(name=name, kind="word", text=msgspec.json.encode(value).decode())
            case _:
                return TreeNode(name=name, kind="number", text=msgspec.json.encode(value).decode())

    def _container(self, name: str | None, kind: str, items: list[tuple[str, Any]], depth: int) -> TreeNode:
        children: list[TreeNode] = []
        for key, item in items:
            if self._left <= 0 or depth >= DEPTH_MAX:
                break
            children.append(self.node(key[:VALUE_CHARS_MAX], item, depth + 1))
        noun = "field" if kind == "object" else "item"
        text = counted(len(items), noun)
        return TreeNode(name=name, kind=kind, text=text, children=children, left_out=len(items) - len(children))


def as_document(value: Any) -> ClippedText:
    """Return a payload as text: JSON with line breaks, text unchanged, bytes as UTF-8 with replacement characters."""
    kind, encoded = encode_payload(value)
    if kind == JSON:
        text = msgspec.json.format(encoded, indent=2).decode()
    else:
        text = value if kind == TEXT else encoded[: TEXT_CHARS_MAX * 4].decode(errors="replace")
    return ClippedText(text=text[:TEXT_CHARS_MAX], left_out=max(0, len(text) - TEXT_CHARS_MAX))


def summary(value: Any) -> str:
    """Return the beginning of a payload on one line."""
    if isinstance(value, bytes):
        return f"{len(value):,} bytes: {value[:24].hex(' ')}{' …' if len(value) > 24 else ''}"
    if isinstance(value, str):
        text = value[: SUMMARY_CHARS_MAX + 1]
    else:
        text = msgspec.json.encode(value)[: SUMMARY_CHARS_MAX * 4 + 4].decode(errors="ignore")
    text = "".join(c if c.isprintable() else " " for c in text[: SUMMARY_CHARS_MAX + 1])
    return f"{text[:SUMMARY_CHARS_MAX]}…" if len(text) > SUMMARY_CHARS_MAX else text


def dump(data: bytes, start: int = 0, *, limit: int = DUMP_BYTES_MAX, row_bytes: int = DUMP_ROW_BYTES) -> Dump:
    """Return a part of some bytes as rows."""
    start = max(0, min(start, len(data)) // row_bytes * row_bytes)
    part = data[start : start + limit]
    rows = []
    for at in range(0, len(part), row_bytes):
        row = part[at : at + row_bytes]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        rows.append(DumpRow(f"{start + at:08x}", row.hex(" ").ljust(row_bytes * 3 - 1), text))
    end = start + len(part)
    return Dump(
        rows=rows,
        start=start,
        size_bytes=len(data),
        previous=max(0, start - limit) if start else None,
        next=end if end < len(data) else None,
    )
