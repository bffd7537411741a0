"""Fixtures for all tests: whether to run the long form, and the addresses of the real servers."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.processor_time import ProcessorTime
from tests.secret_scan import SecretScan
from tests.watchdog import Watchdog
from tidebook.testing.servers.server import Server

# A busy machine is slow, not wrong; an example that fails is printed, so that it can be kept.
settings.register_profile("short", deadline=None, print_blob=True, max_examples=60)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=600)

ROOT = Path(__file__).resolve().parent.parent
LONG_TIMEOUT_S = 3600
PIPELINE = "tests/pipeline/"
#: Short tests that need no server: they fill the lanes at the end of a run, where a long file would be left alone.
SHORT = ("tests/unit/", "tests/tidy/")
#: For the Spark of this process and of those it starts: jobs of a second do not repay the better compiler.
QUICK_SPARK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long tests, and every test in its full form")
    parser.addoption("--processor-time", action="store_true", help="report the files that use the processor most")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watchdog())
    config.pluginmanager.register(SecretScan())
    if config.getoption("--processor-time"):
        config.pluginmanager.register(ProcessorTime(status_file()))
    settings.load_profile("long" if config.getoption("--long") else "short")
    os.environ.setdefault("SPARK_SUBMIT_OPTS", QUICK_SPARK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run files in parallel, but those of the pipeline one after another: they share one Spark session."""
    from xdist.scheduler import LoadFileScheduling

    class Lanes(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return PIPELINE if nodeid.startswith(PIPELINE) else str(super()._split_scope(nodeid))

    return Lanes(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(PIPELINE), item.nodeid.startswith(SHORT)))
    for item in items:
        if item.get_closest_marker("long") is None:
            continue
        if not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: runs under --long"))
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without garbage collections, and exclude the tests from later ones, which would visit all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def long_form(request: pytest.FixtureRequest) -> bool:
    """Return whether --long was given, by which a test chooses its short or full form."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session", autouse=True)
def left_out() -> Iterator[None]:
    """Skip a test that starts a separate server if that kind was left out by name."""
    start = Server.start

    def start_unless_left_out(server: Server) -> Server:
        _skip_if_left_out(server.name)
        return start(server)

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Server, "start", start_unless_left_out)
        yield


@pytest.fixture(scope="session")
def kafka_bootstrap() -> str:
    """Return the address of the real Kafka, as host:port."""
    return str(server_entry("kafka")["address"])


@pytest.fixture(scope="session")
def cassandra_address() -> str:
    """Return the address of the real Cassandra, as host:port."""
    return str(server_entry("cassandra")["address"])


@pytest.fixture(scope="session")
def postgres_url() -> str:
    """Return the URL of the real PostgreSQL, as postgresql://user@host:port/database."""
    return str(server_entry("postgres")["url"])


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """Return the URL of the real MariaDB, as mysql://user@host:port/database."""
    return str(server_entry("mariadb")["url"])


def server_entry(name: str) -> dict[str, Any]:
    """Return the entry of one server in the status file; fail if it is missing and was not left out by name."""
    _skip_if_left_out(name)
    status = status_file()
    if not status.exists():
        pytest.fail(f"{name} is not running: start it with ./dev servers start, or run ./dev test", pytrace=False)
    entry: dict[str, Any] | None = json.loads(status.read_text())["servers"].get(name)
    if entry is None:
        pytest.fail(f"{name} is not among the servers that run: ./dev servers start --only {name}", pytrace=False)
    host, port = entry["address"].split(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        pytest.fail(f"{name} does not answer at {entry['address']}: {error}", pytrace=False)
    return entry


def status_file() -> Path:
    """Return the file in which the running servers are recorded."""
    return Path(os.environ.get("TIDEBOOK_SERVERS") or ROOT / ".servers" / "status.json")


def _skip_if_left_out(name: str) -> None:
    if name in os.environ.get("TIDEBOOK_WITHOUT", "").split(","):
        pytest.skip(f"{name} was left out with --without")
