"""The calls of a history: each is paired from the line of its beginning and the line of its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from tidebook.testing.histories.line import HistoryLine

Outcome = Literal["ok", "fail", "unknown"]
#: The end of a call that may still take effect later.
NEVER_NS = 2**63 - 1


class RecordedCall(msgspec.Struct, frozen=True, eq=False):
    """One call of a process, from its beginning to its end."""

    process: str
    number: int
    op: str
    args: dict[str, Any]
    start_ns: int
    #: NEVER_NS if the outcome is unknown.
    end_ns: int
    outcome: Outcome
    result: Any = None
    error: str | None = None

    @property
    def name(self) -> str:
        """The call's identity, for messages."""
        return f"{self.process}#{self.number}"

    def precedes(self, other: RecordedCall) -> bool:
        """Return whether this call ended before the other one began."""
        return self.end_ns < other.start_ns

    def __str__(self) -> str:
        found = self.result if self.outcome == "ok" else self.error
        return f"{self.name} {self.op}{self.args} -> {self.outcome} {found}"


class RecordedHistory:
    """All calls of a history, also by operation."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self.calls: Sequence[RecordedCall] = sorted(calls, key=lambda call: (call.start_ns, call.process, call.number))
        self._by_op: dict[str, list[RecordedCall]] = defaultdict(list)
        for call in self.calls:
            self._by_op[call.op].append(call)

    def of(self, *ops: str) -> list[RecordedCall]:
        """Return the calls of these operations, sorted by their beginning."""
        if len(ops) == 1:
            return self._by_op.get(ops[0], [])
        return [call for call in self.calls if call.op in ops]


def pair_lines(lines: Iterable[HistoryLine]) -> RecordedHistory:
    """Return the history of these lines. A call without an end has an unknown outcome: its process was killed."""
    begun: dict[tuple[str, int], HistoryLine] = {}
    calls: list[RecordedCall] = []
    for line in sorted(lines, key=lambda line: (line.ns, line.type != "invoke")):
        at = (line.process, line.call)
        if line.type == "invoke":
            if at in begun:
                raise ValueError(f"{line.process} begins call {line.call} twice")
            begun[at] = line
            continue
        start = begun.pop(at, line)
        if start.op != line.op:
            raise ValueError(f"{line.process} ends call {line.call} as {line.op}, begun as {start.op}")
        end_ns = NEVER_NS if line.type == "unknown" else line.ns
        calls.append(
            RecordedCall(
                line.process, line.call, line.op, start.args, start.ns, end_ns, line.type, line.result, line.error
            )
        )
    for line in begun.values():
        calls.append(RecordedCall(line.process, line.call, line.op, line.args, line.ns, NEVER_NS, "unknown"))
    return RecordedHistory(calls)
