"""Routes that only the console has: what they show or do has no single operation in the API."""

from __future__ import annotations

from typing import Final

from tidebook.api.access import Role
from tidebook.api.route import Route

OVERVIEW: Final = Route(
    name="console.overview", method="GET", path="/", role=Role.VIEWER, scope="items", summary="What needs a person."
)
SIGN_IN_PAGE: Final = Route(
    name="console.sign_in", method="GET", path="/sign-in", role=Role.PUBLIC, scope="none", summary="Sign in."
)
