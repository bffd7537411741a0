"""Tokens of the server: the bound on their number, and a file that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.core.errors import InvalidInput, TidebookError
from tidebook.server.database import FILE, ServerDatabase
from tidebook.server.tokens import Tokens
from tidebook.testing.clock import ManualClock


async def test_a_new_token_replaces_the_oldest_invalid_one_at_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.server.tokens.TOKENS_MAX", 3)
    database = ServerDatabase(tmp_path)
    clock = ManualClock(1_000)
    tokens = Tokens(database, clock)
    await tokens.create("short", "viewer", expire_after_s=1.0)
    clock.advance(100)
    revoked = await tokens.create("revoked", "viewer")
    await tokens.create("first", "viewer")
    await tokens.revoke(revoked.id)
    await tokens.create("second", "viewer")
    assert {each.name for each in tokens.list()} == {"short", "first", "second"}
    clock.advance(1_000)
    await tokens.create("third", "viewer")
    assert {each.name for each in tokens.list()} == {"first", "second", "third"}
    with pytest.raises(InvalidInput, match="revoke some first"):
        await tokens.create("fourth", "viewer")
    await database.close()


async def test_tokens_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"this is not a database " * 1_000)
    tokens = Tokens(ServerDatabase(tmp_path), ManualClock(1_000))
    for _ in range(2):  # without any token, a server on loopback is open to all
        with pytest.raises(TidebookError):
            _ = tokens.any


@pytest.mark.parametrize(("name", "prefix"), [("", ""), ("a\nb", ""), ("n" * 201, ""), ("ops", "p" * 201)])
async def test_a_name_that_is_not_a_short_text_is_refused(tmp_path: Path, name: str, prefix: str) -> None:
    tokens = Tokens(ServerDatabase(tmp_path), ManualClock(1_000))
    with pytest.raises(InvalidInput, match="1 to 200 characters"):
        await tokens.create(name, "viewer", prefix=prefix)
    assert tokens.list() == []
