"""Histories of a world that keeps every rule pass the checker, however its calls overlap."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.testing.histories.world import World
from tidebook.testing.histories.__main__ import main
from tidebook.testing.histories.call import pair_lines
from tidebook.testing.histories.checker import check_files, check_history
from tidebook.testing.histories.line import HistoryFile, HistoryLine, encode_line, read_lines


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 4))
def test_good_histories_pass(seed: int, overlap: int, keys: int) -> None:
    world = World(seed, keys=keys, overlap=2 * overlap)
    world.use_journals(60)
    world.use_outbox(15)
    world.use_queue(6)
    world.use_wal(20)
    verdicts = check_history(world.history)
    assert [verdict for verdict in verdicts if not verdict.ok] == []
    assert sum(verdict.checked == 0 for verdict in verdicts) <= 5  # snapshots, commands, and perhaps deletes


def test_a_long_history_of_one_journal_is_checked_completely() -> None:
    world = World(5, keys=1, overlap=12, lost=0.01)
    world.use_journals(1_500)
    assert [verdict for verdict in check_history(world.history) if not verdict.ok] == []


def test_lines_are_read_as_written_and_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "p.ndjson"
    moments = iter(range(1, 10))
    history = HistoryFile(file, "p", now_ns=lambda: next(moments))
    history.begin("append", key="t/k", values=["a"]).ok({"first": 1})
    history.begin("append", key="t/k", values=["b"]).fail(ValueError("no"), {"found": 3})
    history.begin("append", key="t/k", values=["c"]).unknown(OSError())
    history.begin("read", key="t/k")
    history.observe("dump_queue", [], queue="q")
    history.close()
    with file.open("ab") as opened:
        opened.write(encode_line(HistoryLine("p", 9, "read", "invoke", 9))[:-4])
    calls = pair_lines(read_lines([file])).calls
    assert [(call.op, call.outcome, call.error, call.start_ns) for call in calls] == [
        ("append", "ok", None, 1),
        ("append", "fail", "ValueError", 3),
        ("append", "unknown", "OSError", 5),
        ("read", "unknown", None, 7),
        ("dump_queue", "ok", None, 8),
    ]
    assert calls[1].result == {"found": 3}


def test_damage_inside_a_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "p.ndjson"
    file.write_bytes(b'{"process":\n' + encode_line(HistoryLine("p", 1, "read", "invoke", 1)) + b"\n")
    with pytest.raises(ValueError, match="line 1"):
        check_files([file])


def test_a_call_that_begins_twice_or_ends_as_another_is_refused() -> None:
    begun = HistoryLine("p", 1, "read", "invoke", 1)
    with pytest.raises(ValueError, match="twice"):
        pair_lines([begun, begun])
    with pytest.raises(ValueError, match="begun as read"):
        pair_lines([begun, HistoryLine("p", 1, "append", "ok", 2)])


def test_the_command_prints_each_rule_and_fails_on_a_violation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(1)
    world.use_journals(30)
    file = tmp_path / "h.ndjson"
    file.write_bytes(b"\n".join(map(encode_line, world.lines)))
    assert main([str(file)]) == 0
    assert "journals are linearizable: holds" in capsys.readouterr().out
    strange = HistoryLine("x", 1, "read", "ok", 10**9, {"key": "t/k0"}, {"events": [[1, "from nowhere"]]})
    file.write_bytes(b"\n".join(map(encode_line, [*world.lines, strange])))
    assert main([str(file)]) == 1
    assert "from nowhere was never appended" in capsys.readouterr().out
    assert main([]) == 2
