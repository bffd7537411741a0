"""Hide fields of payloads by rule; an admin who asks for them sees them.

Not hidden is what a caller with the role of an operator works on: claimed jobs, and entries of write-ahead logs.

    [mask]
    "orders.*.card" = "last4"        # in topic, queue or namespace `orders`: the field `card`, however deep
    "*.password" = "hide"            # in all topics, queues and namespaces: the field `password` at the top

A rule is a topic, queue or namespace, or `*`, then the path of a field, separated by dots; `*` in a path matches any
number of names. Items of lists need no name. A rule for a whole topic, "secret.*", hides the whole payload, text and
bytes too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from tidebook.api.payload import payload_to
from tidebook.core.errors import InvalidInput

MaskKind = Literal["hide", "last4"]
HIDDEN: Final = "***"
#: Values shorter than this are hidden as a whole, because four characters would reveal too much of them.
LAST4_CHARS_MIN: Final = 8
ANY: Final = "*"
#: In texts, hidden values up to this length are replaced only as whole words, longer ones wherever they occur.
WORD_CHARS_MAX: Final = 3
#: With more hidden values, the whole text is hidden.
TEXT_VALUES_MAX: Final = 100
_NAME = re.compile(r"\*|[A-Za-z0-9_-]+")
Path = tuple[str, ...]
L = TypeVar("L", bound=msgspec.Struct)


def hide(value: Any) -> Any:
    """Replace a value."""
    return HIDDEN


def last4(value: Any) -> Any:
    """Replace a value except for its last four characters."""
    text = value if isinstance(value, str) else str(value) if type(value) is int else ""
    return HIDDEN + text[-4:] if len(text) >= LAST4_CHARS_MIN else HIDDEN


_KINDS: Final[dict[str, Callable[[Any], Any]]] = {"hide": hide, "last4": last4}


class MaskRule(msgspec.Struct, frozen=True):
    """One rule: its text, and how the field is hidden."""

    text: str
    kind: MaskKind

    def path_in(self, name: str) -> Path | None:
        """Return the path that the rule hides in a topic, queue or namespace; None if it concerns others."""
        for start in (f"{name}.", f"{ANY}."):
            if self.text.startswith(start):
                return tuple(self.text[len(start) :].split("."))
        return None


class Masks:
    """The rules of a book."""

    def __init__(self, rules: Mapping[str, Any]) -> None:
        for text, kind in rules.items():
            if kind not in _KINDS:
                raise InvalidInput(f'[mask] "{text}" must be "hide" or "last4", not {kind!r}')
            if "." not in text or not all(text.split(".")):
                raise InvalidInput(f'[mask] "{text}" must be a topic or queue and a field, as in "orders.*.card"')
            name, *path = text.split(".")
            if not _NAME.fullmatch(name) or any(ANY in part and part != ANY for part in path):
                raise InvalidInput(
                    f'[mask] "{text}" would hide nothing: * must stand alone, as in "*.card", for any name'
                )
        self._rules = [MaskRule(text, kind) for text, kind in rules.items()]
        self._by_name: dict[str, Mask | None] = {}

    def of(self, name: str) -> Mask | None:
        """Return the mask of a topic, queue or namespace; None if no rule concerns it."""
        if not self._rules:
            return None
        if name not in self._by_name:
            if len(self._by_name) >= 10_000:
                self._by_name.clear()
            found = [(path, _KINDS[rule.kind]) for rule in self._rules if (path := rule.path_in(name)) is not None]
            self._by_name[name] = Mask(found) if found else None
        return self._by_name[name]


class Mask:
    """The paths that are hidden in one topic, queue or namespace."""

    def __init__(self, paths: list[tuple[Path, Callable[[Any], Any]]]) -> None:
        self._paths = paths
        self._whole = any(all(part == ANY for part in path) for path, _ in paths)

    def __call__(self, payload: Any) -> Any:
        """Return a payload with its fields hidden; the given one is not changed."""
        if self._whole:
            return HIDDEN
        if not isinstance(payload, dict | list):
            return payload
        for path, act in self._paths:
            payload = _masked(payload, path, act)
        return payload

    def text(self, text: str, payload: Any) -> str:
        """Return a text about a payload, such as the reason of a failure, without the values that are hidden in it."""
        if self._whole:
            return HIDDEN
        hidden = dict(_hidden(payload, self(payload)))
        if len(hidden) > TEXT_VALUES_MAX:
            return HIDDEN
        for value in sorted(hidden, key=len, reverse=True):
            pattern = re.escape(value) if len(value) > WORD_CHARS_MAX else rf"(?<!\w){re.escape(value)}(?!\w)"
            text = re.sub(pattern, lambda _, shown=hidden[value]: shown, text)  # type: ignore[misc]
        return text

    def line(self, line: L, payload: Any, metadata: Any) -> L:
        """Return the line of an event with the masked forms of its payload and metadata."""
        shown, encoded = payload_to(self(payload))
        hidden = None if metadata is None else self(metadata)
        hidden = hidden if isinstance(hidden, dict) else None
        return msgspec.structs.replace(line, payload=shown, payload_base64=encoded, metadata=hidden)


def _masked(value: Any, path: Path, act: Callable[[Any], Any]) -> Any:
    if not path:
        return act(value)
    if isinstance(value, list):
        return [_masked(item, path, act) if isinstance(item, dict | list) else item for item in value]
    if not isinstance(value, dict):
        return value
    first, rest = path[0], path[1:]
    if first == ANY:
        value = _masked(value, rest, act) if rest else act(value)  # `*` may match no name
        if not isinstance(value, dict):
            return value
        return {
            name: _masked(item, path, act) if isinstance(item, dict | list) else item for name, item in value.items()
        }
    if first not in value:
        return value
    return {name: _masked(item, rest, act) if name == first else item for name, item in value.items()}


def _hidden(value: Any, masked: Any) -> Iterator[tuple[str, str]]:
    """Yield the text of each value that a mask has hidden, and of what it shows instead."""
    match value, masked:
        case dict(), dict():
            for name, item in value.items():
                yield from _hidden(item, masked[name])
        case list(), list():
            for item, shown in zip(value, masked, strict=True):
                yield from _hidden(item, shown)
        case dict(), str():
            for item in value.values():
                yield from _hidden(item, HIDDEN)
        case list(), str():
            for item in value:
                yield from _hidden(item, HIDDEN)
        case ((str() | int() | float()), str()) if not isinstance(value, bool) and value not in ("", masked):
            yield str(value), masked
