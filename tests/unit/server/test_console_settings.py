"""The settings page shows the effective value of every option and where it came from, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidebook.server.console.settings import effective_sections, shown, without_secrets
from tidebook.wiring.settings import SECTIONS, read_settings

FILE = """\
[log]
url = "kafka://one,two:9093"
linger_ms = 5.0
password = "hunter2"
user = "me"
[store]
url = "cassandra://ada@host/books"
[queue]
dead_letter_command = ["notify", "hunter2"]
[queue.mail]
period = "hour"
[pipeline]
spark = { "spark.hadoop.fs.s3a.secret.key" = "hunter2" }
"""


def test_every_section_has_the_effective_value_of_each_option_and_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text(FILE)
    sections = {each.name: each for each in effective_sections(read_settings(file, environment={}))}
    assert [name for name in sections if "." not in name] == list(SECTIONS)
    found = {(name, row.name): (row.value, row.origin) for name, each in sections.items() for row in each.rows}
    assert found["log", "servers"] == ("one:9092, two:9093", "the url")
    assert found["log", "linger_ms"] == ("5.0", f"{file}, line 3")
    assert found["log", "password"] == ("***", f"{file}, line 4")
    assert found["log", "compression"] == ("none", "default")
    assert found["store", "user"] == ("ada", "the url")
    assert found["store", "keyspace"] == ("books", "the url")
    assert found["store", "consistency"] == ("LOCAL_QUORUM", "default")
    assert found["queue", "connections_max"] == ("4", "default")
    assert found["queue.mail", "period"] == ("hour", f"{file}, line 11")
    assert found["queue.mail", "max_timeouts"] == ("5", "default")
    assert found["pipeline", "master"] == ("local[*]", "default")
    assert [each.problem for each in sections.values() if each.problem] == []
    assert "hunter2" not in str(found)


def test_a_section_with_an_error_shows_what_was_given_and_the_error(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('[queue]\nconections_max = 3\n[queue.mail]\nperiod = "hour"\n')
    sections = {each.name: each for each in effective_sections(read_settings(file, environment={}))}
    assert "did you mean connections_max" in str(sections["queue"].problem)
    assert [(row.name, row.value) for row in sections["queue"].rows] == [("conections_max", "3")]
    assert sections["queue.mail"].problem is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("kafka://host:9092", "kafka://host:9092"),
        ("postgresql://me:hunter2@host/db", "postgresql://***@host/db"),
        ("postgresql://me:hun/t@er2@host/db", "postgresql://***@host/db"),
        ("cassandra://host/ks?password=hunter2&dc=one", "cassandra://host/ks?password=***&dc=one"),
        ("postgresql://host/db?sslmode=require&sslpassword=hunter2", "postgresql://host/db?sslmode=require&sslpassword=***"),
        ("kafka://host:9092?sasl.jaas.config=hunter2&auth=hunter2", "kafka://host:9092?sasl.jaas.config=***&auth=***"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_secrets(url: str, expected: str) -> None:
    assert without_secrets(url) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("password", "hunter2", "***"),
        ("sasl_password", "hunter2", "***"),
        ("client_secret", "hunter2", "***"),
        ("password_file", "secrets/kafka", "secrets/kafka"),
        ("idempotency_keys_max", 100, "100"),
        ("options", {"password": "hunter2", "dc": "one"}, "password = ***, dc = one"),
        ("allowed_hosts", ("a", "b"), "a, b"),
        ("export_folder", None, "–"),
        ("dead_letter_webhook", "https://hooks.example/services/T0/hunter2", "https://hooks.example/***"),
        ("dead_letter_webhook", "https://me:hunter2@hooks.example?key=hunter2", "https://***@hooks.example/***"),
        ("dead_letter_command", ("curl", "-H", "Authorization: hunter2"), "curl ***"),
        ("dead_letter_command", ("notify",), "notify"),
        ("dead_letter_command", (), "–"),
    ],
)
def test_an_option_is_hidden_by_its_name(name: str, value: Any, expected: str) -> None:
    assert shown(name, value) == expected
