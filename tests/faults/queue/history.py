"""What a recorded history must show, whatever was killed, stopped or restarted meanwhile."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

NEVER = 2**63 - 1
#: What expires so soon may well expire before it is done.
SHORT_MS = 600_000


class Put(NamedTuple):
    """A put that was tried, and whether the putter got the answer that it succeeded."""

    hand: str
    serial: int
    key: str | None
    priority: int
    process_at: int | None
    expires_at: int
    inserted_at: int
    reported: bool


class Hold(NamedTuple):
    """What one worker had in its hands, and what became of it."""

    name: str
    at: int
    asked: int
    id: int
    key: str | None
    hand: str
    serial: int
    priority: int
    inserted_at: int
    process_at: int
    expires_at: int
    started_at: int
    #: The last end of its lease that was returned to the worker.
    lease_until: int
    #: When the worker began to finish it or to give it back; NEVER: it died before, or its lease was lost.
    released: int
    released_by: str | None
    #: `finished`, `failed`, `lost`, `unknown`; None: it died before it got an answer.
    outcome: str | None
    reported: int


class Histories(NamedTuple):
    """All that was recorded."""

    puts: list[Put]
    holds: list[Hold]


def read(files: Iterable[Path]) -> Histories:
    """The histories of all hands; the last line of a killed one may be cut."""
    events = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]
    events.sort(key=lambda event: event["at"])
    return of(events)


def of(events: list[dict[str, Any]]) -> Histories:
    """Puts and holds from what was noted, in the order in which it was."""
    put = {(e["hand"], e["serial"]) for e in events if e["what"] == "put"}
    puts = [
        Put(
            e["hand"], e["serial"], e["key"], e["priority"], e["process_at"],
            NEVER if e["expires_at"] is None else e["expires_at"], e["inserted_at"], (e["hand"], e["serial"]) in put,
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
        first["hold"], first["at"], first["asked"], first["id"], first["key"], first["data"]["hand"],
        first["data"]["serial"], first["priority"], first["inserted_at"], first["process_at"],
        NEVER if first["expires_at"] is None else first["expires_at"], first["started_at"],
        max(e["lease_until"] for e in events if "lease_until" in e),
        NEVER if release is None else release["at"], None if release is None else release["what"],
        None if end is None else end["what"], NEVER if end is None else end["at"],
    )  # fmt: skip


def faults_in(found: Histories) -> list[str]:
    """Every way in which a history breaks the rules; none, if all is well."""
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
    """Of one key, in the order of the store's dates: the first has let go, or its lease had ended.

    A claim is dated when its statement begins, and may take what another sweep has freed while it runs: it took effect
    at some moment of the call.
    """
    for first, second in combinations(holds, 2):
        took_ms = (second.at - second.asked) / 1_000_000
        if second.started_at + took_ms < first.lease_until and second.at < first.released:
            yield f"{first.name} and {second.name} held {first.key or first.id} at one time: {first} {second}"


def _finished_wrongly(holds: list[Hold]) -> Iterator[str]:
    """Nobody finishes what is another's, and what is finished never comes again."""
    for first, second in combinations(holds, 2):
        if first.id != second.id or first.outcome != "finished":
            continue
        if second.at < first.released:
            yield f"{first.name} finished what {second.name} had: {first} {second}"
        if second.asked > first.reported:
            yield f"{second.name} was given what {first.name} had finished: {first} {second}"


def _never_done(found: Histories) -> Iterator[str]:
    """An acknowledged put is done, itself or with a later one of its key; one whose worker died then may be."""
    done: dict[object, int] = {}
    for hold in found.holds:
        if hold.released_by == "finishing" and hold.outcome in {"finished", "unknown", None}:
            thing = hold.key if hold.key is not None else (hold.hand, hold.serial)
            done[thing] = max(done.get(thing, 0), hold.serial)
    last_at = max((hold.started_at for hold in found.holds), default=0)
    for put in found.puts:
        thing = put.key if put.key is not None else (put.hand, put.serial)
        if put.reported and put.expires_at > last_at + SHORT_MS and done.get(thing, 0) < put.serial:
            yield f"put {put.serial} of {thing} was never done: {put}"


def _merged_wrongly(found: Histories) -> Iterator[str]:
    """A job is the merge of all puts of its key from the one that it was inserted by to the one whose data it has."""
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
            yield f"{hold.name} was put by nobody: {hold}"
        elif hold.priority != min(put.priority for put in merged):
            yield f"{hold.name} has not the smallest priority of {merged}: {hold}"
        elif hold.expires_at != max(put.expires_at for put in merged):
            yield f"{hold.name} has not the largest expiry of {merged}: {hold}"
        elif hold.process_at < max(put.process_at or 0 for put in merged):
            yield f"{hold.name} has not the largest process date of {merged}: {hold}"
