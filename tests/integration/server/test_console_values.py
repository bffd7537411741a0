"""What each page of the console shows: the values of a small book, as a person reads them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import httpx

from tests.integration.server.console_book import ID, QUEUE, TAG, TOPIC, fill
from tests.integration.server.running import client, served
from tidebook import Book
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.server.console.render import link

#: Dates, and durations, which differ from run to run.
_DATE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}")
_SPAN = re.compile(r"\b[\d.,]+ (ms|s|min|h)\b")


class Shown(HTMLParser):
    """The values of a page: pairs of a name and a value, the rows of its tables, and its texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.pairs: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self._cell: list[str] | None = None
        self._name = ""
        self.feed(html.partition("<main")[2].partition("</main>")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th", "dt", "dd"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if self._cell is None or tag not in ("td", "th", "dt", "dd"):
            return
        text = " ".join("".join(self._cell).split())
        text, self._cell = _SPAN.sub("SPAN", _DATE.sub("DATE", text)), None
        if tag == "dt":
            self._name = text
        elif tag == "dd":
            self.pairs[self._name] = text
        else:
            self.rows[-1].append(text)

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._cell is not None:
            self._cell.append(data)


async def shown(http: httpx.AsyncClient, path: str, **fields: object) -> Shown:
    answer = await http.get(link(path, **fields))
    assert answer.status_code == 200, answer.text
    return Shown(answer.text)


async def test_the_overview_shows_what_needs_a_person_and_the_numbers_of_the_book(tmp_path: Path) -> None:
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
        assert ["Store", "SQLite", "ok answers"] in page.rows
        assert ["Replication", "none", "ok nothing has been replicated yet"] in page.rows


async def test_journals_show_their_topic_head_events_and_both_sides_of_an_event(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        await book.settle()
        (row,) = (await shown(http, "/journals")).rows[1:]
        assert row == ["orders", "6", "0", "–", "4", "1"]  # a mark in each partition too
        topic = await shown(http, "/topic", topic=TOPIC)
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
        assert "paid 3" in page.text
        event = await shown(http, "/event", topic=TOPIC, id=ID, number=2)
        assert event.pairs["Partition/offset"] == f"{partition}/0"
        assert event.pairs["Payload"] == "JSON, 37 B"
        assert event.pairs["Action"] == "append of 3 events"
        assert event.pairs["Key"] == "o-1"
        assert event.pairs["Position (epoch/offset)"] == "1/0"
        assert event.pairs["Index in the record"] == "1"
        assert event.pairs["Number"] == "2"
        assert "the same bytes" in event.text
        assert "user ada" in " ".join(event.text.split())


async def test_tags_show_the_horizon_what_holds_it_back_progress_and_groups(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        await book.settle()
        async with book.tags.subscribe(TAG, "mailers", follow=False) as events:
            async for event in events:
                await events.commit(event)
        overall, page = await shown(http, "/tags"), await shown(http, "/tag", tag=TAG)
        for each in (overall, page):
            assert each.pairs["Complete below (UTC)"] == "DATE"
            assert each.pairs["Held back by"].startswith("orders/")
            assert each.pairs["Records not replicated"] == "0"
            assert ["mailers", "paid", "0", "0 of 64"] in [row[:4] for row in each.rows]
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
        assert (letter.pairs["Key"], letter.pairs["Failures"]) == ("k-1", "1 (0 allowed)")
        place = (await http.get(link("/queue.json", queue=QUEUE, status="processing"))).json()["rows"][0]["place"]
        entry = await shown(http, "/entry", queue=QUEUE, status="processing", place=place)
        assert (entry.pairs["Claimed (UTC)"], entry.pairs["Lease until (UTC)"]) == ("DATE", "DATE")
        assert entry.pairs["Holder"].startswith(claim[0])


async def test_the_outbox_and_the_write_ahead_logs_show_what_waits_and_what_is_pinned(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        assert (await shown(http, "/outbox")).rows[1] == ["mails", "1", "SPAN", "0", "–", "0", "0", "exactly once"]
        row = (await shown(http, "/wal")).rows[1]
        assert (row[0], row[1], row[3:]) == ("metrics/7", "1", ["1", "–", "1", "ok"])
        region = await shown(http, "/region", namespace="metrics", region=7)
        assert region.pairs["Held by tables"] == row[2]
        assert (region.pairs["Pinned by table"], region.pairs["Snapshot age"]) == ("1", "no snapshot")
        assert region.rows[1][:5] == ["1", "2", "1", "3", "0"]
        assert region.rows[1][6] == row[2]


async def _park(book: Book) -> None:
    partition = partition_of(ID, (await book.journal(TOPIC).topic_config()).partitions)
    await book.log.append(Outgoing(TOPIC, partition, ID.encode(), b'{"from": "elsewhere"}'))


async def test_the_pipeline_shows_lag_by_partition_and_parked_records(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        partition = partition_of(ID, 4)
        lagging = (await shown(http, "/pipeline")).rows[1 + partition]
        assert lagging == [f"orders/{partition}", "0", "2", "2", "SPAN", "–", "behind"]
        await _park(book)
        await book.settle()
        page = await shown(http, "/pipeline")
        assert page.rows[1 + partition] == [f"orders/{partition}", "4", "4", "0", "–", "–", "caught up"]
        parked = next(row for row in page.rows if row[:1] == [f"orders/{partition} 2"])
        assert parked[1:3] == ["o-1", "21 B"]
        assert parked[3]


async def test_tokens_and_the_doctor_show_who_may_what_and_what_is_wrong(tmp_path: Path) -> None:
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
        assert (row[1], row[2], row[3], row[5], row[6]) == ("admin", "–", "DATE", "DATE", "Revoke")


async def test_what_was_typed_is_shown_again_when_it_is_refused(tmp_path: Path) -> None:
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
        token = await http.post("/acts/access.sign_in", data={"token": "tb_secret"})
        assert "tb_secret" not in token.text


async def test_an_append_by_hand_has_what_was_typed(tmp_path: Path) -> None:
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
