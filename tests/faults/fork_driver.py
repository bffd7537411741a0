"""Run as a program: processes that fork while they have a book open. Prints one JSON object.

`refused` lists what each use of the parent's book came to in a child; `lost` counts what was acknowledged and is not
there, of journals, WAL and queue.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tidebook
from tidebook.core.event import Event

SECONDS_MAX = 60
WORKERS = 3


def work(folder: str, name: str, count: int, begun: Any, answer: Any) -> None:
    """Open a book, write to all that it has, and report what was acknowledged."""
    signal.alarm(SECONDS_MAX)
    acknowledged = {"journal": 0, "wal": 0, "queue": 0}
    problem = None
    try:
        with tidebook.open_sync(folder) as book:
            journal, queue = book.journal("t"), book.queue("q")
            region = book.wal("w").open_region(int(name), create=True)
            for n in range(count):
                journal.append(name, [Event({"n": n})])
                acknowledged["journal"] += 1
                region.write(table=1, payloads=[b"%d" % n])
                acknowledged["wal"] += 1
                queue.put({"n": n}, key=f"{name}-{n}")
                acknowledged["queue"] += 1
                if n == 1:
                    begun.put(name)
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        begun.put(name)
    answer.put((name, acknowledged, problem))


def lost(folder: str, acknowledged: dict[str, dict[str, int]]) -> dict[str, int]:
    """How much of what was acknowledged is not there."""
    missing = {"journal": 0, "wal": 0, "queue": 0}
    with tidebook.open_sync(folder) as book:
        put = {entry.key for entry in book.queue("q").entries(limit=10_000)}
        for name, counts in acknowledged.items():
            there = {event.payload["n"] for event in book.journal("t").read(name)}
            missing["journal"] += counts["journal"] - len(there & set(range(counts["journal"])))
            missing["queue"] += sum(f"{name}-{n}" not in put for n in range(counts["queue"]))
            if counts["wal"]:
                written = {entry.payload for entry in book.wal("w").open_region(int(name)).read()}
                missing["wal"] += sum(b"%d" % n not in written for n in range(counts["wal"]))
    return missing


def workers(folder: str, method: str) -> dict[str, Any]:
    """Workers of `multiprocessing`, started while the book is open and busy; it is closed and opened as they work."""
    context: Any = multiprocessing.get_context(method)
    begun, answer = context.Queue(), context.Queue()
    counts = {"journal": 0, "wal": 0, "queue": 0}
    acknowledged: dict[str, dict[str, int]] = {"0": counts}
    problems = []

    def append(book: Any) -> None:
        book.journal("t").append("0", [Event({"n": counts["journal"]})])
        counts["journal"] += 1

    started = threading.Event()
    with tidebook.open_sync(folder) as book:
        append(book)

        def be_busy() -> None:
            while not started.is_set():
                append(book)

        busy = threading.Thread(target=be_busy)
        busy.start()
        processes = []
        for number in range(1, WORKERS + 1):
            process = context.Process(target=work, args=(folder, str(number), 40 * number, begun, answer))
            process.start()
            processes.append(process)
        started.set()
        busy.join()
        for _ in processes:
            begun.get(timeout=SECONDS_MAX)
    for _ in range(5):
        with tidebook.open_sync(folder) as book:
            append(book)
    for _ in processes:
        name, counted, problem = answer.get(timeout=SECONDS_MAX)
        acknowledged[name] = counted
        problems += [problem] if problem else []
    for process in processes:
        process.join(SECONDS_MAX)
    return {"acknowledged": acknowledged, "lost": lost(folder, acknowledged), "problems": problems}


def uses(book: Any) -> dict[str, Callable[[], Any]]:
    """Everything that a sync book does, by name."""
    journal, region = book.journal("t"), book.wal("w").open_region(9, create=True)
    queue, tags = book.queue("q"), book.tags
    queue.put({"n": 0})
    journal.append("0", [Event({"n": 0})])
    following = journal.tail("0")
    next(following)
    return {
        "journal": lambda: book.journal("t"),
        "append": lambda: journal.append("0", [Event({})]),
        "read": lambda: list(journal.read("0")),
        "tail on": lambda: next(following),
        "pointer": lambda: journal.pointer("0"),
        "tags": lambda: list(tags.read("x")),
        "wal": lambda: region.write(table=1, payloads=[b"x"]),
        "queue": lambda: queue.put({"n": 1}),
        "claim": lambda: queue.claim(limit=1),
        "outbox": lambda: book.outbox.status(),
    }


def told(use: Callable[[], Any]) -> str:
    try:
        return f"returned {use()!r}"
    except tidebook.TidebookError as error:
        return type(error).__name__ if "fork" in str(error) else repr(error)
    except BaseException as error:
        return repr(error)


def answer_of(pid: int, source: int) -> tuple[dict[str, str], int]:
    """What a child wrote, and the status that it ended with."""
    with open(source) as answered:
        text = answered.read()
    return json.loads(text or "{}"), os.waitpid(pid, 0)[1]


def preload(folder: str) -> dict[str, Any]:
    """A master that opened a book when it loaded the application, and workers that it forks: gunicorn's `--preload`."""
    master = tidebook.open_sync(folder)
    master.__enter__()
    each = uses(master)
    answers = []
    for number in range(1, WORKERS + 1):
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS_MAX)
            refused = {name: told(use) for name, use in each.items()}
            with tidebook.open_sync(folder) as book:  # as in a `post_fork` hook
                for n in range(5):
                    book.journal("t").append(f"worker {number}", [Event({"n": n})])
            os.write(sink, json.dumps(refused).encode())
            master.__exit__(None, None, None)
            sys.exit(0)  # the interpreter ends as usual, clean-up included
        os.close(sink)
        master.journal("t").append("0", [Event({"n": number})])
        found, status = answer_of(pid, source)
        answers.append(found)
        assert status == 0
    pointers = [master.journal("t").pointer(id) for id in ("0", "worker 1", "worker 2", "worker 3")]
    master.__exit__(None, None, None)
    return {"refused": answers, "pointers": pointers}


def asynchronous(folder: str) -> dict[str, Any]:
    """A book of an event loop, used by a child within that loop and in one of its own."""
    answers: dict[str, str] = {}

    async def ask(uses: dict[str, Callable[[], Any]]) -> dict[str, str]:
        found = {}
        for name, use in uses.items():
            try:
                found[name] = f"returned {await use()!r}"
            except tidebook.TidebookError as error:
                found[name] = type(error).__name__ if "fork" in str(error) else repr(error)
            except BaseException as error:
                found[name] = repr(error)
        return found

    async def listed(items: Any) -> list[Any]:
        return [item async for item in items]

    async def main() -> None:
        async with tidebook.open(folder) as book:
            journal, queue, tags = book.journal("t"), book.queue("q"), book.tags
            region = await book.wal("w").open_region(9, create=True)
            await journal.append("0", [Event({"n": 0})])
            await queue.put({"n": 0})

            async def journal_again() -> Any:
                return book.journal("t")

            async def outbox() -> Any:
                return await book.outbox.status()

            each: dict[str, Callable[[], Any]] = {
                "journal": journal_again,
                "append": lambda: journal.append("0", [Event({})]),
                "append elsewhere": lambda: journal.append("1", [Event({})]),
                "read": lambda: listed(journal.read("0")),
                "pointer": lambda: journal.pointer("0"),
                "ids": lambda: listed(journal.ids()),
                "tags": lambda: listed(tags.read("x")),
                "wal": lambda: region.write(table=1, payloads=[b"x"]),
                "queue": lambda: queue.put({"n": 1}),
                "claim": lambda: queue.claim(limit=1),
                "outbox": outbox,
            }
            for where in ("the parent's loop", "a loop of its own"):
                source, sink = os.pipe()
                pid = os.fork()
                if pid == 0:
                    signal.alarm(SECONDS_MAX)
                    if where == "a loop of its own":
                        found: dict[str, str] = {}
                        asker = threading.Thread(target=lambda: found.update(asyncio.run(ask(each))))  # noqa: B023
                        asker.start()
                        asker.join()
                    else:
                        found = await ask(each)
                        await book.__aexit__(None, None, None)
                    os.write(sink, json.dumps(found).encode())
                    os._exit(0)
                os.close(sink)
                found, status = answer_of(pid, source)
                answers.update({f"{name} in {where}": each for name, each in found.items()})
                answers[f"ended in {where}"] = str(status)
            await journal.append("0", [Event({"n": 1})])

    asyncio.run(main())
    return {"refused": answers}


if __name__ == "__main__":
    signal.alarm(2 * SECONDS_MAX)
    kind, where = sys.argv[1], str(Path(sys.argv[2]))
    report = {"preload": preload, "async": asynchronous}.get(kind) or (lambda folder: workers(folder, kind))
    print(json.dumps(report(where)), flush=True)
