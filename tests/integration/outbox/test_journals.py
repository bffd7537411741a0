"""Appends to journals from a transaction: each is applied once, even if relays die."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

import tidebook
from tests.integration.outbox.databases import Database
from tests.integration.outbox.dying import POINTS
from tests.integration.outbox.relaying import Cluster
from tidebook.core.errors import NotFound
from tidebook.core.event import Event
from tidebook.outbox.batch_selection import select_batch, to_relayed
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.port import BatchLimit, BatchSent, NewSession, Outcome, RelayedMessage
from tidebook.wiring.sync import SyncBook

TOPIC = "journal:orders"


class Owner:
    """A relay of appends that the test runs step by step, with an open session."""

    def __init__(self, box: Outbox) -> None:
        self.store = box._parts.database.connect()
        identity = self.store.identity()
        self.target = box._parts.targets(identity).of(TOPIC)
        self.topic = self.target.topic(TOPIC)
        hold = self.store.try_lock(TOPIC, lock_id=uuid.uuid4().bytes, owner="dead")
        assert hold is not None
        self.hold = hold
        batch = self.store.begin(
            hold,
            NewSession(uuid.uuid4().bytes, self.topic.fence, self.topic.uuid, self.target.ends(self.topic)),
            lambda rows, held: select_batch(rows, held, self.topic, box.settings),
            BatchLimit(),
        )
        self.messages = to_relayed(batch.messages, session=batch.session, outbox=identity)

    def send(self, messages: list[RelayedMessage]) -> Outcome:
        channel = self.target.channel(self.topic, fresh=True)
        channel.start(messages, timestamp_ms=0)
        while (outcome := channel.wait(1.0)) is None:
            pass
        return outcome

    def die(self) -> None:
        """Let another relay take the topic immediately."""
        self.store.unlock(self.hold)
        self.store.close()


def payloads(book: SyncBook, id: str) -> list[Any]:
    return [event.payload for event in book.journal("orders").read(id)]


def append(box: Any, engine: Engine, id: str, *numbers: int) -> None:
    with Session(engine) as s, s.begin():
        for n in numbers:
            box.append(s, "orders", id, [Event(n)])


def test_an_append_to_a_journal_is_made_when_the_transaction_commits(book: SyncBook, engine: Engine) -> None:
    with Session(engine) as s, s.begin():
        book.outbox.append(s, "orders", "o-1", [Event({"total": 3}, tags={"paid"}, metadata={"by": "me"})], expected=0)
        book.outbox.append(s, "orders", "o-1", [Event("text"), Event(b"bytes")])
    with Session(engine) as s:
        book.outbox.append(s, "orders", "o-1", [Event("gone")])
        s.rollback()
    assert book.outbox.relay(once=True) == 2
    events = list(book.journal("orders").read("o-1"))
    assert [(e.seq_nr, e.payload) for e in events] == [(1, {"total": 3}), (2, "text"), (3, b"bytes")]
    assert (events[0].tags, events[0].metadata) == (frozenset({"paid"}), {"by": "me"})


def test_many_appends_to_one_journal_keep_their_order(book: SyncBook, engine: Engine) -> None:
    with Session(engine) as s, s.begin():
        for n in range(50):
            book.outbox.append(s, "orders", f"o-{n % 2}", [Event(n)])
    assert book.outbox.relay(once=True) == 50
    for which in range(2):
        payloads = [e.payload for e in book.journal("orders").read(f"o-{which}")]
        assert payloads == list(range(which, 50, 2))


def test_an_append_that_conflicts_is_parked_and_holds_its_journal(book: SyncBook, engine: Engine) -> None:
    book.journal("orders").append("o-1", [Event("there")])
    with Session(engine) as s, s.begin():
        book.outbox.append(s, "orders", "o-1", [Event("no")], expected=0)
        book.outbox.append(s, "orders", "o-1", [Event("after")])
        book.outbox.append(s, "orders", "o-2", [Event("other")], expected=0)
    assert book.outbox.relay(once=True) == 1
    parked, held = book.outbox.parked()
    assert (parked.state, held.state) == ("parked", "held")
    assert "expected seq_nr 0, but the last seq_nr is 1" in parked.reason
    assert book.outbox.parked_drop("journal:orders", parked.id) == 1
    assert book.outbox.relay(once=True) == 1
    assert [e.payload for e in book.journal("orders").read("o-1")] == ["there", "after"]
    with pytest.raises(NotFound):
        book.outbox.parked_retry("journal:orders", parked.id)


def test_an_append_made_before_its_relay_died_is_not_repeated(book: SyncBook, engine: Engine) -> None:
    box = book.outbox
    append(box, engine, "o-1", *range(5))
    dead = Owner(box)
    assert dead.send(dead.messages[:3]) == BatchSent()
    dead.die()
    assert box.relay(once=True) == 5
    for n in range(30):
        book.journal("orders").append("o-1", [Event(f"other {n}")])
    # The first relay was only paused, and continues after its append ids were evicted: nothing is applied twice.
    assert dead.send(dead.messages) != BatchSent()
    assert payloads(book, "o-1") == [*range(5), *(f"other {n}" for n in range(30))]


def test_an_append_whose_id_was_evicted_is_parked(book: SyncBook, engine: Engine) -> None:
    """A relay dies during a batch, and other writers make twenty appends before the next relay starts."""
    box = book.outbox
    append(box, engine, "o-1", 1, 2, 3)
    dead = Owner(box)
    assert dead.send(dead.messages[:2]) == BatchSent()
    dead.die()
    for _ in range(20):
        book.journal("orders").append("o-1", [Event("other")])
    assert box.relay(once=True) == 0
    parked = box.parked()
    assert [each.state for each in parked] == ["parked"] * 3
    assert "no longer remembers" in parked[0].reason
    assert payloads(book, "o-1") == [1, 2, *["other"] * 20]
    box.parked_drop(TOPIC, parked[0].id)
    box.parked_drop(TOPIC, parked[1].id)
    box.parked_retry(TOPIC, parked[2].id)
    assert box.relay(once=True) == 1
    assert payloads(book, "o-1") == [1, 2, *["other"] * 20, 3]


def test_an_append_that_gets_the_id_of_an_earlier_one_is_made(book: SyncBook, engine: Engine) -> None:
    """After the outbox's database alone was restored to an earlier time, it assigns the same ids again."""
    append(book.outbox, engine, "o-1", 1)
    with engine.begin() as connection:
        first = connection.exec_driver_sql("SELECT id FROM kafka_messages").scalar_one()
    assert book.outbox.relay(once=True) == 1
    append(book.outbox, engine, "o-1", 2)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE kafka_messages SET id = {first}")
    assert book.outbox.relay(once=True) == 1
    assert payloads(book, "o-1") == [1, 2]


@pytest.mark.postgres
def test_a_late_commit_does_not_displace_an_open_session(postgres: Database, tmp_path: Path) -> None:
    """A dead relay made eight appends; eight messages with lower ids commit later, and would be the next batch."""
    path = tmp_path / "tidebook.toml"
    path.write_text(f'[sql]\nurl = "{postgres.url}"\n')
    with tidebook.open_sync(path) as book, postgres.connect() as late, postgres.engine() as engine:
        box: Any = book.outbox
        for n in range(8):
            box.append(late, "orders", "o-1", [Event(f"late {n}")])
        append(box, engine, "o-1", *range(8))
        dead = Owner(box)
        assert dead.send(dead.messages) == BatchSent()
        dead.die()
        late.commit()
        for n in range(4):
            book.journal("orders").append("o-1", [Event(f"other {n}")])
        assert box.relay(once=True) == 16
        expected = [*range(8), *(f"other {n}" for n in range(4)), *(f"late {n}" for n in range(8))]
        assert payloads(book, "o-1") == expected


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.postgres])])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the settings of an embedded book and of one on real servers, in turn."""
    text = "[outbox]\nbatch_rows = 6\nlock_limit_s = 1\nrest_s = 0.2\npoll_s = 0.1\n"
    if request.param == "kafka":
        database: Database = request.getfixturevalue("postgres")
        cluster: Cluster = request.getfixturevalue("cluster")
        text += f'[log]\nurl = "kafka://{cluster.bootstrap}"\n[sql]\nurl = "{database.url}"\n'
    path = tmp_path / "tidebook.toml"
    path.write_text(text)
    return path


def test_each_append_is_applied_once_when_relays_are_killed_at_every_point(settings: Path) -> None:
    topic = f"orders-{uuid.uuid4().hex[:8]}"
    with tidebook.open_sync(settings) as book:
        box: Any = book.outbox
        engine = create_engine(box.url)
        with Session(engine) as s, s.begin():
            for n in range(60):
                box.append(s, topic, f"o-{n % 3}", [Event(n)])
        for point in POINTS:
            command = [sys.executable, "-m", "tests.integration.outbox.dying", str(settings), point]
            assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL, point
        with box.relaying():
            until_sent(box, topic)
        engine.dispose()
        for which in range(3):
            found = [event.payload for event in book.journal(topic).read(f"o-{which}")]
            assert found == list(range(which, 60, 3))
        assert box.parked() == []


def until_sent(box: Any, topic: str) -> None:
    from tests.integration.outbox.relaying import until

    def sent() -> bool:
        [status] = [each for each in box.status() if each.topic == f"journal:{topic}"]
        return bool(status.waiting == 0 and not status.dirty)

    until(sent, "everything was appended")
