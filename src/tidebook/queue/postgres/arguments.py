"""Statement parameters as array literals: every driver passes text on unchanged, far cheaper than lists of objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidebook.queue.port import Failure, LeasedEntry, NewEntry, QueueRef

Parameters = tuple[object, ...]


def number_array(values: Iterable[int | None]) -> str:
    """Return an array of numbers, such as `{1,NULL,3}`."""
    return "{" + ",".join(["NULL" if value is None else str(value) for value in values]) + "}"


def boolean_array(values: Iterable[bool]) -> str:
    """Return an array of booleans, such as `{t,f}`."""
    return "{" + ",".join(["t" if value else "f" for value in values]) + "}"


def uuid_array(values: Iterable[bytes]) -> str:
    """Return an array of uuids, each from 16 bytes."""
    return "{" + ",".join([value.hex() for value in values]) + "}"


def text_array(values: Iterable[str | None]) -> str:
    """Return an array of texts."""
    return "{" + ",".join(["NULL" if value is None else _quote(value) for value in values]) + "}"


def bytea_array(values: Iterable[bytes]) -> str:
    """Return an array of byte strings."""
    return "{" + ",".join(['"\\\\x' + value.hex() + '"' for value in values]) + "}"


def _quote(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def put_parameters(queue: QueueRef, entries: Sequence[NewEntry], inserted_at: int) -> Parameters:
    """Return the parameters of `_put`: entries sorted by hash, each with its position in the call."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].keyhash)
    ordered = [entries[index] for index in order]
    return (
        queue.id,
        inserted_at,
        queue.format,
        uuid_array(entry.keyhash for entry in ordered),
        number_array(order),
        number_array(entry.priority for entry in ordered),
        number_array(entry.process_at for entry in ordered),
        number_array(entry.expires_at for entry in ordered),
        number_array(entry.kind for entry in ordered),
        text_array(entry.key for entry in ordered),
        bytea_array(entry.data for entry in ordered),
    )


def held_parameters(held: Sequence[LeasedEntry]) -> Parameters:
    """Return the arrays of key hashes and of their tokens."""
    return uuid_array(entry.keyhash for entry in held), uuid_array(entry.token for entry in held)


def fail_parameters(queue: QueueRef, failures: Sequence[Failure]) -> Parameters:
    """Return the parameters of `_fail`."""
    return (
        queue.id,
        queue.settings.max_timeouts,
        *held_parameters([failure.held for failure in failures]),
        number_array(failure.delay_ms for failure in failures),
        text_array(failure.reason for failure in failures),
    )
