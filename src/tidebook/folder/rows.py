"""Many rows in few statements.

Every step of a statement lets go of the interpreter's lock, and getting it back from a busy thread takes up to 5 ms:
rows that are inserted one by one would each pay that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import apsw

_SIZES = (256, 64, 16, 4, 1)


def put_rows(connection: apsw.Connection, sql: str, width: int, values: Sequence[Any]) -> None:
    """Execute `sql`, which says `VALUES {}`, over rows of `width` values that lie behind one another in `values`."""
    for size, some in _split(width, values):
        connection.execute(_statement(sql, width, size), some)


def each_row(
    connection: apsw.Connection, sql: str, bindings: tuple[Any, ...], values: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """The rows of a SELECT whose `(VALUES {})` stands behind all other bindings, over all values."""
    rows: list[tuple[Any, ...]] = []
    for size, some in _split(1, values):
        rows += connection.execute(_statement(sql, 1, size), (*bindings, *some))
    return rows


def _split(width: int, values: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    at, end = 0, len(values)
    for size in _SIZES:
        step = size * width
        while end - at >= step:
            yield size, values[at : at + step]
            at += step


@cache
def _statement(sql: str, width: int, size: int) -> str:
    row = f"({','.join('?' * width)})"
    return sql.replace("VALUES {}", f"VALUES {','.join([row] * size)}")
