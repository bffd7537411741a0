"""Database dialects and the parameter styles of their drivers."""

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
    """Return the dialect for any of a database's names.

    >>> dialect("mariadb")
    'mysql'
    """
    found = _NAMES.get(name.lower())
    if found is None:
        raise InvalidInput(
            f"{name!r} is not a database that the outbox supports: use postgresql, mysql (or MariaDB) or sqlite"
        )
    return found
