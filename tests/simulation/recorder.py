"""Record the calls of simulated processes, for the checker of histories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.testing.histories.call import RecordedHistory, pair_lines
from tidebook.testing.histories.line import HistoryLine

#: Errors that are only raised if the call changed nothing.
WITHOUT_EFFECT: tuple[type[TidebookError], ...] = (Unavailable, InvalidInput)


class Recorder:
    """Records the history of one simulation by its clock; no two lines have the same time."""

    def __init__(self) -> None:
        self._lines: list[HistoryLine] = []
        self._calls = 0

    def _now_ns(self) -> int:
        return int(asyncio.get_running_loop().time() * 1e9) + len(self._lines)

    def observe(self, process: str, op: str, result: Any, **args: Any) -> None:
        """Record what was seen at this moment."""
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
        """Make a call, record it, and return its result or its error. A killed process records no end."""
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
        """Return everything that was recorded."""
        return pair_lines(self._lines)
