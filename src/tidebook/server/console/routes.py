"""Routes that only the console has: no single operation of the API shows or does the same."""

from __future__ import annotations

from typing import Final

from tidebook.api.access import Role
from tidebook.api.route import Route

OVERVIEW: Final = Route(
    name="console.overview", method="GET", path="/", role=Role.VIEWER, scope="items", summary="What needs a person."
)
SIGN_IN_PAGE: Final = Route(
    name="console.sign_in", method="GET", path="/sign-in", role=Role.PUBLIC, scope="none", summary="Sign in."
)
QUEUE_PURGE: Final = Route(
    name="console.queue_purge",
    method="POST",
    path="/acts/queues.purge",
    role=Role.ADMIN,
    scope="queue",
    summary="Delete the waiting entries that match.",
    mutates=True,
    destructive=True,
)
QUEUE_CANCEL: Final = Route(
    name="console.queue_cancel",
    method="POST",
    path="/acts/queues.cancel_act",
    role=Role.OPERATOR,
    scope="queue",
    summary="Cancel an act on many entries.",
    mutates=True,
)
PARKED_REPLAY: Final = Route(
    name="console.parked_replay",
    method="POST",
    path="/acts/pipeline.replay",
    role=Role.ADMIN,
    scope="topic",
    summary="Append a parked record to its journal again.",
    mutates=True,
    destructive=True,
)
SETTINGS_PAGE: Final = Route(
    name="console.settings", method="GET", path="/settings", role=Role.ADMIN, scope="book", summary="The settings."
)
DOCTOR_PAGE: Final = Route(
    name="console.doctor", method="GET", path="/doctor", role=Role.VIEWER, scope="book", summary="Checks of the book."
)
AUDIT_PAGE: Final = Route(
    name="console.audit", method="GET", path="/audit", role=Role.ADMIN, scope="book", summary="The audit."
)
WAL_PAGE: Final = Route(
    name="console.wal", method="GET", path="/wal", role=Role.VIEWER, scope="items", summary="All regions."
)
