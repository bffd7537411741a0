"""The address and the token of a remote book are checked before anything is sent."""

from __future__ import annotations

import pytest

import tidebook
from tidebook import InvalidInput


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host:0",
        "http://[::1",
        "http://host/\x00",
        "http://me:hunter2@host:8470",
        "http://host:8470?token=hunter2",
        "http://host:8470#hunter2",
    ],
)
def test_a_wrong_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInput, match="https://host:port") as refused:
        tidebook.open(url)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("token", ["tb_secret\n", " tb_secret", "tb_sécret", "tb secret", "", "tb_secret\x7f"])
def test_a_token_with_other_characters_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(InvalidInput, match="end of the line") as refused:
        tidebook.open("http://127.0.0.1:8470", token=token)
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
