"""Further shapes of violations of every rule, and legal histories that resemble them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.testing.histories.test_planted_commands import CAUSED, COMMANDS, KEY, made, two
from tests.unit.testing.histories.test_planted_violations import (
    CONSUMERS,
    FINISHED,
    HOLDER,
    KEPT,
    LINEAR,
    OUTBOX,
    REMOVED,
    SNAPSHOTS,
    STREAMS,
    WAL,
    Script,
    WalScript,
    logged,
    logged_append,
    script,
)
from tests.unit.testing.histories.test_planted_violations import ONCE as EVENTS

SECOND_NS = 1_000_000_000


def broken(history: Script, *rules: str) -> None:
    assert history.broken() == set(rules)


# ---- journals


def with_log(history: Script, *records: dict[str, Any]) -> Script:
    return history("dump_log", list(records), topic="t", partition=0)


def one() -> Script:
    return script().append("a", first=1)


def pair() -> Script:
    return script().append("a", "b", first=1)


def purge(history: Script, **more: Any) -> Script:
    return history("purge", key="t/k", **more)


@pytest.mark.parametrize(
    ("history", "rules"),
    [
        (one().append("b", first=2)("pointer", 2, key="t/k")("pointer", 1, key="t/k"), {LINEAR}),
        (script().lost_append("a", id="x").append("a", first=1, id="x").append("a", first=2, id="x"), {LINEAR}),
        (script().lost_append("a", expected=0).conflict("a", found=1, expected=0).read((1, "a")), {LINEAR}),
        (one().conflict("b", found=1, expected=1), {LINEAR}),
        (one().conflict("b", found=1, at=5), {LINEAR}),
        (script().append("a", first=3, at=3).append("b", first=2, at=2), {LINEAR}),
        (purge(one()).append("b", first=1).read((1, "b"), (2, "a")), {LINEAR, REMOVED}),
        # a call that failed has changed nothing, whether it was read or not
        (with_log(script().refused("a"), logged_append(0, "a")), {KEPT}),
        (with_log(purge(script().refused("a")), logged_append(0, "a"), logged(1, "purge")), {KEPT}),
        (
            with_log(purge(one(), error="Unavailable").read(), logged_append(0, "a"), logged(1, "purge")),
            {LINEAR},
        ),
        # the log: a retry is in it twice, and counts once
        (with_log(script().lost_append("a").append("a", first=1), *2 * [logged_append(0, "a")]), set()),
        (with_log(one(), logged_append(0, "a"), logged_append(1, "a") | {"append_id": "z"}), {LINEAR, EVENTS}),
        (with_log(one(), logged_append(0, "a"), logged_append(1, "nobody's")), {EVENTS}),
        (with_log(one(), logged_append(0, "a") | {"key": "t/other"}), {EVENTS}),
        (with_log(one(), logged_append(0, "a"), logged_append(0, "of a decider") | {"key": "accounts/k"}), set()),
        (with_log(pair(), logged_append(0, "a")), {KEPT}),
        (with_log(script().lost_append("a", "b"), logged_append(0, "a")), {KEPT}),
        (with_log(script().lost_append("a", "b")), set()),
        (
            with_log(pair(), logged_append(0, "a") | {"values": ["a", "x", "b"], "tags": [[], [], []]}),
            {EVENTS},
        ),
    ],
)  # fmt: skip
def test_broken_rules_of_journals_are_found(history: Script, rules: set[str]) -> None:
    broken(history, *rules)


@pytest.mark.parametrize(
    ("saved", "loaded", "rules"),
    [
        ({}, {}, set()),
        ({}, {"payload": "y"}, {SNAPSHOTS}),
        ({}, {"seq_nr": 1}, {SNAPSHOTS}),
        ({"error": "NotFound"}, {}, {SNAPSHOTS}),
        ({"unknown": True}, {}, set()),
        ({"key": "t/other"}, {}, {SNAPSHOTS}),
    ],
)
def test_broken_rules_of_snapshots_are_found(saved: dict[str, Any], loaded: dict[str, Any], rules: set[str]) -> None:
    args: dict[str, Any] = {"key": "t/k", "seq_nr": 2, "payload": "x", **saved}
    history = script()("save_snapshot", **args)
    broken(history("load_snapshot", {"seq_nr": 2, "payload": "x"} | loaded, key="t/k"), *rules)


# ---- consumers and deciders


def delivered(history: Script, value: str, at: int, seq_nr: int, stream: str = "s") -> Script:
    result = {"key": "t/k", "seq_nr": seq_nr, "value": value, "position": [at, "t", 0, at, 0]}
    return history("deliver", result, stream=stream, tag="red")


def test_streams_that_disagree_are_found() -> None:
    history = one().append("b", first=2)
    for value, at in (("a", 1), ("b", 2)):
        delivered(history, value, at, at)
    broken(history)
    delivered(history, "b", 2, 2, stream="other")
    broken(delivered(history, "a", 1, 1, stream="other"), STREAMS)
    broken(delivered(delivered(one(), "a", 1, 1), "a", 2, 1, stream="other"), STREAMS)
    broken(delivered(one(), "a", 1, 2), LINEAR)
    broken(delivered(script(), "a", 1, 1).append("a", first=1), EVENTS)


def test_an_effect_under_another_key_is_found() -> None:
    history = with_log(one(), logged_append(0, "a"))
    broken(history("dump_effects", [{"key": "t/other", "value": "a"}], consumer="p", topic="t"), CONSUMERS)


def test_broken_rules_of_commands_are_found() -> None:
    broken(made().deposit("a", 5, state=5, seq_nr=1).logged("a", "nobody's"), COMMANDS)
    failed = made()("execute", error="Conflict", key=KEY, command_id="a", command="deposit", amount=5, value="a")
    assert isinstance(failed, type(made()))
    broken(failed.logged("a"), COMMANDS)
    rows = [{"key": "accounts/other", "value": "a"}, {"key": KEY, "value": "b"}]
    broken(two()("dump_caused", rows, process="mirror", effect="command"), CAUSED)


# ---- outbox


@pytest.mark.parametrize(
    ("arrivals", "topic", "rules"),
    [
        ([("a", "1", 0, 1), ("a", "2", 0, 2), ("a", "3", 0, 3)], "m", set()),
        ([("b", "1", 0, 1), ("a", "2", 0, 2), ("a", "3", 0, 3)], "m", {OUTBOX}),
        ([("a", "1", 0, 1), ("a", "2", 0, 2), ("a", "3", 0, 3)], "other", {OUTBOX}),
        ([("a", "1", 0, 1), ("a", "2", 0, 2), ("a", "3", 0, 0)], "m", {OUTBOX}),
        ([("a", "1", 0, 1), ("a", "2", 0, 3), ("a", "3", 0, 2)], "m", {OUTBOX}),
        ([("a", "1", 0, 1), ("a", "2", 1, 2), ("a", "3", 0, 3)], "m", {OUTBOX}),
    ],
)
def test_broken_rules_of_the_outbox_are_found(
    arrivals: list[tuple[str, str, int, int]], topic: str, rules: set[str]
) -> None:
    history = script()
    for value in ("1", "2", "3"):
        history("transaction", messages=[["m", "a", value]])
    rows = [{"key": key, "value": value, "partition": p, "offset": o} for key, value, p, o in arrivals]
    broken(history("dump_messages", rows, topic=topic), *rules)


def test_a_message_that_arrives_in_two_topics_is_found() -> None:
    history = script()("transaction", messages=[["m", "a", "1"]])
    for topic in ("m", "other"):
        history("dump_messages", [{"key": "a", "value": "1", "partition": 0, "offset": 0}], topic=topic)
    broken(history, OUTBOX)


# ---- queue


def claim(hold: str, ms: int, *, lease_ms: int = 100, id: int = 1, **more: Any) -> tuple[str, Any, dict[str, Any]]:
    entry = {"hold": hold, "id": id, "key": None, "value": "v", "started_ms": ms, "lease_until_ms": ms + lease_ms}
    return "claim", [entry], more


def end(op: str, hold: str, **more: Any) -> tuple[str, Any, dict[str, Any]]:
    return op, None, {"hold": hold, **more}


@pytest.mark.parametrize(
    ("steps", "rules"),
    [
        # an end that failed releases nothing; one that was retried counts once
        ([claim("1", 0), end("finish", "1", error="Unavailable"), claim("2", 50), end("finish", "2")], {HOLDER}),
        ([claim("1", 0), end("finish", "1", error="Unavailable"), claim("2", 100), end("finish", "2")], set()),
        ([claim("1", 0), end("finish", "1", unknown=True), end("finish", "1", error="LeaseLost")], set()),
        ([claim("1", 0), end("finish", "1"), end("finish", "1", error="LeaseLost"), claim("2", 200)], {HOLDER}),
        ([claim("1", 0), end("give_back", "1"), claim("2", 10), end("finish", "2")], set()),
        # the end of a former holder is refused
        ([claim("1", 0), claim("2", 200), end("finish", "1"), end("finish", "2")], {HOLDER}),
        ([claim("1", 0), claim("2", 200), end("finish", "2"), end("finish", "1")], {HOLDER}),
        ([claim("1", 0), claim("2", 200), end("give_back", "1"), end("finish", "2")], {HOLDER}),
        ([claim("1", 0), claim("2", 200), end("give_back", "1", error="LeaseLost"), end("finish", "2")], set()),
        (
            [claim("1", 0), claim("2", 150), ("heartbeat", {"lease_until_ms": 300}, {"hold": "1"}), end("finish", "2")],
            {HOLDER},
        ),
        # the first lease is still valid when the third begins; the claim between them may have taken effect later
        (
            [
                claim("1", 0, lease_ms=5000),
                claim("2", 1, lease_ms=6000, span=(30, 6 * SECOND_NS)),
                end("give_back", "2", span=(6 * SECOND_NS, 6 * SECOND_NS + 1)),
                claim("3", 4900, span=(7 * SECOND_NS, 7 * SECOND_NS + 1)),
                end("finish", "3"),
            ],
            {HOLDER},
        ),
        # by the store's clock the lease has ended, but no time has passed: each process has another clock
        ([claim("1", 0), claim("2", 3_600_000, span=(50, 60)), end("finish", "2")], {HOLDER}),
        ([claim("1", 3_600_000, span=(50, 60)), claim("2", 0, span=(70, 80)), end("finish", "2")], {HOLDER}),
        # a claim that was dated early and took effect late follows the one that it seems to precede
        (
            [
                claim("1", 0, lease_ms=6000, span=(10, 5 * SECOND_NS)),
                claim("2", 100, span=(20, 30)),
                end("give_back", "2", span=(40, 50)),
                end("finish", "1"),
            ],
            set(),
        ),
        (
            [
                ("claim", [*claim("1", 0)[1], *claim("2", 0)[1]], {}),
                end("finish", "1"),
            ],
            {HOLDER},
        ),
    ],
)  # fmt: skip
def test_broken_rules_of_a_queue_are_found(steps: list[tuple[str, Any, dict[str, Any]]], rules: set[str]) -> None:
    history = script()("put", {"inserted": 1, "merged": 0}, value="v", key=None)
    for op, result, args in steps:
        history(op, result, **args)
    broken(history("dump_queue", [], queue="q"), *rules)


def test_an_entry_that_is_finished_although_its_put_has_failed_is_found() -> None:
    history = script()("put", error="Unavailable", value="v", key=None)
    for op, result, args in (claim("1", 0), end("finish", "1")):
        history(op, result, **args)
    broken(history("dump_queue", [], queue="q"), FINISHED)


# ---- write-ahead log


def replayed(history: Script, *entries: list[Any], region: str = "r") -> Script:
    return history("wal_replay", list(entries), region=region)


def wal() -> WalScript:
    return WalScript()


@pytest.mark.parametrize(
    ("history", "rules"),
    [
        # what one replay returns, every later one does
        (wal().lost("a").replay((1, "a")).replay(), {WAL}),
        (wal().lost("a").replay().replay((1, "a")), set()),
        (wal().lost("a").replay((1, "a")).write("b", first=2).mark(2).replay((2, "b")), set()),
        (replayed(wal().lost("a"), [2, 1, "a"]), {WAL}),
        (replayed(wal().write("a", first=1), [2, 1, "a"]), {WAL}),
        (replayed(wal().lost("a"), [1, 1, "a"], region="other"), {WAL}),
        # a write is atomic, unless a mark splits it
        (wal().lost("a", "b").replay((1, "a")), {WAL}),
        (wal().lost("a", "b").replay((1, "a"), (2, "b")), set()),
        (wal().lost("a", "b").mark(2).replay((2, "b")), set()),
        (wal().lost("a", "b").write("c", first=3).replay((2, "b"), (3, "c")), {WAL}),
        # numbers
        (wal().write("a", first=1).write("b", first=1), {WAL}),
        (wal().lost("z").write("a", first=2).replay((2, "a")), {WAL}),
        (wal().write("a", first=1).replay((1, "a"), (2, "a")), {WAL}),
        (wal().write("a", first=1).write("b", first=2).replay((1, "a")), {WAL}),
        (wal()("wal_write", error="Unavailable", region="r", table=1, values=["a"]), set()),
    ],
)
def test_broken_rules_of_a_write_ahead_log_are_found(history: Script, rules: set[str]) -> None:
    broken(history, *rules)


def test_a_write_that_was_unavailable_and_is_replayed_is_found() -> None:
    history = script()("wal_write", error="Unavailable", region="r", table=1, values=["a"])
    broken(replayed(history, [1, 1, "a"]), WAL)
