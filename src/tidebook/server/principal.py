"""The sender of a request: its token, role and prefix."""

from __future__ import annotations

import msgspec

from tidebook.api.access import Role


class Principal(msgspec.Struct, frozen=True, gc=False):
    """The sender of a request, and what it may do."""

    #: The id of the token; empty without one.
    id: str
    name: str
    role: Role
    #: Topics, queues and namespaces must begin with this text.
    prefix: str = ""
    expires_at_ms: int | None = None

    def may_see(self, name: str) -> bool:
        """Return whether the token's prefix covers a topic, queue or namespace."""
        return name.startswith(self.prefix)


#: Every sender on an open loopback server.
LOCAL = Principal("", "local", Role.ADMIN)
#: A request without a token, which may use public routes only.
ANONYMOUS = Principal("", "anonymous", Role.PUBLIC)
