"""`tidebook audit`: check the hash chains of the server's audit."""

from __future__ import annotations

import typer

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, is_address, open_book
from tidebook.core.errors import InvalidInput

app = Group(help="Check the audit of the server.", no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Check the audit of the server."""


@app.command(check=True)
async def verify(book: BookOption) -> None:
    """Find entries of the audit that were changed, removed or reordered.

    Exit with code 1 if there are any.
    """
    if is_address(book):  # the ends of the chains are in server.db
        raise InvalidInput("--book: verify the audit of a server on the machine that has its folder")
    # Imported only here: the server's modules slow down the start of every other command.
    from tidebook.server.audit_check import check_audit
    from tidebook.server.database import ServerDatabase

    async with open_book(book) as opened:
        database = ServerDatabase(opened.settings.folder)
        try:
            report = await check_audit(opened, database)
        finally:
            await database.close()
    for each in report.findings:
        output.emit(each, f"{each.chain} entry {each.n}: {each.what}: {each.detail}")
    row = {"chains": report.chains, "entries": report.entries, "findings": len(report.findings)}
    output.emit(row, f"{report.entries:,} entries in {report.chains:,} chains, {len(report.findings):,} findings")
    if report.findings:
        raise typer.Exit(1)
