"""The assignment of a tag's journals to the members of a group: pure functions; stored as one setting."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from tidebook.core.errors import Corrupt

#: The number of shares that journals are divided into: the most members that can be active.
SHARES = 64


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A share of the journals: its owner, and the offset after which to continue."""

    owner: str | None = None
    offset: str | None = None
    #: Increases with every change of owner, so that a former owner is fenced.
    term: int = 0
    #: For external offsets: the external offset that `offset` was stored for ("" for none). `offset` is only valid
    #: while the external one is the same.
    external_offset: str | None = None


class GroupAssignment(msgspec.Struct, frozen=True):
    """The members, with the time when each one's lease expires by that member's clock, and the shares."""

    members: dict[str, int] = {}
    shares: tuple[Share, ...] = (Share(),) * SHARES


def share_of(topic: str, id: str) -> int:
    """Return the share that a journal belongs to."""
    return int.from_bytes(blake2b(f"{topic}\0{id}".encode(), digest_size=4).digest()) % SHARES


def lease_renewed(group: GroupAssignment, member: str, *, now_ms: int, lease_ms: int) -> GroupAssignment:
    """Return the group with the member's lease renewed and the shares unchanged."""
    return GroupAssignment({**group.members, member: now_ms + lease_ms}, group.shares)


def rebalanced(
    group: GroupAssignment, member: str, *, now_ms: int, lease_ms: int, alive: Collection[str] = ()
) -> GroupAssignment:
    """Return the group with the member's lease renewed and its shares rebalanced.

    The shares are assigned to the members in turn, in the order of their names. The member releases shares that are
    assigned to others, and takes its own if they are free; a share that another live member still owns is left to it
    until that member renews. `alive` are the members that count as live whatever this member's clock says of their
    leases.
    """
    members = {each: until for each, until in group.members.items() if until > now_ms or each in alive}
    members[member] = now_ms + lease_ms
    names = sorted(members)
    shares = []
    for number, share in enumerate(group.shares):
        assigned = names[number % len(names)]
        if share.owner == member and assigned != member:
            share = replace(share, owner=None)
        elif assigned == member and share.owner != member and (share.owner is None or share.owner not in members):
            share = replace(share, owner=member, term=share.term + 1)
        shares.append(share)
    return GroupAssignment(members, tuple(shares))


def member_removed(group: GroupAssignment, member: str) -> GroupAssignment:
    """Return the group without the member, and with its shares released."""
    members = {each: until for each, until in group.members.items() if each != member}
    shares = (replace(each, owner=None) if each.owner == member else each for each in group.shares)
    return GroupAssignment(members, tuple(shares))


def owned_shares(group: GroupAssignment, member: str) -> dict[int, Share]:
    """Return the member's shares by number."""
    return {number: share for number, share in enumerate(group.shares) if share.owner == member}


def encode_group(group: GroupAssignment) -> str:
    """Encode a group for the setting."""
    return msgspec.json.encode(group).decode()


def decode_group(text: str | None) -> GroupAssignment:
    """Decode a group; without a text, return one without members. Raise `Corrupt` if it is damaged."""
    if text is None:
        return GroupAssignment()
    try:
        group = msgspec.json.decode(text, type=GroupAssignment)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the state of a consumer group is damaged: {error}") from error
    if len(group.shares) != SHARES:
        raise Corrupt(f"the state of a consumer group has {len(group.shares)} shares, not {SHARES}")
    return group
