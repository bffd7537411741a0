"""Errors that only the HTTP server raises, in addition to those in `tidebook.core.errors`."""

from __future__ import annotations

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable


class SignInRequired(TidebookError):
    """The request has no valid token: create one with 'tidebook token create' and send it as a bearer token."""


class PermissionDenied(TidebookError):
    """The request is not allowed; `required` is the role that would allow it, or None if no role would."""

    def __init__(self, message: str, *, required: str | None = None) -> None:
        super().__init__(message)
        self.required = required


class MethodNotAllowed(InvalidInput):
    """The path does not support this method; `allowed` has the methods that it supports."""

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedContent(InvalidInput):
    """The route does not accept the content type of the body."""


class TooManyRequests(Unavailable):
    """A limit of the server was reached; nothing was changed. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooManyConnections(Unavailable):
    """The server has reached its limit of connections; nothing was changed."""


class DeadlineExceeded(Unavailable):
    """The request took longer than its deadline and was cancelled; nothing was changed."""

    def __init__(self, message: str, *, deadline_s: float) -> None:
        super().__init__(message)
        self.deadline_s = deadline_s
