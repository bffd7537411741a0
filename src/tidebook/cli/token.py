"""`tidebook token`: create, list and revoke access tokens of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, cast

import typer

from tidebook.api.access import RoleName
from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, argument, book_settings, option, seconds
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.queue.job import utc_datetime
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens

app = Group(help="Create, list and revoke access tokens of the server.", no_args_is_help=True)


def _role(value: str) -> str:
    if value not in ("viewer", "operator", "admin"):
        raise InvalidInput(f"--role must be viewer, operator or admin, not {value!r}")
    return value


@asynccontextmanager
async def _tokens(book: str | None, *, create: bool = False) -> AsyncIterator[Tokens]:
    try:
        settings = book_settings(book, create=create)
    except NotFound as error:
        raise NotFound(f"{error}; 'token create --new-book' creates one with a token") from error
    database = ServerDatabase(settings.folder)
    try:
        yield Tokens(database, SystemClock())
    finally:
        await database.close()


@app.command()
async def create(
    book: BookOption,
    name: str = argument("NAME", "What the token is for, for example: billing"),
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, operator or admin.", callback=_role)] = "viewer",
    prefix: str = option("PREFIX", "Only topics, queues and namespaces that begin with this.", ""),
    expire_after_s: float | None = seconds("The token expires after this time.", least=0.001),
    new_book: Annotated[bool, typer.Option("--new-book", help="Create the book if it does not exist.")] = False,
) -> None:
    """Create a token and print it. It is not shown again.

    The book must exist, so that a misspelled name is noticed. A server that other machines reach needs a token before
    its first start: in that case, create the book with --new-book.
    """
    async with _tokens(book, create=new_book) as tokens:
        made = await tokens.create(name, cast(RoleName, role), prefix=prefix, expire_after_s=expire_after_s)
    output.emit(made, made.token)
    if output.human():
        output.note(f"token {made.id} for {name}, {role}: it is not shown again")


@app.command("list")
async def list_tokens(book: BookOption) -> None:
    """List tokens, newest first, without their secrets."""
    async with _tokens(book) as tokens:
        table = output.Table("id", "name", "role", "prefix", "expires", "last used", "revoked")
        for each in tokens.list():
            times_ms = (each.expires_at_ms, each.last_used_at_ms, each.revoked_at_ms)
            times = [None if at_ms is None else utc_datetime(at_ms) for at_ms in times_ms]
            table.add(each, each.id, each.name, each.role, each.prefix or None, *times)
        table.print("no tokens")


@app.command(question="Revoke token {id}?")
async def revoke(book: BookOption, id: str = argument("ID", "The token's id, as `token list` prints it.")) -> None:
    """Revoke a token; a running server refuses it within a second."""
    async with _tokens(book) as tokens:
        await tokens.revoke(id)
    output.emit({"id": id, "revoked": True}, f"token {id}: revoked")
