"""One Spark session per run, and books: embedded on temporary folders, and on the real servers."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tidebook
from tests.pipeline.commands import free_port
from tidebook.cli.pipeline import DELTA
from tidebook.pipeline.jars import delta_jars, kafka_source_jars
from tidebook.pipeline.session import PipelineSettings
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OpenBook = Callable[[str], Book]

SERVERS = pytest.param("servers", marks=[pytest.mark.kafka, pytest.mark.cassandra])


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from tidebook.pipeline.session import LOCAL, spark_session

    jars = ",".join(map(str, [*kafka_source_jars(), *delta_jars()]))
    more = {"spark.master": "local[2]", "spark.jars": jars, **LOCAL, **DELTA}
    more["spark.sql.warehouse.dir"] = str(tmp_path_factory.mktemp("warehouse"))
    session = spark_session("tidebook tests", PipelineSettings(), more)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def connect_url(spark: SparkSession) -> str:
    """Spark Connect in the session's JVM, which clients and pipelines share; it ends with the session."""
    context, port = spark._jsc.sc(), free_port()
    context.conf().set("spark.connect.grpc.binding.port", str(port))
    assert spark._jvm is not None
    spark._jvm.org.apache.spark.sql.connect.service.SparkConnectService.start(context)
    return f"sc://127.0.0.1:{port}"


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    portal = BlockingPortal()
    yield portal
    portal.close()


@pytest.fixture
def topic() -> str:
    """A topic that no other test uses, because the real servers outlive a test."""
    return f"t{uuid.uuid4().hex[:12]}"


@contextmanager
def opened(portal: BlockingPortal, where: Path) -> Iterator[Book]:
    book = tidebook.open(where)
    portal.run(book.__aenter__())
    yield book
    portal.run(book.__aexit__(None, None, None))


@pytest.fixture
def open_book(tmp_path: Path, portal: BlockingPortal) -> Iterator[OpenBook]:
    """Opens an embedded book by name, on the portal's loop."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(opened(portal, tmp_path / name))


@pytest.fixture
def embedded(open_book: OpenBook) -> Book:
    return open_book("book")


@pytest.fixture
def servers_toml(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Settings that name the real Kafka and Cassandra."""
    kafka, cassandra = request.getfixturevalue("kafka_bootstrap"), request.getfixturevalue("cassandra_address")
    toml = tmp_path / "tidebook.toml"
    toml.write_text(
        f'[log]\nurl = "kafka://{kafka}"\n[store]\nurl = "cassandra://{cassandra}/pipeline_tests"\n'
        "[journal]\nsegments = 8\n"
    )
    return toml


@pytest.fixture(params=["embedded", SERVERS])
def book(request: pytest.FixtureRequest, portal: BlockingPortal, open_book: OpenBook) -> Iterator[Book]:
    """A book, embedded and on the real servers in turn."""
    if request.param == "embedded":
        yield open_book("book")
        return
    with opened(portal, request.getfixturevalue("servers_toml")) as found:
        yield found
