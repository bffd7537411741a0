"""Access tokens: random, shown once, stored as hashes.

A token is `tb_` and 256 random bits, which nobody can guess, so a hash without salt or stretching is enough.
"""

from __future__ import annotations

import secrets
import time
from hashlib import sha256
from typing import Final

import apsw
import msgspec

from tidebook.api.access import TEXT_CHARS_MAX, NewTokenResponse, Role, RoleName, TokenResponse
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.key import topic_name
from tidebook.core.payload import encode_text
from tidebook.runtime.clock import Clock
from tidebook.server.database import ServerDatabase
from tidebook.server.principal import Principal

TOKEN_PREFIX: Final = "tb_"
TOKENS_MAX: Final = 10_000
#: The time within which a running server notices a new or revoked token.
REFRESH_S: Final = 1.0
#: How often the last use of a token is written.
USED_EVERY_MS: Final = 60_000

_COLUMNS = "id, name, role, prefix, created_at, expires_at, used_at, revoked_at"
#: Deletes the oldest token that is revoked or expired.
_DELETE_INVALID = """DELETE FROM token WHERE id = (
    SELECT id FROM token WHERE revoked_at IS NOT NULL OR expires_at <= ? ORDER BY created_at LIMIT 1)"""


class StoredToken(msgspec.Struct, frozen=True):
    """A row of the table."""

    id: str
    name: str
    role: int
    prefix: str
    created_at: int
    expires_at: int | None
    used_at: int | None
    revoked_at: int | None

    def response(self) -> TokenResponse:
        """Return the token without its secret."""
        return TokenResponse(
            id=self.id,
            name=self.name,
            role=role_name(Role(self.role)),
            prefix=self.prefix,
            created_at_ms=self.created_at,
            expires_at_ms=self.expires_at,
            last_used_at_ms=self.used_at,
            revoked_at_ms=self.revoked_at,
        )


def role_name(role: Role) -> RoleName:
    """Return the name of a role that a token may have."""
    match role:
        case Role.ADMIN:
            return "admin"
        case Role.OPERATOR:
            return "operator"
        case _:
            return "viewer"


def hash_token(token: str) -> bytes:
    """Return the hash under which a token is stored."""
    return sha256(token.encode(errors="replace")).digest()


def _check_prefix(prefix: str) -> None:
    """Raise InvalidInput for a prefix that no name can have: the token would give access to nothing."""
    try:
        topic_name(prefix)
    except InvalidInput as error:
        raise InvalidInput(f"a token's prefix must be the beginning of a name: {error}") from error


class Tokens:
    """The tokens of a book."""

    def __init__(self, database: ServerDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._by_hash: dict[bytes, Principal] = {}
        self._by_id: dict[str, Principal] = {}
        self._used_at: dict[str, int] = {}
        self._refreshed_s = -REFRESH_S
        self._any = False

    async def create(
        self, name: str, role: RoleName, *, prefix: str = "", expire_after_s: float | None = None
    ) -> NewTokenResponse:
        """Create a token and return it with its secret."""
        if not name.isprintable() or not 1 <= len(name) <= TEXT_CHARS_MAX:
            raise InvalidInput(f"a token's name must be printable text of 1 to {TEXT_CHARS_MAX} characters")
        if prefix:
            _check_prefix(prefix)
        now_ms = self._clock.now_ms()
        token = TOKEN_PREFIX + secrets.token_urlsafe(32)
        id = secrets.token_hex(6)
        expires_at = None if expire_after_s is None else now_ms + round(expire_after_s * 1000)
        row = (id, hash_token(token), name, int(Role[role.upper()]), prefix, now_ms, expires_at)

        def insert(connection: apsw.Connection) -> bool:
            count: int = connection.execute("SELECT count(*) FROM token").get
            if count >= TOKENS_MAX:
                connection.execute(_DELETE_INVALID, (now_ms,))
                if not connection.changes():
                    return False
            sql = (
                "INSERT INTO token (id, hash, name, role, prefix, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)"
            )
            connection.execute(sql, row)
            return True

        if not await self._database.change(insert):
            raise InvalidInput(f"there are {TOKENS_MAX:,} valid tokens: revoke some first")
        self._refreshed_s = -REFRESH_S
        return NewTokenResponse(
            id=id,
            name=name,
            role=role,
            prefix=prefix,
            created_at_ms=now_ms,
            expires_at_ms=expires_at,
            last_used_at_ms=None,
            revoked_at_ms=None,
            token=token,
        )

    @property
    def any(self) -> bool:
        """Whether there is any token, including revoked and expired ones."""
        self._refresh()
        return self._any

    def list(self) -> list[TokenResponse]:
        """Return all tokens, newest first."""
        rows = self._database.select(f"SELECT {_COLUMNS} FROM token ORDER BY created_at DESC, id")
        return [StoredToken(*row).response() for row in rows]

    async def revoke(self, id: str) -> None:
        """Revoke a token; raise `NotFound` if no token has this id."""
        encode_text(id, "a token's id")
        now_ms = self._clock.now_ms()

        def update(connection: apsw.Connection) -> int:
            connection.execute("UPDATE token SET revoked_at = coalesce(revoked_at, ?) WHERE id = ?", (now_ms, id))
            return connection.changes()

        # Read first: a failed revocation must not create the file.
        if not self._database.select("SELECT 1 FROM token WHERE id = ?", (id,)) or not await self._database.change(
            update
        ):
            raise NotFound(f"there is no token {id[:40]!r}: 'tidebook token list' prints them")
        self._refreshed_s = -REFRESH_S

    def find(self, token: str) -> Principal | None:
        """Return the holder of a token; None if it is unknown, revoked or expired."""
        self._refresh()
        return self._valid(self._by_hash.get(hash_token(token)))

    def holder(self, id: str) -> Principal | None:
        """Return the holder of the token with this id; None if it is unknown, revoked or expired."""
        self._refresh()
        return self._valid(self._by_id.get(id))

    def _valid(self, found: Principal | None) -> Principal | None:
        if found is None:
            return None
        now_ms = self._clock.now_ms()
        if found.expires_at_ms is not None and found.expires_at_ms <= now_ms:
            return None
        self._used_at[found.id] = now_ms
        return found

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._refreshed_s < REFRESH_S:
            return
        rows = self._database.select(f"SELECT hash, {_COLUMNS} FROM token")
        # Set only after a successful read: a server that could not read its tokens must not seem to have none.
        self._refreshed_s = now_s
        self._any = bool(rows)
        self._by_hash = {
            hash_: Principal(id, name, Role(role), prefix, expires_at)
            for hash_, id, name, role, prefix, _, expires_at, _, revoked_at in rows
            if revoked_at is None
        }
        self._by_id = {each.id: each for each in self._by_hash.values()}

    async def write_uses(self) -> None:
        """Store when each token was last used."""
        used, self._used_at = self._used_at, {}
        if used:
            rows = [(at, id) for id, at in used.items()]

            def update(connection: apsw.Connection) -> None:
                connection.executemany("UPDATE token SET used_at = ? WHERE id = ?", rows)

            await self._database.change(update, synced=False)
