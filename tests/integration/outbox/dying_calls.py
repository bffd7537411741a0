"""Run relays, the n-th of which dies at its n-th call: `python -m tests.integration.outbox.dying_calls BOOK COUNT`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import tidebook
from tidebook.outbox.kafka.channel import KafkaChannel, KafkaTransactionChannel
from tidebook.outbox.kafka.target import KafkaTarget

#: The calls of a relay that has locked a topic; it may die between any two of them.
CALLS = {
    "store": ("try_lock", "begin", "finish", "delete_sent", "park", "unlock", "rest", "notice"),
    KafkaTarget: ("topic", "ends", "channel", "scan", "release"),
    KafkaChannel: ("start", "wait", "drop"),
    KafkaTransactionChannel: ("start", "wait", "_complete", "drop"),
}


class Countdown:
    """Kills its process instead of the n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def before(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return inner(*args, **options)

        return call


def relay(path: str, calls: int) -> None:
    countdown = Countdown(calls)
    with tidebook.open_sync(path) as book:
        box: Any = book.outbox
        for kind, names in CALLS.items():
            of = type(box._parts.database.connect()) if kind == "store" else kind
            for name in names:
                if kind == "store" or name in vars(of):
                    setattr(of, name, countdown.before(getattr(of, name)))
        box.relay()


def main(path: str, count: str) -> None:
    for calls in range(1, int(count) + 1):
        child = os.fork()  # Kafka's client is not open yet
        if child == 0:
            try:
                relay(path, calls)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the relay did not reach its call {calls}"
        assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
