"""An entry of the audit, and the hash that chains the entries of a group to those before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import msgspec

#: The topic of the audit: only the server writes it, and only an admin reads it.
AUDIT_TOPIC: Final = "tidebook-audit"
#: The hash before the first group of a chain.
GENESIS: Final = "0" * 64
TARGET_CHARS_MAX: Final = 500

_encoder = msgspec.json.Encoder()


class AuditEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """One call: who changed or unmasked what, when, and with which status."""

    #: The number in the chain, from 1.
    n: int
    at_ms: int
    #: The name of the token, and its role.
    who: str
    role: str
    #: The address that the request came from.
    client: str
    action: str
    target: str
    status: int
    #: The id of the token; empty without one.
    token: str = ""
    #: Whether masked fields were shown.
    unmask: bool = False
    detail: Any = None
    #: In the last entry of a group: the hash of its entries and of the group before.
    hash: str = ""


class GroupHash:
    """Computes the hash of a group: of the previous group's hash, and of all its entries without their own hash."""

    def __init__(self, previous: str) -> None:
        self._sha256 = hashlib.sha256(previous.encode())

    def add(self, entries: Sequence[AuditEntry]) -> list[bytes]:
        """Add the next entries, which have no hash; return them as they are encoded."""
        lines = _encoder.encode_lines(entries)
        self._sha256.update(lines)
        return lines.split(b"\n")[:-1]

    @property
    def hex(self) -> str:
        """The hash of the entries that were added."""
        return self._sha256.hexdigest()


def encode_group(entries: Sequence[AuditEntry], previous: str) -> tuple[list[bytes], str]:
    """Return the entries of a group as the payloads of their events, and the group's hash, which its last entry has."""
    group_hash = GroupHash(previous)
    encoded, found = group_hash.add(entries), group_hash.hex
    encoded[-1] = _encoder.encode(msgspec.structs.replace(entries[-1], hash=found))
    return encoded, found
