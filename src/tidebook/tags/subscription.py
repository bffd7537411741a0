"""A member of a consumer group: reads its share of a tag's journals, and stores how far it came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType

from tidebook.core.clock import Clock, Ids
from tidebook.core.errors import Fenced, InvalidInput, Unavailable
from tidebook.core.replication import TagPlace
from tidebook.store.port import StoreWriter
from tidebook.tags.event import TaggedEvent
from tidebook.tags.offset import decode_offset
from tidebook.tags.shares import Group, Share, decode_group, encode_group, left, owned, renewed, share_of

LEASE_S = 30.0
#: How long a member reads before it looks who shares the journals with it.
ROUND_S = 2.0
ATTEMPTS_MAX = 50

#: Reads a tag behind an offset, until nothing more is there.
Read = Callable[[str | None], AsyncIterator[TaggedEvent]]
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
        if not tag or not group:
            raise InvalidInput("a tag and a group are texts that are not empty")
        self._tag = tag
        self._setting = f"tags/group/{group}/{tag}"
        self._read = read
        self._store = store
        self._clock = clock
        self._member = ids.new().hex()
        self._offsets = offsets
        self._lease_ms = int(lease_s * 1000)
        self._follow = follow
        self._shares: dict[int, Share] = {}
        #: By share: how far this member was given its events.
        self._given: dict[int, TagPlace] = {}
        #: All of the shares here was given up to this offset.
        self._behind: str | None = None

    @property
    def shares(self) -> frozenset[int]:
        """The numbers of the shares that this member reads."""
        return frozenset(self._shares)

    async def __aenter__(self) -> Subscription:
        await self._renew()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._change(lambda group: left(group, self._member))
        self._shares = {}

    async def __aiter__(self) -> AsyncIterator[TaggedEvent]:
        since, renewed_ms = -1, self._clock.now_ms()
        while True:
            async for event in self._read(self._behind):
                self._behind = event.tag_offset
                share = share_of(event.topic, event.id)
                place = event.place
                if share in self._shares and ((given := self._given.get(share)) is None or place > given):
                    since, self._given[share] = -1, place
                    yield event
                if self._clock.now_ms() - renewed_ms >= ROUND_S * 1000:
                    renewed_ms = self._clock.now_ms()
                    if await self._renew():
                        break  # a share is new here, and may begin further back
            else:
                if not self._follow:
                    return
                since = await self._store.wait_any(timeout_s=ROUND_S, since=since)
                if self._clock.now_ms() - renewed_ms >= ROUND_S * 1000:
                    renewed_ms = self._clock.now_ms()
                    await self._renew()

    async def commit(self, event: TaggedEvent) -> None:
        """Store how far this member came with the event's share; Fenced where another has it by now."""
        number = share_of(event.topic, event.id)
        held = self._shares.get(number)

        def change(group: Group) -> Group:
            share = group.shares[number]
            if held is None or share.owner != self._member or share.term != held.term:
                raise Fenced(f"tag {self._tag!r}: another member has {event.topic}/{event.id} now: it gets it again")
            shares = list(group.shares)
            shares[number] = Share(share.owner, event.tag_offset, share.term)
            return Group(group.members, tuple(shares))

        await self._change(change)

    async def _renew(self) -> bool:
        """Say that this member lives, and see what it is to read; True where a share is new."""
        now_ms = self._clock.now_ms()
        group = await self._change(lambda found: renewed(found, self._member, now_ms=now_ms, lease_ms=self._lease_ms))
        before, self._shares = self._shares, owned(group, self._member)
        new = {
            number
            for number, share in self._shares.items()
            if number not in before or before[number].term != share.term
        }
        kept = await asyncio.to_thread(self._offsets, new) if self._offsets is not None and new else {}
        begins: list[str | None] = []
        for number in new:
            offset = kept.get(number) if self._offsets is not None else self._shares[number].offset
            self._given.pop(number, None)
            self._shares[number] = Share(self._member, offset, self._shares[number].term)
            if offset is not None:
                self._given[number] = decode_offset(self._tag, offset)
            begins.append(offset)
        if new:
            self._behind = self._least([*begins, *([self._behind] if before else [])])
        return bool(new)

    def _least(self, offsets: list[str | None]) -> str | None:
        known = [offset for offset in offsets if offset is not None]
        if len(known) < len(offsets):
            return None  # the beginning
        return min(known, key=lambda offset: decode_offset(self._tag, offset))

    async def _change(self, change: Callable[[Group], Group]) -> Group:
        for _ in range(ATTEMPTS_MAX):
            text = await self._store.setting(self._setting)
            group = change(decode_group(text))
            after = encode_group(group)
            if after == text or await self._store.set_setting(self._setting, after, expected=text):
                return group
        raise Unavailable(f"{self._setting}: others changed it {ATTEMPTS_MAX} times meanwhile: try again")
