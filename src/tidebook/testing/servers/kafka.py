"""Run one Apache Kafka node, which is broker and controller."""

from __future__ import annotations

import socket
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.artifacts import KAFKA, kafka_jars
from tidebook.testing.servers.ivy import find_java
from tidebook.testing.servers.java import JavaServer
from tidebook.testing.servers.security import Security
from tidebook.testing.servers.server import HOST, NotReady, Profile, exactly

PROBE_S_MAX = 2
METADATA = 3
METADATA_VERSION = 1
CORRELATION = 7

LOG4J = """\
status = warn
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = kafka.server
logger.server.level = info
"""


class Kafka(JavaServer):
    """One Kafka node on loopback.

    With ``security``, the client listener takes only SASL_SSL with SCRAM-SHA-512. ``advertised`` is the host:port that
    clients must use instead, such as a proxy's. ``properties`` are added to the server's, or replace them. The nodes of
    one cluster have the same ``cluster_id``.
    """

    name: ClassVar[str] = "kafka"
    version: ClassVar[str] = KAFKA
    port_names: ClassVar[tuple[str, ...]] = ("client", "internal", "controller")

    def __init__(
        self,
        folder: Path,
        *,
        profile: Profile = "test",
        security: Security | None = None,
        advertised: str | None = None,
        properties: Mapping[str, str] | None = None,
        cluster_id: str | None = None,
        heap_mb: int = 512,
    ) -> None:
        super().__init__(folder, profile=profile)
        self.security = security
        self.advertised = advertised
        self._cluster_id = cluster_id or str(uuid.uuid4())
        self._heap_mb = heap_mb
        self.properties = dict(properties or {})

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    def client_settings(self) -> dict[str, str]:
        """Return the librdkafka settings to connect to this node."""
        settings = {"bootstrap.servers": self.address}
        if self.security is not None:
            settings |= {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "SCRAM-SHA-512",
                "sasl.username": self.security.credentials.user,
                "sasl.password": self.security.credentials.password,
                "ssl.ca.location": str(self.security.certificates.authority),
            }
            if self.security.client_certificates:
                settings |= {
                    "ssl.certificate.location": str(self.security.certificates.server),
                    "ssl.key.location": str(self.security.certificates.server_key),
                }
        return settings

    def prepare(self) -> None:
        properties = "".join(f"{name}={value}\n" for name, value in (self._settings() | self.properties).items())
        (self.folder / "server.properties").write_text(properties)
        (self.folder / "log4j2.properties").write_text(LOG4J)
        if not (self.folder / "data" / "meta.properties").exists():
            self._format()

    def jars(self) -> list[Path]:
        return kafka_jars()

    def command(self) -> list[str]:
        options = [f"-Xms{self._heap_mb}m", f"-Xmx{self._heap_mb}m", *self.write_classes()]
        return [*self._java(*options), "kafka.Kafka", str(self.folder / "server.properties")]

    def probe(self) -> None:
        """Request the cluster's metadata; while the broker is fenced, it lists no broker."""
        request = struct.pack(">hhih", METADATA, METADATA_VERSION, CORRELATION, -1) + struct.pack(">i", 0)
        with socket.create_connection((HOST, self.ports["internal"]), timeout=PROBE_S_MAX) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            (size,) = struct.unpack(">i", exactly(connection, 4))
            _, brokers = struct.unpack_from(">ii", exactly(connection, size))
        if brokers < 1:
            raise NotReady("no broker is registered yet")
        socket.create_connection((HOST, self.ports["client"]), timeout=PROBE_S_MAX).close()

    def _settings(self) -> dict[str, str]:
        ports = self.ports
        client_protocol = "PLAINTEXT" if self.security is None else "SASL_SSL"
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{ports['controller']}",
            "listeners": ",".join(
                f"{name}://{HOST}:{ports[port]}"
                for name, port in {"CLIENT": "client", "INTERNAL": "internal", "CONTROLLER": "controller"}.items()
            ),
            "advertised.listeners": (
                f"CLIENT://{self.advertised or self.address},INTERNAL://{HOST}:{ports['internal']}"
            ),
            "listener.security.protocol.map": (f"CLIENT:{client_protocol},INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT"),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "INTERNAL",
            "log.dirs": str(self.folder / "data"),
            # A killed broker can register again only after its old session ends: 9 s by default.
            "broker.heartbeat.interval.ms": "500",
            "broker.session.timeout.ms": "3000",
            "num.partitions": "1",
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": "0",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
        }
        if self.security is not None:
            certificates = self.security.certificates
            listener = "listener.name.client"
            settings |= {
                f"{listener}.ssl.keystore.type": "PEM",
                f"{listener}.ssl.keystore.location": str(certificates.server_bundle),
                f"{listener}.ssl.truststore.type": "PEM",
                f"{listener}.ssl.truststore.location": str(certificates.authority),
                f"{listener}.ssl.client.auth": "required" if self.security.client_certificates else "none",
                f"{listener}.sasl.enabled.mechanisms": "SCRAM-SHA-512",
                f"{listener}.scram-sha-512.sasl.jaas.config": (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                ),
            }
        return settings

    def _format(self) -> None:
        tool = [*self._java(), "kafka.tools.StorageTool", "format", "--cluster-id", self._cluster_id]
        tool += ["--config", str(self.folder / "server.properties")]
        if self.security is not None:
            credentials = self.security.credentials
            tool += ["--add-scram", f"SCRAM-SHA-512=[name={credentials.user},password={credentials.password}]"]
        self.run_tool(tool, cwd=self.folder)

    def _java(self, *options: str) -> list[str]:
        quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"] if self.profile == "test" else []
        return [
            str(find_java()),
            *options,
            *quick,
            *self.read_classes(),
            f"-Dlog4j2.configurationFile={self.folder / 'log4j2.properties'}",
            "-Djava.awt.headless=true",
            *("-cp", self.class_path),
        ]
