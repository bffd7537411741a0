"""Execute statements with many rows of values at once.

Every step of a statement releases the GIL, and getting it back from a busy thread takes up to 5 ms, which rows that are
inserted one by one would each wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import apsw

#: The numbers of rows of one statement: few, because a connection keeps the compiled statements, but so that a group
#: commit of any size takes few statements.
_SIZES = (256, 128, 64, 32, *range(16, 0, -1))


def insert_rows(connection: apsw.Connection, sql: str, width: int, values: Sequence[Any]) -> None:
    """Execute `sql`, which contains `VALUES {}`, for all rows; `values` is the flat list of rows of `width` values."""
    first, end = 0, len(values)
    for size in _SIZES:
        step = size * width
        while end - first >= step:
            connection.execute(_statement(sql, width, size), values[first : first + step])
            first += step


@cache
def _statement(sql: str, width: int, size: int) -> str:
    row = f"({','.join('?' * width)})"
    return sql.replace("VALUES {}", f"VALUES {','.join([row] * size)}")
