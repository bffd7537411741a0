"""`python -m tools.recording`: run the commands of README in a terminal and write docs/images/terminal.svg.

The text is the output of the commands on a terminal of this size; only the pauses between them are artificial.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from tools.environment import PYTHON, ROOT, variables

TARGET = ROOT / "docs" / "images" / "terminal.svg"
COLUMNS, ROWS = 96, 24
LINE_PX, CHARACTER_PX, MARGIN_PX = 20, 8.2, 18
#: The pause before a command, and the pause between the last line and the restart of the recording.
PAUSE_S, END_S = 1.6, 6.0
#: Run in a second terminal while `tidebook up` runs in the first.
COMMANDS = (
    """tidebook journal append orders o-1 '{"total": 3}' '{"paid": 3}' --tag paid""",
    "tidebook journal read orders o-1",
    """tidebook journal append orders o-1 '{"late": true}' --expected 1""",
)
#: Run when `tidebook up` has replicated the appends.
LAST_COMMAND = "tidebook tags read paid"
_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Line(NamedTuple):
    """One line of the recording: its text, when it appears, and whether it shows typed input."""

    text: str
    at_s: float
    typed: bool


class Terminal:
    """A command in a pseudo-terminal, with its output so far."""

    def __init__(self, command: str, folder: Path, columns: int = COLUMNS) -> None:
        self._folder = folder
        self._printed = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        inside = {**variables(), "TERM": "xterm", "NO_COLOR": "1"}
        arguments = ["sh", "-c", command]
        self.process = subprocess.Popen(arguments, cwd=folder, env=inside, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)

    def read(self, until: str | None = None) -> list[str]:
        """Return the lines on the screen when `until` is among them, or when the command has ended."""
        try:
            while until is None or until not in "\n".join(screen(self._printed.decode(errors="ignore"))):
                block = os.read(self._ours, 65536)
                self._printed += block
        except OSError:
            self.process.wait()  # the terminal is closed because the command has ended
            os.close(self._ours)
        folder = str(self._folder.resolve())
        return [line.replace(folder, "~/shop") for line in screen(self._printed.decode(errors="ignore"))]


def screen(printed: str) -> list[str]:
    """Return the visible lines, after carriage returns and after lines that were erased and rewritten."""
    lines = [""]
    for found in _TOKEN.finditer(printed):
        _, control, end, text = found.groups()
        if text:
            lines[-1] += text
        elif end == "\n":
            lines.append("")
        elif control == "A":
            del lines[max(1, len(lines) - 1) :]
        elif control == "K":
            lines[-1] = ""
    return [line.rstrip() for line in "\n".join(lines).rstrip().split("\n")]


def record(folder: Path) -> Iterator[Line]:
    """Run `tidebook up` and the commands at the same time; yield the lines of both."""
    at_s = 0.5
    up = Terminal("exec tidebook up --port 0 --every-s 0.2", folder)
    try:
        yield Line("$ tidebook up", at_s, typed=True)
        shown = up.read(until="The book is served at")
        at_s += PAUSE_S
        for text in shown[: 1 + next(n for n, line in enumerate(shown) if "served at" in line)]:
            yield Line(re.sub(r":\d+$", ":8470", text), at_s, typed=False)
        at_s += PAUSE_S
        yield Line("# in another terminal", at_s, typed=True)
        for command in COMMANDS:
            at_s += PAUSE_S
            yield Line(f"$ {command}", at_s, typed=True)
            at_s += PAUSE_S / 2
            yield from (Line(text, at_s, typed=False) for text in Terminal(command, folder).read())
        at_s += PAUSE_S
        yield Line("# the first terminal now shows", at_s, typed=True)
        shown = up.read(until="│                  0 │\n└")
        for text in shown[next(n for n, line in enumerate(shown) if line.startswith("Journals")) :]:
            yield Line(text, at_s, typed=False)
        at_s += PAUSE_S
        yield Line(f"$ {LAST_COMMAND}", at_s, typed=True)
        at_s += PAUSE_S / 2
        yield from (Line(text, at_s, typed=False) for text in Terminal(LAST_COMMAND, folder).read())
    finally:
        up.process.terminate()
        up.read()


def wrap(line: Line) -> Iterator[Line]:
    """Yield a line in parts that fit into the terminal, which wraps it there."""
    for first in range(0, max(1, len(line.text)), COLUMNS):
        yield line._replace(text=line.text[first : first + COLUMNS])


def draw(lines: list[Line]) -> str:
    """Return the lines as an SVG that shows each at its time, does not scroll, and restarts at the end."""
    width, height = round(COLUMNS * CHARACTER_PX) + 2 * MARGIN_PX, len(lines) * LINE_PX + 2 * MARGIN_PX + 22
    total_s = lines[-1].at_s + END_S
    styles = [
        ".t { font: 13.6px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #d7dde5 }",
        ".typed { fill: #8fd3a6 }",
    ]
    rows = []
    for number, line in enumerate(lines):
        start = line.at_s / total_s * 100
        styles.append(
            f"@keyframes l{number} {{ 0%, {start:.2f}% {{ opacity: 0 }} {start + 0.01:.2f}%, 100% {{ opacity: 1 }} }}"
        )
        styles.append(f".l{number} {{ animation: l{number} {total_s:.1f}s infinite }}")
        kind = "t typed" if line.typed else "t"
        y = MARGIN_PX + 36 + number * LINE_PX
        place = f'x="{MARGIN_PX}" y="{y}" xml:space="preserve"'
        rows.append(f'<text class="{kind} l{number}" {place}>{escape(line.text)}</text>')
    styles.append("@media (prefers-reduced-motion: reduce) { .t { animation: none } }")
    dots = "".join(f'<circle cx="{20 + 16 * n}" cy="18" r="5" fill="#4a5563"/>' for n in range(3))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<style>{' '.join(styles)}</style>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#161b22"/>{dots}',
            *rows,
            "</svg>\n",
        ]
    )  # fmt: skip


def main() -> int:
    """Record and write the picture."""
    if not PYTHON.exists():
        print("recording: run ./dev up once, which installs Tidebook", file=sys.stderr)
        return 5
    with tempfile.TemporaryDirectory() as folder:
        lines = [part for line in record(Path(folder)) for part in wrap(line)]
    TARGET.write_text(draw(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
