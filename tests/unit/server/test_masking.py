"""Masking rules hide fields of payloads."""

from __future__ import annotations

from typing import Any

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.server.masking import Masks

CARD = "4111111111111111"


@pytest.mark.parametrize(
    ("rule", "payload", "masked"),
    [
        ("orders.*.card", {"card": CARD}, {"card": "***1111"}),
        ("orders.*.card", {"a": {"b": [{"card": CARD}]}}, {"a": {"b": [{"card": "***1111"}]}}),
        ("orders.card", {"card": CARD, "a": {"card": CARD}}, {"card": "***1111", "a": {"card": CARD}}),
        ("orders.a.card", {"card": CARD, "a": {"card": CARD}}, {"card": CARD, "a": {"card": "***1111"}}),
        (
            "orders.a.*.card",
            {"a": {"x": {"card": CARD}}, "card": CARD},
            {"a": {"x": {"card": "***1111"}}, "card": CARD},
        ),
        ("*.card", {"card": CARD}, {"card": "***1111"}),
        ("orders.*.card", [{"card": CARD}], [{"card": "***1111"}]),
        ("orders.*.card", {"card": {"number": CARD}}, {"card": "***"}),
        ("orders.*.card", {"card": 4111111111111111}, {"card": "***1111"}),
        ("orders.*.card", {"card": "1234567"}, {"card": "***"}),
        ("orders.*.card", {"card": None}, {"card": "***"}),
        ("orders.*", {"card": CARD}, "***"),
        ("orders.*", b"bytes", "***"),
        ("orders.*.card", "text", "text"),
    ],
)
def test_a_rule_hides_its_field(rule: str, payload: Any, masked: Any) -> None:
    mask = Masks({rule: "last4"}).of("orders")
    assert mask is not None
    assert mask(payload) == masked


def test_a_rule_of_another_topic_hides_nothing() -> None:
    masks = Masks({"orders.*.card": "hide"})
    assert masks.of("order") is None
    assert masks.of("orders-eu") is None


def test_a_topic_may_contain_dots() -> None:
    mask = Masks({"orders.eu.card": "hide"}).of("orders.eu")
    assert mask is not None
    assert mask({"card": 1}) == {"card": "***"}


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        ({"card": CARD}, "ValueError: card '***1111' of 12 is refused"),
        ({"card": CARD, "total": 12}, "ValueError: card '***1111' of 12 is refused"),
        ({"card": [{"number": CARD}]}, "ValueError: card '***' of 12 is refused"),
        ({"card": 12}, f"ValueError: card '{CARD}' of *** is refused"),
        ({"card": 1}, f"ValueError: card '{CARD}' of 12 is refused"),
        ({"card": [f"{n:05}" for n in range(200)]}, "***"),
        ({"total": CARD}, f"ValueError: card '{CARD}' of 12 is refused"),
    ],
)
def test_a_text_about_a_payload_does_not_have_what_is_hidden_in_it(payload: Any, shown: str) -> None:
    mask = Masks({"orders.*.card": "last4"}).of("orders")
    assert mask is not None
    assert mask.text(f"ValueError: card '{CARD}' of 12 is refused", payload) == shown


def test_nothing_of_a_text_is_shown_if_the_whole_payload_is_hidden() -> None:
    mask = Masks({"orders.*": "hide"}).of("orders")
    assert mask is not None
    assert mask.text("ValueError: 12", b"12") == "***"


def test_the_payload_itself_is_not_changed() -> None:
    payload = {"a": [{"card": CARD}]}
    mask = Masks({"orders.*.card": "hide"}).of("orders")
    assert mask is not None
    mask(payload)
    assert payload == {"a": [{"card": CARD}]}


@pytest.mark.parametrize(
    "rules",
    [
        {"orders": "hide"},
        {"orders..card": "hide"},
        {"orders.card": "blur"},
        {".x": "hide"},
        {"orders*.card": "hide"},
        {"orders.card*": "hide"},
        {"orders.**.card": "hide"},
        {"orders/eu.card": "hide"},
    ],
)
def test_a_wrong_rule_is_refused(rules: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="mask"):
        Masks(rules)
