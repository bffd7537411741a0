"""Run the blocks of a page as they are printed: shell commands in a terminal, programs with Python.

A block of text after one of these is what it must print: its lines occur in the output in this order, and … stands for
anything. A program whose first line is a comment with a file name is saved under that name. A command that runs until
it is stopped goes on in the background, as in a second terminal, and is stopped at the end of the page.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tools.recording import Terminal

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./]+\.(?:py|toml))\n")
#: The last command of a block that runs until it is stopped, and what Tidebook's commands print when they are ready.
LASTING = re.compile(r"^(tidebook (?:serve|up|run)|curl -N)\b[^\n]*\n\Z", re.MULTILINE)
READY = "Ctrl-C to stop"
#: Shells see the commands of the environment, as in one that is activated.
ACTIVATED = f'PATH="{Path(sys.executable).parent}:$PATH"'
PROGRAM_S_MAX = 60
COLUMNS = 400


def clone(folder: Path, *, status: str = "{}") -> Path:
    """Make a folder that looks like a clone to the commands of a page; its `./dev` reports that everything runs."""
    folder.mkdir(exist_ok=True)
    for name in (".venv", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "status.json").write_text(status)
    dev = folder / "dev"
    dev.write_text('#!/bin/sh\n[ "$1 $2" = "servers status" ] && cat status.json\nexit 0\n')
    dev.chmod(0o755)
    return folder


def run_page(page: Path, folder: Path, *, port: int | None = None) -> None:
    """Run every block of a page in a folder, its server at another port; fail on the first whose output differs."""
    text = page.read_text()
    blocks = BLOCK.findall(text if port is None else text.replace("8470", str(port)))
    assert any(kind in {"sh", "python"} for kind, _ in blocks)
    exports = [f"export {ACTIVATED}"]
    printed: list[str] = []
    with ExitStack() as running:
        for number, (kind, body) in enumerate(blocks):
            match kind:
                case "sh" if lasting := LASTING.search(body):
                    served = port is not None and lasting[1] in {"tidebook serve", "tidebook up"}
                    command = "\n".join([*exports, body.rstrip() + (f" --port {port}" if served else "")])
                    follows = blocks[number + 1 : number + 2]
                    last = follows[0][1].splitlines()[-1] if follows and follows[0][0] == "text" else READY
                    until = max(last.split("…"), key=len)
                    printed = running.enter_context(_lasting(command, folder, until))
                case "sh":
                    expected = blocks[number + 1][1] if blocks[number + 1 : number + 2] else ""
                    # Unless the page shows an error, each command must succeed.
                    stop = [] if "tidebook: " in expected else ["set -e"]
                    terminal = Terminal("\n".join([*exports, *stop, body]), folder, columns=COLUMNS)
                    printed = [line for line in terminal.read() if line.strip()]
                    assert not stop or terminal.process.returncode == 0, "\n".join(printed)
                    exports += re.findall(r"^export .*$", body, re.MULTILINE)
                case "python" | "toml" if name := FILE.match(body):
                    (folder / name[1]).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name[1]).write_text(body)
                case "python":
                    done = subprocess.run(
                        [sys.executable, "-c", body], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S_MAX
                    )
                    assert done.returncode == 0, done.stderr
                    printed = done.stdout.splitlines()
                case "text":
                    missing = not_printed(body, printed)
                    assert missing is None, f"{page.name}: {missing!r} is not in:\n" + "\n".join(printed)


@contextmanager
def _lasting(command: str, folder: Path, until: str) -> Iterator[list[str]]:
    """Start a command in a terminal of its own, yield its lines when one contains `until`, and stop it at the end."""
    *lines, last = command.strip().splitlines()
    terminal = Terminal("\n".join([*lines, f"exec {last}"]), folder, columns=COLUMNS)
    try:
        yield terminal.read(until=until)
    finally:
        terminal.process.terminate()
        printed = terminal.read()
    assert terminal.process.returncode == (0 if "tidebook" in last else -signal.SIGTERM), "\n".join(printed)


def not_printed(expected: str, printed: list[str]) -> str | None:
    """Return the first expected line that does not follow those before it in the output; None if all do."""
    rest = iter(printed)
    for line in expected.splitlines():
        pattern = ".*".join(map(re.escape, line.strip().split("…")))
        if not any(re.fullmatch(pattern, each.strip()) for each in rest):
            return line
    return None
