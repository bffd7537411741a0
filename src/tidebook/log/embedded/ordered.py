"""Appending a batch whose order counts: all of it in one transaction, and nothing passes a record that is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.folder.inbox import Session
from tidebook.log.port import InOrder, Outgoing, Sent

#: What became of a record; None: it was held back behind one of its chain that was refused.
Outcome = Sent | TooLarge | None
_LIMIT = "SELECT limit_bytes FROM topic WHERE name = ?"


class OrderedAppends:
    """Batches of one topic each. `append` puts records that all pass."""

    def __init__(self, append: Callable[[Session, Sequence[Outgoing]], list[Sent | TidebookError]]) -> None:
        self._append = append

    def run(self, session: Session, batches: Sequence[InOrder]) -> list[list[Outcome]]:
        """Insert them; a batch that fails is not there at all."""
        return [self._batch(session, batch) for batch in batches]

    def _batch(self, session: Session, batch: InOrder) -> list[Outcome]:
        found = session.connection.execute(_LIMIT, (batch.topic,)).fetchone()
        if found is None:
            raise NotFound(f"the log has no topic {batch.topic!r}")
        outcomes = weigh(batch, found[0])
        passing = [place for place, outcome in enumerate(outcomes) if outcome is PASSES]
        sent = self._append(session, [batch.records[place] for place in passing])
        for place, answer in zip(passing, sent, strict=True):
            if not isinstance(answer, Sent):
                raise answer
            outcomes[place] = answer
        return outcomes


#: Stands for the place that a record will get.
PASSES = Sent(-1, -1, -1)


def weigh(batch: InOrder, limit_bytes: int | None) -> list[Outcome]:
    """Which records pass: not one that is too large, nor what follows it in its chain."""
    if limit_bytes is None:
        return [PASSES] * len(batch.records)
    outcomes: list[Outcome] = []
    stopped: set[bytes] = set()
    for record, chain in zip(batch.records, batch.chains, strict=True):
        size_bytes = len(record.value)
        if chain is not None and chain in stopped:
            outcomes.append(None)
        elif size_bytes > limit_bytes:
            outcomes.append(TooLarge("the message", size_bytes=size_bytes, limit_bytes=limit_bytes))
            if chain is not None:
                stopped.add(chain)
        else:
            outcomes.append(PASSES)
    return outcomes
