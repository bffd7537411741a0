"""A member of a consumer group: reads its share of a tag's journals, and stores how far it came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from urllib.parse import quote

import msgspec

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import Fenced, InvalidInput, OutcomeUnknown, Unavailable
from tidebook.core.payload import encode_text
from tidebook.core.replication import TagPlace, TagRow
from tidebook.store.port import StoreWriter
from tidebook.tags.event import TaggedEvent
from tidebook.tags.offset import decode_offset, encode_offset
from tidebook.tags.shares import Group, Share, decode_group, encode_group, kept_alive, left, owned, renewed, share_of
from tidebook.tags.ticks import Following

LEASE_S = 30.0
#: How long a member reads before it looks who shares the journals with it; less where leases are short.
ROUND_S = 2.0
ROUNDS_PER_LEASE = 3
#: How long a member is kept alive that asks for nothing: so long may one event be worked on.
HANDLING_MAX_S = 300.0
#: How often members that keep offsets themselves are asked what they kept.
ASK_KEPT_S = 30.0
#: How long a change of the group's state is tried while others change it too.
CHANGE_S = 15.0
PAUSE_FIRST_S = 0.002
PAUSE_MAX_S = 0.2

#: Its own, so that what an app has seeded goes on as it would.
_chance = random.Random()


class Page(msgspec.Struct, frozen=True):
    """Some rows of a stream, and how far it was read for them."""

    rows: Sequence[TagRow]
    place: TagPlace


#: Reads a tag behind a place, until nothing more is there.
Read = Callable[[TagPlace | None], AsyncIterator[Page]]
#: Where each share was left, by its number: for those who keep offsets themselves.
Offsets = Callable[[Iterable[int]], Mapping[int, str]]


class Subscription:
    """Use it as `async with book.tags.subscribe(tag, group) as events: async for event in events`.

    `commit(event)` stores that the event, and all before it that this member got of the same share, are done. What was
    delivered and not committed is delivered again, to whoever has the share then.
    """

    def __init__(
        self,
        tag: str,
        group: str,
        *,
        read: Read,
        store: StoreWriter,
        clock: Clock,
        ids: Ids,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        follow: bool = True,
    ) -> None:
        if type(group) is not str or not group:
            raise InvalidInput("a group is a text that is not empty")
        encode_text(group, "a group")
        self._tag = tag
        # The tag's slashes are quoted: "c" of group "a/b" is not "b/c" of group "a".
        self._setting = f"tags/group/{group}/{quote(tag, safe='')}"
        self._read = read
        self._store = store
        self._clock = clock
        self._member = ids.new().hex()
        self._offsets = offsets
        if not lease_s > 0:
            raise InvalidInput(f"lease_s is a time in seconds, not {lease_s}")
        self._lease_ms = int(lease_s * 1000)
        self._round_ms = min(ROUND_S * 1000, self._lease_ms / ROUNDS_PER_LEASE)
        #: What it follows is brought below the horizon soon; one that only catches up needs no ticks.
        self._following = Following(store, clock) if follow else None
        self._shares: dict[int, Share] = {}
        #: By share: how far this member was given its events.
        self._given: dict[int, TagPlace] = {}
        #: All of the shares here was given up to this place.
        self._behind: TagPlace | None = None
        #: By share, where offsets are kept elsewhere: what was found there; "" for nothing.
        self._kept: dict[int, str] = {}
        #: By member: what it last said, when this one saw that first, by its own clock, and whether it saw it change.
        self._watched: dict[str, tuple[int, int, bool]] = {}
        self._renewed_ms = self._asked_kept_ms = clock.now_ms()
        self._worked_s = 0.0
        self._keeping: asyncio.Task[None] | None = None

    @property
    def shares(self) -> frozenset[int]:
        """The numbers of the shares that this member reads."""
        return frozenset(self._shares)

    async def __aenter__(self) -> Subscription:
        await self._renew()
        self._worked_s = asyncio.get_running_loop().time()
        self._keeping = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        try:
            if kind is None:
                await self._ask_kept()
        finally:
            await self._change(lambda group: left(self._read_up(group), self._member))
            self._shares = {}

    async def __aiter__(self) -> AsyncGenerator[TaggedEvent, None]:
        since = -1
        while True:
            if self._following is not None:
                await self._following.renew()
            async for page in self._read(self._behind):
                for row in page.rows:
                    self._behind = place = row.place
                    share = share_of(row.topic, row.id)
                    if share in self._shares and ((given := self._given.get(share)) is None or place > given):
                        since, self._given[share] = -1, place
                        yield TaggedEvent(row)
                        if await self._round():
                            break
                else:
                    self._behind = page.place
                    if not await self._round():
                        continue
                break  # a share is new here, and may begin further back
            else:
                if self._following is None:
                    return
                since = await self._store.wait_any(timeout_s=self._round_ms / 1000, since=since)
                await self._round()

    async def _round(self) -> bool:
        """Between two events: renew the lease when it is time; True where a share is new."""
        self._worked_s = asyncio.get_running_loop().time()
        if self._clock.now_ms() - self._renewed_ms < self._round_ms:
            return False
        if self._clock.now_ms() - self._asked_kept_ms >= ASK_KEPT_S * 1000:
            await self._ask_kept()
        return await self._renew()

    async def _keep_alive(self) -> None:
        """While an event is worked on: renew the lease, and leave the shares as they are, so that it is not lost."""

        def change(group: Group) -> Group:
            return kept_alive(group, self._member, now_ms=self._clock.now_ms(), lease_ms=self._lease_ms)

        while True:
            await asyncio.sleep(self._round_ms / 1000)
            works = asyncio.get_running_loop().time() - self._worked_s < HANDLING_MAX_S
            if works and self._clock.now_ms() - self._renewed_ms >= self._round_ms:
                with suppress(Unavailable, OutcomeUnknown):  # the next one may come through
                    await self._change(change)

    async def commit(self, event: TaggedEvent) -> None:
        """Store how far this member came with the event's share; Fenced where another has it by now."""
        number = share_of(event.topic, event.id)
        held = self._shares.get(number)

        def change(group: Group) -> Group:
            share = group.shares[number]
            if held is None or share.owner != self._member or share.term != held.term:
                raise Fenced(f"tag {self._tag!r}: another member has {event.topic}/{event.id} now: it gets it again")
            shares = [self._passed(n, each, event.place) for n, each in enumerate(group.shares)]
            if share.offset is None or decode_offset(self._tag, share.offset) < event.place:
                shares[number] = Share(share.owner, event.tag_offset, share.term)
            return Group(group.members, tuple(shares))

        self._worked_s = asyncio.get_running_loop().time()
        await self._change(change)

    def _read_up(self, group: Group) -> Group:
        """What was read, and has brought nothing that is still owed, need not be read again by whoever comes next."""
        if self._behind is None:
            return group
        shares = [self._passed(number, share, self._behind) for number, share in enumerate(group.shares)]
        return Group(group.members, tuple(shares))

    def _passed(self, number: int, share: Share, place: TagPlace) -> Share:
        """A share that owes nothing goes along: one without events would be read from the start again."""
        held, given = self._shares.get(number), self._given.get(number)
        if held is None or (share.owner, share.term) != (self._member, held.term):
            return share
        if self._behind is None or self._behind < place:
            return share
        kept = None if self._offsets is None else self._kept.get(number, "")
        done = self._told(share, kept)
        stored = None if done is None else decode_offset(self._tag, done)
        owes = given is not None and (stored is None or stored < given)
        if owes or (stored is not None and stored >= place):
            return share
        return Share(share.owner, encode_offset(place), share.term, kept)

    def _told(self, share: Share, kept: str | None) -> str | None:
        """Behind which offset a share goes on. What is kept elsewhere decides: it may have been restored."""
        if kept is None:
            return share.offset
        return share.offset if share.kept == kept else kept or None

    async def _ask_kept(self) -> None:
        """Where offsets are kept elsewhere: learn what was done of what was given."""
        if self._offsets is not None and self._shares:
            self._asked_kept_ms = self._clock.now_ms()
            found = await asyncio.to_thread(self._offsets, list(self._shares))
            self._kept = {number: found.get(number, "") for number in self._shares}

    async def _renew(self) -> bool:
        """Say that this member lives, and see what it is to read; True where a share is new."""
        self._renewed_ms = now_ms = self._clock.now_ms()

        def change(found: Group) -> Group:
            alive = self._watch(found, now_ms)
            return renewed(self._read_up(found), self._member, now_ms=now_ms, lease_ms=self._lease_ms, alive=alive)

        group = await self._change(change)
        before, self._shares = self._shares, owned(group, self._member)
        new = {
            number
            for number, share in self._shares.items()
            if number not in before or before[number].term != share.term
        }
        if self._offsets is not None and new:
            found = await asyncio.to_thread(self._offsets, new)
            self._kept |= {number: found.get(number, "") for number in new}
        begins: list[TagPlace | None] = []
        for number in new:
            offset = self._told(self._shares[number], self._kept[number] if self._offsets is not None else None)
            self._given.pop(number, None)
            if offset is not None:
                self._given[number] = decode_offset(self._tag, offset)
            begins.append(self._given.get(number))
        if new:
            begins += [self._behind] if before else []
            known = [place for place in begins if place is not None]
            self._behind = min(known) if len(known) == len(begins) else None
        return bool(new)

    def _watch(self, group: Group, now_ms: int) -> frozenset[str]:
        """Who lives whatever its lease says: clocks differ, but who was seen to renew lives.

        One that follows takes nobody for dead before it has watched it for a lease of its own.
        """
        watched = {}
        for member, until_ms in group.members.items():
            said, since_ms, changed = self._watched.get(member, (until_ms, now_ms, False))
            watched[member] = (until_ms, now_ms, True) if said != until_ms else (said, since_ms, changed)
        self._watched = watched
        return frozenset(
            member
            for member, (_, since_ms, changed) in watched.items()
            if (changed or self._following is not None) and now_ms - since_ms < self._lease_ms
        )

    async def _change(self, change: Callable[[Group], Group]) -> Group:
        loop = asyncio.get_running_loop()
        give_up_s, pause_s = loop.time() + CHANGE_S, PAUSE_FIRST_S
        while True:
            text = await self._store.setting(self._setting)
            group = change(decode_group(text))
            after = encode_group(group)
            if after == text:
                return group
            try:
                if await self._store.set_setting(self._setting, after, expected=text):
                    return group
            except OutcomeUnknown:
                if loop.time() >= give_up_s:
                    raise
                # Every change says the same when it is made twice.
            if loop.time() >= give_up_s:
                raise Unavailable(f"{self._setting}: others changed it for {CHANGE_S:.0f} s: try again")
            await asyncio.sleep(_chance.uniform(0, pause_s))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
