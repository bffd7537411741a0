"""The scan for secrets: a planted secret fails its test, wherever it appears."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
    import logging, sys
    from tidebook.core.errors import InvalidInput

    def test_of_a_log():
        logging.getLogger("tidebook.x").warning("connecting with %s", "hunter2")

    def test_of_a_traceback():
        try:
            raise ValueError("hunter2")
        except ValueError:
            logging.exception("failed")

    def test_of_an_error():
        InvalidInput("postgresql://me:hunter2@host refused")

    def test_of_standard_error():
        sys.stderr.write("tb_" + "A" * 43)

    def test_of_a_file(tmp_path):
        (tmp_path / "child.log").write_text("started with hunter2")

    def test_without_a_secret():
        logging.warning("connecting to host")
        InvalidInput("tb_ is not a token")
"""
CONFTEST = """
    from tests.secret_scan import SecretScan

    def pytest_configure(config):
        config.pluginmanager.register(SecretScan())
"""


def test_a_planted_secret_fails_its_test_and_is_not_repeated(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # the folder of the package `tests`
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no")
    result.assert_outcomes(passed=6, errors=5)
    assert result.stdout.str().count("<SECRET>") >= 5
    assert "ERROR at teardown of test_without" not in result.stdout.str()
