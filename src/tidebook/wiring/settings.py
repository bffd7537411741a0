"""`tidebook.toml`, the environment and a bare folder, as one value.

    [log]                                      [store]                                    [sql]
    url = "kafka://host:9092"                  url = "cassandra://host:9042/keyspace"     url = "postgresql://…"

A section without a URL is embedded in the book's folder. All other names of a section are options of its adapter.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidebook.core.errors import InvalidInput

SECTIONS = ("log", "store", "sql", "journal", "tags", "wal", "outbox", "queue", "pipeline", "server")
DEFAULT_FOLDER = "tidebook-data"


class Section(msgspec.Struct, frozen=True):
    """One section: where the part lives, and its options."""

    url: str | None = None
    options: dict[str, Any] = {}

    @property
    def embedded(self) -> bool:
        return self.url is None

    def __repr__(self) -> str:  # a URL or an option may hold a password
        return f"Section(embedded={self.embedded}, options={sorted(self.options)})"


class Settings(msgspec.Struct, frozen=True):
    """Where a book lives and how its parts are set."""

    folder: Path
    sections: dict[str, Section] = {}

    def section(self, name: str) -> Section:
        return self.sections.get(name, Section())


def read_settings(where: str | Path, *, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of a folder, or of a `.toml` file; `TIDEBOOK_LOG_URL` and its like win over the file."""
    environment = os.environ if environment is None else environment
    text = str(where)
    if not text:
        raise InvalidInput("a book is a folder or a tidebook.toml: the name given is empty")
    if "://" in text:
        raise InvalidInput(f"{text.split('://')[0]}:// is not a book here: give a folder or a tidebook.toml")
    path = Path(text)
    if path.suffix == ".toml":
        folder, sections = _read_file(path)
    else:
        folder, sections = path, {}
    for name in ("log", "store", "sql"):
        url = environment.get(f"TIDEBOOK_{name.upper()}_URL")
        if url:
            old = sections.get(name, Section())
            sections[name] = Section(url, old.options)
    return Settings(folder, sections)


def _read_file(path: Path) -> tuple[Path, dict[str, Section]]:
    try:
        with path.open("rb") as file:
            tree = tomllib.load(file)
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: there is no such settings file") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"{path}: cannot be read as TOML: {error}") from error
    folder = tree.pop("folder", DEFAULT_FOLDER)
    if not isinstance(folder, str):
        raise InvalidInput(f"{path}: folder must be text")
    sections = {}
    for name, value in tree.items():
        if name not in SECTIONS or not isinstance(value, dict):
            raise InvalidInput(f"{path}: [{name}] is no section; there are {', '.join(SECTIONS)}")
        options = dict(value)
        url = options.pop("url", None)
        if url is not None and not isinstance(url, str):
            raise InvalidInput(f"{path}: url in [{name}] must be text")
        sections[name] = Section(url, options)
    return path.parent / folder, sections


def options_as(section: Section, name: str, type_: type[Any]) -> Any:
    """A section's options as the struct of the part that takes them; a wrong name or value says so."""
    try:
        return msgspec.convert(section.options, type_)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"[{name}] in tidebook.toml: {error}") from error


def settings_to_json(settings: Settings) -> str:
    """Settings as text, for the workers of a cluster, which may not have the file. It may hold secrets."""
    folder = str(settings.folder.resolve())
    return msgspec.json.encode({"folder": folder, "sections": settings.sections}).decode()


def settings_from_json(text: str) -> Settings:
    """Undo `settings_to_json`."""
    return msgspec.json.decode(text, type=Settings, dec_hook=lambda type_, value: type_(value))
