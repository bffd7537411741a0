"""Parse the CQL that the store sends, so that a simulated replica can execute it.

The parser is generic: it knows forms of statements, not single statements. An unknown form raises `UnknownForm`, so
that a new statement of the store is never simulated as something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

TYPES = {"text", "int", "bigint", "blob", "boolean"}
Operator = Literal["=", "<", "<=", ">", ">=", "IN"]


class UnknownForm(Exception):
    """The parser does not know this form of a statement: extend it before trusting the simulation."""


class Bind(NamedTuple):
    """The bind marker with this index, from 0."""

    place: int


class Constant(NamedTuple):
    """A constant in the statement."""

    value: Any


Term = Bind | Constant


class Condition(NamedTuple):
    """A relation of a WHERE or IF clause, over one column, a tuple of columns, or the token of the partition key."""

    columns: tuple[str, ...]
    operator: Operator
    terms: tuple[Term, ...]
    is_token: bool = False


class Table(NamedTuple):
    """The definition of a table."""

    name: str
    types: dict[str, str]
    partition_key: tuple[str, ...]
    clustering: tuple[str, ...]
    descending: tuple[bool, ...]


class CreateTable(NamedTuple):
    table: Table
    if_not_exists: bool


class DropTable(NamedTuple):
    name: str
    if_exists: bool


class AddColumn(NamedTuple):
    name: str
    column: str
    type: str


class Select(NamedTuple):
    table: str
    columns: tuple[str, ...]
    distinct: bool
    where: tuple[Condition, ...]
    order_by: tuple[tuple[str, bool], ...]
    limit: Term | None


class Using(NamedTuple):
    timestamp: Term | None = None
    ttl: Term | None = None


class Insert(NamedTuple):
    table: str
    columns: tuple[str, ...]
    terms: tuple[Term, ...]
    using: Using
    if_not_exists: bool


class Update(NamedTuple):
    table: str
    columns: tuple[str, ...]
    terms: tuple[Term, ...]
    where: tuple[Condition, ...]
    using: Using
    conditions: tuple[Condition, ...]


class Delete(NamedTuple):
    table: str
    columns: tuple[str, ...]
    where: tuple[Condition, ...]
    using: Using
    conditions: tuple[Condition, ...]


Change = Insert | Update | Delete
Definition = CreateTable | DropTable | AddColumn
Parsed = Select | Change | Definition

_TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z0-9_.]*)|(?P<number>-?\d+)|(?P<string>'(?:[^']|'')*')"
    r"|(?P<sign><=|>=|[?(),=<>*{}:]))"
)


@cache
def parse(text: str) -> Parsed:
    """Parse one statement; raise `UnknownForm` if any part of it is not understood."""
    parser = _Parser(text)
    match parser.word():
        case "SELECT":
            parsed: Parsed = parser.select()
        case "INSERT":
            parsed = parser.insert()
        case "UPDATE":
            parsed = parser.update()
        case "DELETE":
            parsed = parser.delete()
        case "CREATE":
            parsed = parser.create()
        case "DROP":
            parsed = parser.drop()
        case "ALTER":
            parsed = parser.alter()
        case _:
            raise parser.unknown()
    parser.expect_end()
    return parsed


def value_of(values: Sequence[Any], term: Term) -> Any:
    """Return the value of a term."""
    return values[term.place] if isinstance(term, Bind) else term.value


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._markers = 0
        place = 0
        stripped = text.rstrip()
        while place < len(stripped):
            found = _TOKEN.match(stripped, place)
            if found is None:
                raise UnknownForm(f"at {stripped[place : place + 20]!r}: {text}")
            kind = found.lastgroup or ""
            self._tokens.append((kind, found[kind]))
            place = found.end()

    # Tokens

    def unknown(self) -> UnknownForm:
        near = " ".join(token for _, token in self._tokens[max(0, self._at - 1) : self._at + 3])
        return UnknownForm(f"near {near!r}: {self._text}")

    def expect_end(self) -> None:
        if self._at != len(self._tokens):
            raise self.unknown()

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _accept(self, *words: str) -> bool:
        """Consume these words or signs, if they come next."""
        some = self._tokens[self._at : self._at + len(words)]
        if len(some) < len(words):
            return False
        for (kind, token), word in zip(some, words, strict=True):
            if kind == "string" or (token.upper() if kind == "word" else token) != word:
                return False
        self._at += len(words)
        return True

    def _expect(self, *words: str) -> None:
        if not self._accept(*words):
            raise self.unknown()

    def _name(self) -> str:
        kind, token = self._peek()
        if kind != "word":
            raise self.unknown()
        self._at += 1
        return token

    def word(self) -> str:
        return self._name().upper()

    def _term(self) -> Term:
        kind, token = self._peek()
        self._at += 1
        if token == "?" and kind == "sign":
            self._markers += 1
            return Bind(self._markers - 1)
        if kind == "number":
            return Constant(int(token))
        if kind == "string":
            return Constant(token[1:-1].replace("''", "'"))
        if kind == "word" and token.upper() in ("TRUE", "FALSE", "NULL"):
            return Constant({"TRUE": True, "FALSE": False, "NULL": None}[token.upper()])
        self._at -= 1
        raise self.unknown()

    def _names(self) -> tuple[str, ...]:
        names = [self._name()]
        while self._accept(","):
            names.append(self._name())
        return tuple(names)

    def _terms(self) -> tuple[Term, ...]:
        terms = [self._term()]
        while self._accept(","):
            terms.append(self._term())
        return tuple(terms)

    # Clauses

    def _operator(self) -> Operator:
        kind, token = self._peek()
        self._at += 1
        if kind == "sign" and token in ("=", "<", "<=", ">", ">="):
            return token  # type: ignore[return-value]
        if kind == "word" and token.upper() == "IN":
            return "IN"
        self._at -= 1
        raise self.unknown()

    def _condition(self) -> Condition:
        if self._accept("("):
            columns = self._names()
            self._expect(")")
            operator = self._operator()
            if operator == "IN":
                raise self.unknown()
            self._expect("(")
            terms = self._terms()
            self._expect(")")
            if len(terms) != len(columns):
                raise self.unknown()
            return Condition(columns, operator, terms)
        if self._accept("TOKEN", "("):
            columns = self._names()
            self._expect(")")
            operator = self._operator()
            if operator == "IN":
                raise self.unknown()
            return Condition(columns, operator, (self._term(),), is_token=True)
        column = self._name()
        return Condition((column,), self._operator(), (self._term(),))

    def _conditions(self) -> tuple[Condition, ...]:
        found = [self._condition()]
        while self._accept("AND"):
            found.append(self._condition())
        return tuple(found)

    def _using(self) -> Using:
        using = Using()
        if not self._accept("USING"):
            return using
        while True:
            if self._accept("TIMESTAMP") and using.timestamp is None:
                using = using._replace(timestamp=self._term())
            elif self._accept("TTL") and using.ttl is None:
                using = using._replace(ttl=self._term())
            else:
                raise self.unknown()
            if not self._accept("AND"):
                return using

    def _only_if(self) -> tuple[Condition, ...]:
        if not self._accept("IF"):
            return ()
        found = self._conditions()
        if any(len(each.columns) != 1 or each.operator != "=" or each.is_token for each in found):
            raise self.unknown()
        return found

    # Statements

    def select(self) -> Select:
        distinct = self._accept("DISTINCT")
        columns = self._names()
        self._expect("FROM")
        table = self._name()
        where = self._conditions() if self._accept("WHERE") else ()
        order_by: list[tuple[str, bool]] = []
        if self._accept("ORDER", "BY"):
            while True:
                column = self._name()
                descending = self._accept("DESC")
                if not descending:
                    self._accept("ASC")
                order_by.append((column, descending))
                if not self._accept(","):
                    break
        limit = self._term() if self._accept("LIMIT") else None
        self._accept("ALLOW", "FILTERING")
        return Select(table, columns, distinct, where, tuple(order_by), limit)

    def insert(self) -> Insert:
        self._expect("INTO")
        table = self._name()
        self._expect("(")
        columns = self._names()
        self._expect(")", "VALUES", "(")
        terms = self._terms()
        self._expect(")")
        if len(terms) != len(columns):
            raise self.unknown()
        if_not_exists = self._accept("IF", "NOT", "EXISTS")
        return Insert(table, columns, terms, self._using(), if_not_exists)

    def update(self) -> Update:
        table = self._name()
        using = self._using()
        self._expect("SET")
        columns: list[str] = []
        terms: list[Term] = []
        while True:
            columns.append(self._name())
            self._expect("=")
            terms.append(self._term())
            if not self._accept(","):
                break
        self._expect("WHERE")
        where = self._conditions()
        return Update(table, tuple(columns), tuple(terms), where, using, self._only_if())

    def delete(self) -> Delete:
        columns: tuple[str, ...] = ()
        if not self._accept("FROM"):
            columns = self._names()
            self._expect("FROM")
        table = self._name()
        using = self._using()
        if using.ttl is not None:
            raise self.unknown()
        self._expect("WHERE")
        where = self._conditions()
        return Delete(table, columns, where, using, self._only_if())

    def create(self) -> CreateTable:
        self._expect("TABLE")
        if_not_exists = self._accept("IF", "NOT", "EXISTS")
        name = self._name()
        self._expect("(")
        types: dict[str, str] = {}
        partition_key: tuple[str, ...] = ()
        clustering: tuple[str, ...] = ()
        while True:
            if self._accept("PRIMARY", "KEY", "("):
                if self._accept("("):
                    partition_key = self._names()
                    self._expect(")")
                else:
                    partition_key = (self._name(),)
                clustering = self._names() if self._accept(",") else ()
                self._expect(")")
            else:
                column, type_ = self._name(), self._name()
                if type_ not in TYPES:
                    raise self.unknown()
                types[column] = type_
                if self._accept("PRIMARY", "KEY"):
                    partition_key = (column,)
            if self._accept(")"):
                break
            self._expect(",")
        descending = self._options(clustering)
        if not partition_key or not {*partition_key, *clustering} <= types.keys():
            raise self.unknown()
        return CreateTable(Table(name, types, partition_key, clustering, descending), if_not_exists)

    def _options(self, clustering: tuple[str, ...]) -> tuple[bool, ...]:
        """Parse a table's options, of which only the order of the clustering columns affects statements."""
        descending = dict.fromkeys(clustering, False)
        if self._accept("WITH"):
            while True:
                if self._accept("CLUSTERING", "ORDER", "BY", "("):
                    while True:
                        column = self._name()
                        if column not in descending:
                            raise self.unknown()
                        descending[column] = self._accept("DESC")
                        if not descending[column]:
                            self._expect("ASC")
                        if not self._accept(","):
                            break
                    self._expect(")")
                elif self._name() in ("compaction", "gc_grace_seconds", "comment", "compression", "caching"):
                    self._expect("=")
                    if self._peek()[1] == "{":
                        self._skip_map()
                    else:
                        self._term()
                else:
                    raise self.unknown()
                if not self._accept("AND"):
                    break
        return tuple(descending.values())

    def _skip_map(self) -> None:
        self._expect("{")
        while True:
            self._term()
            self._expect(":")
            self._term()
            if self._accept("}"):
                return
            self._expect(",")

    def drop(self) -> DropTable:
        self._expect("TABLE")
        if_exists = self._accept("IF", "EXISTS")
        return DropTable(self._name(), if_exists)

    def alter(self) -> AddColumn:
        self._expect("TABLE")
        table = self._name()
        self._expect("ADD")
        self._accept("IF", "NOT", "EXISTS")
        column, type_ = self._name(), self._name()
        if type_ not in TYPES:
            raise self.unknown()
        return AddColumn(table, column, type_)
