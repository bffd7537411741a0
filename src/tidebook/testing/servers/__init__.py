"""Real Kafka, Cassandra, PostgreSQL and MariaDB on loopback, without containers: for tests and benchmarks.

Each server object has a folder; a restart in the same folder uses the same data and ports.

    with Kafka(tmp_path / "kafka") as kafka:
        use(kafka.address)
        kafka.kill9()
        kafka.restart()
"""

from tidebook.pipeline.jars import delta_jars
from tidebook.testing.servers.artifacts import kafka_tools_jars, spark_jars
from tidebook.testing.servers.cassandra import Cassandra
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.kafka import Kafka
from tidebook.testing.servers.mariadb import MariaDb
from tidebook.testing.servers.postgres import Postgres
from tidebook.testing.servers.security import Certificates, Credentials, Security, make_security
from tidebook.testing.servers.server import Profile, Server

__all__ = [
    "Cassandra",
    "Certificates",
    "Credentials",
    "Kafka",
    "MariaDb",
    "Postgres",
    "Profile",
    "Security",
    "Server",
    "ServerError",
    "delta_jars",
    "kafka_tools_jars",
    "make_security",
    "spark_jars",
]
