"""The checker, which applies all rules to a history."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tidebook.testing.histories import commands, journals, outboxes, queues, stores, streams, wals
from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.evidence import Evidence
from tidebook.testing.histories.line import read_lines
from tidebook.testing.histories.linearizability import CONFIGURATIONS_MAX
from tidebook.testing.histories.log_fold import all_events, fold_log
from tidebook.testing.histories.verdict import RuleVerdict


def check_history(history: RecordedHistory, *, configurations_max: int = CONFIGURATIONS_MAX) -> list[RuleVerdict]:
    """Return the verdict of every rule; `configurations_max` bounds the search for each journal."""
    folded = fold_log(history)
    events = None if folded is None else all_events(folded.values())
    evidence = Evidence(history, events)
    return [
        journals.linearizable(history, evidence, configurations_max=configurations_max),
        journals.kept(history, evidence),
        journals.once(history, evidence),
        journals.removed(history, evidence),
        journals.snapshots(history),
        stores.store_is_fold(history, folded),
        streams.tag_streams(history, events),
        streams.consumers(history, events),
        commands.commands(history, folded, configurations_max=configurations_max),
        commands.caused(history, folded),
        outboxes.outbox(history),
        queues.one_holder(history),
        queues.finished(history),
        wals.wal(history),
    ]


def check_files(files: Iterable[Path]) -> list[RuleVerdict]:
    """Return the verdicts on the history in these files."""
    return check_history(pair_lines(read_lines(files)))
