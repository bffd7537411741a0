"""The errors that the library raises. Where an error has details, they are attributes."""

from __future__ import annotations

from typing import Any

_INT_BITS_MAX = 128


class TidebookError(Exception):
    """The base class of all errors that Tidebook raises deliberately."""


class InvalidInput(TidebookError, ValueError):
    """The input can never be accepted; nothing was changed."""


class TooLarge(InvalidInput):
    """A record exceeds the size limit of its topic or region."""

    def __init__(self, subject: str, *, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{subject} takes {size_bytes:,} bytes and the limit is {limit_bytes:,}: "
            "split it, or store the data elsewhere and write a reference to it"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class NotFound(TidebookError, LookupError):
    """The requested object does not exist."""


class Conflict(TidebookError):
    """An append was rejected: the journal is not in the state that the append requires, or has too large a number.

    `expected` is the last number that the append required, and `at` the number that it wanted to give its first event.
    `found` is the journal's last number, or None if that is not known, or is the expected one of another incarnation.
    A flush or an export that another one has overtaken raises this error too; `counted` is then what the numbers count.
    """

    def __init__(
        self,
        *,
        key: object,
        expected: int | None = None,
        at: int | None = None,
        found: int | None,
        counted: str = "seq_nr",
        remedy: str = "read the events that you have not seen, then decide and append again",
    ) -> None:
        last = f"but the last {counted} is {found}"
        if found is None:
            last, remedy = "but the journal had changed", "read the journal, then decide and append again"
        if at is not None:
            reason = f"seq_nr {at} must be above the last one, {last}"
        elif expected is not None:
            reason = f"expected {counted} {expected}, {last}"
        else:
            known = "" if found is None else f" {found}"
            reason = f"the last seq_nr{known} is too close to the largest one"
            remedy = "append these events to another journal"
        super().__init__(f"{key}: {reason}: {remedy}")
        self.key = key
        self.expected = expected
        self.at = at
        self.found = found


class Unavailable(TidebookError):
    """A required component cannot be used now, or is closed; nothing was changed. Retry later."""


class OutcomeUnknown(TidebookError):
    """A write may or may not have happened.

    Pass the error of an append to the next attempt as `retry=`, so that the events are not appended twice.
    """

    def __init__(
        self,
        message: str,
        *,
        append_id: bytes | None = None,
        partition: int | None = None,
        offset: int | None = None,
        floor: int | None = None,
        epoch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.append_id = append_id
        self.partition = partition
        self.offset = offset
        #: The end offset of the partition before the first attempt.
        self.floor = floor
        #: The topic's epoch at the first attempt.
        self.epoch = epoch


class Truncated(TidebookError):
    """Events were deleted or purged before a read in progress reached them: start the read again."""


class Corrupt(TidebookError):
    """Stored bytes are damaged. Nothing is overwritten; restore a copy or repair the store from the log."""


class UnknownVersion(Corrupt):
    """A record or folder was written by a newer version of Tidebook. It cannot be read until Tidebook is upgraded."""

    def __init__(self, subject: str, *, version: int, known: int) -> None:
        super().__init__(
            f"{subject} has version {version}, and this version of Tidebook supports up to {known}: upgrade Tidebook"
        )
        self.version = version
        self.known = known


class UnreadableEvent(TidebookError):
    """An event does not fit the class of its type, or its upcaster failed. The journal is unchanged: fix the class."""

    def __init__(self, *, topic: str, id: str, seq_nr: int, type: str | None, version: int, reason: str) -> None:
        super().__init__(f"{topic}/{id}: event {seq_nr} of type {type!r}, version {version}, cannot be read: {reason}")
        self.topic = topic
        self.id = id
        self.seq_nr = seq_nr
        self.type = type
        self.version = version
        self.reason = reason


class UnknownEventType(UnreadableEvent):
    """An event has a type that is not declared, or a newer version of one. Declare it, upgrade, or read leniently."""

    def __init__(
        self, *, topic: str, id: str, seq_nr: int, type: str | None, version: int, known: int | None = None
    ) -> None:
        if type is None:
            reason = "it was appended without a type"
        elif known is None:
            reason = "no class declares this type"
        else:
            reason = f"this process knows version {known}"
        super().__init__(topic=topic, id=id, seq_nr=seq_nr, type=type, version=version, reason=reason)
        #: The version that this process knows, or None if it does not know the type.
        self.known = known


class Fenced(TidebookError):
    """A newer owner or epoch has taken over, and writes of this one are refused. Open the object again to continue."""


class ProjectionStopped(TidebookError):
    """A slice of a projection is stopped at an event that its handler cannot apply.

    Fix the handler and resume, or skip the event. A rebuild that encounters such an event ends with this error too, and
    leaves the live tables as they were.
    """

    def __init__(self, *, name: str, slice: int, reason: str, rebuild: bool = False) -> None:
        remedy = (
            f"run 'tidebook projection rebuild {name} --app MODULE:APP' again"
            if rebuild
            else f"run 'tidebook projection resume {name} --app MODULE:APP', or pass over the event with "
            f"'tidebook projection skip {name} --app MODULE:APP'"
        )
        where = f"slice {slice} of the rebuild" if rebuild else f"slice {slice}"
        super().__init__(f"projection {name!r}: {where} is stopped at {reason}: fix the handler and {remedy}")
        self.name = name
        self.slice = slice
        self.reason = reason


class EventParked(TidebookError):
    """A projection has skipped an event that its handler could not apply, so the read model lacks it."""

    def __init__(self, *, name: str, event: str, reason: str) -> None:
        super().__init__(
            f"projection {name!r} has parked {event}: {reason}: fix the handler and run "
            f"'tidebook projection rebuild {name} --app MODULE:APP'"
        )
        self.name = name
        #: The event as topic/id/seq_nr.
        self.event = event
        self.reason = reason


class LeaseLost(TidebookError):
    """The job's lease has expired and another worker owns the job; the result was discarded."""


class LogLost(TidebookError):
    """The log no longer holds records that are still needed, for example because retention overtook replication."""

    def __init__(
        self,
        *,
        topic: str,
        partition: int,
        first: int,
        last: int,
        remedy: str = "",
        when: str = "before they were replicated",
    ) -> None:
        text = f"{topic}/{partition}: the log lost offsets {first} to {last} {when}"
        super().__init__(f"{text}: {remedy}" if remedy else text)
        self.topic = topic
        self.partition = partition
        self.first = first
        self.last = last
        self.remedy = remedy
        self.when = when


class MissingTaggedEvent(TidebookError):
    """A tagged event that must exist was not found. A new read with `after=last_known_offset` searches for it again."""

    def __init__(self, *, tag: str, topic: str, id: str, missing: tuple[int, int], last_known_offset: Any) -> None:
        super().__init__(
            f"tag {tag!r}: {topic}/{id} lacks tag_seq_nr {missing[0]} to {missing[1]}: "
            "start a new read after last_known_offset, which delivers the events after that offset again"
        )
        self.tag = tag
        self.topic = topic
        self.id = id
        self.missing = missing
        self.last_known_offset = last_known_offset


def format_int(value: int) -> str:
    """Format an integer for an error message; Python refuses to print integers of thousands of digits.

    >>> format_int(7)
    '7'
    >>> format_int(1 << 20_000)
    'a number of 20,001 bits'
    """
    bits = value.bit_length()
    return str(value) if bits <= _INT_BITS_MAX else f"a number of {bits:,} bits"
