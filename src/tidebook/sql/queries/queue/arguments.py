"""Parameters as text: array literals that every driver passes on as they are, far cheaper than lists of objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidebook.sql.port.queue import Failure, Held, NewEntry, QueueRef

Parameters = tuple[object, ...]


def numbers(values: Iterable[int | None]) -> str:
    """`{1,NULL,3}`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    """`{t,f}`."""
    return "{" + ",".join(["t" if value else "f" for value in values]) + "}"


def hashes(values: Iterable[bytes]) -> str:
    """An array of uuids, each from 16 bytes."""
    return "{" + ",".join([value.hex() for value in values]) + "}"


def texts(values: Iterable[str | None]) -> str:
    """An array of texts."""
    return "{" + ",".join(["NULL" if value is None else _quoted(value) for value in values]) + "}"


def blobs(values: Iterable[bytes]) -> str:
    """An array of byte strings."""
    return "{" + ",".join(['"\\\\x' + value.hex() + '"' for value in values]) + "}"


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def put_parameters(queue: QueueRef, entries: Sequence[NewEntry], inserted_at: int) -> Parameters:
    """The parameters of `_put`, sorted by hash, each with its place in the call."""
    order = sorted(range(len(entries)), key=lambda at: entries[at].keyhash)
    ordered = [entries[at] for at in order]
    return (
        queue.id,
        inserted_at,
        queue.format,
        hashes(entry.keyhash for entry in ordered),
        numbers(order),
        numbers(entry.priority for entry in ordered),
        numbers(entry.process_at for entry in ordered),
        numbers(entry.expires_at for entry in ordered),
        numbers(entry.kind for entry in ordered),
        texts(entry.key for entry in ordered),
        blobs(entry.data for entry in ordered),
    )


def held_parameters(held: Sequence[Held]) -> Parameters:
    """Key hashes and tokens, side by side."""
    return hashes(each.keyhash for each in held), hashes(each.token for each in held)


def fail_parameters(queue: QueueRef, failures: Sequence[Failure]) -> Parameters:
    """The parameters of `_fail`."""
    return (
        queue.id,
        queue.settings.max_timeouts,
        *held_parameters([failure.held for failure in failures]),
        numbers(failure.delay_ms for failure in failures),
        texts(failure.reason for failure in failures),
    )
