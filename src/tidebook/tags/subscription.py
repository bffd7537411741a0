"""A member of a consumer group: reads its share of a tag's journals, and stores its offsets.

The assignment of shares to members is one setting of the store, changed by compare-and-set.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from types import TracebackType
from typing import Generic
from urllib.parse import quote

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from tidebook.core.errors import Corrupt, Fenced, InvalidInput, OutcomeUnknown, Unavailable
from tidebook.core.payload import encode_text
from tidebook.core.replication_plan import TagPosition, TagRow
from tidebook.runtime import tracing
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Clock, Ids
from tidebook.store.port import StoreWriter
from tidebook.tags.event import Decode, E, TaggedEvent, decode_offset, decode_raw, encode_offset
from tidebook.tags.horizon import HorizonStatus, HorizonWait

#: The number of shares that journals are divided into: the most members that can be active.
SHARES = 64
LEASE_S = 30.0
#: How long a member reads before it renews its lease and rebalances; less if leases are short.
ROUND_S = 2.0
ROUNDS_PER_LEASE = 3
#: The longest time that one event may be handled: after it, the lease of a member that requests no event expires.
HANDLING_MAX_S = 300.0
#: How often external offsets are read.
READ_OFFSETS_EVERY_S = 30.0
#: How long a change of the group's setting is retried while others change it too.
CHANGE_RETRY_S = 15.0
RETRY_FIRST_S = 0.002
RETRY_MAX_S = 0.2

#: A separate generator, so that the application's seeded one is not affected.
_random = random.Random()


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


def rebalanced(
    group: GroupAssignment, member: str, *, now_ms: int, lease_ms: int, alive: Collection[str] = ()
) -> GroupAssignment:
    """Return the group with the member's lease renewed and its shares rebalanced.

    The shares are assigned to the members in turn, in the order of their names. The member releases shares of others,
    and takes its own if no live member owns them. The members in `alive` count as live regardless of their leases.
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


def decode_group(text: str | None) -> GroupAssignment:
    """Decode a group; for None, return one without members. Raise `Corrupt` if it is damaged."""
    if text is None:
        return GroupAssignment()
    try:
        group = msgspec.json.decode(text, type=GroupAssignment)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the state of a consumer group is damaged: {error}") from error
    if len(group.shares) != SHARES:
        raise Corrupt(f"the state of a consumer group has {len(group.shares)} shares, not {SHARES}")
    return group


class SubscriptionPage(msgspec.Struct, frozen=True):
    """Rows of a stream, and the position through which it was read for them."""

    rows: Sequence[TagRow]
    position: TagPosition


#: Reads a tag after a position, until there are no more rows.
ReadPages = Callable[[TagPosition | None], AsyncIterator[SubscriptionPage]]
#: Returns external offsets by share number, for applications that store offsets themselves.
Offsets = Callable[[Iterable[int]], Mapping[int, str]]


class Subscription(Generic[E]):
    """A member of a group: it receives the events of a tag from the shares that it owns.

    Use it as `async with book.tags.subscribe(tag, group) as events: async for event in events`.
    `commit(event)` stores that the event, and all earlier ones of its share that this member received, are handled.
    Events that were delivered but not committed are delivered again, to the share's next owner.
    """

    def __init__(
        self,
        tag: str,
        group: str,
        *,
        read: ReadPages,
        store: StoreWriter,
        clock: Clock,
        ids: Ids,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        follow: bool = True,
        horizon_wait: HorizonWait,
        decode: Decode = decode_raw,
    ) -> None:
        if type(group) is not str or not group:
            raise InvalidInput("a group must be non-empty text")
        encode_text(group, "a group")
        self._tag = tag
        self._decode = decode
        # The tag's slashes are quoted: tag "c" of group "a/b" must differ from tag "b/c" of group "a".
        self._setting = f"tags/group/{group}/{quote(tag, safe='')}"
        self._read = read
        self._store = store
        self._clock = clock
        self._member = ids.new().hex()
        self._offsets = offsets
        if not lease_s > 0:
            raise InvalidInput(f"lease_s must be more than 0 seconds, not {lease_s}")
        self._lease_ms = int(lease_s * 1000)
        self._round_ms = min(ROUND_S * 1000, self._lease_ms / ROUNDS_PER_LEASE)
        self._follow = follow
        self._horizon_wait = horizon_wait
        self._shares: dict[int, Share] = {}
        #: The position of the last event that this member delivered, by share.
        self._delivered: dict[int, TagPosition] = {}
        #: The position through which all shares of this member were read.
        self._position: TagPosition | None = None
        #: The external offset of each share; "" for none.
        self._external: dict[int, str] = {}
        #: The lease that each member last stored, when this one first saw it, and whether this one has seen it change.
        self._leases: dict[str, tuple[int, int, bool]] = {}
        # Local times are monotonic: a wall clock that is set back must not extend a lease.
        self._renewed_ms = self._external_read_ms = clock.monotonic_ms()
        self._active_s = 0.0
        self._renewal: asyncio.Task[None] | None = None

    @property
    def shares(self) -> frozenset[int]:
        """The numbers of the shares that this member owns."""
        return frozenset(self._shares)

    @property
    def waiting(self) -> HorizonStatus | None:
        """The horizon, while the stream waits for replication that makes no progress; None otherwise."""
        return self._horizon_wait.waiting

    async def __aenter__(self) -> Subscription[E]:
        await self._renew()
        self._active_s = asyncio.get_running_loop().time()
        self._renewal = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        try:
            if kind is None:
                await self._read_external()
        finally:
            await self._change(lambda group: member_removed(self._advance_idle(group, self._position), self._member))
            self._shares = {}

    async def __aiter__(self) -> AsyncGenerator[TaggedEvent[E], None]:
        delivered_any = False
        while True:
            if self._follow:
                await self._horizon_wait.ask_for_ticks()
            async for page in self._read(self._position):
                for row in page.rows:
                    # Check before each event, because the page may be old: a share that another member took is not
                    # delivered here too.
                    if self._is_renewal_due() and await self._renew_if_due():
                        break
                    self._position = position = row.place
                    share = share_of(row.topic, row.id)
                    if share in self._shares and (
                        (delivered := self._delivered.get(share)) is None or position > delivered
                    ):
                        delivered_any, self._delivered[share] = True, position
                        event: TaggedEvent[E] = TaggedEvent(row, UNSET, self._decode)
                        if tracing.is_on():
                            tracing.delivered("tags.deliver", event.metadata, tag=event.tag, topic=event.topic)
                        yield event
                else:
                    self._position = page.position
                    if not await self._renew_if_due():
                        continue
                break  # a new share may start further back
            else:
                if not self._follow:
                    return
                await self._horizon_wait.wait(self._round_ms / 1000, delivered=delivered_any)
                delivered_any = False
                await self._renew_if_due()

    def _is_renewal_due(self) -> bool:
        return self._clock.monotonic_ms() - self._renewed_ms >= self._round_ms

    async def _renew_if_due(self) -> bool:
        """Renew the lease if it is due, between two events; return True if this member has a new share."""
        self._active_s = asyncio.get_running_loop().time()
        if not self._is_renewal_due():
            return False
        if self._clock.monotonic_ms() - self._external_read_ms >= READ_OFFSETS_EVERY_S * 1000:
            await self._read_external()
        return await self._renew()

    async def _keep_alive(self) -> None:
        """Renew the lease while an event is being handled, without a change of shares: its share must not be lost."""

        def change(group: GroupAssignment) -> GroupAssignment:
            return replace(group, members={**group.members, self._member: self._clock.now_ms() + self._lease_ms})

        while True:
            await asyncio.sleep(self._round_ms / 1000)
            active = asyncio.get_running_loop().time() - self._active_s < HANDLING_MAX_S
            if active and self._is_renewal_due():
                with suppress(Unavailable, OutcomeUnknown):  # the next renewal may succeed
                    await self._change(change)

    async def commit(self, event: TaggedEvent[E]) -> None:
        """Store that the event is handled; raise `Fenced` if another member owns its share by now."""
        number = share_of(event.topic, event.id)
        owned = self._shares.get(number)

        def change(group: GroupAssignment) -> GroupAssignment:
            share = group.shares[number]
            if owned is None or share.owner != self._member or share.term != owned.term:
                raise Fenced(
                    f"tag {self._tag!r}: another member owns {event.topic}/{event.id} now and gets the event again"
                )
            shares = self._advance_idle(group, event.place).shares
            if share.offset is None or decode_offset(self._tag, share.offset) < event.place:
                committed = Share(share.owner, event.tag_offset, share.term)
                shares = (*shares[:number], committed, *shares[number + 1 :])
            return replace(group, shares=shares)

        self._active_s = asyncio.get_running_loop().time()
        await self._change(change)

    def _advance_idle(self, group: GroupAssignment, position: TagPosition | None) -> GroupAssignment:
        """Advance the offsets of idle shares, so that their next owner does not read the same range again."""
        if position is None or self._position is None or self._position < position:
            return group
        return replace(group, shares=tuple([self._advanced(n, each, position) for n, each in enumerate(group.shares)]))

    def _advanced(self, number: int, share: Share, position: TagPosition) -> Share:
        """Return the share with its offset advanced to `position`, unless it has deliveries that are not committed."""
        owned, delivered = self._shares.get(number), self._delivered.get(number)
        if owned is None or (share.owner, share.term) != (self._member, owned.term):
            return share
        resume = self._resume_offset(number, share)
        stored = None if resume is None else decode_offset(self._tag, resume)
        uncommitted = delivered is not None and (stored is None or stored < delivered)
        if uncommitted or (stored is not None and stored >= position):
            return share
        return Share(share.owner, encode_offset(position), share.term, self._external_offset(number))

    def _external_offset(self, number: int) -> str | None:
        return None if self._offsets is None else self._external.get(number, "")

    def _resume_offset(self, number: int, share: Share) -> str | None:
        """Return the offset after which a share continues. An external offset wins: it may have been restored."""
        external = self._external_offset(number)
        return share.offset if external is None or share.external_offset == external else external or None

    async def _read_external(self) -> None:
        """Read the external offsets, to learn which of the delivered events are handled."""
        if self._offsets is not None and self._shares:
            self._external_read_ms = self._clock.monotonic_ms()
            found = await asyncio.to_thread(self._offsets, list(self._shares))
            self._external = {number: found.get(number, "") for number in self._shares}

    async def _renew(self) -> bool:
        """Renew the lease and rebalance; return True if this member has a new share."""
        self._renewed_ms = passed_ms = self._clock.monotonic_ms()
        now_ms = self._clock.now_ms()

        def change(found: GroupAssignment) -> GroupAssignment:
            alive = self._live_members(found, passed_ms)
            idle = self._advance_idle(found, self._position)
            return rebalanced(idle, self._member, now_ms=now_ms, lease_ms=self._lease_ms, alive=alive)

        shares = owned_shares(await self._change(change), self._member)
        new = {n for n, share in shares.items() if n not in self._shares or self._shares[n].term != share.term}
        if new and self._offsets is not None:
            # Until they are read, the new shares are not in `_shares`: if this fails, they are released as they are.
            found = await asyncio.to_thread(self._offsets, new)
            self._external |= {number: found.get(number, "") for number in new}
        before, self._shares = self._shares, shares
        if not new:
            return False
        starts = [self._position] if before else []
        for number in new:
            offset = self._resume_offset(number, self._shares[number])
            self._delivered.pop(number, None)
            if offset is not None:
                self._delivered[number] = decode_offset(self._tag, offset)
            starts.append(self._delivered.get(number))
        known = [position for position in starts if position is not None]
        self._position = min(known) if len(known) == len(starts) else None
        return True

    def _live_members(self, group: GroupAssignment, now_ms: int) -> frozenset[str]:
        """Return the members that count as live regardless of their leases, because clocks differ.

        These are the members whose stored lease has changed within the last `lease_s`, by this member's clock. A live
        stream also includes members that it first saw within that time.
        """
        leases = {}
        for member, until_ms in group.members.items():
            lease, since_ms, changed = self._leases.get(member, (until_ms, now_ms, False))
            leases[member] = (until_ms, now_ms, True) if lease != until_ms else (lease, since_ms, changed)
        self._leases = leases
        return frozenset(
            member
            for member, (_, since_ms, changed) in leases.items()
            if (changed or self._follow) and now_ms - since_ms < self._lease_ms
        )

    async def _change(self, change: Callable[[GroupAssignment], GroupAssignment]) -> GroupAssignment:
        """Apply a change to the group's setting by compare-and-set, with retries; return the new group."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CHANGE_RETRY_S
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        while True:
            text = await self._store.setting(self._setting)
            group = change(decode_group(text))
            after = msgspec.json.encode(group).decode()
            if after == text:
                return group
            try:
                if await self._store.set_setting(self._setting, after, expected=text):
                    return group
            except OutcomeUnknown:
                if loop.time() >= deadline_s:
                    raise
                # The change may have been stored; it is idempotent, so it is retried.
            if loop.time() >= deadline_s:
                raise Unavailable(f"{self._setting}: others changed it for {CHANGE_RETRY_S:.0f} s: try again")
            await asyncio.sleep(_random.uniform(0, backoff.next_s()))
