"""Logs as JSON: one object per line on standard error, without secrets and payloads.

A log line must be safe to send to another system. The messages of Tidebook's own errors are written, because they
contain no payloads. Of any other error, and of any argument that is neither text nor a number, only the type is
written. Text that looks like a token or a password is replaced wherever it occurs.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

import msgspec

from tidebook.core.errors import TidebookError

#: The replacement of a secret.
REDACTED: Final = "***"
#: The length in characters at which a message, and each of its fields, is cut.
TEXT_CHARS_MAX: Final = 2_000
#: How many of the innermost calls of a traceback are written.
FRAMES_MAX: Final = 30

#: The attributes that every record has; all others were passed as `extra`, and are written as fields.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_SECRET_NAMES: Final = re.compile(r"(?i)passw|secret|token|authorization|cookie|credential|payload|^data$|^body$|_key$")
#: The user and the password of a URL.
_URL_USER: Final = r"(?<=://)[^/\s@\"']*:[^\s\"']*(?=@)"
_SECRET_TEXT: Final = re.compile(
    r"(?i)\btb_[\w-]{8,}"  # a token of the server
    r"|(?<=bearer )[^\s\"',]+"
    rf"|{_URL_USER}"
    r"|((?:password|passwd|secret|token)[\"']?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;&)]+)"
)
_encode = msgspec.json.Encoder(enc_hook=lambda value: f"<{type(value).__name__}>").encode


def redact(text: str) -> str:
    """Return the text with everything that looks like a token or a password replaced.

    >>> redact("kafka://me:hunter2@host:9092 refused password='x y'")
    'kafka://***@host:9092 refused password=***'
    """
    return _SECRET_TEXT.sub(lambda found: (found[1] or "") + REDACTED, text)


def redact_urls(text: str) -> str:
    """Return the text with the users and passwords of its URLs replaced, and nothing else, for text that people read.

    >>> redact_urls("postgresql://me:hunter2@host/shop needs a password: ask for one")
    'postgresql://***@host/shop needs a password: ask for one'
    """
    return re.sub(_URL_USER, REDACTED, text)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, fields, and the error with its calls."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        found: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(redact(_message(record))),
        }
        fields = {name: _field(name, value) for name, value in vars(record).items() if name not in _STANDARD}
        if fields:
            found["fields"] = fields
        if record.exc_info and record.exc_info[1] is not None:
            found["error"] = _error(record.exc_info[1])
        return _encode(found).decode()


def _message(record: logging.LogRecord) -> str:
    if not record.args:
        return str(record.msg)
    args = record.args
    shown: Any = (
        {name: _argument(value) for name, value in args.items()}
        if isinstance(args, dict)
        else tuple(_argument(value) for value in args)
    )
    try:
        return str(str(record.msg) % shown)
    except (TypeError, ValueError):  # a log line must not fail its caller
        return str(record.msg)


def _argument(value: object) -> object:
    """Return an argument as a message may show it: only its type if it may hold a payload."""
    if value is None or isinstance(value, str | int | float | Enum | TidebookError):
        return value
    return f"<{type(value).__name__}>"


def _field(name: str, value: object) -> object:
    if _SECRET_NAMES.search(name):
        return REDACTED
    if value is None or isinstance(value, bool | int | float):
        return value
    return _cut(redact(str(_argument(value))))


def _error(error: BaseException) -> dict[str, Any]:
    """Return an error's type and the calls that led to it, and its message if it is one of Tidebook's errors."""
    found: dict[str, Any] = {"type": type(error).__qualname__}
    if isinstance(error, TidebookError):
        found["message"] = _cut(redact(str(error)))
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_MAX:]
    found["calls"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return found


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[:TEXT_CHARS_MAX] + "…"


def log_as_json() -> None:
    """Write all logs of the process as JSON to standard error: Tidebook's from level info, others from warning."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tidebook").setLevel(logging.INFO)
    logging.captureWarnings(True)


def is_json() -> bool:
    """Return whether `log_as_json` was called."""
    return any(isinstance(each.formatter, JsonFormatter) for each in logging.getLogger().handlers)
