"""A WSGI application for a server that preloads it: the master has a book open when it forks its workers.

Each worker opens its own book of the same folder. `/append/N` appends N to the worker's journal, and `/inherited` uses
the master's book; both answer with one JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import tidebook
from tidebook.core.event import Event

FOLDER = os.environ["PRELOADED_FOLDER"]
inherited = tidebook.open_sync(FOLDER).__enter__()
inherited.journal("t").append("master", [Event({"n": 0})])
own: dict[int, Any] = {}


def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    path = environ["PATH_INFO"]
    worker = str(os.getpid())
    answer: dict[str, Any] = {"worker": worker}
    if path == "/inherited":
        try:
            inherited.journal("t").append("master", [Event({"n": 1})])
        except tidebook.InvalidInput as error:
            answer["refused"] = str(error)
    else:
        if os.getpid() not in own:
            own[os.getpid()] = tidebook.open_sync(FOLDER).__enter__()
        number = int(path.removeprefix("/append/"))
        own[os.getpid()].journal("t").append(worker, [Event({"n": number})])
        answer["n"] = number
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
