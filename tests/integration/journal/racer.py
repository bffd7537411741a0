"""A process that races with others for the next number of the same journals, and prints the outcomes."""

from __future__ import annotations

import asyncio
import json
import sys

import tidebook
from tidebook.core.errors import Conflict, NotFound, OutcomeUnknown, Unavailable
from tidebook.core.event import Event
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended

#: After this many attempts an unknown outcome stays unknown: too many other appends have followed.
ATTEMPTS_MAX = 60
REST_S = 0.2


async def append(journal: Journal, id: str, payload: str, expected: int) -> tuple[Appended, int]:
    """Append once, with as many attempts as needed; return the result and the number of attempts."""
    unknown: OutcomeUnknown | None = None
    for attempt in range(ATTEMPTS_MAX):
        try:
            return await journal.append(id, [Event(payload)], expected=expected, retry=unknown), attempt + 1
        except OutcomeUnknown as error:
            unknown = error
        except (Unavailable, NotFound):  # a broker that has just started may not know its topics
            pass
        report(retries=id)
        await asyncio.sleep(REST_S)
    raise unknown or Unavailable("the broker did not recover")


def report(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(where: str, topic: str, name: str, ids: list[str], wins_wanted: int) -> None:
    async with tidebook.open(where) as book:
        journal = book.journal(topic)
        last = dict.fromkeys(ids, 0)
        wins = tries = 0
        while wins < wins_wanted:
            for id in ids:
                tries += 1
                payload = f"{name}-{tries}"
                try:
                    done, attempts = await append(journal, id, payload, last[id])
                except Conflict as conflict:
                    last[id] = conflict.found or 0  # `found` is a number, because nothing is purged
                    report(lost=id, expected=conflict.expected, found=conflict.found, payload=payload)
                except OutcomeUnknown:
                    report(unknown=id, payload=payload)  # the next attempt learns the journal's number
                else:
                    assert done.last is not None
                    report(won=id, seq_nr=done.last, payload=payload, attempts=attempts)
                    last[id] = done.last
                    wins += 1


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(","), int(sys.argv[5])))
