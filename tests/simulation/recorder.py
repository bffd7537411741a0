"""Write down the calls of simulated processes, for the checker of histories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.line import HistoryLine

#: Errors that say that nothing was changed.
WITHOUT_EFFECT: tuple[type[TidebookError], ...] = (Unavailable, InvalidInput)


class Recorder:
    """The history of one simulation, by its clock: no two lines have the same time."""

    def __init__(self) -> None:
        self._lines: list[HistoryLine] = []
        self._calls = 0

    def _now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9) + len(self._lines)

    def observe(self, process: str, op: str, result: Any, **args: Any) -> None:
        """Write down what was seen at this moment."""
        self._calls += 1
        self._lines.append(HistoryLine(process, self._calls, op, "ok", self._now_ns(), args, result))

    async def record(
        self,
        process: str,
        op: str,
        call: Callable[[], Awaitable[Any]],
        result: Callable[[Any], Any] = lambda found: None,
        *,
        failures: tuple[type[TidebookError], ...] = WITHOUT_EFFECT,
        **args: Any,
    ) -> Any:
        """Make a call, write it down, and return what it returned or its error. A killed process writes no end."""
        self._calls += 1
        number = self._calls
        self._lines.append(HistoryLine(process, number, op, "invoke", self._now_ns(), args))

        def end(kind: Any, found: Any, error: str | None) -> None:
            self._lines.append(HistoryLine(process, number, op, kind, self._now_ns(), {}, found, error))

        try:
            found = await call()
        except failures as error:
            end("fail", {"found": error.found} if hasattr(error, "found") else None, type(error).__name__)
            return error
        except TidebookError as error:
            end("unknown", None, type(error).__name__)
            return error
        end("ok", result(found), None)
        return found

    @property
    def history(self) -> RecordedHistory:
        """Everything that was written down."""
        return pair_lines(self._lines)
