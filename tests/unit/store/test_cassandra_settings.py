"""Settings of a Cassandra store, and what they reject."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.store.cassandra.scan import PAGE_BYTES, PageSizes
from tidebook.store.cassandra.settings import CassandraSettings, reads_see_writes, replicas_of

ONE, THREE, TWICE = {"": 1}, {"dc1": 3}, {"dc1": 3, "dc2": 3}


def test_a_url_names_hosts_port_keyspace_and_user() -> None:
    settings = CassandraSettings.read("cassandra://me:p%40ss@one,two:19042/books", environment={})
    assert (settings.hosts, settings.port, settings.keyspace) == (("one", "two"), 19042, "books")
    assert (settings.user, settings.secret()) == ("me", "p@ss")


def test_options_are_given_in_addition_to_the_url() -> None:
    settings = CassandraSettings.read("cassandra://one/books", {"consistency": "QUORUM", "replication": {"dc1": 3}})
    assert (settings.reading, settings.writing, settings.port) == ("QUORUM", "QUORUM", 9042)


def test_the_default_consistency_is_a_quorum_of_the_own_data_centre() -> None:
    settings = CassandraSettings.read("cassandra://one/books", environment={})
    assert (settings.reading, settings.writing) == ("LOCAL_QUORUM", "LOCAL_QUORUM")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("cassandra:///books", {}),
        ("cassandra://one", {}),
        ("cassandra://one/Books", {}),
        ("cassandra://one/books; DROP", {}),
        ("cassandra://one:many/books", {}),
        ("cassandra://one/books?tls=1", {}),
        ("postgresql://one/books", {}),
        ("cassandra://one/books", {"consistency": "ANY"}),
        ("cassandra://one/books", {"read_consistency": "EACH_QUORUM"}),
        ("cassandra://one/books", {"serial_consistency": "QUORUM"}),
        ("cassandra://one/books", {"colour": "blue"}),
        ("cassandra://one/books", {"tls": "yes"}),
        ("cassandra://one/books", {"ca_file": "ca.pem"}),
        ("cassandra://one/books", {"tls": True, "cert_file": "me.pem"}),
        ("cassandra://one/books", {"tls": True, "key_file": "me.key"}),
        ("cassandra://one/books", {"user": "u", "password": "p", "password_file": "f"}),
        ("cassandra://one/books", {"replication": {"d'c": 3}}),
    ],
)
def test_settings_that_can_never_work_are_rejected(url: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        CassandraSettings.read(url, options, environment={})


def test_no_secret_is_shown(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("hidden-in-file\n")
    inline = CassandraSettings.read("cassandra://me:hidden@one/books")
    from_file = CassandraSettings.read("cassandra://me@one/books", {"password_file": str(tmp_path / "password")})
    assert from_file.secret() == "hidden-in-file"
    assert "hidden" not in f"{inline!r} {inline} {from_file!r} {list(inline.__rich_repr__())}"


@pytest.mark.parametrize("cut", ["?", "#", "/", "12/", ":/"])
def test_a_password_with_a_character_that_splits_the_url_is_not_shown(cut: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        CassandraSettings.read(f"cassandra://me:hunter{cut}secret@host/Books")
    assert "hunter" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_password_file_that_is_missing_is_named() -> None:
    settings = CassandraSettings.read("cassandra://me@one/books", {"password_file": "nowhere"})
    with pytest.raises(InvalidInput, match="nowhere"):
        settings.secret()


@pytest.mark.parametrize(
    ("read", "write", "replicas", "local_dc", "seen"),
    [
        ("LOCAL_QUORUM", "LOCAL_QUORUM", ONE, None, True),
        ("ONE", "ONE", ONE, None, True),
        ("LOCAL_QUORUM", "LOCAL_QUORUM", THREE, None, True),
        ("ONE", "ONE", THREE, None, False),
        ("LOCAL_ONE", "LOCAL_QUORUM", THREE, None, False),
        ("TWO", "TWO", THREE, None, True),
        ("ONE", "ALL", THREE, None, True),
        ("ALL", "ONE", THREE, None, True),
        ("LOCAL_ONE", "ALL", TWICE, None, True),
        ("QUORUM", "QUORUM", TWICE, None, True),
        ("LOCAL_QUORUM", "QUORUM", TWICE, None, False),
        ("LOCAL_QUORUM", "EACH_QUORUM", TWICE, None, True),
        ("LOCAL_ONE", "EACH_QUORUM", TWICE, None, False),
        ("QUORUM", "LOCAL_QUORUM", TWICE, None, False),
        ("QUORUM", "EACH_QUORUM", TWICE, None, True),
        ("LOCAL_QUORUM", "LOCAL_QUORUM", {"dc1": 3, "dc2": 2}, "dc2", True),
        ("LOCAL_ONE", "LOCAL_QUORUM", {"dc1": 3, "dc2": 1}, "dc2", True),
        ("LOCAL_ONE", "LOCAL_QUORUM", {"dc1": 3, "dc2": 1}, "dc1", False),
        ("LOCAL_ONE", "LOCAL_QUORUM", {"dc1": 3, "dc2": 1}, None, False),
    ],
)
def test_whether_levels_overlap_depends_on_the_replicas_and_the_data_centre(
    read: str, write: str, replicas: dict[str, int], local_dc: str | None, seen: bool
) -> None:
    assert reads_see_writes(read, write, replicas, local_dc) is seen


def test_replicas_are_read_from_either_strategy() -> None:
    assert replicas_of({"class": "SimpleStrategy", "replication_factor": "3"}) == {"": 3}
    assert replicas_of({"class": "NetworkTopologyStrategy", "a": "3", "b": "2/1"}) == {"a": 3, "b": 2}


def test_pages_of_an_unknown_topic_start_small_and_adapt_to_the_rows() -> None:
    sizes = PageSizes()
    assert sizes.rows("t", 1000) == 16
    sizes.record("t", 16, 16 * 200)
    assert sizes.rows("t", 1000) == 1000


def test_pages_of_large_events_stay_within_their_bytes() -> None:
    sizes = PageSizes()
    sizes.record("t", 10, 10 * 200)
    sizes.record("t", 1, 1_000_000)
    assert sizes.rows("t", 1000) * 1_000_000 <= PAGE_BYTES
    for _ in range(60):
        sizes.record("t", 4, 800)
    assert sizes.rows("t", 1000) == 1000


def test_a_page_that_timed_out_is_read_in_smaller_parts() -> None:
    sizes = PageSizes()
    sizes.record("t", 10, 10 * 1000)
    assert sizes.rows("t", 1000) == 1000
    sizes.timed_out("t")
    sizes.timed_out("t")
    assert sizes.rows("t", 1000) == 250
    for _ in range(20):
        sizes.timed_out("t")
    assert sizes.rows("t", 1000) == 4


def test_fewer_rows_are_read_only_while_they_hold_several_events() -> None:
    sizes = PageSizes()
    sizes.record("t", 10, 1000, events=100)
    assert sizes.rows_of_events("t", 100) == 100 // 10 + 1
    sizes.record("t", 10, 1000, events=19)
    assert sizes.rows_of_events("t", 100) == 100 + 1
    sizes.record("t", 0, 0, events=0)
    assert (sizes.knows("t"), sizes.knows("u")) == (True, False)
