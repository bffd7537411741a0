"""Append a batch in one transaction, and reject the records that follow a rejected one of the same chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidebook.core.errors import NotFound, TidebookError, TooLarge
from tidebook.log.port import Acknowledged, OrderedBatch, Outgoing
from tidebook.sqlite.write_queue import WriteTransaction

#: The outcome of a record. None: it was not appended, because an earlier one of its chain was rejected.
Outcome = Acknowledged | TooLarge | None
_LIMIT = "SELECT limit_bytes FROM topic WHERE name = ?"


class OrderedAppender:
    """Appends batches of one topic each. `append` is the operation for single records."""

    def __init__(
        self, append: Callable[[WriteTransaction, Sequence[Outgoing]], list[Acknowledged | TidebookError]]
    ) -> None:
        self._append = append

    def run(self, transaction: WriteTransaction, batches: Sequence[OrderedBatch]) -> list[list[Outcome]]:
        """Append the batches and return the outcomes of their records. If this raises, nothing was appended."""
        return [self._append_batch(transaction, batch) for batch in batches]

    def _append_batch(self, transaction: WriteTransaction, batch: OrderedBatch) -> list[Outcome]:
        row = transaction.connection.execute(_LIMIT, (batch.topic,)).fetchone()
        if row is None:
            raise NotFound(f"the log has no topic {batch.topic!r}")
        outcomes = check_sizes(batch, row[0])
        accepted = [index for index, outcome in enumerate(outcomes) if outcome is ACCEPTED]
        sent = self._append(transaction, [batch.records[index] for index in accepted])
        for index, result in zip(accepted, sent, strict=True):
            if not isinstance(result, Acknowledged):
                raise result
            outcomes[index] = result
        return outcomes


#: A placeholder for the acknowledgement that an accepted record will get.
ACCEPTED = Acknowledged(-1, -1, -1)


def check_sizes(batch: OrderedBatch, limit_bytes: int | None) -> list[Outcome]:
    """Return an outcome per record: TooLarge, None for those after it in its chain, and otherwise ACCEPTED."""
    if limit_bytes is None:
        return [ACCEPTED] * len(batch.records)
    outcomes: list[Outcome] = []
    rejected_chains: set[bytes] = set()
    for record, chain in zip(batch.records, batch.chains, strict=True):
        size_bytes = len(record.value)
        if chain is not None and chain in rejected_chains:
            outcomes.append(None)
        elif size_bytes > limit_bytes:
            outcomes.append(TooLarge("the message", size_bytes=size_bytes, limit_bytes=limit_bytes))
            if chain is not None:
                rejected_chains.add(chain)
        else:
            outcomes.append(ACCEPTED)
    return outcomes
