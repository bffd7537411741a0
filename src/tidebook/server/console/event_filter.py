"""A small typed language to filter events: parsed into structs and interpreted, never evaluated as code.

    payload.total > 100 and tag = "paid"
    type = "OrderPlaced" or not payload.lines[0].sku contains "x"
    time >= "2026-01-01" and meta.user exists

Fields: `number`, `offset`, `version` (numbers), `time` (an ISO date), `type`, `tag`, `text` (the payload as text), and
paths into `payload` and `meta`. Operators: = != < <= > >= contains begins exists; `and`, `or`, `not`, parentheses.
A value of another type than the field's is unequal to it, and neither less nor greater.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any, Final, Literal, assert_never, cast, get_args

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.server.console.formatting import parse_time

CHARS_MAX: Final = 500
TERMS_MAX: Final = 50
DEPTH_MAX: Final = 20

Root = Literal["number", "offset", "version", "time", "type", "tag", "text", "payload", "meta"]
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "contains", "begins", "exists"]
Value = str | int | float | bool | None

_NUMBERS: Final = frozenset({"number", "offset", "version", "time"})
_TEXTS: Final = frozenset({"type", "tag", "text"})
_ROOTS: Final[tuple[str, ...]] = get_args(Root)
_OPERATORS: Final[tuple[str, ...]] = get_args(Operator)
_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<name>[^\W\d][\w-]*)
      | (?P<operator>!=|<=|>=|=|<|>)
      | (?P<mark>[().\[\]])
    )""",
    re.VERBOSE,
)


class Compare(msgspec.Struct, frozen=True):
    """One comparison of a field with a value."""

    root: Root
    path: tuple[str | int, ...]
    operator: Operator
    value: Value = None


class Both(msgspec.Struct, frozen=True):
    """Both sides match."""

    left: Expression
    right: Expression


class Either(msgspec.Struct, frozen=True):
    """One side matches."""

    left: Expression
    right: Expression


class Negation(msgspec.Struct, frozen=True):
    """The inner expression does not match."""

    inner: Expression


Expression = Compare | Both | Either | Negation


class FilterFields(msgspec.Struct, frozen=True, kw_only=True):
    """The values of an event that a filter can use; masked fields are masked here too, and so not revealed."""

    number: int
    offset: int
    time_ms: int
    type: str | None
    version: int
    tags: frozenset[str]
    payload: Any
    meta: Any


class _Token(msgspec.Struct, frozen=True):
    kind: str
    text: str
    at: int


def parse(text: str) -> Expression:
    """Parse an expression; raise `InvalidInput`, with the position of the mistake, if it is not valid."""
    if len(text) > CHARS_MAX:
        raise InvalidInput(f"a filter may have {CHARS_MAX} characters, and this one has {len(text):,}")
    return _Parser(_tokens(text), text).whole()


def _tokens(text: str) -> list[_Token]:
    found, at = list[_Token](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            if not text[at:].strip():
                break
            rest = text[at:].lstrip()
            raise InvalidInput(f"the filter is not understood at character {len(text) - len(rest) + 1}: {rest[:20]!r}")
        kind = str(match.lastgroup)
        found.append(_Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[_Token], text: str) -> None:
        self._tokens = tokens
        self._text = text
        self._next = 0
        self._terms = 0
        self._depth = 0

    def whole(self) -> Expression:
        found = self._either()
        if self._next < len(self._tokens):
            raise self._mistake("'and' or 'or'")
        return found

    def _mistake(self, expected: str) -> InvalidInput:
        if self._next >= len(self._tokens):
            return InvalidInput(f"the filter ends where {expected} is expected")
        token = self._tokens[self._next]
        return InvalidInput(f"the filter has {token.text[:20]!r} at character {token.at + 1}, not {expected}")

    def _peek(self) -> str:
        return self._tokens[self._next].text if self._next < len(self._tokens) else ""

    def _take(self, *texts: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next].kind != "string" and self._peek() in texts:
            self._next += 1
            return self._tokens[self._next - 1].text
        return None

    def _take_kind(self, kind: str) -> str | None:
        if self._next < len(self._tokens) and self._tokens[self._next].kind == kind:
            self._next += 1
            return self._tokens[self._next - 1].text
        return None

    def _either(self) -> Expression:
        left = self._both()
        while self._take("or"):
            left = Either(left, self._both())
        return left

    def _both(self) -> Expression:
        left = self._term()
        while self._take("and"):
            left = Both(left, self._term())
        return left

    def _term(self) -> Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise InvalidInput(f"the filter is nested more than {DEPTH_MAX} deep")
        try:
            if self._take("not"):
                return Negation(self._term())
            if self._take("("):
                inner = self._either()
                if not self._take(")"):
                    raise self._mistake("')'")
                return inner
            return self._compare()
        finally:
            self._depth -= 1

    def _compare(self) -> Compare:
        self._terms += 1
        if self._terms > TERMS_MAX:
            raise InvalidInput(f"the filter has more than {TERMS_MAX} comparisons")
        root, path = self._field()
        operator = self._take(*_OPERATORS)
        if operator is None:
            raise self._mistake(f"an operator: {' '.join(_OPERATORS)}")
        if operator == "exists":
            return Compare(root, path, "exists")
        return Compare(root, path, cast(Operator, operator), _checked(root, operator, self._value()))

    def _field(self) -> tuple[Root, tuple[str | int, ...]]:
        name = self._peek()
        if name not in _ROOTS or self._take_kind("name") is None:
            raise self._mistake(f"a field: {', '.join(_ROOTS)} (fields of the payload as payload.name)")
        path: list[str | int] = []
        while True:
            if self._take("."):
                part = self._take_kind("name")
                if part is None:
                    raise self._mistake("the name of a field")
                path.append(part)
            elif self._take("["):
                path.append(self._index())
            else:
                break
        if path and name not in ("payload", "meta"):
            raise InvalidInput(f"{name} has no fields of its own: only payload and meta have")
        return cast(Root, name), tuple(path)

    def _index(self) -> str | int:
        number = self._take_kind("number")
        text = self._take_kind("string") if number is None else None
        if text is None and not (number or "").isdecimal():
            raise self._mistake("a number or a quoted name")
        if not self._take("]"):
            raise self._mistake("']'")
        return int(number) if number is not None else _unquoted(text or "")

    def _value(self) -> Value:
        number = self._take_kind("number")
        if number is not None:
            return float(number) if set(number) & set(".eE") else int(number)
        text = self._take_kind("string")
        if text is not None:
            return _unquoted(text)
        match self._take("true", "false", "null"):
            case "true":
                return True
            case "false":
                return False
            case "null":
                return None
            case _:
                raise self._mistake("a number, a quoted string, true, false or null")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def _checked(root: Root, operator: str, value: Value) -> Value:
    """Return the value as the field's type; raise `InvalidInput` if the field can never have it."""
    if operator in ("contains", "begins"):
        if not isinstance(value, str) or root in _NUMBERS:
            raise InvalidInput(f"{operator} compares strings: {root} {operator} {value!r} never matches")
        return value
    if root == "time":
        return value if isinstance(value, int) and not isinstance(value, bool) else parse_time(str(value))
    if root in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidInput(f"{root} must be compared with a number, not {value!r}")
    if root in _TEXTS and not isinstance(value, str):
        raise InvalidInput(f"{root} must be compared with a quoted string, not {value!r}")
    return value


def matches(expression: Expression, event: FilterFields) -> bool:
    """Return whether an event matches."""
    match expression:
        case Both():
            return matches(expression.left, event) and matches(expression.right, event)
        case Either():
            return matches(expression.left, event) or matches(expression.right, event)
        case Negation():
            return not matches(expression.inner, event)
        case Compare():
            return any(_compare(each, expression) for each in _candidates(expression, event))
        case _:
            assert_never(expression)


_MISSING: Final = object()


def _candidates(compare: Compare, event: FilterFields) -> list[Any]:
    """Return the values of a field; an event may have several tags, and a comparison holds if it holds for one."""
    match compare.root:
        case "number" | "offset" | "version":
            return [getattr(event, compare.root)]
        case "time":
            return [event.time_ms]
        case "type":
            return [_MISSING if event.type is None else event.type]
        case "tag":
            if compare.operator == "!=":  # true only if none of the tags is this one
                return [event.tags] if compare.value not in event.tags else []
            return [*event.tags]
        case "text":
            return [as_text(event.payload)]
        case "payload" | "meta":
            return [_at(getattr(event, compare.root), compare.path)]
        case _:
            assert_never(compare.root)


def as_text(payload: Any) -> str:
    """Return a payload as text: JSON is written on one line; of bytes, what is not UTF-8 is left out."""
    if isinstance(payload, str):
        return payload
    if isinstance(payload, bytes):
        return payload.decode(errors="ignore")
    return msgspec.json.encode(payload).decode()


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        if isinstance(part, int):
            exists = isinstance(value, list) and part < len(value)
        else:
            exists = isinstance(value, dict) and part in value
        if not exists:
            return _MISSING
        value = value[part]
    return value


_ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {"<": lt, "<=": le, ">": gt, ">=": ge}


def _compare(found: Any, compare: Compare) -> bool:
    value = compare.value
    match compare.operator:
        case "exists":
            return found is not _MISSING and found is not None
        case "=":
            return found is not _MISSING and _kind(found) == _kind(value) and bool(found == value)
        case "!=":
            return found is _MISSING or _kind(found) != _kind(value) or bool(found != value)
        case "contains":
            if isinstance(found, list):
                return value in found
            return isinstance(found, str) and str(value) in found
        case "begins":
            return isinstance(found, str) and found.startswith(str(value))
        case "<" | "<=" | ">" | ">=":
            if _kind(found) != _kind(value) or _kind(found) not in ("number", "text"):
                return False
            return _ORDERS[compare.operator](found, value)
        case _:
            assert_never(compare.operator)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else type(value).__name__
