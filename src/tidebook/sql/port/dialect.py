"""Which database, and how its driver writes a parameter."""

from __future__ import annotations

from typing import Literal

from tidebook.core.errors import InvalidInput

Dialect = Literal["postgresql", "mysql", "sqlite"]
#: `%s`, `%b` (psycopg, binary), `?`, or `$1`.
Style = Literal["format", "binary", "qmark", "dollar"]

_NAMES: dict[str, Dialect] = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}


def dialect(name: str) -> Dialect:
    """A database by any of its names.

    >>> dialect("mariadb")
    'mysql'
    """
    found = _NAMES.get(name.lower())
    if found is None:
        raise InvalidInput(
            f"{name!r} is no database of the outbox: there are postgresql, mysql (MariaDB too) and sqlite"
        )
    return found
