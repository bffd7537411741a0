"""`tidebook audit`: check the hash chains of the server's audit."""

from __future__ import annotations

import typer

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.wiring.book import Book

app = Group(help="Check the audit of the server.", no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Check the audit of the server."""


@app.command(check=True)
async def verify(book: Book) -> None:
    """Find entries of the audit that were changed, removed or reordered.

    Exit with code 1 if there are any.
    """
    # Imported only here: the server's modules slow down the start of every other command.
    from tidebook.server.audit_check import check_audit
    from tidebook.server.database import ServerDatabase

    database = ServerDatabase(book.settings.folder)
    try:
        report = await check_audit(book, database)
    finally:
        await database.close()
    for each in report.findings:
        output.emit(each, f"{each.chain} entry {each.n}: {each.what}: {each.detail}")
    row = {"chains": report.chains, "entries": report.entries, "findings": len(report.findings)}
    output.emit(row, f"{report.entries:,} entries in {report.chains:,} chains, {len(report.findings):,} findings")
    if report.findings:
        raise typer.Exit(1)
