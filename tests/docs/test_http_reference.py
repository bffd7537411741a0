"""The HTTP reference lists every route, error and setting; `python -m tests.docs.test_http_reference` writes it."""

from __future__ import annotations

from pathlib import Path

from tidebook.api.problem import KINDS, TYPE_PREFIX
from tidebook.api.routes import ROUTES
from tidebook.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/http.md"
NOTES = {"json": "JSON", "text": "text", "lines": "NDJSON", "events": "NDJSON or SSE", "none": "nothing"}


def expected_page() -> str:
    """Return the page, generated from the tables of routes and errors."""
    rows = [
        f"| `{route.method} {route.path}` | {route.summary} | {route.role.label} | "
        f"{f'`{route.body.__name__}`' if route.body else ''} | "
        f"{f'`{route.response.__name__}`, ' if route.response else ''}{NOTES[route.form]} |"
        for route in ROUTES
    ]
    errors = [
        f"| `{kind.slug}` | {kind.status} | `{kind.error.__name__}` | "
        f"{', '.join(f'`{each}`' for each in kind.fields)} |"
        for kind in KINDS
    ]
    return "\n".join(
        [
            "# HTTP",
            "",
            "How to use it: [Serve a book over HTTP](../howto/server.md), [Secure the server](../howto/securing.md).",
            "This page is generated from the tables of routes and errors in `tidebook.api`; the fields of each struct",
            "are in `/v1/openapi.json`.",
            "",
            "## Routes",
            "",
            "| route | what it does | role | body | response |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## Headers",
            "",
            "| header | meaning |",
            "|---|---|",
            "| `Authorization: Bearer tb_…` | the token |",
            "| `Idempotency-Key` | 1 to 200 printable characters: a repetition of the change gets the same response |",
            "| `Idempotency-Replayed: true` | the response is that of an earlier request |",
            "| `Request-Timeout` | seconds until the request is cancelled |",
            "| `Last-Event-ID` | the id of the last server-sent event that was received |",
            "| `X-CSRF-Token` | with a cookie: the token of `GET /v1/session` |",
            "",
            "## Errors",
            "",
            f"The type of a problem is `{TYPE_PREFIX}` and one of these; it has the fields of the error.",
            "",
            "| type | status | error | fields |",
            "|---|---|---|---|",
            *errors,
            "",
            "An unexpected failure has the type `internal` and status 500; the server's log has its cause.",
            "",
        ]
    )


def test_the_page_matches_the_tables() -> None:
    assert PAGE.read_text() == expected_page(), "run: python -m tests.docs.test_http_reference"


def test_every_setting_of_the_server_is_documented() -> None:
    text = (ROOT / "docs/reference/settings.md").read_text()
    assert [name for name in ServerSettings.__struct_fields__ if f"`{name}`" not in text] == []


if __name__ == "__main__":
    PAGE.write_text(expected_page())
