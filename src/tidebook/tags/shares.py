"""How the members of a group share a tag's journals: decided here, purely; kept as one setting of the store."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from tidebook.core.errors import Corrupt

#: Into how many shares journals are cut; the most members that have something to do.
SHARES = 64


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Some journals: who reads them, and behind which offset."""

    owner: str | None = None
    offset: str | None = None
    #: Grows with every owner, so that one who was taken for dead is told.
    term: int = 0
    #: Where members keep offsets themselves: what was kept when `offset` was told, "" for nothing. It holds beside that
    #: alone.
    kept: str | None = None


class Group(msgspec.Struct, frozen=True):
    """The members with the time, by its own clock, through which each is taken for alive, and the shares."""

    members: dict[str, int] = {}
    shares: tuple[Share, ...] = (Share(),) * SHARES


def share_of(topic: str, id: str) -> int:
    """The share that a journal belongs to."""
    return int.from_bytes(blake2b(f"{topic}\0{id}".encode(), digest_size=4).digest()) % SHARES


def kept_alive(group: Group, member: str, *, now_ms: int, lease_ms: int) -> Group:
    """The member is alive, and keeps what it has."""
    return Group({**group.members, member: now_ms + lease_ms}, group.shares)


def renewed(group: Group, member: str, *, now_ms: int, lease_ms: int, alive: Collection[str] = ()) -> Group:
    """The member is alive; it gives back what is another's by now, and takes what is its own and free.

    Shares go round the members in the order of their names. One that another lives and holds is left to it: it gives
    it back when it renews. `alive` are those that live whatever the member's own clock says of their leases.
    """
    members = {each: until for each, until in group.members.items() if until > now_ms or each in alive}
    members[member] = now_ms + lease_ms
    names = sorted(members)
    shares = []
    for number, share in enumerate(group.shares):
        wanted = names[number % len(names)]
        if share.owner == member and wanted != member:
            share = replace(share, owner=None)
        elif wanted == member and share.owner != member and (share.owner is None or share.owner not in members):
            share = replace(share, owner=member, term=share.term + 1)
        shares.append(share)
    return Group(members, tuple(shares))


def left(group: Group, member: str) -> Group:
    """The member is gone, and has given back what it held."""
    members = {each: until for each, until in group.members.items() if each != member}
    shares = (replace(each, owner=None) if each.owner == member else each for each in group.shares)
    return Group(members, tuple(shares))


def owned(group: Group, member: str) -> dict[int, Share]:
    """The member's shares by number."""
    return {number: share for number, share in enumerate(group.shares) if share.owner == member}


def encode_group(group: Group) -> str:
    """A group as the setting has it."""
    return msgspec.json.encode(group).decode()


def decode_group(text: str | None) -> Group:
    """Undo `encode_group`; a group that nobody has joined yet has no text."""
    if text is None:
        return Group()
    try:
        group = msgspec.json.decode(text, type=Group)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the state of a consumer group is damaged: {error}") from error
    if len(group.shares) != SHARES:
        raise Corrupt(f"the state of a consumer group has {len(group.shares)} shares, not {SHARES}")
    return group
