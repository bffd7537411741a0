"""The rules that a recorded history must satisfy, even if processes were killed, stopped or restarted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 2**63 - 1
#: An entry that expires this soon may expire before it is finished.
SHORT_MS = 600_000


class Put(NamedTuple):
    """A put that was attempted, and whether it was acknowledged."""

    member: str
    serial: int
    key: str | None
    priority: int
    process_at: int | None
    expires_at: int
    inserted_at: int
    reported: bool


class Hold(NamedTuple):
    """A claim of one entry by one worker, and its outcome."""

    name: str
    at: int
    asked: int
    id: int
    key: str | None
    member: str
    serial: int
    priority: int
    inserted_at: int
    process_at: int
    expires_at: int
    started_at: int
    #: The last end of its lease that was returned to the worker.
    lease_until: int
    #: When the worker began to finish the entry or give it back; NEVER if it died before or had lost its lease.
    released: int
    released_by: str | None
    #: `finished`, `failed`, `lost` or `unknown`; None if the worker died before it got an answer.
    outcome: str | None
    reported: int


class Histories(NamedTuple):
    """All recorded puts and holds."""

    puts: list[Put]
    holds: list[Hold]


def read(files: Iterable[Path]) -> Histories:
    """Read the histories of all processes; the last line of a killed one may be incomplete."""
    events = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    events.sort(key=lambda event: event["at"])
    return of(events)


def of(events: list[dict[str, Any]]) -> Histories:
    """Return the puts and holds of recorded events, which must be sorted by time."""
    put = {(e["member"], e["serial"]) for e in events if e["what"] == "put"}
    puts = [
        Put(
            e["member"], e["serial"], e["key"], e["priority"], e["process_at"],
            NEVER if e["expires_at"] is None else e["expires_at"], e["inserted_at"], (e["member"], e["serial"]) in put,
        )
        for e in events if e["what"] == "putting"
    ]  # fmt: skip
    of_hold: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if "hold" in event:
            of_hold[event["hold"]].append(event)
    return Histories(puts, [_hold(each) for each in of_hold.values()])


def _hold(events: list[dict[str, Any]]) -> Hold:
    first, *rest = events
    release = next((e for e in rest if e["what"] in {"finishing", "failing"}), None)
    end = next((e for e in rest if e["what"] in {"finished", "failed", "lost", "unknown"}), None)
    return Hold(
        first["hold"], first["at"], first["asked"], first["id"], first["key"], first["data"]["member"],
        first["data"]["serial"], first["priority"], first["inserted_at"], first["process_at"],
        NEVER if first["expires_at"] is None else first["expires_at"], first["started_at"],
        max(e["lease_until"] for e in events if "lease_until" in e),
        NEVER if release is None else release["at"], None if release is None else release["what"],
        None if end is None else end["what"], NEVER if end is None else end["at"],
    )  # fmt: skip


def faults_in(found: Histories) -> list[str]:
    """Return every violation of the rules in a history."""
    by_thing: dict[object, list[Hold]] = defaultdict(list)
    for hold in sorted(found.holds, key=lambda hold: (hold.started_at, hold.at)):
        by_thing[hold.key if hold.key is not None else hold.id].append(hold)
    return [
        *_handed_out_wrongly(found.holds),
        *(fault for holds in by_thing.values() for fault in _held_by_two(holds)),
        *(fault for holds in by_thing.values() for fault in _finished_wrongly(holds)),
        *_never_done(found),
        *_merged_wrongly(found),
    ]


def _handed_out_wrongly(holds: list[Hold]) -> Iterator[str]:
    for hold in holds:
        if hold.expires_at <= hold.started_at:
            yield f"{hold.name} was handed out expired: {hold}"
        if hold.process_at > hold.started_at:
            yield f"{hold.name} was handed out before its date: {hold}"


def _held_by_two(holds: list[Hold]) -> Iterator[str]:
    """Check that two holds of one key do not overlap: the first was released, or its lease had ended.

    A claim has the time at which its statement began, but may get an entry that a sweep freed later: it takes effect at
    some time during the call.
    """
    for first, second in combinations(holds, 2):
        took_ms = (second.at - second.asked) / 1_000_000
        if second.started_at + took_ms < first.lease_until and second.at < first.released:
            yield f"{first.name} and {second.name} held {first.key or first.id} at the same time: {first} {second}"


def _finished_wrongly(holds: list[Hold]) -> Iterator[str]:
    """Check that no worker finishes an entry of another one, and that a finished entry is never claimed again."""
    for first, second in combinations(holds, 2):
        if first.id != second.id or first.outcome != "finished":
            continue
        if second.at < first.released:
            yield f"{first.name} finished the entry of {second.name}: {first} {second}"
        if second.asked > first.reported:
            yield f"{second.name} claimed what {first.name} had finished: {first} {second}"


def _never_done(found: Histories) -> Iterator[str]:
    """Check that each acknowledged put is finished, itself or merged into a later one of its key.

    An entry whose worker died while finishing it counts as finished.
    """
    done: dict[object, int] = {}
    for hold in found.holds:
        if hold.released_by == "finishing" and hold.outcome in {"finished", "unknown", None}:
            thing = hold.key if hold.key is not None else (hold.member, hold.serial)
            done[thing] = max(done.get(thing, 0), hold.serial)
    last_at = max((hold.started_at for hold in found.holds), default=0)
    for put in found.puts:
        thing = put.key if put.key is not None else (put.member, put.serial)
        if put.reported and put.expires_at > last_at + SHORT_MS and done.get(thing, 0) < put.serial:
            yield f"put {put.serial} of {thing} was never done: {put}"


def _merged_wrongly(found: Histories) -> Iterator[str]:
    """Check that an entry merges all puts of its key, from the one that inserted it to the one whose data it has."""
    puts: dict[str, list[Put]] = defaultdict(list)
    for put in found.puts:
        if put.key is not None:
            puts[put.key].append(put)
    for hold in found.holds:
        if hold.key is None:
            continue
        first = next((put.serial for put in puts[hold.key] if put.inserted_at == hold.inserted_at), None)
        merged = [put for put in puts[hold.key] if first is not None and first <= put.serial <= hold.serial]
        if not merged:
            yield f"{hold.name} belongs to no put: {hold}"
        elif hold.priority != min(put.priority for put in merged):
            yield f"{hold.name} does not have the smallest priority of {merged}: {hold}"
        elif hold.expires_at != max(put.expires_at for put in merged):
            yield f"{hold.name} does not have the latest expiry of {merged}: {hold}"
        elif hold.process_at < max(put.process_at or 0 for put in merged):
            yield f"{hold.name} does not have the latest process date of {merged}: {hold}"
