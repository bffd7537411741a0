"""What goes wrong with a server."""

from __future__ import annotations


class ServerError(Exception):
    """A server could not be had, started, reached or stopped; the message says which, and where its log is."""
