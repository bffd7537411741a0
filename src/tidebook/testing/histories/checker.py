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
        journals.check_linearizability(history, evidence, configurations_max=configurations_max),
        journals.check_appends(history, evidence),
        journals.check_events(history, evidence, folded),
        journals.check_removals(history, evidence),
        journals.check_snapshots(history),
        stores.check_store(history, folded),
        streams.check_tag_streams(history, events),
        streams.check_consumers(history, events),
        commands.check_commands(history, folded, configurations_max=configurations_max),
        commands.check_effects(history, folded),
        outboxes.check_outbox(history),
        queues.check_holders(history),
        queues.check_puts(history),
        wals.check_wal(history),
    ]


def check_files(files: Iterable[Path]) -> list[RuleVerdict]:
    """Return the verdicts on the history in these files."""
    return check_history(pair_lines(read_lines(files)))
