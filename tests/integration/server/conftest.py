"""Fixtures: tokens of a book, created before it is served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tidebook.api.access import NewTokenResponse, RoleName
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens

CreateToken = Callable[..., Awaitable[NewTokenResponse]]


@pytest.fixture
def create_token(tmp_path: Path) -> CreateToken:
    """Create a token of the book in `tmp_path / "book"`."""

    async def create(role: RoleName, **options: Any) -> NewTokenResponse:
        database = ServerDatabase(tmp_path / "book")
        try:
            return await Tokens(database, SystemClock()).create(role, role, **options)
        finally:
            await database.close()

    return create
