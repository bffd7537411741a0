"""Find the route of a request: a tree of path segments, built from the table of routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any
from urllib.parse import unquote_to_bytes

from tidebook.api.errors import MethodNotAllowed
from tidebook.api.route import Route
from tidebook.core.errors import InvalidInput, NotFound

_PARAMETER = ""


class Router:
    """The routes by path segment and method; a literal segment is preferred to a parameter."""

    def __init__(self, routes: Iterable[tuple[Route, Any]]) -> None:
        self._root: dict[str | None, Any] = {}
        for route, target in routes:
            node = self._root
            for segment in route.path.split("/")[1:]:
                node = node.setdefault(_PARAMETER if segment.startswith("{") else segment, {})
            node.setdefault(None, {})[route.method] = target

    def find(self, method: str, path: bytes) -> tuple[Any, list[str]]:
        """Return the target of a request and its path parameters; raise `NotFound` or `MethodNotAllowed`."""
        node, parameters = self._root, list[str]()
        segments = map(_decode, path.split(b"/")) if b"%" in path else _decode(path).split("/")
        for segment in islice(segments, 1, None):
            found = node.get(segment) if segment else None
            if found is None:
                found = node.get(_PARAMETER)
                if found is None or not segment:
                    raise _not_found(path)
                parameters.append(segment)
            node = found
        methods: Mapping[str, Any] | None = node.get(None)
        if methods is None:
            raise _not_found(path)
        target = methods.get(method)
        if target is None:
            allowed = sorted(methods)
            raise MethodNotAllowed(f"{method[:20]} is not allowed here: use {' or '.join(allowed)}", allowed=allowed)
        return target, parameters


def _not_found(path: bytes) -> NotFound:
    return NotFound(f"there is no {_decode(path)[:200]!r} here: /v1/openapi.json lists all paths")


def _decode(raw: bytes) -> str:
    try:
        return (unquote_to_bytes(raw) if b"%" in raw else raw).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("the path is not UTF-8: percent-encode the UTF-8 bytes of ids and tags") from error
