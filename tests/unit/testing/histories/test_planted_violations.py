"""Every rule detects its violations: each test plants one in a history that is otherwise good."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.testing.histories.world import World
from tidebook.testing.histories.call import NEVER_NS, RecordedCall, RecordedHistory
from tidebook.testing.histories.checker import check_history
from tidebook.testing.histories.evidence import Evidence
from tidebook.testing.histories.journals import check_linearizability
from tidebook.testing.histories.log_fold import all_events, fold_log

LINEAR = "journals are linearizable"
KEPT = "acknowledged appends are kept"
ONCE = "each event has one place, and reads are in order"
REMOVED = "deleted and purged events never return"
SNAPSHOTS = "snapshots are of the current incarnation"
STORE = "the store is the fold of the log"
STREAMS = "streams by tag have each event once, in order"
CONSUMERS = "groups and projections apply each event exactly once"
OUTBOX = "outbox messages arrive once, if committed, in key order"
HOLDER = "a queue entry has one valid holder"
FINISHED = "queue entries are finished at least once"
WAL = "acknowledged WAL writes are replayed, fenced ones are not"


class Script:
    """Records calls one after the other, or overlapping where a test requests it."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.ns = 0

    def __call__(
        self,
        op: str,
        result: Any = None,
        *,
        error: str | None = None,
        unknown: bool = False,
        span: tuple[int, int] | None = None,
        **args: Any,
    ) -> Script:
        began = self.ns + 10
        if op == "claim" and result:  # the clock of the store is that of the machine
            began = max(began, result[0]["started_ms"] * 1_000_000)
        start, end = span or (began, began + 10)
        self.ns = max(self.ns, end)
        outcome = "unknown" if unknown else "ok" if error is None else "fail"
        number = len(self.calls) + 1
        self.calls.append(
            RecordedCall("p", number, op, args, start, NEVER_NS if unknown else end, outcome, result, error)  # type: ignore[arg-type]
        )
        return self

    def append(self, *values: str, first: int, id: str = "", key: str = "t/k", **more: Any) -> Script:
        result = {"first": first, "last": first + len(values) - 1}
        return self("append", result, key=key, values=list(values), append_id=id or values[0], **more)

    def lost_append(self, *values: str, id: str = "", **more: Any) -> Script:
        return self("append", key="t/k", values=list(values), append_id=id or values[0], unknown=True, **more)

    def refused(self, value: str) -> Script:
        return self("append", error="Unavailable", key="t/k", values=[value], append_id=value)

    def conflict(self, *values: str, found: int | None, **more: Any) -> Script:
        result = {"found": found}
        return self("append", result, error="Conflict", key="t/k", values=list(values), append_id=values[0], **more)

    def read(self, *events: tuple[int, str], **more: Any) -> Script:
        return self("read", {"events": [list(each) for each in events]}, key="t/k", **more)

    def broken(self) -> set[str]:
        return {verdict.rule for verdict in check_history(RecordedHistory(self.calls)) if not verdict.ok}


def script() -> Script:
    return Script()


@pytest.mark.parametrize(
    ("made", "rules"),
    [
        (script().append("a", first=1).read((1, "a")), set()),
        # numbers
        (script().append("a", first=2), {LINEAR}),
        (script().append("a", first=1).append("b", first=1), {LINEAR}),
        (script().append("a", first=1).append("b", first=3), {LINEAR}),
        (script().append("a", first=1).append("b", first=5, at=5).read((1, "a"), (5, "b")), set()),
        (script().append("a", first=1).append("b", first=2, at=5), {LINEAR}),
        (script().append("a", first=1).append("b", first=1, at=1), {LINEAR}),
        # lost, stale, invented, reordered, twice
        (script().append("a", first=1).read(), {LINEAR}),
        (script().append("a", first=1).append("b", first=2).read((1, "a")), {LINEAR}),
        (script().append("a", first=1).append("b", first=2).read((1, "a"), (2, "b")).read((1, "a")), {LINEAR}),
        (script().append("a", first=1).read((1, "a"), (2, "x")), {LINEAR, ONCE}),
        (script().append("a", first=1).append("b", first=2).read((2, "b"), (1, "a")), {LINEAR, ONCE}),
        (script().append("a", first=1).append("b", first=2).read((1, "b"), (2, "a")), {LINEAR}),
        (script().append("a", first=1).read((1, "a"), (2, "a")), {LINEAR, ONCE}),
        (script().append("a", first=1).read((1, "a")).read((1, "a"), (1, "a")), {LINEAR, ONCE}),
        (script().read((1, "a")).append("a", first=1), {LINEAR, ONCE}),
        (script().append("a", first=1).read((2, "a")), {LINEAR}),
        (script().append("a", first=1, key="t/other").read((1, "a")), {LINEAR, ONCE}),
        # an append is atomic
        (script().append("a", "b", first=1).read((1, "a")), {LINEAR}),
        # conditions
        (script().append("a", first=1).append("b", first=2, expected=0), {LINEAR}),
        (script().append("a", first=1).conflict("b", found=1, expected=0).read((1, "a")), set()),
        (script().append("a", first=1).conflict("b", found=2, expected=0), {LINEAR}),
        (script().append("a", first=1).conflict("b", found=None, expected=1), {LINEAR}),
        (script().append("a", first=1).conflict("b", found=1, expected=0).read((1, "a"), (2, "b")), {LINEAR, KEPT}),
        # an unknown outcome allows an effect at any later time, or none, but at most one, and a complete one
        (script().lost_append("a").append("b", first=1).append("c", first=3).read((1, "b"), (2, "a"), (3, "c")), set()),
        (script().lost_append("a").append("b", first=1).read((1, "b")), set()),
        (script().lost_append("a").append("b", first=2).read((1, "a"), (2, "b")).read((2, "b")), {LINEAR}),
        (script().lost_append("a", "b").append("c", first=3).read((1, "a"), (3, "c")), {LINEAR}),
        (script().lost_append("a").append("a", first=1, id="a").read((1, "a")), set()),
        (script().lost_append("a").append("a", first=2, id="a").read((1, "a"), (2, "a")), {LINEAR, ONCE}),
        (script().append("a", first=1).append("a", first=1, id="a").append("b", first=2), set()),
        (script().append("a", first=1).append("a", first=2, id="a"), {LINEAR}),
        (script().refused("a").read((1, "a")), {LINEAR, KEPT}),
        # removed
        (script().append("a", first=1).append("b", first=2)("delete", key="t/k", to=1).read((2, "b")), set()),
        (
            script().append("a", first=1).append("b", first=2)("delete", key="t/k", to=1).read((1, "a"), (2, "b")),
            {LINEAR, REMOVED},
        ),
        (script().append("a", first=1)("delete", key="t/k", to=9).append("b", first=2).read((2, "b")), set()),
        (script().append("a", first=1)("delete", key="t/k", to=9).append("b", first=10), {LINEAR}),
        (script()("delete", key="t/k", to=7).append("b", first=8)("pointer", 8, key="t/k"), set()),
        (script().append("a", first=1)("purge", key="t/k").read().append("b", first=1).read((1, "b")), set()),
        (script().append("a", first=1)("purge", key="t/k").read((1, "a")), {LINEAR, REMOVED}),
        (script().append("a", first=1)("purge", key="t/k").append("b", first=2), {LINEAR}),
        (script().append("a", first=1)("purge", key="t/k", unknown=True).read((1, "a")).read(), set()),
        (script().append("a", first=1)("purge", key="t/k", unknown=True).read().read((1, "a")), {LINEAR}),
        (script().append("a", first=1)("pointer", 2, key="t/k"), {LINEAR}),
        (script().append("a", first=1)("purge", key="t/k")("pointer", 1, key="t/k"), {LINEAR}),
        # overlapping calls may take effect in either order, but in one order for all
        (
            script()
            .append("a", first=2, span=(10, 50))
            .append("b", first=1, span=(20, 60))
            .read((1, "b"), (2, "a"), span=(70, 80)),
            set(),
        ),
        (
            script()
            .append("a", first=1, span=(10, 50))
            .read((1, "a"), span=(12, 20))
            .read(span=(30, 40)),
            {LINEAR},
        ),
    ],
)  # fmt: skip
def test_planted_violations_of_a_journal_are_found(made: Script, rules: set[str]) -> None:
    assert made.broken() == rules


def test_a_search_that_is_abandoned_is_no_proof() -> None:
    made = script()
    for number in range(12):  # all appends differ, so that none can take the place of another
        made.lost_append(*(f"lost{number}.{index}" for index in range(number + 1)))
    made.append("a", first=79).append("b", first=1)
    history = RecordedHistory(made.calls)
    [violation] = check_linearizability(history, Evidence(history, None), configurations_max=1_000).violations
    assert violation.undecided


def logged(offset: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "key": "t/k", "offset": offset, "epoch": 1, "epoch_of_log": 1, **fields}


def logged_append(offset: int, value: str) -> dict[str, Any]:
    return logged(offset, "append", append_id=value, values=[value], tags=[[]])


def test_many_retried_appends_of_unknown_outcome_are_decided_quickly() -> None:
    made, records = script(), list[dict[str, Any]]()
    for number in range(16):  # as while a broker is cut off: each append is retried, and in the log several times
        value = f"lost{number}"
        for _ in range(4):
            made.lost_append(value)
            records.append(logged_append(len(records), value))
        if number == 7:
            made("purge", key="t/k")
            records.append(logged(len(records), "purge"))
    made.read(*((number - 7, f"lost{number}") for number in range(8, 16)))
    made("dump_log", records, topic="t", partition=0)
    history = RecordedHistory(made.calls)
    folded = fold_log(history)
    assert folded is not None
    for events in (None, all_events(folded.values())):
        assert check_linearizability(history, Evidence(history, events), configurations_max=1_000).ok


@pytest.mark.parametrize(
    ("records", "rules"),
    [
        ([logged_append(0, "a"), logged_append(1, "b")], set()),
        ([logged_append(0, "b"), logged_append(1, "a")], {LINEAR}),
        ([logged_append(0, "a")], {KEPT}),
        ([logged_append(0, "a"), logged_append(1, "b") | {"expected": 7}], {KEPT}),
    ],
)
def test_acknowledged_appends_have_their_numbers_in_the_log(records: list[dict[str, Any]], rules: set[str]) -> None:
    made = script().append("a", first=1).append("b", first=2)
    assert made("dump_log", records, topic="t", partition=0).broken() == rules


SAVE: dict[str, Any] = {"key": "t/k", "seq_nr": 2, "payload": "x"}
LOADED = {"seq_nr": 2, "payload": "x"}


@pytest.mark.parametrize(
    ("made", "rules"),
    [
        (script()("save_snapshot", **SAVE)("load_snapshot", LOADED, key="t/k"), set()),
        (script()("load_snapshot", LOADED, key="t/k"), {SNAPSHOTS}),
        (script()("save_snapshot", **SAVE)("load_snapshot", LOADED, key="t/k", to=1), {SNAPSHOTS}),
        (script()("save_snapshot", **SAVE)("purge", key="t/k")("load_snapshot", LOADED, key="t/k"), {SNAPSHOTS}),
    ],
)
def test_planted_violations_of_snapshots_are_found(made: Script, rules: set[str]) -> None:
    assert made.broken() == rules


# ---- the history of a whole world, in which a test changes the result of one call


class Spoiled:
    """The history of a good world, in which a test changes the results of calls."""

    def __init__(self, seed: int = 3) -> None:
        world = World(seed)
        world.use_journals(60)
        world.use_outbox(20)
        world.use_queue(9)
        world.use_wal(30)
        self.calls = list(world.history.calls)
        assert self.broken() == set()

    def results(self, op: str, **args: Any) -> list[Any]:
        return [
            call.result
            for call in self.calls
            if call.op == op and call.outcome == "ok" and args.items() <= call.args.items()
        ]

    def values(self, op: str, outcome: str) -> list[list[str]]:
        return [call.args["values"] for call in self.calls if call.op == op and call.outcome == outcome]

    def broken(self) -> set[str]:
        return {verdict.rule for verdict in check_history(RecordedHistory(self.calls)) if not verdict.ok}


@pytest.fixture
def spoiled() -> Spoiled:
    return Spoiled()


def test_an_acknowledged_append_that_is_not_in_the_log_is_found(spoiled: Spoiled) -> None:
    [log] = spoiled.results("dump_log")
    acknowledged = {values[0] for values in spoiled.values("append", "ok")}
    record = next(each for each in log if each["kind"] == "append" and each["values"][0] in acknowledged)
    log.remove(record)
    assert KEPT in spoiled.broken()


def first_stored(spoiled: Spoiled) -> dict[str, Any]:
    [store] = spoiled.results("dump_store")
    found: dict[str, Any] = next(journal for journal in store.values() if journal["events"])
    return found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda journal: journal["events"].pop(),
        lambda journal: journal["events"].append([99, "resurrected"]),
        lambda journal: journal["events"].append(journal["events"][0]),
        lambda journal: journal.update(last=journal["last"] + 1),
        lambda journal: journal.update(deleted=journal["deleted"] + 1),
        lambda journal: journal.update(incarnation=[1, 10**6]),
    ],
)
def test_a_store_that_differs_from_its_log_is_found(spoiled: Spoiled, spoil: Any) -> None:
    spoil(first_stored(spoiled))
    assert spoiled.broken() == {STORE}


def test_a_journal_that_is_missing_or_extra_in_the_store_is_found(spoiled: Spoiled) -> None:
    [store] = spoiled.results("dump_store")
    key = next(iter(store))
    store["t/gone"] = store.pop(key)
    assert spoiled.broken() == {STORE}


def stream(spoiled: Spoiled) -> list[RecordedCall]:
    return [call for call in spoiled.calls if call.op == "deliver" and call.args["tag"] == "red"]


def survivors(spoiled: Spoiled) -> set[str]:
    [store] = spoiled.results("dump_store")
    return {value for journal in store.values() for _, value in journal["events"]}


def test_a_stream_that_skips_an_event_is_found(spoiled: Spoiled) -> None:
    left = survivors(spoiled)
    spoiled.calls.remove(next(call for call in stream(spoiled) if call.result["value"] in left))
    assert spoiled.broken() == {STREAMS}


def test_a_stream_that_delivers_twice_is_found(spoiled: Spoiled) -> None:
    call = stream(spoiled)[-1]
    spoiled.calls.append(
        RecordedCall("q", 1, "deliver", call.args, call.start_ns + 1, call.end_ns + 1, "ok", call.result)
    )
    assert spoiled.broken() == {STREAMS}


def test_a_stream_out_of_order_is_found(spoiled: Spoiled) -> None:
    first, second = stream(spoiled)[:2]
    kept = dict(first.result)
    first.result.update(second.result)
    second.result.update(kept)
    assert STREAMS in spoiled.broken()


def test_a_removed_event_that_stays_in_its_stream_is_found(spoiled: Spoiled) -> None:
    left = survivors(spoiled)
    removed = next(call.result["value"] for call in stream(spoiled) if call.result["value"] not in left)
    spoiled.results("dump_tag")[0].insert(0, removed)
    assert spoiled.broken() == {STREAMS}


@pytest.mark.parametrize("spoil", [lambda values: values.pop(), lambda values: values.reverse()])
def test_a_stream_that_finally_lacks_or_reorders_events_is_found(spoiled: Spoiled, spoil: Any) -> None:
    spoil(spoiled.results("dump_tag")[0])
    assert spoiled.broken() == {STREAMS}


def test_a_stream_with_an_event_of_another_tag_is_found(spoiled: Spoiled) -> None:
    call = next(call for call in spoiled.calls if call.op == "deliver" and call.args["tag"] == "blue")
    spoiled.calls.append(
        RecordedCall(
            "q",
            1,
            "deliver",
            {"stream": "s", "tag": "red"},
            10**9,
            10**9,
            "ok",
            {**call.result, "position": [10**9, "t", 0, 1, 1]},
        )
    )
    assert STREAMS in spoiled.broken()


@pytest.mark.parametrize("consumer", ["projection", "group of red"])
def test_an_effect_that_is_missing_duplicated_or_out_of_order_is_found(consumer: str) -> None:
    for what in ("missing", "twice", "swapped", "foreign"):
        spoiled = Spoiled()
        [rows] = spoiled.results("dump_effects", consumer=consumer)
        left = survivors(spoiled)
        mine = next(row for row in rows if row["value"] in left)
        match what:
            case "missing":
                rows.remove(mine)
            case "twice":
                rows.append(mine)
            case "swapped":
                rows.reverse()
            case _:
                rows.append({"key": "t/k0", "seq_nr": 1, "value": "foreign"})
        assert spoiled.broken() == {CONSUMERS}, what


def test_messages_that_are_lost_duplicated_invented_or_out_of_order_are_found() -> None:
    for what in ("lost", "twice", "invented", "reordered", "scattered", "rolled back"):
        spoiled = Spoiled()
        [rows] = spoiled.results("dump_messages")
        committed = {
            m[2] for c in spoiled.calls if c.op == "transaction" and c.outcome == "ok" for m in c.args["messages"]
        }
        mine = next(row for row in rows if row["value"] in committed)
        match what:
            case "lost":
                rows.remove(mine)
            case "twice":
                rows.append({**mine, "offset": 10**6})
            case "invented":
                rows.append({**mine, "value": "nobody"})
            case "reordered":
                for row in rows:
                    row["offset"] = -row["offset"]
            case "scattered":
                mine["partition"] = 7
            case _:
                failed = next(c for c in spoiled.calls if c.op == "transaction" and c.outcome == "fail")
                rows.append({**mine, "offset": 10**6, "value": failed.args["messages"][0][2]})
        assert spoiled.broken() == {OUTBOX}, what


def test_a_transaction_that_arrives_in_part_is_found() -> None:
    made = script()("transaction", messages=[["m", "a", "1"], ["m", "a", "2"]], unknown=True)
    made("dump_messages", [{"key": "a", "value": "1", "partition": 0, "offset": 0}], topic="m")
    assert made.broken() == {OUTBOX}


def claimed(hold: str, ms: int, *, id: int = 1, key: str | None = None) -> list[dict[str, Any]]:
    return [{"hold": hold, "id": id, "key": key, "value": "v", "started_ms": ms, "lease_until_ms": ms + 100}]


def queue(*steps: tuple[str, Any, dict[str, Any]]) -> Script:
    made = script()("put", {"inserted": 1, "merged": 0}, value="v", key=None)
    for op, result, args in steps:
        made(op, result, **args)
    return made("dump_queue", [], queue="q")


FINISH = ("finish", None, {"hold": "h2"})


@pytest.mark.parametrize(
    ("made", "rules"),
    [
        (queue(("claim", claimed("h1", 0), {}), ("claim", claimed("h2", 100), {}), FINISH), set()),
        (queue(("claim", claimed("h1", 0), {}), ("claim", claimed("h2", 99), {}), FINISH), {HOLDER}),
        (
            queue(
                ("claim", claimed("h1", 0), {}),
                ("heartbeat", {"lease_until_ms": 180}, {"hold": "h1"}),
                ("claim", claimed("h2", 120), {}),
                FINISH,
            ),
            {HOLDER},
        ),
        (queue(("claim", claimed("h2", 0), {}), FINISH, ("claim", claimed("h3", 200), {})), {HOLDER}),
        (
            queue(("claim", claimed("h2", 0), {}), ("claim", claimed("h3", 200), {}), FINISH),
            {HOLDER},
        ),
        (
            queue(("claim", claimed("h1", 0, key="k"), {}), ("claim", claimed("h2", 50, id=2, key="k"), {}), FINISH),
            {HOLDER, FINISHED},
        ),
        (queue(("claim", claimed("h1", 0), {}), ("give_back", None, {"hold": "h1"})), {FINISHED}),
        (queue(), {FINISHED}),
        (queue(("dump_queue", [{"value": "v"}], {"queue": "q"})), {FINISHED}),
        (
            queue(("put", {"inserted": 1, "merged": 0}, {"value": "w"}), ("claim", claimed("h2", 0), {}), FINISH),
            {FINISHED},
        ),
        (queue(("claim", [{**claimed("h2", 0)[0], "value": "nobody's"}], {}), FINISH), {FINISHED}),
    ],
)  # fmt: skip
def test_planted_violations_of_a_queue_are_found(made: Script, rules: set[str]) -> None:
    assert made.broken() == rules


def test_a_put_is_finished_with_the_entry_that_it_was_merged_into() -> None:
    def history(merged: int) -> Script:
        made = script()("put", {"inserted": 1, "merged": 0}, value="u", key="k")
        made("put", {"inserted": 1 - merged, "merged": merged}, value="v", key="k")
        made("claim", claimed("h", 0, key="k"))("finish", hold="h")
        return made("dump_queue", [], queue="q")

    assert history(merged=1).broken() == set()
    assert history(merged=0).broken() == {FINISHED}


class WalScript(Script):
    """Records the calls on a region, one after the other."""

    def write(self, *values: str, first: int, **more: Any) -> WalScript:
        self("wal_write", {"first": first, "last": first + len(values) - 1}, **_region(values), **more)
        return self

    def lost(self, *values: str) -> WalScript:
        self("wal_write", unknown=True, **_region(values))
        return self

    def fenced(self, *values: str) -> WalScript:
        self("wal_write", error="Fenced", **_region(values))
        return self

    def mark(self, seq: int) -> WalScript:
        self("wal_mark", region="r", table=1, seq=seq)
        return self

    def replay(self, *entries: tuple[int, str]) -> WalScript:
        self("wal_replay", [[1, seq, value] for seq, value in entries], region="r")
        return self


def _region(values: tuple[str, ...]) -> dict[str, Any]:
    return {"region": "r", "table": 1, "values": list(values)}


@pytest.mark.parametrize(
    ("made", "rules"),
    [
        (WalScript().write("a", first=1).replay((1, "a")), set()),
        (WalScript().write("a", first=1).replay(), {WAL}),
        (WalScript().fenced("a").replay((1, "a")), {WAL}),
        (WalScript().lost("a").replay((1, "a")), set()),
        (WalScript().lost("a").replay(), set()),
        (WalScript().write("a", "b", first=1).replay((1, "b"), (2, "a")), {WAL}),
        (WalScript().write("a", first=1).replay((2, "a")), {WAL}),
        (WalScript().replay((1, "a")).write("a", first=1), {WAL}),
        (WalScript().replay((1, "nobody's")), {WAL}),
        (WalScript().lost("a").lost("b").replay((1, "a")).replay((1, "b")), {WAL}),
        (WalScript().write("a", first=1).write("b", first=2).mark(2).replay((2, "b")), set()),
        (WalScript().write("a", first=1).write("b", first=2).mark(2).replay((1, "a")), {WAL}),
        (WalScript().write("a", first=1).write("b", first=3).replay((1, "a"), (3, "b")), {WAL}),
        (WalScript().write("a", "b", first=1).replay((2, "b"), (1, "a")), {WAL}),
    ],
)
def test_planted_violations_of_a_write_ahead_log_are_found(made: Script, rules: set[str]) -> None:
    assert made.broken() == rules


def test_random_damage_to_reads_is_found() -> None:
    """Repeat or replace the last event of any read."""
    for seed in range(25):
        world = World(seed, keys=1)
        world.use_journals(40)
        calls = list(world.history.calls)
        reads = [call for call in calls if call.op == "read" and call.outcome == "ok" and call.result["events"]]
        assert reads
        for read in reads:
            intact = list(read.result["events"])
            for spoiled in ([*intact, intact[-1]], [*intact[:-1], [intact[-1][0], "nobody's"]]):
                read.result["events"] = spoiled
                history = RecordedHistory(calls)
                assert not check_linearizability(history, Evidence(history, None)).ok, (seed, spoiled)
            read.result["events"] = intact


def test_a_put_is_finished_at_the_end_of_a_chain_of_merges() -> None:
    def history(*, dies: bool) -> Script:
        made = script()("put", {"inserted": 1, "merged": 0}, value="u", key="k")
        made("put", {"inserted": 0, "merged": 1}, value="v", key="k")
        if dies:  # the worker holds it; when its lease has ended, the entry is merged into the newer one
            made("claim", claimed("h1", 0, key="k"))
        made("put", {"inserted": 1, "merged": 0}, value="w", key="k")
        made("claim", [{**claimed("h2", 500, key="k")[0], "value": "w"}])("finish", hold="h2")
        return made("dump_queue", [], queue="q")

    assert history(dies=True).broken() == set()
    assert history(dies=False).broken() == {FINISHED}


def test_a_claim_without_an_answer_may_hold_an_entry_that_is_merged_later() -> None:
    def history(*, lost: bool) -> Script:
        made = script()("put", {"inserted": 1, "merged": 0}, value="u", key="k")
        if lost:
            made("claim", unknown=True)
        made("put", {"inserted": 1, "merged": 0}, value="v", key="k")
        made("claim", claimed("h", 500, key="k"))("finish", hold="h")
        return made("dump_queue", [], queue="q")

    assert history(lost=True).broken() == set()
    assert history(lost=False).broken() == {FINISHED}


def test_a_transaction_of_two_keys_that_loses_the_message_of_one_is_found(spoiled: Spoiled) -> None:
    """The order of the key that did not arrive is not checked; its loss is."""
    call = next(each for each in spoiled.calls if each.op == "transaction" and each.outcome == "ok")
    call.args["messages"].append(["m", "another key", "never sent"])
    assert spoiled.broken() == {OUTBOX}
