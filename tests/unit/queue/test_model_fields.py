"""Fields that are declared by a pydantic model."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic
import pytest

import tidebook
from tidebook.core.errors import InvalidInput
from tidebook.queue.fields import fields_of
from tidebook.queue.queue import Queue


class Mail(pydantic.BaseModel):
    to: str
    price: Decimal
    at: datetime
    copies: int = 1


MAIL = Mail(to="ada", price=Decimal("1.10"), at=datetime(2026, 1, 2, tzinfo=UTC))


async def test_a_model_is_put_into_a_queue_and_claimed(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        queue: Queue[Any] = book.queue("mail", fields=Mail)
        await queue.put(MAIL)
        await queue.put({"to": "bob", "price": "2", "at": "2026-01-02T00:00:00Z"})
        jobs = await queue.claim(limit=5, lease=timedelta(minutes=1))
        assert [job.data.to for job in jobs] == ["ada", "bob"]
        assert jobs[0].data == MAIL


@pytest.mark.parametrize(
    "data", [{}, {"to": 5}, "text", None, Mail.model_construct(to=5, price=None, at="x")], ids=repr
)
def test_data_that_is_not_as_declared_is_refused(data: Any) -> None:
    with pytest.raises(InvalidInput, match="not as declared"):
        fields_of(Mail).check(data)


def test_data_of_an_incompatible_declaration_is_returned_unchanged() -> None:
    assert fields_of(Mail).read({"other": 1}) == {"other": 1}
