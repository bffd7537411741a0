"""What the relay asks of a database."""

from __future__ import annotations

import msgspec

#: How many rows of `kafka_order_lock` `ordered=True` spreads its locks over (MySQL).
ORDER_SLOTS = 256

Headers = tuple[tuple[str, bytes | None], ...]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Headers).decode


def pack_headers(headers: Headers) -> bytes | None:
    """Headers as the column holds them: a MessagePack list of pairs, or NULL where there are none."""
    return _encode(headers) if headers else None


def unpack_headers(packed: bytes | None) -> Headers:
    """Undo `pack_headers`."""
    return _decode(packed) if packed else ()
