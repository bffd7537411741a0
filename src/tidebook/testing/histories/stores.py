"""The rule of the store: it is the fold of the log."""

from __future__ import annotations

from collections.abc import Mapping

from tidebook.testing.histories.call import RecordedHistory
from tidebook.testing.histories.log_fold import LoggedJournal
from tidebook.testing.histories.verdict import RuleRun, RuleVerdict, first_few


def check_store(history: RecordedHistory, folded: Mapping[str, LoggedJournal] | None) -> RuleVerdict:
    """Check that the store has exactly the journals, numbers and events that follow from its log."""
    run = RuleRun("the store is the fold of the log")
    stored: dict[str, dict[str, object]] = {}
    topics: set[str] = set()
    for dump in history.of("dump_store"):
        if dump.outcome == "ok":
            topics.add(dump.args["topic"])
            stored |= dump.result
    if folded is None or not topics:
        return run.verdict()
    expected = {key: each for key, each in folded.items() if each.live and key.split("/", 1)[0] in topics}
    for key in sorted(expected.keys() | stored.keys()):
        run.count()
        if key not in stored:
            run.violated(key, f"the log has this journal with last number {expected[key].last}, the store has none")
        elif key not in expected:
            run.violated(key, f"the store has this journal, and the log does not: {stored[key]}")
        else:
            _compare(run, expected[key], stored[key])
    return run.verdict()


def _compare(run: RuleRun, expected: LoggedJournal, stored: Mapping[str, object]) -> None:
    values = {
        "last": expected.last,
        "deleted": expected.deleted,
        "incarnation": expected.incarnation,
        "events": [[event.seq_nr, event.value] for event in expected.events if not event.removed],
    }
    wrong = [name for name, value in values.items() if stored[name] != value]
    if wrong:
        details = (f"{name}: {stored[name]} in the store, {values[name]} in the log" for name in wrong)
        run.violated(expected.key, first_few(details))
