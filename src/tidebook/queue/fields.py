"""A queue's declared user fields, from a dataclass, a msgspec Struct, a pydantic model, a mapping, TOML or XML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn
from xml.etree import ElementTree

import msgspec

from tidebook.core.errors import InvalidInput

FIELDS_MAX: Final = 200
XML_BYTES_MAX: Final = 1_000_000

#: The types of fields in TOML, XML and mappings. A date is text in ISO 8601, with its time.
TYPES: Final[Mapping[str, Any]] = {
    "text": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "date": datetime,
    "list": list[Any],
    "object": dict[str, Any],
    "any": Any,
}


class Fields:
    """Validates data before it is put, and converts claimed data to the declared type."""

    def __init__(self, type_: type[Any], *, as_type: bool) -> None:
        self._type = type_
        self._as_type = as_type
        self._field_names = _field_names(type_)
        self.schema = _schema(type_)

    def check(self, data: Any) -> Any:
        """Return the data as plain JSON values; raise InvalidInput if it does not match the declaration."""
        try:
            if isinstance(data, self._type):
                data = msgspec.to_builtins(data)
            # Converting to a class would drop unknown fields silently.
            if isinstance(data, Mapping) and not self._field_names.issuperset(data):
                unknown = ", ".join(sorted(repr(name) for name in data if name not in self._field_names))
                raise InvalidInput(f"the data is not as declared: it has no field {unknown}")
            return msgspec.to_builtins(msgspec.convert(data, self._type))
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidInput(f"the data is not as declared: {error}") from error
        except RecursionError as error:
            raise InvalidInput("the data is nested too deeply, or contains itself") from error

    def read(self, data: Any) -> Any:
        """Return stored data as the declared type, or unchanged if it was put under an incompatible declaration."""
        if not self._as_type:
            return data
        try:
            return msgspec.convert(data, self._type)
        except msgspec.ValidationError:
            return data


class ModelFields(Fields):
    """The fields of a pydantic model, which validates and converts by its own rules; pydantic is not imported here."""

    def __init__(self, model: type[Any]) -> None:
        self._model: Any = model
        self.schema = msgspec.json.encode(self._model.model_json_schema(), order="sorted")

    def check(self, data: Any) -> Any:
        """Return the data as plain JSON values; raise InvalidInput if it does not match the declaration."""
        try:
            model = data if isinstance(data, self._model) else self._model.model_validate(data)
            # A model can be constructed with wrong values, but data that is put must be readable again.
            value = model.model_dump(mode="json", warnings=False)
            self._model.model_validate(value)
            return value
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidInput(f"the data is not as declared: {error}") from error

    def read(self, data: Any) -> Any:
        """Return stored data as the model, or unchanged if it was put under an incompatible declaration."""
        try:
            return self._model.model_validate(data)
        except ValueError:
            return data


def fields_of(declared: object) -> Fields:
    """Return the fields that a class, a `.toml` or `.xml` file, or a mapping of names to types declares."""
    if isinstance(declared, type):
        if is_dataclass(declared) or issubclass(declared, msgspec.Struct):
            return Fields(declared, as_type=True)
        if callable(getattr(declared, "model_json_schema", None)):
            return ModelFields(declared)
        raise InvalidInput(
            f"{declared.__name__} declares no fields: pass a dataclass, a msgspec Struct or a pydantic model"
        )
    if isinstance(declared, str | Path):
        path = Path(declared)
        match path.suffix:
            case ".toml":
                return _fields_from_rows(_read_toml(path))
            case ".xml":
                return _fields_from_rows(read_xml(_read_bytes(path), str(path)))
            case _:
                raise InvalidInput(f"{path} is neither a .toml nor an .xml file")
    if isinstance(declared, Mapping):
        return _fields_from_rows([(str(name), value) for name, value in declared.items()])
    raise InvalidInput(f"{type(declared).__name__} declares no fields: pass a class, a file or a mapping")


def _fields_from_rows(rows: list[tuple[str, Any]]) -> Fields:
    """Build fields from pairs of a name and a type name (`text`, or `text?` if optional) or a table."""
    if not 1 <= len(rows) <= FIELDS_MAX:
        raise InvalidInput(f"a queue must declare 1 to {FIELDS_MAX} fields, not {len(rows)}")
    definitions: list[Any] = []
    for name, value in rows:
        kind, optional = _parse_type(name, value)
        if not name.isidentifier():
            raise InvalidInput(f"{name!r} is not a valid name for a field")
        if optional:
            definitions.append((name, kind | None if kind is not Any else Any, None))
        else:
            definitions.append((name, kind))
    definitions.sort(key=len)  # required fields first
    try:
        struct = msgspec.defstruct("Declared", definitions, forbid_unknown_fields=True, kw_only=True)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a name like __a, which Python mangles
        raise InvalidInput(f"the declaration cannot be used: {error}") from error
    return Fields(struct, as_type=False)


def _parse_type(name: str, value: Any) -> tuple[Any, bool]:
    optional = False
    if isinstance(value, Mapping):
        unknown = set(value) - {"type", "required"}
        if unknown:
            raise InvalidInput(f"field {name!r}: {', '.join(sorted(unknown))} is unknown; use type and required")
        required = value.get("required", True)
        if type(required) is not bool:
            raise InvalidInput(f"field {name!r}: required must be true or false, not {required!r}")
        optional = not required
        value = value.get("type", "any")
    if isinstance(value, str) and value.endswith("?"):
        value, optional = value[:-1], True
    if not isinstance(value, str) or value not in TYPES:
        raise InvalidInput(f"field {name!r}: {value!r} is not a type; the types are {', '.join(TYPES)}")
    return TYPES[value], optional


def _read_toml(path: Path) -> list[tuple[str, Any]]:
    try:
        tree = tomllib.loads(_read_bytes(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: cannot be read as TOML: {error}") from error
    fields = tree.get("fields")
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path}: there is no table [fields]")
    return list(fields.items())


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error


def _field_names(type_: type[Any]) -> frozenset[str]:
    """Return the names of a class's fields as they appear in data."""
    if not issubclass(type_, msgspec.Struct):
        return frozenset(field.name for field in dataclass_fields(type_))
    tag = type_.__struct_config__.tag_field
    return frozenset(field.encode_name for field in msgspec.structs.fields(type_)) | ({tag} if tag else set())


def _schema(type_: type[Any]) -> bytes:
    """Return the declaration as canonical JSON Schema bytes: equal bytes mean equal declarations."""
    try:
        return msgspec.json.encode(msgspec.json.schema(type_), order="sorted")
    except (TypeError, NameError) as error:
        raise InvalidInput(f"the fields of {type_.__name__} cannot be encoded as JSON: {error}") from error


class _PlainTree(ElementTree.TreeBuilder):
    """Builds a tree of elements; rejects document types, with their entities, and processing instructions."""

    def doctype(self, *_: object) -> NoReturn:
        """Reject a document type."""
        raise InvalidInput("a declaration must not contain a document type")

    def pi(self, *_: object) -> NoReturn:
        """Reject a processing instruction."""
        raise InvalidInput("a declaration must not contain a processing instruction")


def read_xml(text: bytes, name: str) -> list[tuple[str, Any]]:
    """Return the columns of a declaration.

    It looks like `<table name="mail" type="journal"><column name="to" type="text" required="false"/></table>`.
    """
    if len(text) > XML_BYTES_MAX:
        raise InvalidInput(f"{name} takes {len(text):,} bytes and a declaration may take {XML_BYTES_MAX:,}")
    try:
        return _columns(ElementTree.fromstring(text, ElementTree.XMLParser(target=_PlainTree())))
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # an unknown encoding raises one of the last two
        raise InvalidInput(f"{name}: cannot be read as XML: {error}") from error


def _columns(root: ElementTree.Element) -> list[tuple[str, Any]]:
    rows: dict[str, Any] = {}
    waiting = [(root, "", False)]  # each element with its parent's name, and whether it is inside a table
    while waiting:
        element, parent, in_table = waiting.pop()
        match element.tag:
            case "table" if parent in {"", "tables"}:
                if element.get("type", "journal").lower() != "journal":
                    raise InvalidInput(f"a table of type {element.get('type')!r} is not a journal")
                if len(list(root.iter("table"))) > 1:
                    raise InvalidInput("more than one table is declared, but a queue has one")
                in_table = True
            case "column" | "field" if in_table and parent in {"table", "schema"}:
                _add_column(rows, element.attrib)
            case "description" | "tables" | "schema":
                pass
            case _:
                raise InvalidInput(f"<{element.tag}> is unknown")
        waiting += [(child, element.tag, in_table) for child in reversed(element)]
    return list(rows.items())


def _add_column(rows: dict[str, Any], attributes: Mapping[str, str]) -> None:
    unknown = set(attributes) - {"name", "type", "required"}
    if unknown:
        raise InvalidInput(f"a column has no attribute {', '.join(sorted(unknown))}")
    if "name" not in attributes:
        raise InvalidInput("a column has no name")
    required = attributes.get("required", "true").lower()
    if required not in {"true", "false"}:
        raise InvalidInput("required must be true or false")
    if attributes["name"] in rows:
        raise InvalidInput(f"{attributes['name']!r} is declared twice")
    rows[attributes["name"]] = {"type": attributes.get("type", "any"), "required": required == "true"}
