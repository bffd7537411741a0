"""Every page of the console shows the values of a small book in readable form."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import httpx
import msgspec
import pytest
from sqlalchemy import create_engine

from tests.integration.server.console_book import ID, QUEUE, TAG, TOPIC, fill
from tests.integration.server.running import client, served
from tidebook import Book, Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.queue.entry import Entry
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.worker import Worker
from tidebook.replication.status import JobStatus, write_job_status
from tidebook.server.console.render import link
from tidebook.sqlite.checksums import connect

#: Dates and durations, which differ from run to run.
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}")
_SPAN = re.compile(r"(?:< )?\b[\d.,]+ (ms|s|min|h)\b")


class Shown(HTMLParser):
    """The values of a page: pairs of a name and a value, the rows of its tables, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.all_pairs: list[tuple[str, str]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._cell: list[str] | None = None
        self._name = ""
        self.feed(html.partition("<main")[2].partition("</main>")[0])

    @property
    def pairs(self) -> dict[str, str]:
        return dict(self.all_pairs)

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th", "dt", "dd"):
            self._cell = []

    def row_of(self, name: str) -> list[str]:
        """Return the first row of a table that begins with a name."""
        return next(row for row in self.rows if row[:1] == [name])

    def handle_endtag(self, tag: str) -> None:
        if self._cell is None or tag not in ("td", "th", "dt", "dd"):
            return
        text = " ".join("".join(self._cell).split())
        text, self._cell = _SPAN.sub("SPAN", _DATE.sub("DATE", text)), None
        if tag == "dt":
            self._name = text
        elif tag == "dd":
            self.all_pairs.append((self._name, text))
        else:
            self.rows[-1].append(text)

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"
        if self._cell is not None:
            self._cell.append(data)


async def shown(http: httpx.AsyncClient, path: str, **fields: object) -> Shown:
    answer = await http.get(link(path, **fields))
    assert answer.status_code == 200, answer.text
    return Shown(answer.text)


async def test_the_overview_shows_what_needs_attention_and_the_numbers_of_the_book(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        page = await shown(http, "/")
        numbers = dict(page.pairs)
        held = numbers.pop("Held by WALs")
        assert held.endswith(" B")
        assert numbers == {
            "Topics": "1",
            "Records in the log": "2",
            "Not replicated yet": "2",
            "Queued entries": "5",
            "Dead letters": "2",
            "Outbox waiting": "1",
        }
        assert "Queue mail" in page.text
        assert "2 dead letters" in page.text
        assert _DATE.search(page.text.partition("As of")[2])
        assert ["Store", "SQLite", "ok answers"] in page.rows
        assert ["Replication", "none", "ok no process has reported"] in page.rows


async def test_a_part_of_this_process_that_fails_is_the_first_thing_on_the_overview(tmp_path: Path) -> None:
    async def broken() -> None:
        raise RuntimeError("no luck")

    async with served(tmp_path / "book") as (url, book), client(url) as http, book.running(broken):
        async with asyncio.timeout(60):
            while not (await http.get("/overview.json")).json()["findings"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        page = await shown(http, "/")
        name = next(each.name for each in (await book.health()).running)
        assert f"Needs attention fix {name} RuntimeError: no luck Book" in page.words


async def test_journals_show_their_topic_head_events_and_both_sides_of_an_event(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        await book.settle()
        (row,) = (await shown(http, "/journals")).rows[1:]
        assert row == ["orders", "6", "0", "–", "4", "1"]  # including a mark in each partition
        topic = await shown(http, "/topic", topic=TOPIC)
        for path in ("/journals", link("/topic", topic=TOPIC)):
            assert "counted in records, not in bytes" in (await http.get(path)).text
        assert topic.pairs == {
            "Records in the log": "6",
            "Not replicated yet": "0",
            "Partitions": "4",
            "Epoch": "1",
            "Record limit": "1.0 MB",
        }
        partition = partition_of(ID, 4)
        assert topic.rows[1 + partition] == [str(partition), "0", "3", "2"]
        assert "o-1" in topic.text
        page = await shown(http, "/journal", topic=TOPIC, id=ID)
        assert page.pairs == {
            "Last number": "5",
            "Deleted up to": "0",
            "Last append": "DATE",
            "Position (epoch/offset)": "1/1",
            "Incarnation (epoch/offset)": "1/0",
        }
        assert page.rows[1] == [
            "1", "DATE", "", '{"total":0,"card":"4111111111111111"}', "paid", f"{partition}/0"
        ]  # fmt: skip
        assert page.rows[5] == ["5", "DATE", "Noted v2", "text", "", f"{partition}/1"]
        assert "paid 3" in page.words
        event = await shown(http, "/event", topic=TOPIC, id=ID, number=2)
        assert event.all_pairs == [
            ("Time (UTC)", "DATE"),
            ("Partition/offset", f"{partition}/0"),
            ("Type", "–"),
            ("Payload", "JSON, 37 B"),
            ("Tags", "paid"),
            ("Partition/offset", f"{partition}/0"),  # of the log record
            ("Time (UTC)", "DATE"),
            ("Action", "append of 3 events"),
            ("Key", "o-1"),
            ("Headers", "–"),
            ("Size", "233 B"),
            ("Position (epoch/offset)", "1/0"),  # of the store row
            ("Time (UTC)", "DATE"),
            ("Index in the record", "1"),
            ("Log time (UTC)", "DATE"),
            ("Number", "2"),
            ("Size", "63 B"),
        ]
        assert "the same bytes" in event.text
        assert "user ada" in event.words
        typed = await shown(http, "/event", topic=TOPIC, id=ID, number=5)
        assert (typed.all_pairs[2], typed.all_pairs[3]) == (("Type", "Noted v2"), ("Payload", "text, 4 B"))


async def test_tags_show_the_horizon_and_what_holds_it_back_progress_and_groups(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        await book.settle()
        async with book.tags.subscribe(TAG, "mailers", follow=False) as events:
            async for event in events:
                await events.commit(event)
        overall, page = await shown(http, "/tags"), await shown(http, "/tag", tag=TAG)
        for each in (overall, page):
            assert each.pairs["Held back by"].startswith("orders/")
            assert {**each.pairs, "Held back by": "-"} == {
                "Complete below (UTC)": "DATE",
                "Age": "SPAN",
                "Held back by": "-",
                "Records not replicated": "0",
            }
            assert ["mailers", "paid", "0", "0 of 64", "DATE", "SPAN"] in each.rows
        assert "Find paid" in overall.words
        assert "No tag has events and begins with “x”." in (await shown(http, "/tags", prefix="x")).words
        assert page.rows[1] == ["DATE", "orders/o-1", "1", "1", "", '{"total":0,"card":"4111111111111111"}']
        assert ["orders/o-1", "3", "3"] in page.rows
        assert "No number is missing on this page." in page.text


async def test_a_queue_shows_its_entries_by_state_its_claims_and_an_entry_with_its_lease(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        assert (await shown(http, "/queues")).rows[1] == ["mail", "3", "1", "1", "2"]
        dead = await shown(http, "/queue", queue=QUEUE, status="dead")
        data = '{"to":1,"card":"4111111111111111"}'
        assert dead.rows[1] == ["", "2", "k-1", "100", "DATE", "1", "smtp 550", data]
        held = await shown(http, "/queue", queue=QUEUE, status="processing")
        assert held.rows[1][1:6] == ["k-2", "100", "DATE", "0", "DATE"]
        claim = held.rows[-1]
        assert claim[1:] == ["1", "DATE", "DATE"]
        assert held.rows[1][6] == claim[0]
        assert "4111111111111111" in held.rows[1][7]
        later = await shown(http, "/queue", queue=QUEUE, status="later", after="2090-01-01", until="2100-01-01")
        assert later.rows[1][2:5] == ["later", "100", "DATE"]
        assert "later" in dead.text.partition("Due soon")[2]
        assert dead.pairs == {
            "Lease": "SPAN",
            "Failures allowed": "0",
            "Keys in parallel": "no",
            "Period": "day",
        }
        letter = await shown(http, "/entry", queue=QUEUE, status="dead", place=known["letter"])
        assert letter.pairs == {
            "Key": "k-1",
            "Priority": "100",
            "Failures": "1 (0 allowed)",
            "Put (UTC)": "DATE",
            "Dead since (UTC)": "DATE",
        }
        assert "Reason smtp 550 Data 2 fields to 1 card 4111111111111111" in letter.words
        place = (await http.get(link("/queue.json", queue=QUEUE, status="processing"))).json()["rows"][0]["place"]
        entry = await shown(http, "/entry", queue=QUEUE, status="processing", place=place)
        assert (entry.pairs["Claimed (UTC)"], entry.pairs["Lease until (UTC)"]) == ("DATE", "DATE")
        assert entry.pairs["Holder"].startswith(claim[0])


async def test_the_outbox_and_the_write_ahead_logs_show_waiting_messages_and_pinned_logs(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        assert (await shown(http, "/outbox")).rows[1] == ["mails", "1", "SPAN", "0", "–", "0", "0", "exactly once"]
        row = (await shown(http, "/wal")).rows[1]
        assert (row[0], row[1], row[3:]) == ("metrics/7", "1", ["1", "–", "1", "ok"])
        region = await shown(http, "/region", namespace="metrics", region=7)
        assert region.pairs == {
            "Held by tables": row[2],
            "Pinned by table": "1",
            "Log offsets": "0 to 2",
            "Snapshot age": "no snapshot",
            "Term of the owner": "1",
            "Recovery took": "SPAN",
        }
        assert region.rows[1] == ["1", "2", "1", "3", "0", "1", row[2], "Force flush Release all Drop table"]


async def _park(book: Book) -> None:
    partition = partition_of(ID, (await book.journal(TOPIC).topic_config()).partitions)
    await book.log.append(Outgoing(TOPIC, partition, ID.encode(), b'{"from": "elsewhere"}'))


async def test_regions_are_shown_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.server.console.wal.ROWS_MAX", 1)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        for number in (7, 8):
            await book.wal("metrics").open_region(number, create=True)
        for page, number in ((1, 7), (2, 8), (3, 8)):
            found = await shown(http, "/wal", page=page)
            assert [row[0] for row in found.rows[1:]] == [f"metrics/{number}"]
            assert f"Page {min(page, 2)} of 2" in found.words


async def test_the_pipeline_shows_lag_by_partition_and_parked_records(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        partition = partition_of(ID, 4)
        lagging = (await shown(http, "/pipeline")).rows[1 + partition]
        assert lagging == [f"orders/{partition}", "0", "2", "2", "SPAN", "–", "lags"]
        await _park(book)
        await book.settle()
        page = await shown(http, "/pipeline")
        assert page.rows[1 + partition] == [f"orders/{partition}", "4", "4", "0", "–", "–", "caught up"]
        parked = next(row for row in page.rows if row[:1] == [f"orders/{partition} 2"])
        assert parked[1:3] == ["o-1", "21 B"]
        assert parked[3]


async def test_topics_are_sorted_filtered_and_shown_page_by_page(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        for n in range(52):
            await book.journal(f"topic-{n:02}").append("a", [Event(n)])
        for n in (7, 31, 31):
            await book.journal(f"topic-{n:02}").append("b", [Event(n)])
        by_name = await shown(http, "/journals")
        assert [row[0] for row in by_name.rows[1:]] == [f"topic-{n:02}" for n in range(50)]
        assert "52 topics" in by_name.words
        assert "Page 1 of 2" in by_name.words
        last = await shown(http, "/journals", page=2)
        assert [row[0] for row in last.rows[1:]] == ["topic-50", "topic-51"]
        by_records = await shown(http, "/journals", sort="records")
        assert by_records.rows[0][1] == "Records ↓"
        assert [row[:2] for row in by_records.rows[1:3]] == [["topic-31", "3"], ["topic-07", "2"]]
        assert [row[0] for row in (await shown(http, "/journals", sort="lag")).rows[1:3]] == ["topic-31", "topic-07"]
        assert [row[0] for row in (await shown(http, "/journals", prefix="-3", sort="records")).rows[1:3]] == [
            "topic-31",
            "topic-30",
        ]
        assert "No topic has “x” in its name." in (await shown(http, "/journals", prefix="x")).words
        assert "No id begins with “x”." in (await shown(http, "/topic", topic="topic-31", prefix="x")).words
        found = await shown(http, "/topic", topic="topic-31", prefix="b")  # even if it is not replicated yet
        assert "Find b" in found.words


async def test_a_long_journal_shows_its_timeline_its_pages_and_how_far_a_filter_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.server.console.journal.SCAN_S_MAX", 60.0)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal(TOPIC)
        for start in range(0, 120, 40):
            await orders.append("long", [Event({"n": n}) for n in range(start, start + 40)], expire_after=timedelta(1))
            appended_ms = book.clock.now_ms()
            while book.clock.now_ms() == appended_ms:  # noqa: ASYNC110 - a timeline needs events of different times
                await asyncio.sleep(0)
        await orders.delete("long", to=5)
        await orders.save_snapshot("long", seq_nr=50, payload={})
        await book.settle()
        journal = {"topic": TOPIC, "id": "long"}
        last = await shown(http, "/journal", **journal)
        assert last.pairs == {
            "Last number": "120",
            "Deleted up to": "5",
            "Last append": "DATE",
            "Position (epoch/offset)": "1/3",
            "Incarnation (epoch/offset)": "1/0",
            "Expires": "DATE",
            "Snapshots at": "50",
        }
        assert [row[0] for row in last.rows[1:]] == [str(n) for n in range(71, 121)]
        assert "First Previous" in last.words
        assert "Events by time (UTC), estimated from some of them" in last.words
        first = await shown(http, "/journal", at=1, **journal)
        assert [row[0] for row in first.rows[1:]] == [str(n) for n in range(6, 56)]
        assert "Next Last" in first.words
        assert "First Previous" not in first.words
        found = await shown(http, "/journal", where="payload.n < 9", **journal)
        assert [row[0] for row in found.rows[1:]] == ["6", "7", "8", "9", "4 found in all events up to number 120."]
        monkeypatch.setattr("tidebook.server.console.journal.SCAN_EVENTS_MAX", 10)
        some = await shown(http, "/journal", where="payload.n < 9", **journal)
        assert some.rows[-1][0].startswith("4 found up to number 15 of 120")
        timeline = (await http.get(link("/journal.json", **journal))).json()["timeline"]
        assert round(sum(bar["events"] for bar in timeline["bars"])) == 115


async def test_a_missing_number_of_a_tag_is_shown(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        await book.settle()
        store = connect(tmp_path / "book" / "store.db")
        store.execute("DELETE FROM tag_views WHERE tag_seq_nr = 2")
        store.close()
        assert "missing orders/o-1 2 to 2" in (await shown(http, "/tag", tag=TAG)).words


async def test_a_queue_shows_what_its_workers_do_and_expired_leases(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("jobs", settings=QueueSettings(max_timeouts=3))
        await queue.put_many([Entry(data=n, key=f"j-{n}", expires_at=4_000_000_000_000) for n in range(3)])
        done = asyncio.Event()

        async def handle(job: Job) -> None:
            if job.data == 1:
                done.set()
                await asyncio.Event().wait()

        worker = Worker(queue, handle, concurrency=1, label="printer")
        running = asyncio.create_task(worker.run())
        try:
            await done.wait()
            async with asyncio.timeout(60):
                while (page := await shown(http, "/queue", queue="jobs")).row_of("printer")[5] != "1":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert page.row_of("printer") == ["printer", "live", "DATE", "SPAN ago", "1 of 1", "1", "0"]
            held = await shown(http, "/queue", queue="jobs", status="processing")
            assert held.rows[1][1:8] == ["j-1", "100", "DATE", "0", "DATE", "printer", "1"]
            place = (await http.get(link("/queue.json", queue="jobs"))).json()["rows"][0]["place"]
            entry = await shown(http, "/entry", queue="jobs", status="due", place=place)
            assert entry.pairs == {
                "Key": "j-2",
                "Priority": "100",
                "Failures": "0 (3 allowed)",
                "Put (UTC)": "DATE",
                "Due (UTC)": "DATE",
                "Expires": "2096-10-02T07:06:40+00:00",
            }
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_the_outbox_shows_parked_messages_with_their_reasons(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        engine = create_engine(book.outbox.url)
        with engine.begin() as connection:
            book.outbox.append(connection, "shipments", "s-1", [Event(1)], expected=99)
        engine.dispose()
        await book.outbox.relay(once=True)
        page = await shown(http, "/outbox")
        (topic,) = {each.topic for each in await book.outbox.parked()}
        assert page.row_of(topic)[1:] == ["0", "–", "0", "–", "1", "0", "exactly once"]
        (row,) = [row for row in page.rows if row[2:3] == ["parked"]]
        assert (row[0], row[3], row[5]) == (topic, "s-1", "1")
        assert "99" in row[7]
        found = [each["detail"] for each in (await http.get("/overview.json")).json()["findings"]]
        assert "1 message is parked" in found


async def test_the_pipeline_shows_the_last_report_and_stopped_partitions(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        partition = partition_of(ID, 4)
        status = JobStatus(
            book.clock.now_ms() - 2_000, 7, 900, 1, 50.0, 0.5, stopped={f"orders/{partition}": "it is damaged"},
            process="host:1",
        )  # fmt: skip
        await write_job_status(book.store, status)
        page = await shown(http, "/pipeline")
        assert page.pairs == {
            "Last report": "SPAN ago, spark",
            "Batches": "7",
            "Records": "900",
            "Latest batch": "50/s in SPAN",
            "Process": "host:1",
        }
        assert page.row_of(f"orders/{partition}")[1:] == ["0", "2", "2", "SPAN", "–", "stopped it is damaged"]
        assert "1 topic, those that lag most first" in page.words
        await write_job_status(book.store, msgspec.structs.replace(status, stopped={}))
        async with asyncio.timeout(60):  # the page shows the last survey
            while (row := (await shown(http, "/pipeline")).row_of(f"orders/{partition}"))[6] != "lags":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert row[5] == "SPAN"
        assert ["Replication", "spark", "ok last reported SPAN ago by host:1"] in (await shown(http, "/")).rows


async def test_the_audit_shows_who_did_what_and_that_its_chains_are_whole(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        assert "Nothing was changed yet." in (await shown(http, "/audit")).words
        await http.delete(f"/v1/journals/{TOPIC}/{ID}")
        page = await shown(http, "/audit", check="true")
        assert page.rows[1] == [
            "2", "DATE", "local admin", "127.0.0.1", "journals.purge", f"/v1/journals/{TOPIC}/{ID}", "204"
        ]  # fmt: skip
        assert page.rows[2][4] == "server.start"
        assert "2 entries of 1 chain are intact." in page.words


async def test_settings_show_where_each_value_came_from(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[journal]\npage_events = 7\n[mask]\n"orders.*.card" = "hide"\n')
    async with served(file) as (url, _), client(url) as http:
        page = await shown(http, "/settings")
        assert page.row_of("page_events") == ["page_events", "7", f"set {file}, line 3"]
        assert page.row_of("orders.*.card") == ["orders.*.card", "hide", f"set {file}, line 5"]
        assert page.row_of("url") == ["url", "embedded: SQLite in the folder", "default"]
        assert f"The book is in {(tmp_path / 'book').resolve()} ." in page.words


async def test_an_act_in_the_background_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.server.console.queue_acts.AT_ONCE_MAX", 1)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        dry_run = await http.get("/acts/queues.retry", params={"queue": QUEUE, "status": "dead"})
        form = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', dry_run.text.partition("<main")[2]))
        started = await http.post("/acts/queues.retry", data=form)
        where = started.headers["location"]
        async with asyncio.timeout(60):
            while (await http.get(where.replace("?", ".json?", 1))).json()["state"] == "running":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        page = Shown((await http.get(where)).text)
        assert page.pairs == {"State": "done", "Done": "2 of 2", "Started (UTC)": "DATE", "Took": "SPAN"}


async def test_tokens_and_the_doctor_show_permissions_and_problems(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        doctor = await shown(http, "/doctor", files="true")
        assert ["Log", "ok", "SQLite: answers"] in doctor.rows
        assert ["Queue mail", "bad", "2 dead letters"] in doctor.rows
        assert ["Topic orders", "ok", "epoch 1, 2 records, 2 not replicated yet"] in doctor.rows
        assert ["File store.db", "ok", "no damage found"] in doctor.rows
        made = await http.post("/acts/access.create_token", data={"name": "ops", "role": "admin", "days": "1"})
        secret = re.search(r"tb_[\w-]+", made.text)
        assert secret is not None
        async with client(url, secret[0]) as admin:
            row = (await shown(admin, "/tokens")).rows[1]
            assert row[0].startswith("ops ")
            assert (row[1:4], row[5:]) == (["admin", "–", "DATE"], ["DATE", "Revoke"])
            weak = await admin.post("/v1/tokens", json={"name": "old", "role": "viewer", "prefix": "o"})
            await admin.delete(f"/v1/tokens/{weak.json()['id']}")
            old = (await shown(admin, "/tokens")).rows[1]
            assert old[1:] == ["viewer", "o", "DATE", "–", "revoked", ""]


async def test_refused_input_is_shown_again(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        refused = await http.get(link("/journal", topic=TOPIC, id=ID, where='payload.n > "<b>'))
        assert refused.status_code == 400
        assert 'name="where" value="payload.n &gt; &#34;&lt;b&gt;"' in refused.text
        assert f'name="id" value="{ID}"' in refused.text
        form = {"topic": TOPIC, "id": ID, "payload": '{"long": 1', "tags": "a, b", "back": "/journals"}
        refused = await http.post("/acts/journals.append", data=form)
        assert refused.status_code == 400
        assert '<textarea name="payload" spellcheck="false">{&#34;long&#34;: 1</textarea>' in refused.text
        assert 'name="tags" value="a, b"' in refused.text
        assert 'name="back" value="/journals"' in refused.text
        conflict = await http.post("/acts/journals.append", data={**form, "payload": "{}", "expected": "1"})
        assert conflict.status_code == 409
        assert 'name="expected" value="1"' in conflict.text
        number = await http.get(link("/queue", queue=QUEUE, priority="high"))
        assert "priority cannot be &#39;high&#39;" in number.text
        assert 'name="priority" value="high"' in number.text
        assert len([event async for event in book.journal(TOPIC).read(ID)]) == 5
        token = await http.post("/acts/access.create_token", data={"name": "n" * 201, "prefix": "or"})
        assert 'Name <input name="name"' in token.text
        assert 'Only names that begin with <input name="prefix" value="or"' in token.text
        number = await http.get(link("/acts/journals.delete", topic=TOPIC, id=ID, to="all"))
        assert 'Up to number <input name="to" value="all"' in number.text
        token = await http.post("/acts/access.sign_in", data={"token": "tb_secret"})
        assert "tb_secret" not in token.text


async def test_an_append_by_hand_has_the_typed_values(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        form = {
            "topic": TOPIC,
            "id": "o-9",
            "payload": '{"n": 1}',
            "type": "Placed",
            "tags": "a",
            "metadata": '{"u": 1}',
        }
        assert (await http.post("/acts/journals.append", data=form)).status_code == 303
        found = [(each.payload, each.type, each.metadata) async for each in book.journal(TOPIC).read("o-9")]
        assert found == [({"n": 1}, "Placed", {"u": 1})]
