"""`tidebook backup` and `tidebook restore`: copy an embedded book while it is in use, and create a book from a copy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidebook.cli import output
from tidebook.cli.options import BookOption, argument, book_settings, embedded_files, is_address
from tidebook.core.errors import InvalidInput
from tidebook.wiring.backup import BackupManifest, Progress, back_up, restore
from tidebook.wiring.settings import DEFAULT_BOOK, read_settings

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar
    from rich.progress import TaskID


def make_backup(
    book: BookOption, target: str = argument("FOLDER", "The new folder of the backup; it must be empty or missing.")
) -> None:
    """Back up an embedded book while it is in use.

    All files are copied as of one moment, and every page is checked. Writers wait until outbox.db and process.db, if
    there are any, are copied: usually only for a moment.
    """
    _refuse_address(book)
    settings = book_settings(book)
    with output.progress_bar() as bar:
        report = _report_to(bar, "backing up")
        manifest = back_up(settings.folder.expanduser(), embedded_files(settings), Path(target).expanduser(), report)
    _emit(manifest, target, f"backed up {settings.folder} to {target}")
    for section in ("log", "store", "sql"):
        if not settings.section(section).embedded:
            output.note(f"the {section} is on a server and not in this backup: back it up with the server's tools")


def restore_backup(
    book: BookOption, backup: str = argument("FOLDER", "The folder that tidebook backup wrote.")
) -> None:
    """Create a book from a backup.

    The book's folder must be empty or missing. Every page of the backup is checked first.
    """
    _refuse_address(book)
    settings = read_settings(DEFAULT_BOOK if book is None else book)
    with output.progress_bar() as bar:
        manifest = restore(Path(backup).expanduser(), settings.folder.expanduser(), _report_to(bar, "restoring"))
    _emit(manifest, backup, f"restored {settings.folder} from {backup}, as of {output.format_time(manifest.made_at)}")


def _refuse_address(book: str | None) -> None:
    if is_address(book):
        raise InvalidInput("--book: back up and restore the book of a server on the machine that has its folder")


def _report_to(bar: ProgressBar, what: str) -> Progress:
    tasks: dict[str, TaskID] = {}

    def report(name: str, copied: int, of: int) -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(f"{what} {name}", total=of)
        bar.update(tasks[name], completed=copied, total=of)

    return report


def _emit(manifest: BackupManifest, folder: str, text: str) -> None:
    size_bytes = sum(manifest.files.values())
    output.emit(manifest, f"{text}: {', '.join(manifest.files)} ({size_bytes:,} bytes)", folder=folder)
