"""A member of a group is killed with its transaction open: the other processes take over its journals."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import pytest

import tidebook
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.tags.sql_offsets import TABLE
from tidebook.tags.subscription import SHARES
from tidebook.testing.replicating import replicate

pytestmark = pytest.mark.postgres

JOURNALS, BATCH = 60, 120
LEASE_S = 1.5
CASE_TIMEOUT_S = 90
#: Prints how many shares it has, and writes each event and its offset in one transaction. If it is to hold an event
#: it prints that while the transaction is open, and stops there.
MEMBER = textwrap.dedent(
    """
    import asyncio, sys, time
    import psycopg
    import tidebook
    from tidebook.tags.sql_offsets import SqlOffsets

    async def report(events):
        shares = -1
        while True:
            if len(events.shares) != shares:
                shares = len(events.shares)
                print(shares, flush=True)
            await asyncio.sleep(0.05)

    async def main(where, url, tag, topic, group, name, hold, lease_s):
        offsets = SqlOffsets(tag, group, lambda: psycopg.connect(url), paramstyle="format")
        with psycopg.connect(url) as connection:
            async with tidebook.open(where) as book:
                subscription = book.tags.subscribe(tag, group, topics=[topic], offsets=offsets, lease_s=float(lease_s))
                async with subscription as events:
                    reporting = asyncio.create_task(report(events))
                    async for event in events:
                        try:
                            if offsets.advance(connection, event):
                                connection.execute(
                                    "INSERT INTO tag_done VALUES (%s, %s, %s, %s)",
                                    (group, name, event.id, event.payload),
                                )
                            if event.payload >= int(hold):
                                print("holds", flush=True)
                                time.sleep(600)
                            connection.commit()
                        except (tidebook.Fenced, psycopg.errors.UniqueViolation):
                            connection.rollback()  # another member now has the share

    asyncio.run(main(*sys.argv[1:]))
    """
)
Row = tuple[str, str, int]


class Group:
    """Processes that share a tag's journals, and the table that they write to."""

    def __init__(self, where: Path, postgres_url: str, topic: str) -> None:
        self.where = where
        self.url = postgres_url
        self.topic = topic
        self.name = f"g-{uuid.uuid4().hex}"

    @property
    def tag(self) -> str:
        return f"tag-{self.topic}"

    @asynccontextmanager
    async def member(self, name: str, *, hold: int = sys.maxsize) -> AsyncIterator[asyncio.subprocess.Process]:
        arguments = (self.where, self.url, self.tag, self.topic, self.name, name, hold, LEASE_S)
        command = (sys.executable, "-c", MEMBER, *map(str, arguments))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def append(self, book: tidebook.Book, payloads: range) -> None:
        for n in payloads:
            await book.journal(self.topic).append(f"j-{n % JOURNALS}", [Event(n, tags={self.tag})])
        await replicate(book.log, book.store, self.topic)
        await tick(book.log, book.store, [self.topic])
        await replicate(book.log, book.store, self.topic)

    def rows(self, connection: psycopg.Connection) -> list[Row]:
        found = connection.execute("SELECT member, id, payload FROM tag_done WHERE who = %s", (self.name,))
        return found.fetchall()

    async def all_done(self, connection: psycopg.Connection, count: int) -> list[Row]:
        while len(rows := self.rows(connection)) < count:  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.05)
        return rows


async def read_until(process: asyncio.subprocess.Process, wanted: Callable[[str], bool]) -> None:
    assert process.stdout is not None
    while not wanted(line := (await process.stdout.readline()).decode().strip()):
        assert line, "the member has ended"


@pytest.fixture
def where(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    toml = f'folder = "{tmp_path / "book"}"\n[journal]\npartitions = 2\n'
    if request.param == "cassandra":
        toml += f'[store]\nurl = "cassandra://{request.getfixturevalue("cassandra_address")}/tag_killed"\n'
    path = tmp_path / "tidebook.toml"
    path.write_text(toml)
    return path


@pytest.fixture
def connection(postgres_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(TABLE)
        connection.execute("CREATE TABLE IF NOT EXISTS tag_done (who TEXT, member TEXT, id TEXT, payload INTEGER)")
        yield connection


@pytest.mark.parametrize("where", ["embedded", pytest.param("cassandra", marks=pytest.mark.cassandra)], indirect=True)
async def test_the_journals_of_a_process_that_was_killed_are_taken_over_and_each_event_counts_once(
    where: Path, postgres_url: str, connection: psycopg.Connection
) -> None:
    group = Group(where, postgres_url, f"t-{uuid.uuid4().hex[:12]}")
    async with asyncio.timeout(CASE_TIMEOUT_S), tidebook.open(where) as book:
        await book.journal(group.topic).append("begin", [Event(0)])
        async with group.member("one") as one, group.member("two") as two, group.member("dies", hold=BATCH) as dies:
            for each in (one, two, dies):
                await read_until(each, lambda line: 0 < int(line) <= SHARES // 2)
            await group.append(book, range(BATCH))
            rows = await group.all_done(connection, BATCH)
            assert {member for member, _, _ in rows} == {"one", "two", "dies"}
            had = {id for member, id, _ in rows if member == "dies"}
            await group.append(book, range(BATCH, 2 * BATCH))
            await read_until(dies, lambda line: line == "holds")
            dies.kill()
            assert await dies.wait() == -9
            await group.all_done(connection, 2 * BATCH)
            await group.append(book, range(2 * BATCH, 3 * BATCH))
            rows = await group.all_done(connection, 3 * BATCH)
    assert sorted(payload for _, _, payload in rows) == list(range(3 * BATCH)), "an event was lost or counted twice"
    later = [(member, id) for member, id, payload in rows if payload >= BATCH]
    assert {member for member, _ in later} == {"one", "two"}, "the held event was committed by the killed member"
    assert had <= {id for _, id in later}
    for id in had:
        payloads = [payload for _, of, payload in rows if of == id]
        assert len(payloads) == 3 * BATCH // JOURNALS
