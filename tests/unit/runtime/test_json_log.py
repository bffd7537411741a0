"""Logs as JSON, without secrets and payloads."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import pytest

from tidebook.core.errors import Unavailable
from tidebook.runtime.json_log import TEXT_CHARS_MAX, JsonFormatter, redact


def line(message: str, *args: Any, error: BaseException | None = None, **fields: Any) -> dict[str, Any]:
    record = logging.getLogger("tidebook.test").makeRecord(
        "tidebook.test",
        logging.WARNING,
        "file.py",
        7,
        message,
        args,
        None if error is None else (type(error), error, error.__traceback__),
        extra=fields,
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_message_and_fields() -> None:
    found = line("topic %s: %d\nrecords", "orders", 3, topic="orders", lag=2.5, ok=True, none=None)
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "warning",
        "logger": "tidebook.test",
        "message": "topic orders: 3\nrecords",
        "fields": {"topic": "orders", "lag": 2.5, "ok": True, "none": None},
    }


@pytest.mark.parametrize(
    "text",
    [
        "kafka://me:hunter2@host:9092 is down",
        "postgresql://me:hunt@hunt/er2@host/db is down",
        "sent Authorization: Bearer hunter2hunter2",
        "token tb_hunter2hunter2 is unknown",
        "sasl.password=hunter2, next",
        "{'password': 'hunter2 hunter2'}",
        'secret: "hunter2"',
    ],
)
def test_text_that_looks_like_a_secret_is_replaced(text: str) -> None:
    assert "hunt" not in redact(text)
    assert "***" in redact(text)


def test_fields_with_the_name_of_a_secret_or_payload_are_replaced() -> None:
    found = line("x", password="hunter2", api_key="hunter2", payload={"card": 4111}, data="4111", body=b"4111")
    assert set(found["fields"].values()) == {"***"}


def test_arguments_that_may_hold_a_payload_are_written_as_their_type() -> None:
    found = line("%s %s %s", {"card": 4111}, b"4111", ValueError("4111"), other=["4111"])
    assert found["message"] == "<dict> <bytes> <ValueError>"
    assert found["fields"] == {"other": "<list>"}


def test_an_error_is_written_with_its_calls_but_its_text_only_if_it_is_of_this_package() -> None:
    found = []
    for error in (ValueError("card 4111"), Unavailable("the log is down")):
        try:
            raise error
        except Exception:
            found.append(line("failed", error=sys.exc_info()[1])["error"])
    assert [each["type"] for each in found] == ["ValueError", "Unavailable"]
    assert "message" not in found[0]
    assert found[1]["message"] == "the log is down"
    assert all("test_json_log.py" in each["calls"][-1] for each in found)


def test_a_long_message_is_truncated_and_a_wrong_format_does_not_fail() -> None:
    assert len(line("x" * 10_000)["message"]) == TEXT_CHARS_MAX + 1
    assert line("%d", "x")["message"] == "%d"
