"""The conditions of the benchmark in this process: its command, its start, the machine, and the load before it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

_began: dict[str, Any] = {}
_began_s = 0.0


def begin(arguments: Sequence[str]) -> None:
    """Record the arguments, the time and the load of the machine; call it once, before the benchmark."""
    global _began, _began_s
    _began_s = time.monotonic()
    _began = {
        "command": " ".join(["./dev", "bench", *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "load_before": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def conditions() -> dict[str, Any]:
    """Return the conditions as JSON values, with the duration so far."""
    return {**_began, "seconds": round(time.monotonic() - _began_s, 1)}
