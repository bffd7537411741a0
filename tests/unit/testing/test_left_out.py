"""Tests that use a server excluded by --without are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.testing.servers import Cassandra, Kafka, MariaDb, Postgres, Server


@pytest.mark.parametrize("kind", [Kafka, Cassandra, Postgres, MariaDb])
def test_a_test_with_its_own_server_is_skipped_if_that_server_is_excluded(
    kind: type[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEBOOK_WITHOUT", f"other,{kind.name}")
    with pytest.raises(pytest.skip.Exception, match=f"{kind.name} was left out with --without"), kind(tmp_path / "own"):
        pytest.fail("it was started")
    assert not (tmp_path / "own").exists()
