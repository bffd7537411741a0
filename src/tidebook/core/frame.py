"""The frame around every record in a log: a header of six bytes, whose layout never changes.

    magic | version | CRC-32 of version and content, 4 bytes big-endian | content

Every version can thus distinguish damage, which is skipped, from a newer version, which stops the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from struct import Struct
from typing import Final

try:  # the same checksums in a third of the time, on platforms with a wheel
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

from tidebook.core.errors import Corrupt, UnknownVersion

HEADER_BYTES: Final = 6

_HEADER = Struct(">BBI")
_pack, _unpack = _HEADER.pack, _HEADER.unpack_from


class Frame:
    """Adds and checks the frame of one kind of record, which its magic byte identifies.

    >>> bytes(Frame(0x7B, 1, "a record").unseal(Frame(0x7B, 1, "a record").seal(b"abc")))
    b'abc'
    """

    def __init__(self, magic: int, version: int, label: str) -> None:
        self.magic = magic
        self.version = version
        self.label = label
        self._crc = crc32(bytes([version]))

    def seal(self, content: bytes) -> bytes:
        """Return the content with its header."""
        return _pack(self.magic, self.version, crc32(content, self._crc)) + content

    def seal_all(self, contents: Sequence[bytes]) -> list[bytes]:
        """Return the sealed form of each content; faster than calling `seal` for each."""
        checksums = map(crc32, contents, repeat(self._crc))
        headers = map(_pack, repeat(self.magic), repeat(self.version), checksums)
        return [header + content for header, content in zip(headers, contents, strict=True)]

    def unseal(self, value: bytes) -> memoryview:
        """Return the content as a view; raise UnknownVersion for another version and Corrupt for damaged bytes."""
        if len(value) < HEADER_BYTES or value[0] != self.magic:
            raise Corrupt(f"the bytes are not {self.label} of Tidebook")
        _, version, checksum = _unpack(value)
        content = memoryview(value)[HEADER_BYTES:]
        if crc32(content, self._crc if version == self.version else crc32(value[1:2])) != checksum:
            raise Corrupt(f"the checksum of {self.label} does not match its bytes")
        if version != self.version:
            raise UnknownVersion(self.label, version=version, known=self.version)
        return content
