"""The progress of a pip run: which package it is downloading, how many remain, and how much was downloaded."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TextIO

#: On a terminal the progress is one line that is rewritten; elsewhere it is a new line at this interval.
TERMINAL_EVERY_S = 0.5
LINES_EVERY_S = 5.0
#: The number of pip's last lines that are shown if it fails.
KEPT_LINES_MAX = 40

_UNITS = {"bytes": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}
_REQUIREMENT = re.compile(r"^[A-Za-z0-9][^=\n]*==", re.M)
_COLLECTING = re.compile(r"^(?:Collecting|Requirement already satisfied:) ([^=]+)==")
_DOWNLOADING = re.compile(r"^\s+Downloading \S+ \(([\d.]+) (bytes|kB|MB|GB)\)")


class PipProgress:
    """Counts the packages that pip reports, line by line."""

    def __init__(self, packages: int) -> None:
        self._packages = packages
        self._seen = 0
        self._downloaded_bytes = 0
        self._step = "starting pip"

    def take(self, line: str) -> None:
        """Count one line of pip's output."""
        if found := _COLLECTING.match(line):
            self._seen += 1
            self._step = found[1]
        elif found := _DOWNLOADING.match(line):
            self._downloaded_bytes += int(float(found[1]) * _UNITS[found[2]])
        elif line.startswith("Ignoring "):  # a package of another platform
            self._packages -= 1
        elif line.startswith("Installing collected packages"):
            self._step = "unpacking"

    def describe(self, seconds: float) -> str:
        """Return the progress as one line of text."""
        downloaded = f"{self._downloaded_bytes / 1_000_000:.1f} MB downloaded"
        return f"{self._seen} of {self._packages} packages, {downloaded}, {seconds:.0f} s: {self._step}"


def count_packages(requirements: str) -> int:
    """Return the number of packages in the text of a requirement file."""
    return len(_REQUIREMENT.findall(requirements))


def run_pip(command: list[str], folder: Path, packages: int, stream: TextIO | None = None) -> int:
    """Run pip, show its progress on standard error, and return its exit code; if it fails, show its last lines."""
    shown = stream or sys.stderr
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: Queue[str | None] = Queue()
    Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    progress, kept, display = PipProgress(packages), deque[str](maxlen=KEPT_LINES_MAX), _Display(shown)
    while True:
        try:
            line = lines.get(timeout=display.every_s)
        except Empty:
            line = ""
        if line is None:
            break
        progress.take(line)
        kept.append(line)
        display.show(progress)
    process.stdout.close()
    code = process.wait()
    display.finish(progress if code == 0 else None)
    if code != 0:
        shown.writelines(kept)
    return code


def _forward(output: TextIO, lines: Queue[str | None]) -> None:
    for line in output:
        lines.put(line)
    lines.put(None)


class _Display:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self.every_s = TERMINAL_EVERY_S if self._rewrites else LINES_EVERY_S
        self._started_s = self._shown_s = time.monotonic()

    def show(self, progress: PipProgress) -> None:
        """Show the progress, unless it was shown a moment ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= self.every_s:
            self._shown_s = now_s
            self._write(progress.describe(now_s - self._started_s), end="" if self._rewrites else "\n")

    def finish(self, progress: PipProgress | None) -> None:
        """Replace the progress by the final counts, or remove it if there are none."""
        if progress is not None:
            self._write(progress.describe(time.monotonic() - self._started_s).rpartition(":")[0], end="\n")
        elif self._rewrites:
            self._stream.write("\r\x1b[K")

    def _write(self, text: str, *, end: str) -> None:
        start = "\r\x1b[K" if self._rewrites else ""
        self._stream.write(f"{start}dev:   {text}{end}")
        self._stream.flush()
