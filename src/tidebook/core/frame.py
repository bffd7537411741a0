"""The outer six bytes of everything that is written to a log: they never change.

    magic | version | CRC-32 of version and rest, 4 bytes big-endian | rest

So every version can tell damage, which is void, from a newer writer, which stops the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from struct import Struct
from typing import Final

try:  # the same sums in a third of the time, where there is a wheel of it
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

from tidebook.core.errors import Corrupt, UnknownVersion

HEADER_BYTES: Final = 6

_pack = Struct(">BBI").pack


class Frame:
    """How one kind of record is framed: its magic byte tells it from the other kinds.

    >>> bytes(Frame(0x7B, 1, "the record").unseal(Frame(0x7B, 1, "the record").seal(b"abc")))
    b'abc'
    """

    def __init__(self, magic: int, version: int, what: str) -> None:
        self.magic = magic
        self.version = version
        self.what = what
        self._crc = crc32(bytes([version]))
        self._header = partial(_pack, magic, version)

    def seal(self, rest: bytes) -> bytes:
        """The framed bytes."""
        return self._header(crc32(rest, self._crc)) + rest

    def seal_all(self, rests: Sequence[bytes]) -> list[bytes]:
        """`seal` for many, without a call for each."""
        headers = map(self._header, map(crc32, rests, repeat(self._crc)))
        return [header + rest for header, rest in zip(headers, rests, strict=True)]

    def unseal(self, value: bytes) -> memoryview:
        """What was sealed, not copied. Raises UnknownVersion for what a newer Tidebook wrote, Corrupt for damage."""
        if len(value) < HEADER_BYTES or value[0] != self.magic:
            raise Corrupt(f"this is not {self.what} of Tidebook")
        rest = memoryview(value)[HEADER_BYTES:]
        crc = self._crc if value[1] == self.version else crc32(value[1:2])
        if crc32(rest, crc) != int.from_bytes(value[2:HEADER_BYTES], "big"):
            raise Corrupt(f"the checksum of {self.what} does not match its bytes")
        if value[1] != self.version:
            raise UnknownVersion(self.what, version=value[1], known=self.version)
        return rest
