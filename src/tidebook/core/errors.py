"""Every error a user can meet. Each carries the facts as attributes and says what to do about them."""

from __future__ import annotations

from typing import Any


class TidebookError(Exception):
    """The root of all errors that Tidebook raises on purpose."""


class InvalidInput(TidebookError, ValueError):
    """What was given can never be accepted; nothing was changed."""


class TooLarge(InvalidInput):
    """A record is over the size limit of its topic or region."""

    def __init__(self, what: str, *, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"{what} takes {size_bytes:,} bytes and the limit is {limit_bytes:,}: "
            "split it, or keep the bulk elsewhere and journal a reference"
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class NotFound(TidebookError, LookupError):
    """What was asked for is not there."""


class Conflict(TidebookError):
    """An append lost against another one: the journal does not stand where the appender expected it."""

    def __init__(self, *, key: object, expected: int | None = None, at: int | None = None, found: int) -> None:
        if at is not None:
            wanted = f"at seq_nr {at}, which must be above the last one"
        else:
            wanted = f"expected seq_nr {expected}" if expected is not None else "no number is left behind the last one"
        super().__init__(f"{key}: {wanted}, found {found}: read on from there, then append again")
        self.key = key
        self.expected = expected
        self.at = at
        self.found = found


class Unavailable(TidebookError):
    """A part that is needed does not answer; nothing was changed, try again later."""


class OutcomeUnknown(TidebookError):
    """A write may or may not have happened. Give this error as `retry=` to try again: never a second copy."""

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
        #: The partition's end before the first attempt.
        self.floor = floor
        #: The topic's epoch at the first attempt.
        self.epoch = epoch


class Truncated(TidebookError):
    """Events that a read still owed were deleted or purged under it: start the read again."""


class Corrupt(TidebookError):
    """Stored bytes are damaged. Nothing is overwritten; restore a copy or repair from the log."""


class UnknownVersion(Corrupt):
    """A record or folder was written by a newer Tidebook: upgrade this one; reading stops here until then."""

    def __init__(self, what: str, *, version: int, known: int) -> None:
        super().__init__(f"{what} has version {version}, this Tidebook knows up to {known}: upgrade it and start again")
        self.version = version
        self.known = known


class Fenced(TidebookError):
    """A newer owner has taken over; what this one writes no longer counts. Open it again to take it back."""


class LeaseLost(TidebookError):
    """The job's lease ran out and it belongs to another worker now; its result was not taken."""


class LogLost(TidebookError):
    """The log no longer holds records that are still needed: retention has overtaken replication, for one."""

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


class MissingTaggedEvent(TidebookError):
    """A tagged event that must exist was not found; read again from `last_known_offset` to look further back."""

    def __init__(self, *, tag: str, topic: str, id: str, missing: tuple[int, int], last_known_offset: Any) -> None:
        super().__init__(
            f"tag {tag!r}: {topic}/{id} lacks tag_seq_nr {missing[0]} to {missing[1]}: "
            "read again from last_known_offset (what came after it is delivered again)"
        )
        self.tag = tag
        self.topic = topic
        self.id = id
        self.missing = missing
        self.last_known_offset = last_known_offset
