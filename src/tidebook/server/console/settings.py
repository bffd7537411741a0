"""The effective settings of the book and their origins, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.journal.settings import JournalSettings
from tidebook.outbox.settings import OutboxSettings
from tidebook.pipeline.session import PipelineSettings
from tidebook.queue.port import QueueSettings
from tidebook.server.console.page import Page
from tidebook.server.console.routes import SETTINGS_PAGE
from tidebook.server.console.view import View
from tidebook.server.settings import ServerSettings
from tidebook.tags.settings import TagSettings
from tidebook.wal.settings import WalSettings
from tidebook.wiring.adapters import cassandra_settings, kafka_settings
from tidebook.wiring.queue import QueueOptions
from tidebook.wiring.settings import SECTIONS, SERVERS, Section, Settings, options_as

#: The sections with the same options in every book; those of a server depend on its URL.
STRUCTS: Final[dict[str, type[msgspec.Struct]]] = {
    "journal": JournalSettings,
    "tags": TagSettings,
    "wal": WalSettings,
    "outbox": OutboxSettings,
    "queue": QueueOptions,
    "pipeline": PipelineSettings,
    "server": ServerSettings,
}
HIDDEN: Final = "***"
_SECRET: Final = r"pass|secret|token|credential|sasl|key(?!s)|auth"
_SECRET_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
#: Up to the last @, because a password may have been written with characters that a URL does not allow.
_USERINFO: Final = re.compile(r"(?<=://).*@")
_PARAMETER: Final = re.compile(rf"([?&][^=&]*(?:{_SECRET})[^=&]*=)[^&]*", re.IGNORECASE)
#: The scheme and the host of a URL, and what follows.
_PATH: Final = re.compile(r"^([^:]+://[^/?#]*).+$")


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One option: its value, and where it came from."""

    name: str
    value: str
    origin: str
    is_default: bool


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True):
    """One section of `tidebook.toml`."""

    name: str
    rows: list[SettingRow]
    problem: str | None = None


class SettingsData(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    sections: list[SettingsSection]


async def settings(view: View) -> SettingsData:
    found = view.book.settings
    return SettingsData(folder=str(found.folder.resolve()), sections=list(effective_sections(found)))


def effective_sections(found: Settings) -> Iterator[SettingsSection]:
    """Yield the sections of the settings, each with all its options: the given ones and the defaults of the others."""
    for name in SECTIONS:
        section = found.section(name)
        tables = [each for each, value in section.options.items() if name == "queue" and isinstance(value, dict)]
        shared = {each: value for each, value in section.options.items() if each not in tables}
        yield _section(found, name, msgspec.structs.replace(section, options=shared))
        for each in tables:  # [queue.mail] has the settings of the queue mail
            yield _section(found, f"{name}.{each}", section.table(each))


def _section(found: Settings, name: str, section: Section) -> SettingsSection:
    rows = [_url_row(name, section)] if name in SERVERS else []
    problem, effective = None, None
    try:
        effective = _effective(found, name, section)
    except TidebookError as error:
        problem = str(error)
    values = dict(section.options)
    defaults: dict[str, Any] = {}
    if effective is not None:
        values |= msgspec.structs.asdict(effective)
        defaults = _defaults(type(effective))
    for option, value in values.items():
        is_default = option not in section.options and option in defaults and value == defaults[option]
        origin = _origin(section, option) if option in section.options else "the url"
        rows.append(
            SettingRow(
                name=option,
                # A rule of [mask] is named after the field that it hides.
                value=str(value) if name == "mask" else shown(option, value),
                origin="default" if is_default else origin,
                is_default=is_default,
            )
        )
    return SettingsSection(name=name, rows=rows, problem=problem)


def _effective(found: Settings, name: str, section: Section) -> msgspec.Struct | None:
    """Return the options of a section with their defaults; None if the section has none."""
    if name in SERVERS:
        if section.url is None or name == "sql":
            return None
        settings: msgspec.Struct = kafka_settings(found) if name == "log" else cassandra_settings(found)
        return settings
    if name.startswith("queue."):  # `fields` declares the data of the entries
        options = {each: value for each, value in section.options.items() if each != "fields"}
        return options_as(msgspec.structs.replace(section, options=options), name, QueueSettings)
    return options_as(section, name, STRUCTS[name]) if name in STRUCTS else None


def _defaults(type_: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(type_)
        if not field.required
    }


def _url_row(name: str, section: Section) -> SettingRow:
    variable = f"TIDEBOOK_{name.upper()}_URL"
    if section.url is None:
        return SettingRow(name="url", value="embedded: SQLite in the folder", origin="default", is_default=True)
    origin = f"environment variable {variable}" if os.environ.get(variable) else _origin(section, "url")
    return SettingRow(name="url", value=without_secrets(section.url), origin=origin, is_default=False)


def _origin(section: Section, option: str) -> str:
    line = section.lines.get(option)
    return f"{section.file or 'the settings'}{f', line {line}' if line else ''}"


def shown(name: str, value: Any) -> str:
    """Return a value as text; hide it if it may be a secret."""
    if value is None:
        return "–"
    if name == "dead_letter_webhook":  # the path of such a URL is often its password
        return _PATH.sub(rf"\1/{HIDDEN}", without_secrets(str(value)))
    if name == "dead_letter_command":
        return f"{value[0]} {HIDDEN}" if len(value) > 1 else shown("", list(value))
    if isinstance(value, str | bytes | dict | list) and _SECRET_NAME.search(name) and not name.endswith("_file"):
        return HIDDEN
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return ", ".join(f"{key} = {shown(str(key), item)}" for key, item in value.items()) or "–"
    if isinstance(value, list | tuple):
        return ", ".join(shown(name, item) for item in value) or "–"
    return without_secrets(str(value))


def without_secrets(text: str) -> str:
    """Return a URL without its password, and without parameters that may be secrets."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USERINFO.sub(f"{HIDDEN}@", text))


PAGES = (Page("settings", SETTINGS_PAGE, settings),)
