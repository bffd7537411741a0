"""Run one Apache Cassandra node for tests and benchmarks."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.artifacts import CASSANDRA, cassandra_jars
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.ivy import find_java
from tidebook.testing.servers.java import JavaServer
from tidebook.testing.servers.security import Credentials, Security
from tidebook.testing.servers.server import HOST, NotReady, Profile, exactly

KEYSPACE = "tidebook"
ANSWER_S_MAX = 20
SUPERUSER = Credentials("cassandra", "cassandra")
PEM = "org.apache.cassandra.security.PEMBasedSslContextFactory"

# The part of the native protocol, version 4, that a readiness check needs.
VERSION = 0x04
STARTUP, READY, AUTHENTICATE, QUERY, RESULT, AUTH_RESPONSE, AUTH_SUCCESS = 0x01, 0x02, 0x03, 0x07, 0x08, 0x0F, 0x10
QUORUM = 0x0004

EXPORTS = (
    "java.base/java.lang.ref",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.ref",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.sql/java.sql",
    "jdk.attach/sun.tools.attach",
    "jdk.unsupported/sun.misc",
)
OPENS = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.module",
    "java.base/java.lang.reflect",
    "java.base/java.util",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.util.jar",
    "java.base/sun.nio.ch",
    "jdk.management/com.sun.management.internal",
)

#: Settings for benchmarks. Each write waits for a disk sync, so many concurrent writers must share a sync; memtables
#: get the default share of the heap.
BENCH = {
    "concurrent_writes": "128",
    "memtable_heap_space": "768MiB",
    "memtable_offheap_space": "768MiB",
}

LOGBACK = """\
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%date %-5level %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="OUT"/></root>
  <logger name="org.apache.cassandra.service" level="INFO"/>
</configuration>
"""


class Cassandra(JavaServer):
    """One Cassandra node on loopback, with the keyspace ``tidebook``.

    With ``security``, clients need TLS and a password. ``settings`` are added to cassandra.yaml, or override it. Each
    node of a cluster needs its own loopback address as ``host``; ``java_options`` follow all other options.
    """

    name: ClassVar[str] = "cassandra"
    version: ClassVar[str] = CASSANDRA
    #: Java refuses the class archive beside an agent without these options; this agent changes no class.
    archive_options: ClassVar[tuple[str, ...]] = ("-XX:+UnlockDiagnosticVMOptions", "-XX:+AllowArchivingWithJavaAgent")
    port_names: ClassVar[tuple[str, ...]] = ("client", "storage", "jmx")

    def __init__(
        self,
        folder: Path,
        *,
        profile: Profile = "test",
        security: Security | None = None,
        settings: Mapping[str, str] | None = None,
        host: str = HOST,
        replication: int = 1,
        java_options: Sequence[str] = (),
    ) -> None:
        super().__init__(folder, profile=profile)
        self.security = security
        self.host = host
        self._replication = replication
        self._java_options = java_options
        self.settings = dict(settings or {})

    @property
    def url(self) -> str:
        return f"cassandra://{self.address}/{KEYSPACE}"

    def prepare(self) -> None:
        settings = self._settings() | self.settings
        (self.folder / "cassandra.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        (self.folder / "logback.xml").write_text(LOGBACK)

    def jars(self) -> list[Path]:
        return cassandra_jars()

    def command(self) -> list[str]:
        [agent] = [jar for jar in self.jars() if jar.name.startswith("jamm-")]
        # The approximate clock is read for timeouts only; by default even an idle node updates it every 2 ms.
        cheap = ("-XX:TieredStopAtLevel=1", "-Dcassandra.approximate_time_precision_ms=20")
        # A million rows of one tag in a minute exhaust a smaller heap.
        profiled = ["-Xmx1g", *cheap] if self.profile == "test" else ["-Xmx3g"]
        return [
            str(find_java()),
            *("-Xms512m", "-XX:+UseG1GC", "-Xss384k", "-XX:+ExitOnOutOfMemoryError"),
            *profiled,
            *self.read_classes(),
            *self.write_classes(),
            f"-javaagent:{agent}",
            *(f"--add-exports={package}=ALL-UNNAMED" for package in EXPORTS),
            *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENS),
            "-Djdk.attach.allowAttachSelf=true",
            "-Dio.netty.tryReflectionSetAccessible=true",
            "-Djava.net.preferIPv4Stack=true",
            f"-Dcassandra.jmx.local.port={self.ports['jmx']}",
            "-Dcassandra-foreground=yes",
            f"-Dcassandra.config=file://{self.folder / 'cassandra.yaml'}",
            f"-Dcassandra.storagedir={self.folder / 'data'}",
            # A single node need not wait for gossip at start, nor announce its shutdown.
            "-Dcassandra.skip_wait_for_gossip_to_settle=0",
            "-Dcassandra.shutdown_announce_in_ms=0",
            "-Dcassandra.superuser_setup_delay_ms=0",
            f"-Dlogback.configurationFile={self.folder / 'logback.xml'}",
            *self._java_options,
            *("-cp", self.class_path),
            "org.apache.cassandra.service.CassandraDaemon",
        ]

    def probe(self) -> None:
        """Open a session; it fails until the node accepts logins."""
        with self._session():
            pass

    def after_ready(self) -> None:
        with self._session() as session:
            session.query(
                f"CREATE KEYSPACE IF NOT EXISTS {KEYSPACE} "
                f"WITH replication = {{'class': 'SimpleStrategy', 'replication_factor': {self._replication}}}"
            )
            if self.security is not None:
                credentials = self.security.credentials
                session.query(
                    f"CREATE ROLE IF NOT EXISTS {credentials.user} "
                    f"WITH PASSWORD = '{credentials.password}' AND LOGIN = true AND SUPERUSER = true"
                )

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        with socket.create_connection((self.host, self.ports["client"]), timeout=ANSWER_S_MAX) as connection:
            if self.security is None:
                session = _Session(connection)
                session.log_in(None)
                yield session
                return
            certificates = self.security.certificates
            context = ssl.create_default_context(cafile=str(certificates.authority))
            # Sent only if the node requests a client certificate.
            context.load_cert_chain(certificates.server, certificates.server_key)
            with context.wrap_socket(connection, server_hostname=self.host) as encrypted:
                session = _Session(encrypted)
                session.log_in(SUPERUSER)
                yield session

    def _settings(self) -> dict[str, str]:
        data = self.folder / "data"
        settings = {
            "cluster_name": "tidebook",
            "num_tokens": "1",
            "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
            "listen_address": self.host,
            "rpc_address": self.host,
            "storage_port": str(self.ports["storage"]),
            "native_transport_port": str(self.ports["client"]),
            "endpoint_snitch": "SimpleSnitch",
            "seed_provider": (
                "[{class_name: org.apache.cassandra.locator.SimpleSeedProvider, "
                f'parameters: [{{seeds: "{HOST}:{self.ports["storage"]}"}}]}}]'
            ),
            "data_file_directories": f"[{data / 'data'}]",
            "commitlog_directory": str(data / "commitlog"),
            "saved_caches_directory": str(data / "saved_caches"),
            "hints_directory": str(data / "hints"),
            "cdc_raw_directory": str(data / "cdc_raw"),
            # Acknowledged means synced: with the periodic default, a kill loses acknowledged rows.
            "commitlog_sync": "batch",
            "commitlog_segment_size": "32MiB",
            "storage_compatibility_mode": "NONE",
            "auto_snapshot": "false",
            "hinted_handoff_enabled": "false",
            "memtable_heap_space": "192MiB",
            "memtable_offheap_space": "192MiB",
            "key_cache_size": "16MiB",
            "counter_cache_size": "1MiB",
            "file_cache_size": "64MiB",
            "concurrent_compactors": "1",
            "disk_failure_policy": "die",
            "commit_failure_policy": "die",
            "authenticator": "AllowAllAuthenticator",
            "authorizer": "AllowAllAuthorizer",
        }
        if self.profile == "bench":
            settings |= BENCH
        if self.security is not None:
            certificates = self.security.certificates
            settings |= {
                "authenticator": "PasswordAuthenticator",
                "authorizer": "CassandraAuthorizer",
                "role_manager": "CassandraRoleManager",
                "client_encryption_options": (
                    f"{{enabled: true, optional: false, ssl_context_factory: {{class_name: {PEM}}}, "
                    f"keystore: {certificates.server_bundle}, truststore: {certificates.authority}, "
                    f"require_client_auth: {str(self.security.client_certificates).lower()}}}"
                ),
            }
        return settings


class _Session:
    """A connection that exchanges frames of the native protocol."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def log_in(self, credentials: Credentials | None) -> None:
        options = struct.pack(">H", 1) + _string("CQL_VERSION") + _string("3.0.0")
        kind, body = self._request(STARTUP, options)
        if kind == AUTHENTICATE and credentials is not None:
            token = f"\0{credentials.user}\0{credentials.password}".encode()
            kind, body = self._request(AUTH_RESPONSE, struct.pack(">i", len(token)) + token)
        if kind not in {READY, AUTH_SUCCESS}:
            raise NotReady(f"the node refuses the login: {body!r}")

    def query(self, statement: str) -> None:
        text = statement.encode()
        kind, body = self._request(QUERY, struct.pack(">i", len(text)) + text + struct.pack(">HB", QUORUM, 0))
        if kind != RESULT:
            raise ServerError(f"cassandra refused {statement!r}: {body!r}")

    def _request(self, kind: int, body: bytes) -> tuple[int, bytes]:
        self._connection.sendall(struct.pack(">BBhBi", VERSION, 0, 0, kind, len(body)) + body)
        _, _, _, answer, size = struct.unpack(">BBhBi", exactly(self._connection, 9))
        return answer, exactly(self._connection, size)


def _string(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()
