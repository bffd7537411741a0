"""Hooks that report new dead letters: the log, a metric, a command and a webhook."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from http.client import HTTPException
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import JSON, TEXT, decode_payload
from tidebook.queue.job import utc_datetime
from tidebook.queue.port import DeadLetterRow, QueueStore
from tidebook.runtime.metrics import Metrics

log = logging.getLogger("tidebook.queue")

HOOK_S_MAX: Final = 10.0
#: How many dead letters are announced concurrently, and for how long this process reserves them: longer than both
#: hooks may take.
BATCH_MAX: Final = 10
HOLD_MS: Final = 30_000
#: The maximum number of dead letters that are logged in one round.
LOGGED_MAX: Final = 1_000
Announce = Callable[[], Awaitable[None]]


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """The hooks that run for each dead letter: each gets one JSON object, the command on its standard input."""

    command: tuple[str, ...] = ()
    webhook: str | None = None

    def __post_init__(self) -> None:
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise InvalidInput(f"a webhook must be an http:// or https:// URL, not {self.webhook[:40]!r}")


def dead_letter_json(letter: DeadLetterRow) -> dict[str, Any]:
    """Return a dead letter as values that JSON can encode."""
    data: Any = decode_payload(letter.kind, letter.data) if letter.kind in (JSON, TEXT) else {"bytes": len(letter.data)}
    return {
        "id": letter.id,
        "queue": letter.queue,
        "raised_at": utc_datetime(letter.raised_at).isoformat(timespec="milliseconds"),
        "reason": letter.reason,
        "key": letter.key,
        "priority": letter.priority,
        "timeouts": letter.timeouts,
        "inserted_at": utc_datetime(letter.inserted_at).isoformat(timespec="milliseconds"),
        "data": data,
    }


class Announcer:
    """Runs the hooks for new dead letters. A hook that fails is retried after `hold_ms`."""

    def __init__(self, store: QueueStore, hooks: Hooks, *, metrics: Metrics, hold_ms: int = HOLD_MS) -> None:
        self._store = store
        self._hooks = hooks
        self._metrics = metrics
        self._hold_ms = hold_ms
        #: The highest id that this process has logged, and the highest that existed when it started.
        self._logged_up_to = self._initial_up_to = 0

    async def start(self) -> None:
        """Find the newest dead letter, so that letters from before this process are logged but not counted."""
        if not self._has_hook:
            for letter in await self._store.dead_letters(limit=1):
                self._initial_up_to = letter.id

    @property
    def _has_hook(self) -> bool:
        return bool(self._hooks.command) or self._hooks.webhook is not None

    async def __call__(self) -> None:
        """Run the hooks for all dead letters that were not announced yet."""
        if not self._has_hook:
            await self._log_new()  # they stay unannounced, for a process that has a hook
            return
        while letters := await self._store.unannounced(limit=BATCH_MAX, hold_ms=self._hold_ms):
            results = await asyncio.gather(*(self._run_hooks(letter) for letter in letters))
            announced = [letter for letter, accepted in zip(letters, results, strict=True) if accepted]
            for letter in announced:
                self._metrics.count("queue_dead_letters_announced", queue=letter.queue)
            if announced:
                await self._store.announced([letter.id for letter in announced])

    async def _log_new(self) -> None:
        limit = BATCH_MAX
        letters = await self._store.dead_letters(limit=limit)
        while len(letters) == limit < LOGGED_MAX and letters[-1].id > max(self._logged_up_to, self._initial_up_to):
            limit *= 10
            letters = await self._store.dead_letters(limit=limit)
        for letter in reversed(letters):
            if letter.id > self._logged_up_to:
                _log(letter)
                self._logged_up_to = letter.id
                if letter.id > self._initial_up_to:
                    self._metrics.count("queue_dead_letters_announced", queue=letter.queue)

    async def _run_hooks(self, letter: DeadLetterRow) -> bool:
        _log(letter)
        row = msgspec.json.encode(dead_letter_json(letter))
        try:
            if self._hooks.command:
                await _run_command(self._hooks.command, row)
            if self._hooks.webhook is not None:
                await asyncio.to_thread(_post, self._hooks.webhook, row)
        except (OSError, TimeoutError, RuntimeError, HTTPException, ValueError) as error:  # ValueError: a malformed URL
            self._metrics.count("queue_hook_failures", queue=letter.queue)
            log.warning("a hook for dead letters failed and will be retried: %s", error)
            return False
        return True


def _log(letter: DeadLetterRow) -> None:
    key = "" if letter.key is None else f", key {letter.key}"
    log.warning("queue %s: new dead letter %s%s: %s", letter.queue, letter.id, key, letter.reason)


async def _run_command(command: Sequence[str], row: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(HOOK_S_MAX):
            await process.communicate(row + b"\n")
    except BaseException as error:  # a timeout, or the book is being closed
        if process.returncode is None:
            process.kill()
            await process.wait()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{command[0]} did not end within {HOOK_S_MAX:g} s") from error
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} exited with status {process.returncode}")


def _post(url: str, row: bytes) -> None:
    request = urllib.request.Request(url, row, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=HOOK_S_MAX) as response:
        response.read(1)
