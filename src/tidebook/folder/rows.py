"""Many rows in few statements.

Every step of a statement lets go of the interpreter's lock, and getting it back from a busy thread takes up to 5 ms:
rows that are inserted one by one would each pay that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import apsw

_SIZES = (256, 64, 16, 4, 1)


def put_rows(connection: apsw.Connection, sql: str, width: int, values: Sequence[Any]) -> None:
    """Execute `sql`, which says `VALUES {}`, over rows of `width` values that lie behind one another in `values`."""
    at, end = 0, len(values)
    for size in _SIZES:
        step = size * width
        while end - at >= step:
            connection.execute(_statement(sql, width, size), values[at : at + step])
            at += step


@cache
def _statement(sql: str, width: int, size: int) -> str:
    row = f"({','.join('?' * width)})"
    return sql.replace("VALUES {}", f"VALUES {','.join([row] * size)}")
