"""Routes that only the console has: no single operation of the API shows or does the same."""

from __future__ import annotations

from typing import Final

from tidebook.api.access import Role
from tidebook.api.route import Route, Scope


def _page(name: str, path: str, role: Role, scope: Scope, summary: str) -> Route:
    return Route(name=name, method="GET", path=path, role=role, scope=scope, summary=summary)


def _act(name: str, path: str, role: Role, scope: Scope, summary: str, *, destructive: bool = False) -> Route:
    return Route(
        name=name, method="POST", path=path, role=role, scope=scope, summary=summary, mutates=True,
        destructive=destructive,
    )  # fmt: skip


OVERVIEW: Final = _page("console.overview", "/", Role.VIEWER, "items", "What needs attention.")
SIGN_IN_PAGE: Final = _page("console.sign_in", "/sign-in", Role.PUBLIC, "none", "Sign in.")
SETTINGS_PAGE: Final = _page("console.settings", "/settings", Role.ADMIN, "book", "The settings.")
DOCTOR_PAGE: Final = _page("console.doctor", "/doctor", Role.VIEWER, "book", "Checks of the book.")
AUDIT_PAGE: Final = _page("console.audit", "/audit", Role.ADMIN, "book", "The audit.")
WAL_PAGE: Final = _page("console.wal", "/wal", Role.VIEWER, "items", "All regions.")

QUEUE_CANCEL: Final = _act(
    "console.queue_cancel", "/acts/queues.cancel_act", Role.OPERATOR, "queue", "Cancel an act on many entries."
)
QUEUE_PURGE: Final = _act(
    "console.queue_purge", "/acts/queues.purge", Role.ADMIN, "queue", "Delete the waiting entries that match.",
    destructive=True,
)  # fmt: skip
PARKED_REPLAY: Final = _act(
    "console.parked_replay", "/acts/pipeline.replay", Role.ADMIN, "topic",
    "Append a parked record to its journal again.", destructive=True,
)  # fmt: skip
