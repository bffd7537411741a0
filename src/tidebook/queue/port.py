"""The port of a queue store. `tidebook.testing.conformance` tests every adapter against it.

Times are milliseconds since 1970 on the store's clock, which alone decides what is due, leased or expired; only
`inserted_at` is by the clock of the process that puts an entry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from tidebook.core.errors import InvalidInput

#: The date that never comes: no expiry, no wake-up.
NEVER_MS: Final = 2**63 - 1
#: Entries from this priority on are claimed only when nothing more urgent is due.
SLOW_PRIORITY: Final = 200
PRIORITY_MAX: Final = 255
#: The maximum number of entries in one call of `put`.
ENTRIES_MAX: Final = 1_000
#: The maximum number of bytes of data in one put; a single entry may be larger.
PUT_BYTES_MAX: Final = 16_000_000
#: A hundred years.
LEASE_MS_MAX: Final = 3_153_600_000_000
#: The maximum number of process dates that `due` reports for a queue.
UPCOMING_MAX: Final = 200
#: A worker that has not reported itself for the first time counts as gone; after the second it is forgotten.
WORKER_GONE_MS: Final = 35_000
WORKER_FORGOTTEN_MS: Final = 3_600_000
#: The tokens of a worker's claims begin with this many bytes of its id.
HOLDER_BYTES: Final = 8

Period = Literal["hour", "day", "month", "ever"]
Drained = Literal["truncate", "reset", "drop"]
Synchronous = Literal["local", "remote_write", "on", "remote_apply"]
Outcome = Literal["waiting", "merged", "dead", "expired", "lost"]


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a queue. They are stored with the queue, so they are the same for every process."""

    #: The lease of a claim that does not specify one.
    lease_ms: int = 60_000
    #: How many times an entry may time out or fail; after one more it becomes a dead letter.
    max_timeouts: int = 5
    #: Whether an entry may be claimed while another one of its key is being processed.
    parallel_keys: bool = False
    #: How long entries go to one partition before they go to the next.
    period: Period = "day"
    #: A period other than `ever` also ends when this many entries were finished, failed, merged or expired in it.
    finished_max: int = 50_000
    #: What happens to a drained partition.
    drained: Drained = "truncate"
    #: Whether the queue has its own table instead of the shared one; fixed when the queue is created.
    own_table: bool = False
    #: PostgreSQL's synchronous_commit: `local` is durable on the primary, the others wait for replicas too.
    synchronous: Synchronous = "local"

    def __post_init__(self) -> None:
        """Raise InvalidInput for values that other processes could not use."""
        for name, least, most in (("lease_ms", 1, LEASE_MS_MAX), ("max_timeouts", 0, 255), ("finished_max", 1, 2**62)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidInput(f"{name} must be {least} to {most}, not {value!r}")
        for name, choices in (("period", Period), ("drained", Drained), ("synchronous", Synchronous)):
            if getattr(self, name) not in get_args(choices):
                raise InvalidInput(f"{name} must be one of {', '.join(get_args(choices))}, not {getattr(self, name)!r}")
        for name in ("parallel_keys", "own_table"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name} must be true or false, not {getattr(self, name)!r}")


class QueueRef(msgspec.Struct, frozen=True):
    """A queue as the store identifies it."""

    id: int
    name: str
    settings: QueueSettings
    #: The partitioned table that holds its entries.
    table: str = ""
    #: The number of the field declaration under which entries are put; 0: none.
    format: int = 0


class NewEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry to be put. Without a key, `keyhash` is unique to the entry."""

    keyhash: bytes
    kind: int
    data: bytes
    key: str | None = None
    priority: int = 100
    #: None means now.
    process_at: int | None = None
    expires_at: int = NEVER_MS
    #: The trace context of the put, as a W3C `traceparent`.
    trace: str | None = None


class Put(msgspec.Struct, frozen=True):
    """The result of a put: how many entries are new, and how many were merged into a waiting one."""

    inserted: int
    merged: int
    now_ms: int


class Step(NamedTuple):
    """A move of one mark in the transaction of a put; `before` is its expected place, None if there is no mark yet."""

    part: int
    before: str | None
    after: str


class LeasedEntry(msgspec.Struct, frozen=True, gc=False):
    """The identity of a claimed entry and the token that proves its lease."""

    keyhash: bytes
    token: bytes
    #: Where the store finds the entry: in PostgreSQL its partition when it was claimed, in SQLite its row.
    slot: int = 0
    #: The size of the bundle that contains the entry, 0 if none does; a whole bundle is finished in one step.
    together: int = 0


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """An entry that was claimed."""

    slot: int
    id: int
    keyhash: bytes
    key: str | None
    priority: int
    timeouts: int
    format: int
    inserted_at: int
    process_at: int
    expires_at: int
    started_at: int
    lease_until: int
    kind: int
    data: bytes
    #: The token of its claim.
    token: bytes
    together: int = 0
    trace: str | None = None

    @property
    def held(self) -> LeasedEntry:
        """Return the hash and token that prove the lease."""
        return LeasedEntry(self.keyhash, self.token, self.slot, self.together)


class FinishingClaim(msgspec.Struct, frozen=True):
    """A claim of a caller that has finished other entries."""

    token: bytes
    limit: int
    finished: Sequence[LeasedEntry] = ()


def find_lost(calls: Iterable[Sequence[LeasedEntry]], finished: Set[LeasedEntry]) -> list[list[LeasedEntry]]:
    """Return the entries that each caller has lost; an entry that two callers name is finished by the first."""
    left, lost = set(finished), list[list[LeasedEntry]]()
    for call in calls:
        lost.append([each for each in call if each not in left])
        left.difference_update(call)
    return lost


def limits_without_loss(claims: Sequence[FinishingClaim], finished: Set[LeasedEntry]) -> dict[bytes, int]:
    """Return the limits of the claims by token, without those whose caller has lost an entry."""
    limits = dict[bytes, int]()
    for claim, lost in zip(claims, find_lost([each.finished for each in claims], finished), strict=True):
        if not lost:
            limits[claim.token] = limits.get(claim.token, 0) + claim.limit
    return limits


def split_by_key(held: Sequence[LeasedEntry]) -> Iterator[list[LeasedEntry]]:
    """Split held entries into as few lists as possible, so that no list contains a key twice."""
    while held:
        by_key = {each.keyhash: each for each in held}
        yield list(by_key.values())
        held = [] if len(by_key) == len(held) else [each for each in held if by_key[each.keyhash] is not each]


class Failure(msgspec.Struct, frozen=True):
    """A claimed entry whose processing failed."""

    held: LeasedEntry
    delay_ms: int = 0
    reason: str = ""


class WaitingEntry(msgspec.Struct, frozen=True):
    """A stored entry, waiting or being processed, as a listing shows it."""

    id: int
    key: str | None
    status: str
    priority: int
    timeouts: int
    inserted_at: int
    process_at: int
    expires_at: int
    started_at: int | None
    lease_until: int | None
    kind: int
    data: bytes


class Due(msgspec.Struct, frozen=True):
    """When a queue next has work."""

    now_ms: int
    #: The earliest end of a lease.
    lease_end: int
    #: Whether an entry can be claimed now.
    ready: bool
    #: Whether due entries wait for another one of their key to be finished.
    held: bool
    #: The next process dates, ascending, at most UPCOMING_MAX.
    upcoming: tuple[int, ...] = ()
    #: Whether the queue is paused: then it has no work until it is resumed.
    paused: bool = False


class Counts(msgspec.Struct, frozen=True):
    """The number of entries of a queue, by state."""

    due: int
    later: int
    processing: int
    dead: int
    #: How long the oldest due entry has been due.
    oldest_due_ms: int
    next_at: int
    tables: int
    #: Since when the queue is paused; None if it is not.
    paused_at: int | None = None


class DeadLetterRow(msgspec.Struct, frozen=True):
    """A stored dead letter."""

    id: int
    queue: str
    raised_at: int
    reason: str
    key: str | None
    priority: int
    timeouts: int
    inserted_at: int
    expires_at: int
    kind: int
    data: bytes


class MaintenanceResult(msgspec.Struct, frozen=True):
    """The result of a sweep: the numbers of expired entries, expired leases and new dead letters."""

    expired: int = 0
    leases_expired: int = 0
    dead: int = 0
    #: When to sweep next: the earliest expiry, lease end or period end.
    next_at: int = NEVER_MS
    now_ms: int = 0


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report about itself."""

    id: bytes
    name: str
    concurrency: int
    running: int
    done: int
    failed: int


class WorkerRow(WorkerReport, frozen=True):
    """A worker as its last report describes it."""

    started_at: int
    reported_at: int
    now_ms: int

    @property
    def gone(self) -> bool:
        """Whether the worker has been silent for too long to be working."""
        return self.now_ms - self.reported_at > WORKER_GONE_MS


class WakeRequest(NamedTuple):
    """A notification that an entry becomes due at `at`. Without `at`, poll the queue; if `queue` is 0, poll all."""

    queue: int
    at: int | None


class QueueStore(Protocol):
    """Queues of entries, shared by all processes that open the same store.

    A store that fails raises Unavailable (nothing was changed), OutcomeUnknown (it may have been) or Corrupt.
    """

    #: Whether `put_within` can join the caller's transaction.
    takes_transactions: bool

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """Return a queue by name, created if it is missing; `settings`, if given, replace the stored ones."""

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields; entries under a changed declaration go to a new partition.

        Raise Unavailable if the partition cannot be added because the tables are busy.
        """

    async def queues(self) -> list[QueueRef]:
        """Return all queues, by name."""

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; merge an entry whose key is already waiting into the waiting one.

        Each key occurs once. `inserted_at` is the client's time, and is only recorded.
        """

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """Put inside the caller's transaction; return an awaitable if the transaction's driver is async."""

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """Put, and move the marks of a source in the same transaction; do nothing and return None if a mark has moved.

        So entries that a source delivers twice are put once. `entries` may be empty.
        """

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Return the mark of each part of a source."""

    async def claim(
        self, queue: QueueRef, limits: Mapping[bytes, int], *, lease_ms: int, together: bool = True
    ) -> list[Claimed]:
        """Claim due entries in order of priority, process date and age; slow entries are never claimed with others.

        `limits` has the token and the limit of each caller: the first entries go to the first caller. A claim is
        bounded in bytes, so it may return fewer entries than are due, but at least one.
        `together` is a hint that the entries will probably be finished in one call; it changes only the cost.
        A claim of a paused queue returns nothing.
        """

    async def pause(self, queue: QueueRef) -> int:
        """Make claims return nothing until the queue is resumed; return since when it is paused.

        The pause is stored with the queue, so it applies to all processes and survives restarts. When this returns, no
        claim is in progress. Workers keep the entries that they hold, and puts are accepted.
        """

    async def resume(self, queue: QueueRef) -> bool:
        """Allow claims again, and wake all processes that listen; return False if the queue was not paused."""

    async def heartbeat(self, queue: QueueRef, held: Sequence[LeasedEntry], *, lease_ms: int) -> dict[LeasedEntry, int]:
        """Extend leases; return the entries that are still held, with the new end of their lease."""

    async def finish(self, queue: QueueRef, held: Sequence[LeasedEntry]) -> set[LeasedEntry]:
        """Delete finished entries; return those that were still held. No keyhash occurs twice."""

    async def finish_and_claim(
        self, queue: QueueRef, claims: Sequence[FinishingClaim], *, lease_ms: int, together: bool = True
    ) -> tuple[Set[LeasedEntry], list[Claimed]]:
        """Finish the entries of all callers, then claim for those that have lost none; return both results.

        A store that can do both in one transaction does so: either both happen or neither. If the claim fails, another
        store may return what it has finished, and no entries.
        """

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to the queue, merge them into a waiting one of their key, or make dead letters of them."""

    async def report_worker(self, queue: QueueRef, report: WorkerReport) -> None:
        """Record that a worker is alive; forget those of the queue that have been silent for a long time."""

    async def remove_worker(self, queue: QueueRef, id: bytes) -> None:
        """Forget a worker that has ended."""

    async def workers(self, queue: QueueRef, *, limit: int = 100) -> list[WorkerRow]:
        """Return the workers of a queue, the latest report first."""

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """Return, for each queue, when it next has work."""

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Publish until when this process sleeps in each queue, and whether it waits for a held key."""

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """Withdraw the sleep of these queues: puts need not wake this process."""

    async def still_asleep(self, sleeper: bytes) -> None:
        """Refresh the published sleep: a sleeper that is silent for two minutes is considered dead."""

    def wakes(self) -> AsyncIterator[WakeRequest]:
        """Yield the puts of other processes that are due before this process would wake."""

    async def sweep(self, queue: QueueRef) -> MaintenanceResult:
        """Expire leases and entries, and rotate to the next partition if its period is over."""

    async def entries(self, queue: QueueRef, *, limit: int) -> list[WaitingEntry]:
        """Return the first entries in claim order, those being processed first."""

    async def counts(self, queue: QueueRef) -> Counts:
        """Return the number of entries, by state."""

    async def dead_letters(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[DeadLetterRow]:
        """Return dead letters, newest first."""

    async def retry(self, queue: QueueRef, id: int) -> bool:
        """Put a dead letter back as a new entry; return False if the queue has no dead letter of this id.

        A newer entry of its key keeps its data: a waiting one absorbs the letter; if one is being processed,
        the letter waits with the data of that entry.
        """

    async def edit(self, queue: QueueRef, id: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; return False if the queue has no dead letter of this id."""

    async def drop(self, queue: QueueRef, id: int) -> bool:
        """Delete a dead letter; return False if the queue has no dead letter of this id."""

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[DeadLetterRow]:
        """Return dead letters that no hook has reported yet, and reserve them for the caller for `hold_ms`."""

    async def announced(self, ids: Sequence[int]) -> None:
        """Mark dead letters as reported."""

    async def close(self) -> None:
        """Finish the calls in flight, then release all resources."""
