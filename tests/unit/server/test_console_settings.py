"""The settings page shows no secret."""

from __future__ import annotations

from typing import Any

import pytest

from tidebook.server.console.settings import shown, without_secrets


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
    ],
)
def test_an_option_is_hidden_by_its_name(name: str, value: Any, expected: str) -> None:
    assert shown(name, value) == expected
