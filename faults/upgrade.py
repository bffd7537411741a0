"""Make a later build of Tidebook, which writes records of the next version and reads those of both."""

from __future__ import annotations

import shutil
from pathlib import Path

import tidebook

#: Replacements (old text, new text) in `core/frame.py`, which encodes every record of a journal and a write-ahead log.
_CHANGES = (
    ("        self.magic = magic\n", "        self.magic = magic\n        version += 1\n"),
    ("if version != self.version:", "if version not in (self.version, self.version - 1):"),
)


def make_next_build(folder: Path) -> Path:
    """Copy the package with a higher record version into a folder, for PYTHONPATH; return the folder."""
    shutil.copytree(Path(tidebook.__file__).parent, folder / "tidebook", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "tidebook" / "core" / "frame.py"
    text = file.read_text()
    for old, new in _CHANGES:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times in {file}")
        text = text.replace(old, new)
    file.write_text(text)
    return folder
