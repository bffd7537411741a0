"""The bounds of fields that are decoded from a log or a store, and the errors that decoding raises.

Whether a record is valid depends on its bytes alone: a bound never depends on a clock, a setting or the stack depth.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

#: A write timestamp has 12 bits for the epoch and 47 for the offset.
EPOCH_BITS: Final = 12
OFFSET_BITS: Final = 47
EPOCH_MAX: Final = (1 << EPOCH_BITS) - 1
OFFSET_MAX: Final = (1 << OFFSET_BITS) - 1
#: The largest integer that every JSON reader represents exactly; the limit of sequence numbers and durations.
NUMBER_MAX: Final = 2**53 - 1
#: The last millisecond of the year 9999.
TIME_MS_MAX: Final = 253_402_300_799_999
#: How far a tick may advance the log time beyond its own record's timestamp. Without this limit one wrong tick would
#: move every partition into the future irrevocably. The clocks of brokers differ by far less.
TICK_AHEAD_MS_MAX: Final = 86_400_000
#: How many events one append may hold.
EVENTS_MAX: Final = 10_000
IDENTITY_BYTES: Final = 16
#: The limit of counters, of offsets of a write-ahead log and of byte counts; the sum of two fits in 64 bits.
COUNTER_MAX: Final = 2**62 - 1

EpochNumber = Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
#: A non-negative integer.
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
#: A positive integer.
Ordinal = Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]
#: A non-negative and a positive integer up to `COUNTER_MAX`.
Counter = Annotated[int, msgspec.Meta(ge=0, le=COUNTER_MAX)]
PositiveCounter = Annotated[int, msgspec.Meta(ge=1, le=COUNTER_MAX)]
#: 16 bytes that identify a writer or an append uniquely.
Identity = Annotated[bytes, msgspec.Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]
TimeMs = Annotated[int, msgspec.Meta(ge=0, le=TIME_MS_MAX)]

#: The errors for damaged bytes: those of msgspec, and UnicodeDecodeError for text that is not UTF-8.
#: A type that decides the meaning of a record must not let msgspec skip values: it forbids unknown fields and contains
#: neither `Raw` nor `Any`. msgspec skips recursively, so the result would depend on the stack depth.
STRICT_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError)
#: The same for types where values may be skipped, because only the result of this one reader depends on it.
DECODE_ERRORS: Final = (*STRICT_DECODE_ERRORS, RecursionError)
