"""The entry point of `tidebook`: handle Ctrl-C and closed standard streams, then import the commands."""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command line; an interrupt exits with code 130, even while modules are imported."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a parent may have ignored it
    if interruptible:
        signal.signal(signal.SIGINT, _exit_at_once)
    _open_missing_streams()
    from tidebook.cli.app import main as run

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, _exit_at_once)
        gc.freeze()  # everything is closed; a final garbage collection of all modules would take a fifth of a second


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Exit without raising: an exception inside an import could be swallowed, or printed by the interpreter."""
    os._exit(INTERRUPTED)


def _open_missing_streams() -> None:
    """Open the null device for each standard stream that is closed.

    Otherwise a file of the book would get the stream's descriptor, and printed text would be written into that file.
    `sys.stdout` stays None: `run` then refuses to work, because its result could not be seen.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the system assigns the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


if __name__ == "__main__":
    main()
