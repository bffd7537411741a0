"""The error that test servers raise."""

from __future__ import annotations


class ServerError(Exception):
    """A server could not be downloaded, started, reached or stopped; the message names it and its log file."""
