"""An empty database per test, on each server that the outbox supports."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import sqlalchemy


@dataclass(frozen=True)
class Database:
    """A database; `url` is in the form of Tidebook's settings."""

    kind: str
    url: str

    @property
    def name(self) -> str:
        return urlsplit(self.url).path.lstrip("/")

    @property
    def placeholder(self) -> str:
        return "?" if self.kind == "sqlite" else "%s"

    def sqlalchemy_url(self, *, asynchronous: bool = False) -> str:
        driver = {
            "postgresql": "postgresql+psycopg",
            "mysql": "mysql+pymysql",
            "sqlite": "sqlite+aiosqlite" if asynchronous else "sqlite",
        }[self.kind]
        return driver + self.url.removeprefix(self.kind)

    @contextmanager
    def engine(self) -> Iterator[sqlalchemy.Engine]:
        engine = sqlalchemy.create_engine(self.sqlalchemy_url())
        try:
            yield engine
        finally:
            engine.dispose()

    @contextmanager
    def connect(self) -> Iterator[Any]:
        """Open a DB-API connection that is not in autocommit."""
        connection = self._connect()
        try:
            yield connection
        finally:
            connection.close()

    def _connect(self) -> Any:
        match self.kind:
            case "postgresql":
                return psycopg.connect(self.url)
            case "mysql":
                return pymysql.connect(**mysql_parameters(self.url))
            case _:
                return sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=30)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement on a separate connection and commit it."""
        with self.connect() as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            rows = cursor.fetchall() if cursor.description else []
            connection.commit()
            cursor.close()
        return [tuple(row) for row in rows]

    def waiting(self) -> int:
        """Return the number of waiting messages."""
        [[count]] = self.query("SELECT count(*) FROM kafka_messages")
        return int(count)


def mysql_parameters(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path.lstrip("/"),
    }


@contextmanager
def postgres_database(server_url: str) -> Iterator[Database]:
    name = f"outbox_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            yield Database("postgresql", urlsplit(server_url)._replace(path=f"/{name}").geturl())
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def mysql_database(server_url: str) -> Iterator[Database]:
    name = f"outbox_{uuid.uuid4().hex[:12]}"
    server = pymysql.connect(**mysql_parameters(server_url), autocommit=True)
    try:
        with server.cursor() as cursor:
            cursor.execute("SET GLOBAL max_allowed_packet = 67108864")  # applies to connections that are opened later
            cursor.execute(f"CREATE DATABASE {name}")
            try:
                yield Database("mysql", urlsplit(server_url)._replace(path=f"/{name}").geturl())
            finally:
                cursor.execute(f"DROP DATABASE {name}")
    finally:
        server.close()


@contextmanager
def sqlite_database(folder: Path) -> Iterator[Database]:
    yield Database("sqlite", f"sqlite:///{folder / 'app.db'}")
