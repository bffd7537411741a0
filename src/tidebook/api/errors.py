"""Errors that only a server raises, beside those of `tidebook.core.errors`."""

from __future__ import annotations

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable


class SignInRequired(TidebookError):
    """The request has no valid token: create one with 'tidebook token create' and send it as a bearer token."""


class PermissionDenied(TidebookError):
    """The token is valid and does not allow this request; `required` is the role that does."""

    def __init__(self, message: str, *, required: str | None = None) -> None:
        super().__init__(message)
        self.required = required


class MethodNotAllowed(InvalidInput):
    """The path exists, and not with this method; `allowed` are the methods that it has."""

    def __init__(self, message: str, *, allowed: list[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedContent(InvalidInput):
    """The body has another content type than the route accepts."""


class TooManyRequests(Unavailable):
    """A limit of the server was reached; nothing was changed. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(Unavailable):
    """The request took longer than its deadline and was cancelled; nothing was changed."""

    def __init__(self, message: str, *, deadline_s: float) -> None:
        super().__init__(message)
        self.deadline_s = deadline_s
