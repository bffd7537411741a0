"""The effective settings of the book, where each came from, and no secret."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.journal.settings import JournalSettings
from tidebook.outbox.settings import OutboxSettings
from tidebook.server.console.page import Page
from tidebook.server.console.routes import SETTINGS_PAGE
from tidebook.server.console.view import View
from tidebook.server.settings import ServerSettings
from tidebook.tags.settings import TagSettings
from tidebook.wal.settings import WalSettings
from tidebook.wiring.settings import SECTIONS, Section

#: The sections whose defaults are known here; of others, only the given options are shown.
STRUCTS: Final[dict[str, type[msgspec.Struct]]] = {
    "journal": JournalSettings,
    "tags": TagSettings,
    "wal": WalSettings,
    "outbox": OutboxSettings,
    "server": ServerSettings,
}
HIDDEN: Final = "***"
_SECRET: Final = r"pass|secret|token|credential|sasl|key(?!s)|auth"
_SECRET_NAME: Final = re.compile(_SECRET, re.IGNORECASE)
#: Up to the last @, because a password may have been written with characters that a URL does not allow.
_USERINFO: Final = re.compile(r"(?<=://).*@")
_PARAMETER: Final = re.compile(rf"([?&][^=&]*(?:{_SECRET})[^=&]*=)[^&]*", re.IGNORECASE)


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
    """The values that the template of the page shows."""

    folder: str
    sections: list[SettingsSection]


async def settings(view: View) -> SettingsData:
    """Show the settings."""
    found = view.book.settings
    return SettingsData(
        folder=str(found.folder.resolve()), sections=[_section(view, name, found.section(name)) for name in SECTIONS]
    )


def _section(view: View, name: str, section: Section) -> SettingsSection:
    rows = [_url_row(name, section)] if name in ("log", "store", "sql") else []
    values, problem = dict(section.options), None
    if name in STRUCTS:
        try:
            values = msgspec.structs.asdict(view.book.settings.options(name, STRUCTS[name]))
        except TidebookError as error:
            problem = str(error)
    for option, value in values.items():
        given = option in section.options
        rows.append(
            SettingRow(
                name=option,
                # A rule of [mask] is named after the field that it hides.
                value=str(value) if name == "mask" else shown(option, value),
                origin=_origin(section, option) if given else "default",
                is_default=not given,
            )
        )
    return SettingsSection(name=name, rows=rows, problem=problem)


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


PAGES = (Page(name="settings", path="/settings", route=SETTINGS_PAGE, read=settings, template="settings.html"),)
