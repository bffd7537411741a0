"""Run as a program: processes that fork while they have a book open. Prints one JSON object.

`refused` has the result of each use of the parent's book in a child; `lost` counts acknowledged writes that are
missing, of journals, WAL, queue and outbox. The book is a folder, or a settings file with servers.
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
from tidebook.outbox import Message

SECONDS_MAX = 60
WORKERS = 3
FEATURES = ("journal", "wal", "queue", "outbox")
#: Topics, queues and namespaces of a run: servers are shared with other tests.
NAME = sys.argv[3] if len(sys.argv) > 3 else "t"


def work(folder: str, name: str, count: int, begun: Any, answer: Any) -> None:
    """Open a book, write with every feature, and report what was acknowledged."""
    signal.alarm(SECONDS_MAX)
    acknowledged = dict.fromkeys(FEATURES, 0)
    problem = None
    try:
        with tidebook.open_sync(folder) as book:
            journal, queue = book.journal(NAME), book.queue(NAME)
            region = book.wal(NAME).open_region(int(name), create=True)
            for n in range(count):
                journal.append(name, [Event({"n": n})])
                acknowledged["journal"] += 1
                region.write(table=1, payloads=[b"%d" % n])
                acknowledged["wal"] += 1
                queue.put({"n": n}, key=f"{name}-{n}")
                acknowledged["queue"] += 1
                book.outbox.publish_alone([Message(topic=f"out-{name}", payload=b"%d" % n)])
                acknowledged["outbox"] += 1
                if n == 1:
                    begun.put(name)
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        begun.put(name)
    answer.put((name, acknowledged, problem))


def lost(folder: str, acknowledged: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return how many acknowledged writes are missing, by feature."""
    missing = dict.fromkeys(FEATURES, 0)
    with tidebook.open_sync(folder) as book:
        put = {entry.key for entry in book.queue(NAME).entries(limit=10_000)}
        published = {status.topic: status.waiting for status in book.outbox.status()}
        for name, counts in acknowledged.items():
            found = {event.payload["n"] for event in book.journal(NAME).read(name)}
            missing["journal"] += counts["journal"] - len(found & set(range(counts["journal"])))
            missing["queue"] += sum(f"{name}-{n}" not in put for n in range(counts["queue"]))
            missing["outbox"] += counts["outbox"] - published.get(f"out-{name}", 0)
            if counts["wal"]:
                written = {entry.payload for entry in book.wal(NAME).open_region(int(name)).read()}
                missing["wal"] += sum(b"%d" % n not in written for n in range(counts["wal"]))
    return missing


def workers(folder: str, method: str) -> dict[str, Any]:
    """Start workers of `multiprocessing` while the book is open and busy; close and open it while they work."""
    context: Any = multiprocessing.get_context(method)
    begun, answer = context.Queue(), context.Queue()
    counts = dict.fromkeys(FEATURES, 0)
    acknowledged: dict[str, dict[str, int]] = {"0": counts}
    problems = []

    def append(book: Any) -> None:
        book.journal(NAME).append("0", [Event({"n": counts["journal"]})])
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
    """Return calls of everything that a sync book does, by name."""
    journal, region = book.journal(NAME), book.wal(NAME).open_region(9, create=True)
    queue, tags, outbox = book.queue(NAME), book.tags, book.outbox
    queue.put({"n": 0})
    journal.append("0", [Event({"n": 0})])
    following = journal.tail("0")
    next(following)
    return {
        "journal": lambda: book.journal(NAME),
        "append": lambda: journal.append("0", [Event({})]),
        "read": lambda: list(journal.read("0")),
        "tail on": lambda: next(following),
        "pointer": lambda: journal.pointer("0"),
        "tags": lambda: list(tags.read("x")),
        "wal": lambda: region.write(table=1, payloads=[b"x"]),
        "queue": lambda: queue.put({"n": 1}),
        "claim": lambda: queue.claim(limit=1),
        "outbox": lambda: book.outbox.status(),
        "outbox status": lambda: outbox.status(),
        "publish alone": lambda: outbox.publish_alone([Message(topic=f"{NAME}-out", payload=b"x")]),
    }


def reported(use: Callable[[], Any]) -> str:
    try:
        return f"returned {use()!r}"
    except tidebook.TidebookError as error:
        return type(error).__name__ if "fork" in str(error) else repr(error)
    except BaseException as error:
        return repr(error)


def answer_of(pid: int, source: int) -> tuple[dict[str, str], int]:
    """Return what a child wrote, and its exit status."""
    with open(source) as answered:
        text = answered.read()
    return json.loads(text or "{}"), os.waitpid(pid, 0)[1]


def preload(folder: str) -> dict[str, Any]:
    """Fork workers of a master that opened a book when it loaded the application, as gunicorn's `--preload` does."""
    master = tidebook.open_sync(folder)
    master.__enter__()
    each = uses(master)
    answers = []
    for number in range(1, WORKERS + 1):
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(SECONDS_MAX)
            refused = {name: reported(use) for name, use in each.items()}
            with tidebook.open_sync(folder) as book:  # as in a `post_fork` hook
                for n in range(5):
                    book.journal(NAME).append(f"worker {number}", [Event({"n": n})])
            os.write(sink, json.dumps(refused).encode())
            master.__exit__(None, None, None)
            sys.exit(0)  # the interpreter ends as usual, with its clean-up
        os.close(sink)
        master.journal(NAME).append("0", [Event({"n": number})])
        found, status = answer_of(pid, source)
        answers.append(found)
        assert status == 0
    pointers = [master.journal(NAME).pointer(id) for id in ("0", "worker 1", "worker 2", "worker 3")]
    master.__exit__(None, None, None)
    return {"refused": answers, "pointers": pointers}


def asynchronous(folder: str) -> dict[str, Any]:
    """Use the book of an event loop in a child, within that loop and within a new one."""
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
            journal, queue, tags, outbox = book.journal(NAME), book.queue(NAME), book.tags, book.outbox
            region = await book.wal(NAME).open_region(9, create=True)
            await journal.append("0", [Event({"n": 0}, tags={"x"})])
            await queue.put({"n": 0})
            await outbox.publish_alone([Message(topic=f"{NAME}-out", payload=b"x")])
            following = journal.tail("0")
            await anext(following)

            async def journal_again() -> Any:
                return book.journal(NAME)

            async def outbox_again() -> Any:
                return await book.outbox.status()

            async def publish() -> Any:
                return outbox.publish(None, topic=f"{NAME}-out", payload=b"x")

            each: dict[str, Callable[[], Any]] = {
                "journal": journal_again,
                "append": lambda: journal.append("0", [Event({})]),
                "append elsewhere": lambda: journal.append("1", [Event({})]),
                "append many": lambda: journal.append_many([("2", [Event({})])]),
                "purge": lambda: journal.purge("0"),
                "read": lambda: listed(journal.read("0")),
                "read elsewhere": lambda: listed(journal.read("3")),
                "tail on": lambda: anext(following),
                "pointer": lambda: journal.pointer("0"),
                "ids": lambda: listed(journal.ids()),
                "tags": lambda: listed(tags.read("x")),
                "all tags": lambda: listed(tags.list()),
                "wal": lambda: region.write(table=1, payloads=[b"x"]),
                "queue": lambda: queue.put({"n": 1}),
                "claim": lambda: queue.claim(limit=1),
                "entries": lambda: queue.entries(),
                "outbox": outbox_again,
                "outbox status": lambda: outbox.status(),
                "publish": publish,
                "publish alone": lambda: outbox.publish_alone([Message(topic=f"{NAME}-out", payload=b"x")]),
                "relay": lambda: outbox.relay(once=True),
            }

            def in_flight() -> list[asyncio.Task[Any]]:
                """Start calls before the process forks, which later ones would wait for."""
                calls: list[Any] = [journal.append("4", [Event({})]), listed(journal.read("0")), journal.pointer("0")]
                calls += [listed(journal.ids()), listed(tags.read("x")), outbox.status()]
                return [asyncio.create_task(call) for call in calls]

            for where in ("the parent's loop", "a separate loop"):
                source, sink = os.pipe()
                begun = in_flight()
                await asyncio.sleep(0)
                pid = os.fork()
                if pid == 0:
                    signal.alarm(SECONDS_MAX)
                    if where == "a separate loop":
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
                await asyncio.gather(*begun)
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
