"""Telling the administrator of flags: on the console, as a metric, by a command or a webhook."""

from __future__ import annotations

import asyncio
import logging
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from http.client import HTTPException
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.core.payload import JSON, TEXT, decode_payload
from tidebook.queue.job import date
from tidebook.sql.port.queue import Flag, QueueStore

log = logging.getLogger("tidebook.queue")

HOOK_S_MAX: Final = 10.0
#: Flags that are told of side by side, and how long they are ours to tell of: both hooks, and some time to spare.
TOLD_MAX: Final = 10
HOLD_MS: Final = 30_000
#: Flags that are told on the console at one time.
CONSOLE_MAX: Final = 1_000
Announce = Callable[[], Awaitable[None]]


class Hooks(msgspec.Struct, frozen=True, kw_only=True):
    """Who is told: both get one JSON object a flag, the command on its standard input."""

    command: tuple[str, ...] = ()
    webhook: str | None = None

    def __post_init__(self) -> None:
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise InvalidInput(f"a webhook is an http:// or https:// URL, not {self.webhook[:40]!r}")


def flag_row(flag: Flag) -> dict[str, Any]:
    """A flag as JSON can show it."""
    data: Any = decode_payload(flag.kind, flag.data) if flag.kind in (JSON, TEXT) else {"bytes": len(flag.data)}
    return {
        "id": flag.id,
        "queue": flag.queue,
        "raised_at": date(flag.raised_at).isoformat(timespec="milliseconds"),
        "reason": flag.reason,
        "key": flag.key,
        "priority": flag.priority,
        "timeouts": flag.timeouts,
        "inserted_at": date(flag.inserted_at).isoformat(timespec="milliseconds"),
        "data": data,
    }


class Announcer:
    """Tells of flags that nobody was told of. One that a hook did not take is told of again after `hold_ms`."""

    def __init__(self, store: QueueStore, hooks: Hooks, *, metrics: Metrics, hold_ms: int = HOLD_MS) -> None:
        self._store = store
        self._hooks = hooks
        self._metrics = metrics
        self._hold_ms = hold_ms
        #: What has a number up to these was told on the console here; was there before this process.
        self._told_to = 0
        self._old_to = 0

    async def begin(self) -> None:
        """Find out which flags are older than this process: they are told on its console, and not counted."""
        if not self._has_hook:
            for flag in await self._store.flags(limit=1):
                self._old_to = flag.id

    @property
    def _has_hook(self) -> bool:
        return bool(self._hooks.command) or self._hooks.webhook is not None

    async def __call__(self) -> None:
        """Announce what is there."""
        if not self._has_hook:
            await self._tell_console()  # and leave it to a process that has a hook to tell of it there
            return
        while flags := await self._store.unannounced(limit=TOLD_MAX, hold_ms=self._hold_ms):
            taken = await asyncio.gather(*(self._tell(flag) for flag in flags))
            told = [flag for flag, took in zip(flags, taken, strict=True) if took]
            for flag in told:
                self._metrics.count("queue_flags", queue=flag.queue)
            if told:
                await self._store.announced([flag.id for flag in told])

    async def _tell_console(self) -> None:
        limit = TOLD_MAX
        flags = await self._store.flags(limit=limit)
        while len(flags) == limit < CONSOLE_MAX and flags[-1].id > max(self._told_to, self._old_to):
            limit *= 10
            flags = await self._store.flags(limit=limit)
        for flag in reversed(flags):
            if flag.id > self._told_to:
                _log(flag)
                self._told_to = flag.id
                if flag.id > self._old_to:
                    self._metrics.count("queue_flags", queue=flag.queue)

    async def _tell(self, flag: Flag) -> bool:
        _log(flag)
        row = msgspec.json.encode(flag_row(flag))
        try:
            if self._hooks.command:
                await _run_command(self._hooks.command, row)
            if self._hooks.webhook is not None:
                await asyncio.to_thread(_post, self._hooks.webhook, row)
        except (OSError, TimeoutError, RuntimeError, HTTPException, ValueError) as error:  # ValueError: a bad address
            self._metrics.count("queue_hook_failures", queue=flag.queue)
            log.warning("the hook for flags failed, and is tried again: %s", error)
            return False
        return True


def _log(flag: Flag) -> None:
    log.warning("queue %s: %s is a dead letter: %s", flag.queue, flag.key or flag.id, flag.reason)


async def _run_command(command: Sequence[str], row: bytes) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(HOOK_S_MAX):
            await process.communicate(row + b"\n")
    except BaseException as error:  # it takes too long, or the book is closed
        if process.returncode is None:
            process.kill()
            await process.wait()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"{command[0]} did not end within {HOOK_S_MAX:g} s") from error
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}")


def _post(url: str, row: bytes) -> None:
    request = urllib.request.Request(url, row, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=HOOK_S_MAX) as answer:
        answer.read(1)
