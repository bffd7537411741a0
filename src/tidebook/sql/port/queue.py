"""What a store of work entries must do. Its adapters stand beside it; `tidebook.testing.conformance` says what each
must pass. All times are milliseconds since 1970 on the store's own clock, which alone decides due, lease and expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from tidebook.core.errors import InvalidInput

#: The date of what never comes: no expiry, no wake-up.
NEVER_MS: Final = 2**63 - 1
#: From this priority up, an entry is handed out only when nothing below it is due.
SLOW_PRIORITY: Final = 200
PRIORITY_MAX: Final = 255
#: Entries in one call of the port.
ENTRIES_MAX: Final = 1_000
#: Data in one put, in bytes; one entry may always be put by itself.
PUT_BYTES_MAX: Final = 16_000_000
#: A hundred years.
LEASE_MS_MAX: Final = 3_153_600_000_000
#: Process dates that `due` tells of a queue.
UPCOMING_MAX: Final = 200

Period = Literal["hour", "day", "month", "ever"]
Drained = Literal["truncate", "reset", "drop"]
Synchronous = Literal["local", "remote_write", "on", "remote_apply"]
Outcome = Literal["waiting", "merged", "dead", "expired", "lost"]


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a queue behaves: kept with the queue, the same for every process."""

    #: How long a claimed entry is held where the claim does not say.
    lease_ms: int = 60_000
    #: How often an entry may time out or fail; once more, and it is a dead letter.
    max_timeouts: int = 5
    #: Whether an entry may be handed out while another one of its key is being processed.
    parallel_keys: bool = False
    #: How long entries go to one table before they go to the next.
    period: Period = "day"
    #: A period also ends when this many entries were finished in it.
    finished_max: int = 50_000
    #: What becomes of a table that was drained.
    drained: Drained = "truncate"
    #: A table of its own instead of the one that queues share; settled when the queue is made.
    own_table: bool = False
    #: PostgreSQL's synchronous_commit: `local` is durable on the primary, the others wait for replicas too.
    synchronous: Synchronous = "local"

    def __post_init__(self) -> None:
        """What is kept with a queue must be readable by everybody."""
        for name, least, most in (("lease_ms", 1, LEASE_MS_MAX), ("max_timeouts", 0, 255), ("finished_max", 1, 2**62)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise InvalidInput(f"{name} is {least} to {most}, not {value!r}")
        for name, choices in (("period", Period), ("drained", Drained), ("synchronous", Synchronous)):
            if getattr(self, name) not in get_args(choices):
                raise InvalidInput(f"{name} is one of {', '.join(get_args(choices))}, not {getattr(self, name)!r}")
        for name in ("parallel_keys", "own_table"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"{name} is true or false, not {getattr(self, name)!r}")


class QueueRef(msgspec.Struct, frozen=True):
    """A queue as the store knows it."""

    id: int
    name: str
    settings: QueueSettings
    #: The group of period tables that its entries are in.
    table: str = ""
    #: The number of the declaration that the table of the current period is bound to; 0 is none.
    format: int = 0


class NewEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry on its way in. `keyhash` is unique by itself where there is no key."""

    keyhash: bytes
    kind: int
    data: bytes
    key: str | None = None
    priority: int = 100
    #: None is now.
    process_at: int | None = None
    expires_at: int = NEVER_MS


class Put(msgspec.Struct, frozen=True):
    """What became of a put: how many entries are new and how many were merged into a waiting one."""

    inserted: int
    merged: int
    now_ms: int


class Step(NamedTuple):
    """A mark that is moved with a put: of the source's part `part`, from where it stood (None: nowhere yet)."""

    part: int
    before: str | None
    after: str


class Held(msgspec.Struct, frozen=True, gc=False):
    """What proves that one holds an entry."""

    keyhash: bytes
    token: bytes
    #: Where the entry was when it was claimed: a hint that saves a search.
    slot: int = 0
    #: With how many others of its claim it is kept; 0: for itself. A hint that lets all of them be finished as one.
    together: int = 0


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """An entry that was handed out."""

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
    together: int = 0


class Failure(msgspec.Struct, frozen=True):
    """An entry that goes back to wait."""

    held: Held
    delay_ms: int = 0
    reason: str = ""


class Waiting(msgspec.Struct, frozen=True):
    """An entry as it lies in the queue, for those who look on."""

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
    """When there is next something to do in a queue."""

    now_ms: int
    #: The earliest end of a lease.
    lease_end: int
    #: Something can be handed out now.
    ready: bool
    #: Due entries wait for another one of their key to be finished.
    held: bool
    #: The next process dates, ascending; UPCOMING_MAX of them where there are more.
    upcoming: tuple[int, ...] = ()


class Counts(msgspec.Struct, frozen=True):
    """A queue in numbers."""

    due: int
    later: int
    processing: int
    dead: int
    #: How long the entry that is due the longest has waited.
    oldest_due_ms: int
    next_at: int
    tables: int


class Flag(msgspec.Struct, frozen=True):
    """A dead letter, and the flag that it raised."""

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


class Swept(msgspec.Struct, frozen=True):
    """What a sweep found: entries past their expiry, leases that had run out, dead letters made of them."""

    expired: int = 0
    run_out: int = 0
    dead: int = 0
    #: When to sweep next: the earliest expiry, lease end or period end.
    next_at: int = NEVER_MS
    now_ms: int = 0


class Wake(NamedTuple):
    """Something in a queue becomes due at a date; None: look for yourself."""

    queue: int
    at: int | None


class QueueStore(Protocol):
    """Queues of entries, shared by all who open the same store.

    Every failure is a TidebookError: Unavailable (nothing was changed), OutcomeUnknown (it may have been).
    """

    #: Whether `put_within` takes part in the caller's own transaction.
    takes_transactions: bool

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        """A queue by name, made where it is missing; settings that are given replace the ones that are kept."""
        ...

    async def declare(self, queue: QueueRef, fields: bytes) -> QueueRef:
        """Bind a queue to a declaration of its fields. A changed one applies to a new table, which is begun for it.

        Unavailable where the tables are kept busy, and the new one could not be begun.
        """
        ...

    async def queues(self) -> list[QueueRef]:
        """All queues, by name."""
        ...

    async def put(self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int) -> Put:
        """Add entries in one transaction; one whose key waits already is merged into the waiting one.

        Each key occurs once. `inserted_at` is the client's own date, and only recorded.
        """
        ...

    def put_within(
        self, transaction: object, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int
    ) -> Put | Awaitable[Put]:
        """`put` inside the caller's transaction; awaitable where the transaction's driver is."""
        ...

    async def put_once(
        self, queue: QueueRef, entries: Sequence[NewEntry], *, inserted_at: int, source: str, steps: Sequence[Step]
    ) -> Put | None:
        """`put`, and the marks of a source move on in the same transaction; None, and nothing done, if one has moved.

        So what a source delivers twice is put once. There may be no entries.
        """
        ...

    async def marks(self, queue: QueueRef, source: str) -> dict[int, str]:
        """Where the parts of a source stand."""
        ...

    async def claim(
        self, queue: QueueRef, *, limit: int, lease_ms: int, token: bytes, together: bool = True
    ) -> list[Claimed]:
        """Hand out due entries in order of priority, process date and age. Slow ones never come with others.

        Fewer than there are may come, one at least: what a claim brings is bounded in bytes, too.
        `together` says that they will be finished in one call, most likely; it changes nothing but what that costs.
        """
        ...

    async def heartbeat(self, queue: QueueRef, held: Sequence[Held], *, lease_ms: int) -> dict[Held, int]:
        """Extend leases; the ones that are still held, with their new end."""
        ...

    async def finish(self, queue: QueueRef, held: Sequence[Held]) -> set[Held]:
        """Delete entries; the ones that were still held. No keyhash occurs twice."""
        ...

    async def fail(self, queue: QueueRef, failures: Sequence[Failure]) -> list[Outcome]:
        """Return entries to wait, merge them into a waiting one of their key, or make dead letters of them."""
        ...

    async def due(self, queues: Sequence[QueueRef]) -> list[Due]:
        """When something becomes due, queue by queue."""
        ...

    async def sleep(self, sleeper: bytes, until: Mapping[int, tuple[int, bool]]) -> None:
        """Tell putters that this process sleeps until a date, queue by queue, and whether it waits for a held key."""
        ...

    async def awake(self, sleeper: bytes, queues: Sequence[int]) -> None:
        """It sleeps no more in these queues: nobody needs to tell it anything."""
        ...

    async def still_asleep(self, sleeper: bytes) -> None:
        """It is alive: a sleeper that is not heard of for two minutes is taken for dead."""
        ...

    def wakes(self) -> AsyncIterator[Wake]:
        """What other processes put that is due before this one would wake."""
        ...

    async def sweep(self, queue: QueueRef) -> Swept:
        """Notice leases that ran out and entries that expired; move on to the next period's table where it is time."""
        ...

    async def entries(self, queue: QueueRef, *, limit: int) -> list[Waiting]:
        """The first entries in the order in which they would be handed out, those being processed first."""
        ...

    async def counts(self, queue: QueueRef) -> Counts:
        """A queue in numbers."""
        ...

    async def flags(self, queue: QueueRef | None = None, *, limit: int = 100) -> list[Flag]:
        """Dead letters, newest first."""
        ...

    async def retry(self, queue: QueueRef, flag: int) -> bool:
        """Put a dead letter back as a new entry; False where the queue has none of this number.

        A newer entry of its key keeps its data: one that waits takes the letter in, beside one that is being processed
        the letter waits with that one's data.
        """
        ...

    async def edit(self, queue: QueueRef, flag: int, kind: int, data: bytes) -> bool:
        """Replace a dead letter's user data; False where the queue has none of this number."""
        ...

    async def drop(self, queue: QueueRef, flag: int) -> bool:
        """Delete a dead letter; False where the queue has none of this number."""
        ...

    async def unannounced(self, *, limit: int = 100, hold_ms: int = 0) -> list[Flag]:
        """Dead letters that no hook has been told of yet; for `hold_ms` they are the caller's alone to tell of."""
        ...

    async def announced(self, flags: Sequence[int]) -> None:
        """These were told."""
        ...

    async def close(self) -> None:
        """Finish what was begun, then let go."""
        ...
