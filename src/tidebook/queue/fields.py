"""The declaration of a queue's user fields: from a dataclass, a msgspec Struct, TOML or XML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.queue.fields_xml import read_xml

FIELDS_MAX: Final = 200

#: What a field may be declared as in TOML and XML. A date is text in ISO 8601, with its time.
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
    """Checks data before it is put, and gives it back as it was declared."""

    def __init__(self, type_: type[Any], *, as_type: bool) -> None:
        self._type = type_
        self._as_type = as_type
        self._names = _names(type_)
        self.schema = _schema(type_)

    def check(self, data: Any) -> Any:
        """The data as plain JSON values; InvalidInput where it is not what was declared."""
        try:
            if isinstance(data, self._type):
                data = msgspec.to_builtins(data)
            if isinstance(data, Mapping) and not self._names.issuperset(data):  # a class would drop it silently
                unknown = ", ".join(sorted(repr(name) for name in data if name not in self._names))
                raise InvalidInput(f"the data is not as declared: it has no field {unknown}")
            return msgspec.to_builtins(msgspec.convert(data, self._type))
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidInput(f"the data is not as declared: {error}") from error
        except RecursionError as error:
            raise InvalidInput("the data is nested too deeply, or contains itself") from error

    def read(self, data: Any) -> Any:
        """What was checked, as the declared type; what an older declaration let in stays as it is."""
        if not self._as_type:
            return data
        try:
            return msgspec.convert(data, self._type)
        except msgspec.ValidationError:
            return data


def fields_of(declared: object) -> Fields:
    """The fields of a dataclass, a Struct, a `.toml` or `.xml` file, or a mapping of names to types."""
    if isinstance(declared, type):
        if is_dataclass(declared) or issubclass(declared, msgspec.Struct):
            return Fields(declared, as_type=True)
        raise InvalidInput(f"{declared.__name__} declares no fields: give a dataclass or a msgspec Struct")
    if isinstance(declared, str | Path):
        path = Path(declared)
        match path.suffix:
            case ".toml":
                return _from_rows(_read_toml(path))
            case ".xml":
                return _from_rows(read_xml(_bytes_of(path), str(path)))
            case _:
                raise InvalidInput(f"{path} is neither a .toml nor an .xml file")
    if isinstance(declared, Mapping):
        return _from_rows([(str(name), value) for name, value in declared.items()])
    raise InvalidInput(f"{type(declared).__name__} declares no fields: give a class, a file or a mapping")


def _from_rows(rows: list[tuple[str, Any]]) -> Fields:
    """Rows of a name and either a type's name, with `?` behind it where the field may be left out, or a table."""
    if not 1 <= len(rows) <= FIELDS_MAX:
        raise InvalidInput(f"a queue declares 1 to {FIELDS_MAX} fields, not {len(rows)}")
    made: list[Any] = []
    for name, value in rows:
        kind, optional = _kind_of(name, value)
        if not name.isidentifier():
            raise InvalidInput(f"{name!r} is no name for a field")
        if optional:
            made.append((name, kind | None if kind is not Any else Any, None))
        else:
            made.append((name, kind))
    made.sort(key=len)  # those that may be left out come last
    try:
        struct = msgspec.defstruct("Declared", made, forbid_unknown_fields=True, kw_only=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the declaration cannot be used: {error}") from error
    return Fields(struct, as_type=False)


def _kind_of(name: str, value: Any) -> tuple[Any, bool]:
    optional = False
    if isinstance(value, Mapping):
        unknown = set(value) - {"type", "required"}
        if unknown:
            raise InvalidInput(f"field {name!r}: {', '.join(sorted(unknown))} is unknown; there are type and required")
        required = value.get("required", True)
        if type(required) is not bool:
            raise InvalidInput(f"field {name!r}: required is true or false, not {required!r}")
        optional = not required
        value = value.get("type", "any")
    if isinstance(value, str) and value.endswith("?"):
        value, optional = value[:-1], True
    if not isinstance(value, str) or value not in TYPES:
        raise InvalidInput(f"field {name!r}: {value!r} is no type; there are {', '.join(TYPES)}")
    return TYPES[value], optional


def _read_toml(path: Path) -> list[tuple[str, Any]]:
    try:
        tree = tomllib.loads(_bytes_of(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: cannot be read as TOML: {error}") from error
    fields = tree.get("fields")
    if not isinstance(fields, dict):
        raise InvalidInput(f"{path}: there is no table [fields]")
    return list(fields.items())


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}") from error


def _names(type_: type[Any]) -> frozenset[str]:
    """The fields of a class as they are named in data."""
    if not issubclass(type_, msgspec.Struct):
        return frozenset(field.name for field in dataclass_fields(type_))
    tag = type_.__struct_config__.tag_field
    return frozenset(field.encode_name for field in msgspec.structs.fields(type_)) | ({tag} if tag else set())


def _schema(type_: type[Any]) -> bytes:
    """The declaration as canonical bytes: two that are equal are the same declaration."""
    try:
        return msgspec.json.encode(msgspec.json.schema(type_), order="sorted")
    except (TypeError, NameError) as error:
        raise InvalidInput(f"the fields of {type_.__name__} cannot be kept as JSON: {error}") from error
