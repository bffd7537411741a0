"""Requests and responses of queues."""

from __future__ import annotations

import binascii
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tidebook.api.payload import payload_from, payload_to
from tidebook.core.errors import InvalidInput
from tidebook.queue.entry import Entry
from tidebook.queue.job import Job
from tidebook.queue.port import ENTRIES_MAX, LeasedEntry
from tidebook.queue.priority import DEFAULT
from tidebook.queue.views import DeadLetter, EntryView

CLAIM_MAX = 1_000
#: The longest time that a claim may wait for work.
CLAIM_WAIT_S_MAX = 60.0
ENTRIES_LISTED_MAX = 10_000

Seconds = Annotated[float, Meta(ge=0, le=3_153_600_000)]


class EntryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An entry to put: `data` (a JSON value or text) or `data_base64` (bytes). Dates need a time zone."""

    data: Any = UNSET
    data_base64: bytes | UnsetType = UNSET
    key: str | None = None
    priority: Annotated[int, Meta(ge=0, le=255)] = DEFAULT
    process_at: datetime | None = None
    expires_at: datetime | None = None
    #: The trace that its processing continues; by default the `traceparent` header of the request.
    traceparent: str | None = None

    def entry(self, traceparent: str | None = None) -> Entry:
        """Return the entry to put; it continues the trace of the request, unless it names another one."""
        return Entry(
            data=payload_from(self.data, self.data_base64, "data"),
            key=self.key,
            priority=self.priority,
            process_at=self.process_at,
            expires_at=self.expires_at,
            traceparent=self.traceparent or traceparent,
        )


class PutBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entries to put; those with the same key are merged."""

    entries: Annotated[tuple[EntryBody, ...], Meta(min_length=1, max_length=ENTRIES_MAX)]


class PutResponse(msgspec.Struct, frozen=True):
    """How many entries are new, and how many were merged into a waiting one."""

    inserted: int
    merged: int


class ClaimBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A claim of due entries; with `wait_s` it waits that long for the first one.

    `done` has the leases of finished jobs: they are finished first, which saves a worker every second request.
    """

    limit: Annotated[int, Meta(ge=1, le=CLAIM_MAX)] = 1
    lease_s: Annotated[float, Meta(gt=0, le=3_153_600_000)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=CLAIM_WAIT_S_MAX)] = 0.0
    together: bool = True
    #: The id of the worker that claims.
    worker: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    done: Annotated[tuple[str, ...], Meta(max_length=CLAIM_MAX)] = ()


class JobResponse(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A claimed entry; `lease` proves the claim to `heartbeat`, `done` and `fail`."""

    lease: str
    id: int
    priority: int
    timeouts: int
    inserted_at: datetime
    process_at: datetime
    started_at: datetime
    lease_until: datetime
    expires_at: datetime | None = None
    key: str | None = None
    data: Any = UNSET
    data_base64: bytes | UnsetType = UNSET
    traceparent: str | None = None

    @classmethod
    def of(cls, job: Job) -> JobResponse:
        """Return the response for a job."""
        data, encoded = payload_to(job.data)
        return cls(
            encode_lease(job.held, job.id, job.key), job.id, job.priority, job.timeouts, job.inserted_at,
            job.process_at, job.started_at, job.lease_until, job.expires_at, job.key, data, encoded,
            job.traceparent,
        )  # fmt: skip


class ClaimResponse(msgspec.Struct, frozen=True):
    """The claimed entries; none if nothing is due."""

    jobs: list[JobResponse]


class HeldJob:
    """A job decoded from its lease: the fields that a queue needs to extend, finish or fail it."""

    __slots__ = ("held", "id", "key", "lease_until_ms", "queue")

    def __init__(self, queue: str, lease: str) -> None:
        self.queue = queue
        self.held, self.id, self.key = decode_lease(lease)
        self.lease_until_ms: int | None = None

    def extended(self, lease_until: int) -> None:
        """Record the new end of the lease after a heartbeat."""
        self.lease_until_ms = lease_until

    def __repr__(self) -> str:
        return f"job {self.id} of queue {self.queue!r}"


Leases = Annotated[tuple[str, ...], Meta(min_length=1, max_length=CLAIM_MAX)]


class HeartbeatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The leases to extend."""

    leases: Leases
    lease_s: Annotated[float, Meta(gt=0, le=3_153_600_000)] | None = None


class HeartbeatResponse(msgspec.Struct, frozen=True):
    """The new ends of the leases, in the order of the request."""

    lease_until: list[datetime]


class DoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The leases of the finished jobs."""

    leases: Leases


class FailBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The leases of the failed jobs, and the minimum time until their entries are retried."""

    leases: Leases
    delay_s: Seconds = 0.0
    reason: str = "it failed"


class FailResponse(msgspec.Struct, frozen=True):
    """The state of each entry afterwards: waiting, merged, dead or expired."""

    outcomes: list[str]


class QueueResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The number of entries of a queue, by state."""

    queue: str
    due: int
    later: int
    processing: int
    dead: int
    oldest_due_s: float
    next_at: datetime | None
    tables: int
    #: When the queue was paused; while it is paused, claims return nothing.
    paused_at: datetime | None = None


class WorkersQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum number of workers to list."""

    limit: Annotated[int, Meta(ge=1, le=ENTRIES_LISTED_MAX)] = 100


class WorkerBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker's report about itself."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    concurrency: Annotated[int, Meta(ge=0, lt=2**31)] = 1
    running: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    done: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    failed: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class WorkerResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its last report describes it; `gone` if it has been silent for too long."""

    id: str
    name: str
    queue: str
    started_at: datetime
    heartbeat_at: datetime
    gone: bool
    concurrency: int
    running: int
    done: int
    failed: int


class WorkersResponse(msgspec.Struct, frozen=True):
    """The workers of a queue, the latest heartbeat first."""

    workers: list[WorkerResponse]


class QueuesResponse(msgspec.Struct, frozen=True):
    """All queues."""

    queues: list[QueueResponse]


class EntriesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum number of entries to list."""

    limit: Annotated[int, Meta(ge=1, le=ENTRIES_LISTED_MAX)] = 100
    unmask: bool = False


class EntryResponse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A waiting (W) or processing (P) entry."""

    id: int
    status: str
    priority: int
    timeouts: int
    inserted_at: datetime
    process_at: datetime
    key: str | None = None
    expires_at: datetime | None = None
    started_at: datetime | None = None
    lease_until: datetime | None = None
    data: Any = UNSET
    data_base64: bytes | UnsetType = UNSET

    @classmethod
    def of(cls, view: EntryView) -> EntryResponse:
        """Return the response for an entry."""
        fields = {name: getattr(view, name) for name in view.__struct_fields__ if name != "data"}
        data, encoded = payload_to(view.data)
        return cls(**fields, data=data, data_base64=encoded)


class EntriesResponse(msgspec.Struct, frozen=True):
    """The first entries: those being processed, then the waiting ones, in claim order."""

    entries: list[EntryResponse]


class DeadLetterResponse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A dead letter: retry it, edit it first, or drop it."""

    id: int
    queue: str
    raised_at: datetime
    reason: str
    priority: int
    timeouts: int
    inserted_at: datetime
    key: str | None = None
    expires_at: datetime | None = None
    data: Any = UNSET
    data_base64: bytes | UnsetType = UNSET

    @classmethod
    def of(cls, letter: DeadLetter) -> DeadLetterResponse:
        """Return the response for a dead letter."""
        fields = {name: getattr(letter, name) for name in letter.__struct_fields__ if name != "data"}
        data, encoded = payload_to(letter.data)
        return cls(**fields, data=data, data_base64=encoded)


class DeadLettersResponse(msgspec.Struct, frozen=True):
    """Dead letters, newest first."""

    dead_letters: list[DeadLetterResponse]


class DataBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """New data of a dead letter: `data` or `data_base64`."""

    data: Any = UNSET
    data_base64: bytes | UnsetType = UNSET


class DueLine(msgspec.Struct, frozen=True):
    """The time, by the store's clock, at which work became due."""

    due_at: datetime


_SixteenBytes = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    keyhash: _SixteenBytes
    token: _SixteenBytes
    slot: _Number
    together: _Number
    id: _Number
    key: str | None


#: Base64 with the alphabet for URLs and without padding; the functions of `base64` take twice as long.
_TO_URL, _FROM_URL = bytes.maketrans(b"+/", b"-_"), bytes.maketrans(b"-_", b"+/")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Lease).decode


def encode_lease(held: LeasedEntry, id: int, key: str | None) -> str:
    """Return the opaque string that proves a claim."""
    packed = _encode(_Lease(held.keyhash, held.token, held.slot, held.together, id, key))
    return binascii.b2a_base64(packed, newline=False).translate(_TO_URL, b"=").decode()


def decode_lease(text: str) -> tuple[LeasedEntry, int, str | None]:
    """Undo `encode_lease`; raise `InvalidInput` for any other string."""
    try:
        found = _decode(binascii.a2b_base64((text + "=" * (-len(text) % 4)).encode().translate(_FROM_URL)))
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInput(f"{text[:40]!r} is not a lease: send the lease of a claimed job back unchanged") from error
    return LeasedEntry(found.keyhash, found.token, found.slot, found.together), found.id, found.key
