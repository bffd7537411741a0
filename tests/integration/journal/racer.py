"""One of several processes that race for the next number of the same journals; prints what it was told."""

from __future__ import annotations

import asyncio
import json
import sys

import tidebook
from tidebook import Conflict, Event


async def main(where: str, topic: str, name: str, ids: list[str], wins_wanted: int) -> None:
    async with tidebook.open(where) as book:
        journal = book.journal(topic)
        last = dict.fromkeys(ids, 0)
        wins = 0
        while wins < wins_wanted:
            for id in ids:
                try:
                    done = await journal.append(id, [Event(f"{name}-{wins}")], expected=last[id])
                except Conflict as conflict:
                    last[id] = conflict.found
                    print(json.dumps({"lost": id, "expected": conflict.expected, "found": conflict.found}))
                else:
                    assert done.last is not None
                    print(json.dumps({"won": id, "seq_nr": done.last, "payload": f"{name}-{wins}"}))
                    last[id] = done.last
                    wins += 1


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(","), int(sys.argv[5])))
