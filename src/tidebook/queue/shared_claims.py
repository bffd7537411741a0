"""Serve concurrent claims with shared calls, and repeat the call for the claims that got nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from tidebook.core.errors import TidebookError

Claim = TypeVar("Claim")
Kind = TypeVar("Kind", bound=Hashable)
Claimed = TypeVar("Claimed")


async def share_claims(
    claims: Sequence[Claim],
    kind_of: Callable[[Claim], Kind],
    call: Callable[[Kind, Sequence[Claim]], Awaitable[Sequence[list[Claimed]]]],
) -> list[list[Claimed] | BaseException]:
    """Return the entries, or the error, of each claim; claims of one kind share a call.

    `call` returns one list for each claim, filled in the order of the claims. An empty list does not prove that nothing
    is due: a call never mixes slow entries with others, and returns a bounded number of bytes. Only a call that returns
    nothing at all does, so the claims that got nothing call again until then.
    """
    outcomes: list[list[Claimed] | BaseException] = [[] for _ in claims]
    for kind in dict.fromkeys(map(kind_of, claims)):
        unserved = [index for index, claim in enumerate(claims) if kind_of(claim) == kind]
        while unserved:
            try:
                shares = await call(kind, [claims[index] for index in unserved])
            except TidebookError as error:
                for index in unserved:
                    outcomes[index] = error
                break
            for index, share in zip(unserved, shares, strict=True):
                outcomes[index] = share
            if not shares[0]:
                break
            unserved = [index for index in unserved if not outcomes[index]]
    return outcomes
