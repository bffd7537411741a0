"""The record codec: its layout is frozen, and damage is distinguished from a newer version."""

from __future__ import annotations

from zlib import crc32

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.core.nonsense import BODY, ID, NONSENSE, append_of, array_of, deep
from tidebook.core.action import Action, Append, Damaged, Delete, Mark, Purge, Seal
from tidebook.core.bounds import EVENTS_MAX, OFFSET_MAX, TIME_MS_MAX
from tidebook.core.errors import Corrupt, InvalidInput, TooLarge, UnknownVersion
from tidebook.core.event import Event, encode_event, encode_events, pack_events, plain_payloads
from tidebook.core.frame import HEADER_BYTES
from tidebook.core.position import Position
from tidebook.core.record import (
    MAGIC,
    PLAIN_BYTES_MAX,
    VERSION,
    decode_record,
    encode_plain_append,
    encode_plain_appends,
    encode_record,
    has_other_version,
    is_record,
    read_record,
)

LIMIT = 1_000_000
PLAIN_BODY = pack_events([encode_event(Event(b"a"))])

PLAIN_APPEND = "9b0101c410000102030405060708090a0b0c0d0e0f01c406919202c40161"
APPEND = "9b0101c410000102030405060708090a0b0c0d0e0f02c41d929202c401619400c4077b2274223a317d91a178c4077b226d223a327d"

TYPED_BODY = pack_events([encode_event(Event({"t": 1}, type="deposited", version=2))])
TYPED = "9b0101c410000102030405060708090a0b0c0d0e0f01c419919600c4077b2274223a317d90c0a96465706f736974656402"

COUNTED = (("x", 1),)

#: Never change these: every record that was ever written must stay readable.
GOLDEN: list[tuple[Action, str]] = [
    (Append(1, ID, 1, PLAIN_BODY), f"7b017c3532b6{PLAIN_APPEND}c0c0c0c090c0"),
    (Append(1, ID, 2, BODY, expected=0, tagged=COUNTED), f"7b0169655049{APPEND}00c0c0c09192a17801c0"),
    (
        Append(1, ID, 2, BODY, at=10**15, expire_after_ms=5, floor=77, tagged=COUNTED),
        f"7b01e8688c6b{APPEND}c0cf00038d7ea4c68000054d9192a17801c0",
    ),
    (Append(1, ID, 2, BODY, tagged=COUNTED), f"7b0111da5ee8{APPEND}c0c0c0c09192a17801c0"),
    (Append(1, ID, 1, TYPED_BODY), f"7b01c0830bde{TYPED}c0c0c0c090c0"),
    (Delete(1, 7), "7b0121f6051d94020107c0"),
    (Delete(2, 7, Position(1, 5)), "7b018f36ee5a94020207920105"),
    (Purge(1), "7b01d48edd4f930301c0"),
    (Purge(1, Position(1, 9)), "7b01c1a548e9930301920109"),
    (Mark(1), "7b01d1c1cbca930401c0"),
    (Mark(3, 1_700_000_000_000), "7b01d47a9461930403cf0000018bcfe56800"),
    (Seal(4), "7b011d75e4bb920504"),
]
ACTIONS = [action for action, _ in GOLDEN]

numbers = st.none() | st.integers(1, 2**53 - 1)
positions = st.builds(Position, st.integers(1, 4095), st.integers(0, 2**47 - 1))
bodies = st.lists(st.binary(max_size=9).map(lambda payload: encode_event(Event(payload))), min_size=1, max_size=4)
appends = st.builds(
    lambda kept, kind, number, expiry, floor: Append(
        1, ID, len(kept), pack_events(kept), **({kind: number} if kind else {}), expire_after_ms=expiry, floor=floor
    ),
    bodies,
    st.sampled_from(["", "expected", "at"]),
    numbers,
    numbers,
    st.none() | st.integers(-1, OFFSET_MAX),
)
others = st.one_of(
    st.builds(Delete, st.just(1), st.integers(1, 2**53 - 1), st.none() | positions),
    st.builds(Purge, st.just(1), st.none() | positions),
    st.builds(Mark, st.just(1), st.none() | st.integers(0, TIME_MS_MAX)),
    st.builds(Seal, st.integers(1, 4095)),
)


def names(action: Action) -> str:
    return f"{type(action).__name__}"


def sealed(version: int, rest: bytes) -> bytes:
    """Return a record with a valid checksum around any content."""
    crc = crc32(bytes([version]) + rest)
    return bytes([MAGIC, version]) + crc.to_bytes(4, "big") + rest


@pytest.mark.parametrize(("action", "golden"), GOLDEN, ids=[repr(action)[:60] for action in ACTIONS])
def test_the_layout_of_a_record_is_frozen(action: Action, golden: str) -> None:
    assert encode_record(action, limit_bytes=LIMIT).hex() == golden
    assert decode_record(bytes.fromhex(golden)) == action


@given(appends | others)
def test_a_decoded_action_equals_the_encoded_one(action: Action) -> None:
    assert decode_record(encode_record(action, limit_bytes=LIMIT)) == action


@pytest.mark.parametrize("action", ACTIONS, ids=names)
def test_a_change_of_any_one_byte_is_corrupt_and_never_another_action_or_a_newer_version(action: Action) -> None:
    value = encode_record(action, limit_bytes=LIMIT)
    for at in range(len(value)):
        for flip in range(1, 256):
            damaged = bytearray(value)
            damaged[at] ^= flip
            with pytest.raises(Corrupt) as caught:
                decode_record(bytes(damaged))
            assert type(caught.value) is Corrupt


@pytest.mark.parametrize("action", ACTIONS, ids=names)
def test_a_record_that_is_too_short_or_too_long_is_corrupt(action: Action) -> None:
    value = encode_record(action, limit_bytes=LIMIT)
    for wrong in (*(value[:end] for end in range(len(value))), value + b"\x00", value + value):
        with pytest.raises(Corrupt) as caught:
            decode_record(wrong)
        assert type(caught.value) is Corrupt


@given(st.binary(max_size=40))
def test_foreign_bytes_are_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        decode_record(value)
    assert type(caught.value) is Corrupt


@given(st.integers(0, 255).filter(lambda version: version != VERSION), st.binary(max_size=40))
def test_a_newer_version_with_a_valid_checksum_is_distinguished_from_damage(version: int, rest: bytes) -> None:
    with pytest.raises(UnknownVersion, match="upgrade") as caught:
        decode_record(sealed(version, rest))
    assert (caught.value.version, caught.value.known) == (version, VERSION)


@given(st.binary(max_size=40))
def test_a_valid_checksum_over_an_invalid_envelope_is_corrupt(rest: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        decode_record(sealed(VERSION, rest))
    assert type(caught.value) is Corrupt


@pytest.mark.parametrize(
    "action",
    [
        Append(1, ID, 0, pack_events([])),
        Append(1, ID, -1, BODY),
        Append(1, ID, 2, BODY, expected=0, at=1, tagged=COUNTED),
        Append(1, ID, 1, BODY, tagged=COUNTED),
        Append(1, ID, 3, BODY),
        Append(1, ID, 2, BODY[:-1]),
        Append(1, ID, 2, b""),
    ],
    ids=["no event", "fewer than none", "expected and at", "one too many", "one too few", "cut short", "no body"],
)
def test_an_append_that_contradicts_itself_is_corrupt(action: Append) -> None:
    with pytest.raises(Corrupt, match=r"append|envelope|events of a record"):
        decode_record(sealed(VERSION, msgspec.msgpack.encode(action)))


def test_a_record_at_the_limit_is_written_and_one_over_it_is_refused_with_size_and_limit() -> None:
    size = len(encode_record(ACTIONS[0], limit_bytes=LIMIT))
    assert len(encode_record(ACTIONS[0], limit_bytes=size)) == size
    with pytest.raises(TooLarge, match=f"{size} bytes.*limit is {size - 1}") as caught:
        encode_record(ACTIONS[0], limit_bytes=size - 1)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (size, size - 1)


def test_a_record_over_the_limit_reads_as_damaged() -> None:
    value = encode_record(ACTIONS[0], limit_bytes=LIMIT)
    assert read_record(value, limit_bytes=len(value)) == ACTIONS[0]
    assert isinstance(read_record(value, limit_bytes=len(value) - 1), Damaged)


@pytest.mark.parametrize("value", [None, b"", b"not ours", bytes(HEADER_BYTES), sealed(VERSION, b"\xc1")])
def test_an_unreadable_record_reads_as_damaged(value: bytes | None) -> None:
    assert isinstance(read_record(value, limit_bytes=LIMIT), Damaged)


def test_a_newer_version_never_reads_as_damaged() -> None:
    with pytest.raises(UnknownVersion):
        read_record(sealed(VERSION + 1, b""), limit_bytes=LIMIT)


def test_the_events_of_an_append_stay_packed() -> None:
    decoded = decode_record(encode_record(ACTIONS[0], limit_bytes=LIMIT))
    assert isinstance(decoded, Append)
    assert decoded.body == PLAIN_BODY


@given(
    st.integers(1, 4095),
    st.binary(min_size=16, max_size=16),
    st.one_of(st.text(min_size=1), st.binary(min_size=1), st.dictionaries(st.text(), st.integers(0, 9))),
)
@example(1, b"\xff" * 16, b"\xff" * 70_000)
@example(4095, b"\xff" * 16, b"\xff")
def test_a_plain_append_is_the_same_record_whichever_encoder_is_used(
    epoch: int, append_id: bytes, payload: object
) -> None:
    types, payloads = plain_payloads([[Event(payload)]])
    body, _ = encode_events([Event(payload)])
    [value] = encode_plain_appends(epoch, [append_id], types, payloads)
    assert value == encode_record(Append(epoch, append_id, 1, body), limit_bytes=LIMIT)
    assert value == encode_plain_append(epoch, append_id, types[0], payloads[0])
    assert len(value) <= len(payloads[0]) + PLAIN_BYTES_MAX


@pytest.mark.parametrize(
    "payloads",
    [[b"a", b"b", b"c"], [b"a", "b", {"c": 1}], [b"a", b"bc", b"d"], [b"a", "b"], [b"a", "bc"], []],
    ids=["of one kind", "of all kinds", "of two sizes", "of two kinds", "of two kinds and sizes", "none"],
)
def test_plain_appends_encoded_together_equal_those_encoded_alone(payloads: list[object]) -> None:
    appends = [[Event(payload)] for payload in payloads]
    ids = [bytes([n]) * 16 for n in range(len(payloads))]
    expected = [
        encode_record(Append(7, id, 1, encode_events(events)[0]), limit_bytes=LIMIT)
        for id, events in zip(ids, appends, strict=True)
    ]
    assert encode_plain_appends(7, iter(ids), *plain_payloads(appends)) == expected


# ---- malformed content in a valid frame is void for every process, whatever its stack size


@pytest.mark.parametrize("rest", NONSENSE.values(), ids=NONSENSE)
def test_malformed_content_in_a_valid_frame_reads_as_damaged(rest: bytes) -> None:
    assert isinstance(read_record(sealed(VERSION, rest), limit_bytes=2**31), Damaged)


@pytest.mark.parametrize("rest", [NONSENSE["a deep field that nobody knows"], append_of(array_of(deep(200)))])
def test_whether_nested_content_is_damaged_does_not_depend_on_the_stack(rest: bytes) -> None:
    value = sealed(VERSION, rest)

    def at_depth(levels: int) -> object:
        return at_depth(levels - 1) if levels else read_record(value, limit_bytes=LIMIT)

    verdicts = [at_depth(levels) for levels in (0, 100, 500)]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert isinstance(verdicts[0], Damaged)


@pytest.mark.parametrize(
    "action",
    [
        Mark(0),
        Mark(4096),
        Mark(1, TIME_MS_MAX + 1),
        Mark(1, 2**64),
        Mark(1, -1),
        Seal(2**70),
        Delete(1, 0),
        Delete(1, 2**53),
        Delete(1, 7, Position(1, 2**47)),
        Purge(1, Position(2**12, 1)),
        Append(0, ID, 2, BODY),
        Append(1, ID[:-1], 2, BODY),
        Append(1, ID, 0, BODY),
        Append(1, ID, EVENTS_MAX + 1, BODY),
        Append(1, ID, 2, BODY, expected=-1),
        Append(1, ID, 2, BODY, expected=2**53),
        Append(1, ID, 2, BODY, at=0),
        Append(1, ID, 2, BODY, at=2**70),
        Append(1, ID, 2, BODY, expected=1, at=2),
        Append(1, ID, 2, BODY, expire_after_ms=-1),
        Append(1, ID, 2, BODY, expire_after_ms=2**63),
        Append(1, ID, 2, BODY, floor=1.5),  # type: ignore[arg-type]
        Append(1, "sixteen letters.", 2, BODY),  # type: ignore[arg-type]
        Append(1, ID, 2, BODY, floor=-2),
        Append(1, ID, 2, BODY, floor=2**47),
    ],
    ids=repr,
)
def test_an_action_that_could_not_be_decoded_is_refused_by_the_encoder(action: Action) -> None:
    with pytest.raises(InvalidInput, match="out of bounds"):
        encode_record(action, limit_bytes=LIMIT)


def test_a_refusal_names_the_fields_of_the_action_but_not_its_events() -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_record(Append(1, ID, 2, BODY, at=1 << 5_000, tagged=COUNTED), limit_bytes=LIMIT)
    text = str(caught.value)
    assert "Append(epoch=1" in text
    assert "count=2, expected=None, at=a number of 5,001 bits" in text
    assert "body" not in text
    assert "tagged" not in text


def test_an_incarnation_is_written_only_beside_an_expected_number() -> None:
    action = Append(1, ID, 2, BODY, expected=3, tagged=COUNTED, incarnation=Position(1, 5))
    assert decode_record(encode_record(action, limit_bytes=LIMIT)) == action
    with pytest.raises(InvalidInput, match="out of bounds"):
        encode_record(msgspec.structs.replace(action, expected=None), limit_bytes=LIMIT)


@given(st.lists(st.builds(Event, st.binary(max_size=9), tags=st.frozensets(st.sampled_from("abc"))), min_size=1))
def test_tags_are_counted_by_the_encoder_as_the_decoder_counts_them(events: list[Event]) -> None:
    body, tagged = encode_events(events)
    action = Append(1, ID, len(events), body, tagged=tagged)
    assert decode_record(encode_record(action, limit_bytes=LIMIT)) == action


def test_only_a_framed_record_of_any_version_counts_as_a_journal_record() -> None:
    value = encode_record(Mark(1), limit_bytes=LIMIT)
    newer = bytes([MAGIC, VERSION + 1])
    newer += crc32(newer[1:] + b"x").to_bytes(4, "big") + b"x"
    assert [is_record(each) for each in (value, newer, None, b"", b"a message", value[:-1])] == [True] * 2 + [False] * 4
    claims = [has_other_version(each) for each in (value, newer, None, b"", b"a message", b"x" + newer[1:])]
    assert claims == [False, True, False, False, False, False]


@pytest.mark.parametrize("payload", [b"a", "a", {"a": 1}])
def test_an_append_that_counts_tags_which_its_plain_events_do_not_carry_is_corrupt(payload: object) -> None:
    body = pack_events([encode_event(Event(payload))])
    value = encode_record(Append(1, ID, 1, body, tagged=(("x", 1),)), limit_bytes=LIMIT)
    with pytest.raises(Corrupt, match="tags"):
        decode_record(value)
