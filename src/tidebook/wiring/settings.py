"""Read a book's settings from a `tidebook.toml`, or use the defaults for a folder; then apply the environment.

A folder is not searched for a `tidebook.toml`.

    [log]                                      [store]                                    [sql]
    url = "kafka://host:9092"                  url = "cassandra://host:9042/keyspace"     url = "postgresql://…"

Only these sections have URLs. One without a URL is embedded: SQLite files in the book's folder. The other keys of [log]
and [store] are options of the adapter; [sql] has none.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import encode_text

SECTIONS = ("log", "store", "sql", "journal", "tags", "wal", "outbox", "queue", "pipeline", "server", "mask")
#: The sections that may name a server by its URL, each with an example.
SERVERS = {
    "log": "kafka://host:9092",
    "store": "cassandra://host:9042/keyspace",
    "sql": "postgresql://user@host/database",
}
DEFAULT_FOLDER = "tidebook-data"
#: The file in an embedded book's folder with the offsets of process managers.
PROCESS_FILE = "process.db"
#: The book that is opened if none is named.
DEFAULT_BOOK = f"./{DEFAULT_FOLDER}"
Options = TypeVar("Options", bound=msgspec.Struct)


class Section(msgspec.Struct, frozen=True):
    """One section of the settings: the URL of the server, if any, and the options."""

    url: str | None = None
    options: dict[str, Any] = {}
    #: The file it was read from, and the line of each option in it; the key "" holds the line of the section header.
    file: str | None = None
    lines: dict[str, int] = {}

    @property
    def embedded(self) -> bool:
        """Whether the part uses SQLite files in the book's folder instead of a server."""
        return self.url is None

    def __repr__(self) -> str:  # a URL or an option may contain a password
        return f"Section(embedded={self.embedded}, options={sorted(self.options)})"

    def place(self, name: str, option: str = "") -> str:
        """Return the file, the line and the section of an option, for error messages."""
        line = self.lines.get(option) or self.lines.get("")
        where = f"{self.file or 'tidebook.toml'}, line {line}: " if line else ""
        return f"{where}[{name}]" if where or self.file is None else f"{self.file}: [{name}]"

    def table(self, name: str) -> Section:
        """Return a nested table, such as [queue.mail], as a section."""
        lines = {key.removeprefix(f"{name}."): line for key, line in self.lines.items() if key.startswith(f"{name}.")}
        return Section(None, dict(self.options[name]), self.file, {"": self.lines.get(name, 0), **lines})


class Settings(msgspec.Struct, frozen=True):
    """The settings of a book: its folder, and one section for each part."""

    folder: Path
    sections: dict[str, Section] = {}
    #: The address of a remote book's server, which alone knows the settings of that book; None for any other book.
    server: str | None = None

    def section(self, name: str) -> Section:
        """Return the section of this name; an empty one if the settings have no such section."""
        return self.sections.get(name, Section())

    def options(self, name: str, type_: type[Options]) -> Options:
        """Return the options of a section as an instance of the struct `type_`; see `options_as`."""
        return options_as(self.section(name), name, type_)


def read_settings(where: str | Path, *, environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a folder or of a `.toml` file; raise `InvalidInput` if the file is not valid.

    The environment variables `TIDEBOOK_LOG_URL`, `TIDEBOOK_STORE_URL` and `TIDEBOOK_SQL_URL` override the file.
    """
    environment = os.environ if environment is None else environment
    text = str(where)
    if not text.strip():
        raise InvalidInput("the name of the book is empty: name a folder or a tidebook.toml")
    if "://" in text:
        raise InvalidInput(f"{text.split('://')[0]}:// is not supported here: use a folder or a tidebook.toml")
    path = Path(text)
    folder, sections = _read_file(path) if path.suffix == ".toml" else (path, {})
    check_path(folder)
    for name in SERVERS:
        if url := environment.get(f"TIDEBOOK_{name.upper()}_URL"):
            sections[name] = msgspec.structs.replace(sections.get(name, Section()), url=url)
        _check_url(sections.get(name, Section()), name)
    return Settings(folder, sections)


def check_path(path: Path) -> None:
    """Raise `InvalidInput` for a folder that SQLite cannot open: its path must be text in UTF-8 without NUL."""
    if b"\0" in encode_text(str(path), "the path of a folder"):
        raise InvalidInput(f"the path of a folder must not contain NUL: {str(path)!r}")


def _check_url(section: Section, name: str) -> None:
    """Raise `InvalidInput` for options without a URL, which would silently be embedded, and for any option of [sql]."""
    for option in section.options:
        place = f"{section.place(name, option)} {option}"
        if section.url is None:
            close = _suggestion(option, ["url"]) or f": add a line 'url = \"{SERVERS[name]}\"', or remove this one"
            raise InvalidInput(f"{place} has no effect without a url, and [{name}] would be embedded{close}")
        if name == "sql":
            raise InvalidInput(f"{place} is unknown: the only option is url")


def _read_file(path: Path) -> tuple[Path, dict[str, Section]]:
    try:
        text = path.read_bytes().decode()
        tree = tomllib.loads(text)
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: there is no such settings file") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path}: cannot be read as TOML: {error}") from error
    lines = _lines(text)
    folder = tree.pop("folder", DEFAULT_FOLDER)
    if not isinstance(folder, str):
        raise InvalidInput(f"{_place(path, lines, 'folder')}: folder must be a string")
    sections = {}
    for name, value in tree.items():
        if name not in SECTIONS:
            hint = f"the sections are {', '.join(SECTIONS)}"
            close = _suggestion(name, (*SECTIONS, "folder"))
            raise InvalidInput(f"{_place(path, lines, name)}: [{name}] is not a section{close}; {hint}")
        if not isinstance(value, dict):
            raise InvalidInput(f"{_place(path, lines, name)}: {name} must be a section, [{name}]")
        options = dict(value)
        url = options.pop("url", None)
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"{_place(path, lines, name, 'url')}: url in [{name}] must be a string")
        sections[name] = Section(url, options, str(path), lines.get(name, {}))
    return path.parent / folder, sections


def _place(path: Path, lines: dict[str, dict[str, int]], name: str, option: str = "") -> str:
    """Return the file and, if it is known, the line of a section, of its option, or of a key before all sections."""
    line = lines.get(name, {}).get(option) or lines.get("", {}).get(name)
    return f"{path}, line {line}" if line else str(path)


_HEADER = re.compile(r"""\s*\[\s*(?P<name>[^\[\]#]+?)\s*\]""")
_OPTION = re.compile(r"""\s*(?P<name>[A-Za-z0-9_.-]+|"[^"]*"|'[^']*')\s*=""")


def _lines(text: str) -> dict[str, dict[str, int]]:
    """Return the line of each option by section, for error messages: `tomllib` does not report lines.

    The options of a nested table have its name as a prefix.

    >>> _lines("[queue]\\nschema = 'a'\\n[queue.mail]\\nperiod = 'day'")
    {'queue': {'': 1, 'schema': 2, 'mail': 3, 'mail.period': 4}}
    """
    found: dict[str, dict[str, int]] = {}
    section, prefix = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section, _, table = header["name"].replace('"', "").replace("'", "").partition(".")
            prefix = f"{table}." if table else ""
            found.setdefault(section, {}).setdefault(table, number)
        elif option := _OPTION.match(line):
            found.setdefault(section, {}).setdefault(prefix + option["name"].strip("\"'"), number)
    return found


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def check_names(section: Section, name: str, type_: type[Any]) -> None:
    """Raise `InvalidInput`, with file, line and the closest name, for an option that the struct does not have."""
    known = [field.encode_name for field in msgspec.structs.fields(type_)]
    for option in section.options:
        if option not in known:
            close = _suggestion(option, known) or f": the options are {', '.join(sorted(known))}"
            raise InvalidInput(f"{section.place(name, option)} {option} is unknown{close}")


def options_as(section: Section, name: str, type_: type[Options]) -> Options:
    """Return a section's options as an instance of the struct `type_`.

    Raise `InvalidInput`, with file and line, for an unknown name, a missing required option or a value of a wrong type.
    """
    check_names(section, name, type_)
    for field in msgspec.structs.fields(type_):
        option = field.encode_name
        if option not in section.options:
            if field.required:
                raise InvalidInput(f"{section.place(name)} {option} is missing: add a line '{option} = …'")
            continue
        try:
            msgspec.convert(section.options[option], field.type)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"{section.place(name, option)} {option}: {error}") from error
    try:
        return msgspec.convert(section.options, type_)
    except (msgspec.ValidationError, InvalidInput) as error:  # raised by the checks of the struct as a whole
        raise InvalidInput(f"{section.place(name)}: {error}") from error


def adapter_options(section: Section, name: str, type_: Any) -> Any:
    """Return the adapter settings that `type_.read` builds from the URL and the options of a section."""
    check_names(section, name, type_)
    try:
        return type_.read(section.url, section.options)
    except InvalidInput as error:
        if section.file is None:
            raise
        raise InvalidInput(f"{section.place(name)}: {error}") from error


def settings_to_json(settings: Settings) -> str:
    """Return the settings as JSON, for Spark workers that do not have the file. The text may contain secrets."""
    folder = str(settings.folder.resolve())
    return msgspec.json.encode({"folder": folder, "sections": settings.sections}).decode()


def settings_from_json(text: str) -> Settings:
    """Return the settings that `settings_to_json` encoded."""
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda type_, value: type_(value))
