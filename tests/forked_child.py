"""Run a function in a forked child, for tests of what a fork leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

SECONDS_MAX = 30


def in_child(body: Callable[[], str]) -> str:
    """Return the result of `body` in a forked child, or the error that it raised; an alarm ends a child that hangs."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS_MAX)
        try:
            answer = body()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(sink, answer.encode())
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as answered:
        answer = answered.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return answer
