"""Declared fields in XML: a table of type journal and its columns. Only elements and attributes are accepted.

<table name="mail" type="journal">
  <column name="to" type="text"/>
  <column name="retries" type="integer" required="false"/>
</table>
"""

from __future__ import annotations

from typing import Any, Final
from xml.parsers import expat

from tidebook.core.errors import InvalidInput

XML_BYTES_MAX: Final = 1_000_000
_WRAPPERS: Final = {"tables", "schema"}


class _Refused(Exception):
    """The document contains something that a declaration may not contain, such as an entity."""


class _Reader:
    def __init__(self) -> None:
        self.rows: list[tuple[str, Any]] = []
        self._open_elements: list[str] = []
        self._tables = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._open_elements[-1] if self._open_elements else ""
        self._open_elements.append(name)
        match name:
            case "table" if parent in {"", "tables"}:
                if attributes.get("type", "journal").lower() != "journal":
                    raise _Refused(f"a table of type {attributes['type']!r} is not a journal")
                self._tables += 1
                if self._tables > 1:
                    raise _Refused("more than one table is declared, but a queue has one")
            case "column" | "field" if "table" in self._open_elements and parent in {"table", "schema"}:
                row = _row(attributes)
                if row[0] in dict(self.rows):
                    raise _Refused(f"{row[0]!r} is declared twice")
                self.rows.append(row)
            case "description":
                pass
            case _ if name in _WRAPPERS:
                pass
            case _:
                raise _Refused(f"<{name}> is unknown")

    def end(self, name: str) -> None:
        self._open_elements.pop()


def _row(attributes: dict[str, str]) -> tuple[str, Any]:
    unknown = set(attributes) - {"name", "type", "required"}
    if unknown:
        raise _Refused(f"a column has no attribute {', '.join(sorted(unknown))}")
    if "name" not in attributes:
        raise _Refused("a column has no name")
    required = attributes.get("required", "true").lower()
    if required not in {"true", "false"}:
        raise _Refused("required is true or false")
    return attributes["name"], {"type": attributes.get("type", "any"), "required": required == "true"}


def read_xml(text: bytes, name: str) -> list[tuple[str, Any]]:
    """Return the columns of a declaration; reject document types, entities and processing instructions."""
    if len(text) > XML_BYTES_MAX:
        raise InvalidInput(f"{name} takes {len(text):,} bytes and a declaration may take {XML_BYTES_MAX:,}")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse("a document type")
    parser.EntityDeclHandler = _refuse("an entity")
    parser.ExternalEntityRefHandler = _refuse("an external entity")
    parser.ProcessingInstructionHandler = _refuse("a processing instruction")
    try:
        parser.Parse(text, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # LookupError, ValueError: an unknown encoding
        raise InvalidInput(f"{name}: cannot be read as XML: {error}") from error
    except _Refused as error:
        raise InvalidInput(f"{name}: {error}") from error
    return reader.rows


def _refuse(what: str) -> Any:
    def refuse(*_: object) -> None:
        raise _Refused(f"a declaration must not contain {what}")

    return refuse
