"""The number of browser sessions is bounded, for each token and in total."""

from __future__ import annotations

import pytest

from tidebook.server import browser_sessions
from tidebook.server.browser_sessions import BrowserSessions


def test_a_token_ends_its_own_oldest_session_and_not_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_sessions, "SESSIONS_PER_TOKEN_MAX", 3)
    sessions = BrowserSessions(session_s=60)
    other, _ = sessions.begin("other")
    own = [sessions.begin("own")[0] for _ in range(5)]
    assert [sessions.find(each) is not None for each in own] == [False, False, True, True, True]
    assert sessions.find(other) is not None


def test_the_oldest_session_ends_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_sessions, "SESSIONS_MAX", 2)
    sessions = BrowserSessions(session_s=60)
    values = [sessions.begin(name)[0] for name in "abc"]
    assert [sessions.find(each) is not None for each in values] == [False, True, True]
