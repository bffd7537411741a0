"""An entry of the audit, and the hash that chains it to the one before."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

import msgspec

#: The topic of the audit: only the server writes it, and only an admin reads it.
AUDIT_TOPIC: Final = "tidebook-audit"
#: The hash before the first entry of a chain.
GENESIS: Final = "0" * 64
TARGET_CHARS_MAX: Final = 500

_encode = msgspec.json.Encoder().encode


class AuditEntry(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One call: who changed or unmasked what, when, and with which status."""

    #: The number in the chain, from 1.
    n: int
    at_ms: int
    #: The name and the id of the token, and its role.
    who: str
    token: str
    role: str
    #: The address that the request came from.
    client: str
    action: str
    target: str
    status: int
    #: Whether masked fields were shown.
    unmask: bool
    detail: Any
    #: The hash of the entry before.
    prev: str
    hash: str = ""


def hash_of(entry: AuditEntry) -> str:
    """Return the hash of all fields of an entry except its own hash."""
    return hash_fields([getattr(entry, name) for name in FIELDS])


def hash_fields(fields: list[Any]) -> str:
    """Return the hash of the values of `FIELDS`."""
    return sha256(_encode(fields)).hexdigest()


def chained(entry: AuditEntry) -> AuditEntry:
    """Return the entry with its hash."""
    return msgspec.structs.replace(entry, hash=hash_of(entry))


#: The fields that are hashed, in this order.
FIELDS: Final = tuple(name for name in AuditEntry.__struct_fields__ if name != "hash")
