"""Declarations of user fields: their forms, the data that they accept, and the declarations that are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidebook.core.errors import InvalidInput
from tidebook.queue.fields import XML_BYTES_MAX, fields_of, read_xml


@dataclass
class Mail:
    to: str
    retries: int = 0


class Letter(msgspec.Struct):
    to: str
    retries: int = 0


XML = b"""<?xml version="1.0"?>
<table name="mail" type="JOURNAL">
  <description>Mail to be sent.</description>
  <schema>
    <column name="to" type="text"/>
    <column name="retries" type="integer" required="false"/>
  </schema>
</table>"""
TOML = """[fields]
to = "text"
retries = "integer?"
"""


@pytest.fixture(params=["dataclass", "struct", "toml", "xml", "mapping"])
def declared(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return the same declaration in one of its forms."""
    match request.param:
        case "dataclass":
            return Mail
        case "struct":
            return Letter
        case "toml":
            (tmp_path / "mail.toml").write_text(TOML)
            return tmp_path / "mail.toml"
        case "xml":
            (tmp_path / "mail.xml").write_bytes(XML)
            return tmp_path / "mail.xml"
        case _:
            return {"to": "text", "retries": {"type": "integer", "required": False}}


def test_data_that_is_as_declared_is_accepted(declared: Any) -> None:
    assert fields_of(declared).check({"to": "x", "retries": 3}) == {"to": "x", "retries": 3}


def test_a_field_that_is_declared_optional_may_be_left_out(declared: Any) -> None:
    assert fields_of(declared).check({"to": "x"})["to"] == "x"


@pytest.mark.parametrize("data", [{"to": 1}, {"retries": 1}, {"to": "x", "retries": "many"}, [], "x", None])
def test_data_that_is_not_as_declared_is_refused(declared: Any, data: Any) -> None:
    with pytest.raises(InvalidInput, match="declared"):
        fields_of(declared).check(data)


@pytest.mark.parametrize("kind", [Mail, Letter])
def test_an_instance_is_encoded_and_decoded(kind: Any) -> None:
    fields = fields_of(kind)
    assert fields.read(fields.check(kind("x", 2))) == kind("x", 2)


def test_data_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["more"] = endless
    with pytest.raises(InvalidInput, match="nested too deeply"):
        fields_of({"more": "any"}).check(endless)


def test_data_of_an_older_declaration_is_returned_unchanged() -> None:
    assert fields_of(Mail).read({"address": "x"}) == {"address": "x"}


def test_a_date_field_accepts_only_dates() -> None:
    fields = fields_of({"at": "date"})
    assert fields.check({"at": "2030-01-31T12:00:00Z"}) == {"at": "2030-01-31T12:00:00Z"}
    for wrong in ("tomorrow", "2030-13-01T00:00:00Z", 3):
        with pytest.raises(InvalidInput, match="declared"):
            fields.check({"at": wrong})


def test_equal_declarations_have_equal_schemas_and_others_do_not() -> None:
    first, second = fields_of({"to": "text"}), fields_of({"to": "text"})
    assert first.schema == second.schema != fields_of({"to": "integer"}).schema


@pytest.mark.parametrize(
    "declared",
    [{}, {"to": "txt"}, {"1x": "text"}, {"to": {"type": "text", "size": 3}}, int, 7, "mail.json", "missing.toml"],
)
def test_an_invalid_declaration_is_refused(declared: Any) -> None:
    with pytest.raises(InvalidInput):
        fields_of(declared)


@pytest.mark.parametrize(
    "text",
    [
        b'<!DOCTYPE t [<!ENTITY a "aaaa">]><table><column name="x" type="text"/></table>',
        b'<!DOCTYPE t SYSTEM "file:///etc/passwd"><table/>',
        b'<!DOCTYPE t [<!ENTITY e SYSTEM "file:///etc/passwd">]><table>&e;</table>',
        b"<?php x ?><table/>",
        b"<table><script/></table>",
        b'<table type="tree"/>',
        b'<table><column type="text"/></table>',
        b'<table><column name="x" size="3"/></table>',
        b"<table>",
        b"",
        b"x" * (XML_BYTES_MAX + 1),
        b'<?xml version="1.0" encoding="klingon"?><table><column name="x"/></table>',
        b'<?xml version="1.0" encoding="utf-7"?><table><column name="x"/></table>',
        b'<table><column name="x"><column name="y"/></column></table>',
    ],
)
def test_xml_with_anything_but_a_declaration_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_xml(text, "mail.xml")


def test_a_field_that_was_not_declared_is_refused_in_every_form(declared: Any) -> None:
    fields = fields_of(declared)
    with pytest.raises(InvalidInput, match="retires"):
        fields.check({"to": "x", "retires": 3})
    assert fields.check({"to": "x", "retries": 3}) == {"to": "x", "retries": 3}


def test_fields_have_the_names_by_which_a_struct_is_encoded() -> None:
    class Parcel(msgspec.Struct, rename="camel", tag_field="kind", tag="parcel"):
        sent_to: str

    fields = fields_of(Parcel)
    assert fields.check({"kind": "parcel", "sentTo": "x"}) == {"kind": "parcel", "sentTo": "x"}
    with pytest.raises(InvalidInput):
        fields.check({"kind": "parcel", "sentTo": "x", "sent_to": "y"})


@dataclass
class Parcel(Mail):
    weight: int = 1


class Registered(Letter):
    number: int = 1


@dataclass
class Unknown:
    to: NoSuchType  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(("declared", "data"), [(Mail, Parcel("x")), (Letter, Registered("x"))])
def test_an_instance_with_more_fields_than_declared_is_refused(declared: Any, data: Any) -> None:
    with pytest.raises(InvalidInput, match="it has no field"):
        fields_of(declared).check(data)


def test_a_class_with_unresolvable_annotations_is_refused() -> None:
    with pytest.raises(InvalidInput, match="NoSuchType"):
        fields_of(Unknown)


@pytest.mark.parametrize("required", ["false", 0, None])
def test_a_required_that_is_not_true_or_false_is_refused(required: Any) -> None:
    with pytest.raises(InvalidInput, match="'to': required must be true or false"):
        fields_of({"to": {"type": "text", "required": required}})


def test_a_column_that_is_declared_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'to' is declared twice"):
        read_xml(b'<table><column name="to" type="text"/><column name="to" type="integer"/></table>', "mail.xml")


def test_a_declaration_of_several_tables_is_refused() -> None:
    with pytest.raises(InvalidInput, match="more than one table"):
        read_xml(b'<tables><table><column name="a"/></table><table><column name="b"/></table></tables>', "mail.xml")
