"""Levels overlap if each read reaches a replica of every acknowledged write; and settings that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.store.cassandra.settings import (
    READ_LEVELS,
    WRITE_LEVELS,
    CassandraSettings,
    reads_see_writes,
    replicas_of,
)

Replica = tuple[str, int]
COUNTS = {"ONE": 1, "TWO": 2, "THREE": 3, "LOCAL_ONE": 1}


def answering(level: str, replicas: Mapping[str, int], dc: str) -> Iterator[frozenset[Replica]]:
    """Yield the smallest sets of replicas that satisfy a level for a client in one data centre."""
    everywhere = [(name, number) for name, count in replicas.items() for number in range(count)]
    if level == "EACH_QUORUM":
        of_each = [
            combinations([each for each in everywhere if each[0] == name], count // 2 + 1)
            for name, count in replicas.items()
        ]
        for parts in product(*of_each):
            yield frozenset(each for part in parts for each in part)
        return
    requested = [each for each in everywhere if each[0] == dc] if level.startswith("LOCAL_") else everywhere
    if level.endswith("QUORUM"):
        needed = len(requested) // 2 + 1
    else:
        needed = len(requested) if level == "ALL" else min(COUNTS[level], len(requested))
    yield from map(frozenset, combinations(requested, needed))


def always_meet(read: str, write: str, replicas: Mapping[str, int], local_dc: str | None) -> bool:
    return all(
        seen & written
        for dc in ([local_dc] if local_dc in replicas else replicas)
        if replicas[dc or ""]
        for seen in answering(read, replicas, dc or "")
        for written in answering(write, replicas, dc or "")
    )


@pytest.mark.parametrize(
    "replicas", [{"": 1}, {"": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 1}, {"a": 3, "b": 2}], ids=str
)
@pytest.mark.parametrize("read", READ_LEVELS)
@pytest.mark.parametrize("write", WRITE_LEVELS)
def test_levels_overlap_exactly_if_every_two_sets_of_replicas_share_one(
    read: str, write: str, replicas: dict[str, int]
) -> None:
    for local_dc in (None, *replicas, "elsewhere"):
        expected = always_meet(read, write, replicas, local_dc)
        assert reads_see_writes(read, write, replicas, local_dc) is expected, local_dc


def test_a_data_centre_without_replicas_does_not_count() -> None:
    assert reads_see_writes("LOCAL_QUORUM", "LOCAL_QUORUM", {"a": 3, "b": 0})
    assert not reads_see_writes("LOCAL_ONE", "LOCAL_ONE", {"a": 3, "b": 0})


def test_transient_replicas_do_not_count() -> None:
    assert replicas_of({"class": "NetworkTopologyStrategy", "a": "3/1"}) == {"a": 3}


def settings(url: str = "cassandra://one/books", /, **options: Any) -> CassandraSettings:
    return CassandraSettings.read(url, options, environment={})


@pytest.mark.parametrize(("port", "valid"), [(0, False), (1, True), (65535, True), (65536, False)])
def test_a_port_is_in_the_valid_range(port: int, valid: bool) -> None:
    if valid:
        assert settings(f"cassandra://one:{port}/books").port == port
    else:
        with pytest.raises(InvalidInput, match="one port is given for all hosts"):
            settings(f"cassandra://one:{port}/books")


@pytest.mark.parametrize("name", ["max_message_batch_size", "partitions_together_max"])
def test_a_batch_may_hold_at_least_one_row(name: str) -> None:
    assert getattr(settings(**{name: 1}), name) == 1
    for value in (0, -1):
        with pytest.raises(InvalidInput, match="at least 1"):
            settings(**{name: value})


@pytest.mark.parametrize("url", ["cassandra://one,/books", "cassandra://,one/books", "cassandra:///books"])
def test_an_empty_host_name_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="at least one host"):
        settings(url)


@pytest.mark.parametrize("rest", ["?tls=1", "#part"])
def test_a_url_has_neither_query_nor_fragment(rest: str) -> None:
    with pytest.raises(InvalidInput, match="no query"):
        settings(f"cassandra://one/books{rest}")


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_a_certificate_needs_tls(name: str) -> None:
    with pytest.raises(InvalidInput, match="tls is off"):
        settings(**{name: "file.pem"})


@pytest.mark.parametrize("name", ["read_consistency", "write_consistency"])
def test_reads_and_writes_may_have_different_levels(name: str) -> None:
    found = settings(consistency="QUORUM", **{name: "ALL"})
    reads = name == "read_consistency"
    assert (found.reading, found.writing) == (("ALL", "QUORUM") if reads else ("QUORUM", "ALL"))
    with pytest.raises(InvalidInput, match=f"{name} must be one of .*, not 'SOME'"):
        settings(**{name: "SOME"})


def test_secret_and_certificate_are_optional() -> None:
    assert settings().secret() is None
    assert settings().certificate("ca_file") is None
