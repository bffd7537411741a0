"""Messages that py4j logs on the root logger are not printed: it also raises its errors, and Ctrl-C is no error."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import py4j.java_gateway
import pytest

from tidebook.pipeline.session import PipelineSettings, _spark_settings, is_not_of_py4j


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Prepare this process as for a Spark context, and undo it."""
    for name in ("SPARK_LOCAL_IP", "PYSPARK_PYTHON", "SPARK_LAUNCHER_OPTS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    root = logging.getLogger()
    present = is_not_of_py4j in root.filters
    _spark_settings(PipelineSettings(), None)
    yield
    if not present:
        root.removeFilter(is_not_of_py4j)


@pytest.mark.usefixtures("prepared")
def test_an_interrupt_inside_py4j_prints_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = "import logging; logging.exception('KeyboardInterrupt while sending command.')"
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        exec(compile(log, str(py4j.java_gateway.__file__), "exec"))
    logging.getLogger().error("another one")
    assert [record.message for record in caplog.records] == ["another one"]
