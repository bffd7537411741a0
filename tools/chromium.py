"""Find Chromium, which the tests of the console drive; install Debian's package if this runs as root."""

from __future__ import annotations

import os
import shutil

from tools.environment import SetupError, apt_install

PACKAGE = "chromium"


def ensure() -> str:
    """Return the path of Chromium; install it if it is missing and this runs as root."""
    found = shutil.which(PACKAGE)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        apt_install(PACKAGE)
        found = shutil.which(PACKAGE)
    if found is None:
        raise SetupError(
            f"Chromium is needed for the tests of the console. Install it (Debian: {PACKAGE}) and try again"
        )
    return found


def is_needed(arguments: list[str]) -> bool:
    """Return whether the arguments of a test run select tests with a browser; without any, all tests run."""
    return not arguments or any("browser" in each or each.rstrip("/") == "tests" for each in arguments)
