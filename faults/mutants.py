"""Mutants of Tidebook: in each, one fence, check or ordering is switched off, which short runs must detect."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: The duration of the faults of one run, and the time limit of the whole run.
TRY_MINUTES = 0.35
TRY_S_MAX = 240.0
#: How long a run may take to end its processes.
STOP_S_MAX = 60.0
TRIES = 3
FIRST_SEED = 11
#: The result of a run that failed before its workload began: nothing has detected the mutant.
NOT_RUN = "it did not run"


class Mutant(NamedTuple):
    """One check switched off in the source: `old`, which must occur once, becomes `new`."""

    name: str
    #: Below `src/tidebook`.
    file: str
    old: str
    new: str
    #: A second change of the file (old text, new text), if two checks have the same effect.
    also: tuple[str, str] | None = None
    #: The only role into which faults are injected, if faults of other roles do not help to detect the mutant.
    only: str | None = None

    def apply(self, text: str) -> str:
        """Return the changed text of the file; raise ValueError if the old text does not occur exactly once."""
        for old, new in [(self.old, self.new), *([] if self.also is None else [self.also])]:
            if text.count(old) != 1:
                raise ValueError(f"mutant {self.name!r}: its text occurs {text.count(old)} times in {self.file}")
            text = text.replace(old, new)
        return text


_FOLD, _WAL = "core/fold.py", "wal/meta.py"
_STORE, _CLAIMS = "store/sqlite/writes.py", "queue/sqlite/claims.py"

#: Mutants that another check makes harmless are not listed: a writer that trusts an old end of the log inserts a row
#: that exists, fails, and reads the end again; a slice that the pointer does not fence is only a replay. The terms of
#: a write-ahead log only matter for late records, which embedded files do not have: see `tests/simulation`.
MUTANTS: Sequence[Mutant] = (
    # journals: conditions, numbers, retries, removals
    Mutant("expected is not checked", _FOLD, "if action.expected != last or not", "if not"),
    Mutant("at is not checked", _FOLD, "if action.at <= last:", "if action.at < 0:"),
    Mutant("a retry is applied again", _FOLD, "if known.append_id == append_id:", "if known.append_id is None:"),
    Mutant(
        "a purge keeps the numbers",
        _FOLD,
        "and head.live else 0\n    if action.expected",
        "else 0\n    if action.expected",
    ),
    Mutant("a delete removes future events", _FOLD, "to = min(action.to, head.seq_nr)", "to = action.to"),
    Mutant("a delete has no effect", _FOLD, "if to <= head.delete_to:", "if to <= head.delete_to or to > 0:"),
    Mutant(
        "a purge has no effect",
        _FOLD,
        "return head, UNCHANGED\n    if action.if_position",
        "return head, UNCHANGED\n    if True:\n        return head, UNCHANGED\n    if action.if_position",
    ),
    Mutant(
        "a read does not wait for the end of the log",
        "journal/reader.py",
        "await self._log.end(cache.topic, cache.partition) - 1",
        "cache.seen",
    ),
    Mutant(
        "an append is folded without the records before it",
        "journal/head_cache.py",
        "if offset != self.next_offset:",
        "if offset < self.next_offset:",
    ),
    Mutant(
        "a read omits the tail",
        "journal/view.py",
        "to = max(after, folded.delete_to), min(to, folded.seq_nr)",
        "to = max(after, folded.delete_to), min(to, stored.seq_nr if stored is not None else folded.seq_nr)",
    ),
    Mutant(
        "a read ignores deletes in the tail",
        "journal/view.py",
        "after, to = max(after, folded.delete_to),",
        "after, to = max(after, stored.delete_to if stored is not None else 0),",
    ),
    Mutant(
        "writes are acknowledged without a commit",
        "sqlite/writer.py",
        'self._transaction.connection.execute("COMMIT")',
        'self._transaction.connection.execute("COMMIT" if hash(str(time.monotonic_ns())) % 50 else "ROLLBACK")',
    ),
    Mutant(
        "a remote append is repeated under a new id",
        "remote/journal.py",
        "body = msgspec.structs.replace(body, append_id=None, retry=retry)",
        "body = msgspec.structs.replace(body, append_id=self._ids.new())",
        only="http",
    ),
    # store
    Mutant("a purge leaves rows in the store", _STORE, "_clear_events(transaction, write, 0, LAST)", "pass"),
    Mutant("a delete leaves rows of the tags", _STORE, "transaction.connection.executemany(_CLEAR_TAG, keys)", "pass"),
    Mutant("the head is not stored", _STORE, 'VALUES {}", 5, heads)', 'VALUES {}", 5, heads[5:])'),
    Mutant(
        "snapshots outlive a purge",
        "store/sqlite/store.py",
        'WHERE topic = ? AND id = ? AND epoch = ? AND "offset" = ? ORDER BY seq_nr DESC',
        "WHERE topic = ? AND id = ? AND ? > 0 AND ? >= 0 ORDER BY seq_nr DESC",
    ),
    # streams
    Mutant(
        "streams pass the horizon",
        "store/sqlite/store.py",
        "WHERE tag = ? AND log_ms < ? AND (log_ms, topic",
        "WHERE tag = ? AND log_ms < ? + 100000 AND (log_ms, topic",
    ),
    Mutant(
        "streams are in the order of offsets",
        "store/sqlite/store.py",
        'ORDER BY log_ms, topic, partition, "offset", "index", epoch LIMIT',
        'ORDER BY "offset", "index" LIMIT',
    ),
    Mutant(
        "offsets of a group are not compared",
        "tags/sql_offsets.py",
        "if decode_offset(self._tag, before) >= decode_offset(self._tag, event.tag_offset):",
        "if before is None:",
        only="consumer",
    ),
    Mutant(
        "a projection does not check its position",
        "domain/projection_tables.py",
        "self._owned_at(build, member, slices, before, ",
        "self._slices(build, SLICE.c.slice.in_(slices), ",
        also=(
            "self._owned_at(build, member, slices, position)",
            "self._slices(build, SLICE.c.slice.in_(slices), SLICE.c.position == position)",
        ),
        only="consumer",
    ),
    Mutant(
        "a projection does not move its position",
        "domain/projection_tables.py",
        ".values(position=after)",
        ".values(position=before)",
    ),
    # deciders and process managers
    Mutant(
        "a refusal is not checked against the journal",
        "domain/decider.py",
        "                if is_fresh:\n                    raise\n",
        "                if True:\n                    raise\n",
    ),
    Mutant(
        "a repeated command is executed again",
        "domain/decider.py",
        "append_id = blake2b(msgspec.json.encode([self.topic, id, command_id]), digest_size=16).digest()",
        "append_id = None",
        also=("if command_id is not None and (known := entity", "if command_id is None and (known := entity"),
        only="disk_error",
    ),
    Mutant(
        "a process manager executes its commands without an id",
        "domain/process.py",
        "each.command, command_id=each.command_id)",
        "each.command)",
        only="consumer",
    ),
    Mutant(
        "a process manager ignores its marks",
        "domain/process.py",
        "if not mark.covers(placed)]",
        "if mark is not None]",
        only="consumer",
    ),
    # outbox
    Mutant(
        "relays do not search for messages that were sent",
        "outbox/topic_relay.py",
        "ids, lost = found.ids, found.lost",
        "ids, lost = frozenset(), None",
    ),
    Mutant(
        "relays send in the wrong order",
        "outbox/topic_relay.py",
        "relayed = batch_selection.to_relayed(batch.messages,",
        "relayed = batch_selection.to_relayed(batch.messages[::-1],",
    ),
    Mutant(
        "relays do not send the first message of a batch",
        "outbox/topic_relay.py",
        "            channel.start(relayed, timestamp_ms=",
        "            channel.start(relayed[1:], timestamp_ms=",
    ),
    Mutant(
        "relays do not delete the first message of a batch",
        "outbox/store.py",
        "self._delete_and_update(lock, sent, self._sql.close_and_unlock",
        "self._delete_and_update(lock, sent[1:], self._sql.close_and_unlock",
    ),
    # queue
    Mutant("a key has several holders", _CLAIMS, "h.queue = ?1 AND h.status = 'P'", "h.queue = ?1 AND h.status = 'X'"),
    Mutant(
        "leases end early",
        _CLAIMS,
        "(token, now_ms, until, serial,",
        "(token, now_ms, until - lease_ms * 3 // 4, serial,",
    ),
    Mutant(
        "an expired lease may be finished",
        _CLAIMS,
        "WHERE e.status = 'P' AND e.token = ?",
        "WHERE e.status = 'P' AND ? IS NOT NULL",
    ),
    Mutant(
        "leases are compared with the clock of each process",
        "wiring/queue.py",
        "SqliteQueues(settings.folder, clock=folder_clock,",
        "SqliteQueues(settings.folder, clock=clock,",
        only="clock",
    ),
    Mutant("finished entries stay", _CLAIMS, "session.connection.execute(_DELETE, (ids,))", "pass"),
    Mutant(
        "heartbeats do not extend the lease",
        _CLAIMS,
        "session.connection.execute(_EXTEND, (now_ms + lease_ms, ids))",
        "pass",
    ),
    Mutant(
        "entries that are given back are lost",
        "queue/sqlite/expired_leases.py",
        "    connection.execute(_WAIT, (total_timeouts, at_ms, id))\n",
        "    _delete(connection, id)\n",
    ),
    # write-ahead log
    Mutant(
        "a mark covers one entry too many",
        _WAL,
        "table.mapping.remove_below(seq)",
        "table.mapping.remove_below(seq + 1)",
    ),
)


class TryResult(NamedTuple):
    """The result of the runs on a mutant."""

    mutant: str
    #: The violated rules, or how else the run failed; empty if no run detected the mutant.
    caught_by: list[str]
    tries: int


def run_mutants(names: str | None, say: Callable[[str], None]) -> Sequence[TryResult]:
    """Run every mutant, or those whose name contains a text, until a run detects it or the limit of runs is reached.

    The unchanged code runs first: if that fails, as on a machine that is too busy, the runs would prove nothing.
    """
    results: list[TryResult] = []
    with tempfile.TemporaryDirectory(prefix="tidebook-mutant-") as folder:
        if failed := _run(ROOT / "src", Path(folder) / "run", FIRST_SEED, None):
            say(f"the unchanged code fails, so that no mutant was tried: {failed}")
            return results
    for mutant in MUTANTS:
        if names is None or names in mutant.name:
            result = _try(mutant)
            say(f"{'caught' if result.caught_by else 'MISSED'} in {result.tries}: {mutant.name}: {result.caught_by}")
            results.append(result)
    caught = sum(bool(result.caught_by) for result in results)
    say(f"{caught} of {len(results)} mutants were caught")
    return results


def make_mutant(mutant: Mutant, source: Path, target: Path) -> None:
    """Copy the source to a new folder and change it; raise ValueError if the old text does not occur exactly once."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    file = target / "tidebook" / mutant.file
    file.write_text(mutant.apply(file.read_text()))


def _try(mutant: Mutant) -> TryResult:
    with tempfile.TemporaryDirectory(prefix="tidebook-mutant-") as name:
        source = Path(name) / "src"
        make_mutant(mutant, ROOT / "src", source)
        for number in range(1, TRIES + 1):
            out = Path(name) / f"run-{number}"
            caught = _run(source, out, FIRST_SEED + number, mutant.only)
            if caught and caught != [NOT_RUN]:
                return TryResult(mutant.name, caught, number)
    return TryResult(mutant.name, [], TRIES)


def _run(source: Path, out: Path, seed: int, only: str | None) -> list[str]:
    command = [sys.executable, "-m", "faults", "--minutes", str(TRY_MINUTES), "--seed", str(seed), "--out", str(out)]
    command += [] if only is None else ["--only", only]
    variables = {**os.environ, "PYTHONPATH": str(source)}
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as run:
        try:
            _, errors = run.communicate(timeout=TRY_S_MAX)
        except BaseException as error:
            _stop(run)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return ["it did not end"]
    if run.returncode == 0:
        return []
    report = out / "report.json"
    if not report.exists():
        print(errors.decode()[-400:], file=sys.stderr)
        return [NOT_RUN]
    found = json.loads(report.read_text())
    rules = [verdict["rule"] for verdict in found["verdicts"] if not verdict["ok"]]
    return rules or [*found["ended_badly"], *found["lacking"], *found["unrecovered"]] or ["it ended early"]


def _stop(run: subprocess.Popen[bytes]) -> None:
    """End a run and its processes."""
    run.terminate()
    try:
        run.communicate(timeout=STOP_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
