"""The OpenAPI 3.1 document, generated from the routes and the structs that decode requests."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import msgspec

from tidebook.api.access import Role
from tidebook.api.journals import EndLine
from tidebook.api.problem import CONTENT_TYPE, KINDS, TYPE_PREFIX, Problem
from tidebook.api.route import Route
from tidebook.api.routes import ROUTES

_REFERENCE = "#/components/schemas/{name}"
#: The schemas of the path parameters that do not accept arbitrary text.
_PARAMETERS: dict[str, dict[str, Any]] = {
    "topic": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,200}$"},
    "queue": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,200}$"},
    "seq_nr": {"type": "integer", "minimum": 1},
    "dead_letter": {"type": "integer", "minimum": 0},
    "region": {"type": "integer", "minimum": 0},
    "table": {"type": "integer", "minimum": 0},
}
_PROBLEM = {
    "description": "Any error, as problem details (RFC 9457).",
    "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


@cache
def document(version: str) -> dict[str, Any]:
    """Return the document of this version of the API."""
    structs = [each for route in ROUTES for each in (route.body, route.response) if each is not None]
    _, components = msgspec.json.schema_components([*dict.fromkeys(structs), EndLine, Problem], ref_template=_REFERENCE)
    components["Problem"]["additionalProperties"] = True
    components["Problem"]["properties"]["type"]["examples"] = [TYPE_PREFIX + kind.slug for kind in KINDS]
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidebook",
            "version": version,
            "summary": "Durable journals, tags, queues, outbox and write-ahead logs over HTTP.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": "tidebook_session"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [route.noun],
        "x-role": route.role.label,
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_headers(route)],
        "responses": {str(route.status): _response(route), "default": _PROBLEM},
        "security": [] if route.role is Role.PUBLIC else [{"token": []}, {"session": []}],
    }
    if route.body is not None:
        schema = {"$ref": _REFERENCE.format(name=route.body.__name__)}
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    schemas = {name: _PARAMETERS.get(name, {"type": "string", "minLength": 1}) for name in route.parameters}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name, schema in schemas.items()]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    (_,), components = msgspec.json.schema_components([route.query], ref_template=_REFERENCE)
    schema = components[route.query.__name__]
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _without_null(each)}
        for name, each in schema["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without null: a query string cannot express it, so clients omit an optional parameter."""
    options = schema.get("anyOf")
    if options is None:
        return {name: value for name, value in schema.items() if value is not None}
    [only] = [each for each in options if each != {"type": "null"}]
    return dict(only)


def _headers(route: Route) -> list[dict[str, Any]]:
    found = [("Request-Timeout", {"type": "number", "exclusiveMinimum": 0}, "Seconds until the request is cancelled.")]
    if route.mutates and not route.returns_secret:
        text = "A repeat of a successful request with the same key gets the same response and changes nothing."
        found.append(("Idempotency-Key", {"type": "string", "pattern": "^[!-~]{1,200}$"}, text))
    if route.form == "events":
        found.append(("Last-Event-ID", {"type": "string"}, "The id of the last server-sent event that was received."))
    return [
        {"name": name, "in": "header", "required": False, "schema": schema, "description": text}
        for name, schema, text in found
    ]


def _response(route: Route) -> dict[str, Any]:
    description = " ".join(((route.response and inspect.getdoc(route.response)) or route.summary).split())
    if route.form == "none":
        return {"description": description}
    if route.form == "text":
        return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}
    schema = {"$ref": _REFERENCE.format(name=route.response.__name__)} if route.response else {"type": "object"}
    if route.form == "json":
        return {"description": description, "content": {"application/json": {"schema": schema}}}
    line = {"anyOf": [schema, {"$ref": "#/components/schemas/EndLine"}]}
    content: dict[str, Any] = {"application/x-ndjson": {"schema": {"type": "string"}, "x-line": line}}
    if route.form == "events":
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-line": line}
    return {"description": description, "content": content}
