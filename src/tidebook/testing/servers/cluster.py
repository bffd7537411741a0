"""Run clusters on one machine: three brokers, three nodes, a primary and a standby, a Spark master and two workers."""

from __future__ import annotations

import json
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from tidebook.testing.servers.cassandra import KEYSPACE, Cassandra
from tidebook.testing.servers.kafka import Kafka
from tidebook.testing.servers.postgres import Postgres
from tidebook.testing.servers.server import HOST, Profile, Server
from tidebook.testing.servers.spark import SparkMasterNode, SparkWorkerNode
from tidebook.testing.servers.standby import PRIMARY_SETTINGS, PostgresStandby

NODES = 3
KAFKA_HEAP_MB = 320
#: The tokens that divide the ring into three equal parts.
TOKENS = ("-9223372036854775808", "-3074457345618258603", "3074457345618258602")
CASSANDRA_JAVA = ("-Xms256m", "-Xmx640m", "-Dcassandra.ring_delay_ms=3000")


class ServerCluster(ABC):
    """Several servers that clients use as one, with those methods of a `Server` that a `ServerGroup` calls."""

    name: ClassVar[str]

    def __init__(self, folder: Path, *, profile: Profile = "test") -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.profile: Profile = profile
        self.nodes: Sequence[Server] = self.make_nodes()

    @abstractmethod
    def make_nodes(self) -> Sequence[Server]:
        """Return the servers of the cluster, in the order in which they start."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Return the URL for Tidebook's settings."""

    @property
    def address(self) -> str:
        """Return the addresses for clients, as host:port, separated by commas."""
        return ",".join(node.address for node in self.nodes)

    def describe(self) -> dict[str, Any]:
        """Return the values that another process needs to use or stop the cluster."""
        first = self.nodes[0].describe()
        return first | {"address": self.address, "url": self.url, "nodes": [node.describe() for node in self.nodes]}

    def adopt(self) -> bool:
        """Use the processes of an earlier run; return whether all of them run."""
        running = [node.adopt() for node in self.nodes]  # a list, so that all nodes adopt even if one has ended
        return all(running)

    def alive(self) -> bool:
        """Return whether all nodes run."""
        return all(node.alive() for node in self.nodes)

    def start(self) -> None:
        """Start the nodes that do not run, one after the other."""
        for node in self.nodes:
            if not node.adopt():
                node.start()

    def stop(self) -> None:
        """Stop all nodes."""
        self._each(lambda node: node.stop())

    def kill9(self) -> None:
        """Kill all nodes."""
        self._each(lambda node: node.kill9())

    def remove(self) -> None:
        """Stop all nodes and delete their data."""
        self._each(lambda node: node.remove())
        shutil.rmtree(self.folder, ignore_errors=True)

    def _each(self, call: Callable[[Server], None]) -> None:
        for node in self.nodes:
            node.adopt()
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(call, self.nodes))


class KafkaCluster(ServerCluster):
    """Three brokers that are controllers too; topics have three replicas, and a write needs two of them."""

    name: ClassVar[str] = "kafka"

    def make_nodes(self) -> Sequence[Server]:
        file = self.folder / "cluster.json"
        if not file.exists():
            file.write_text(json.dumps(str(uuid.uuid4())))
        cluster_id = json.loads(file.read_text())
        folders = [self.folder / f"broker-{number}" for number in range(1, NODES + 1)]
        ports = [Kafka(folder).ports["controller"] for folder in folders]
        voters = ",".join(f"{number}@{HOST}:{port}" for number, port in enumerate(ports, 1))
        replicated = {
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            "share.coordinator.state.topic.replication.factor": "3",
            "share.coordinator.state.topic.min.isr": "2",
            "controller.quorum.voters": voters,
        }
        return [
            Kafka(
                folder,
                profile=self.profile,
                properties={"node.id": str(number), **replicated},
                cluster_id=cluster_id,
                heap_mb=KAFKA_HEAP_MB,
            )
            for number, folder in enumerate(folders, 1)
        ]

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    def start(self) -> None:
        """Start the brokers together: one alone has no quorum."""
        self._each(_start_if_ended)


class CassandraCluster(ServerCluster):
    """Three nodes on 127.0.0.1 to 127.0.0.3; the keyspace has three replicas.

    `client_hosts` are the addresses that clients must use instead, such as those of proxies on the same port.
    """

    name: ClassVar[str] = "cassandra"

    def __init__(
        self, folder: Path, *, profile: Profile = "test", client_hosts: Sequence[str | None] = (None,) * NODES
    ) -> None:
        self._client_hosts = client_hosts
        super().__init__(folder, profile=profile)

    def make_nodes(self) -> Sequence[Server]:
        folders = [self.folder / f"node-{number}" for number in range(1, NODES + 1)]
        shared = Cassandra(folders[0]).ports
        for folder in folders[1:]:  # drivers expect the same port on every node
            ports = Cassandra(folder).ports
            (folder / "ports.json").write_text(json.dumps({**shared, "jmx": ports["jmx"]}))
        seeds = f'parameters: [{{seeds: "{HOST}:{shared["storage"]}"}}]'
        common = {
            "auto_bootstrap": "false",
            "hinted_handoff_enabled": "true",
            "memtable_heap_space": "96MiB",
            "memtable_offheap_space": "96MiB",
            "seed_provider": f"[{{class_name: org.apache.cassandra.locator.SimpleSeedProvider, {seeds}}}]",
        }
        return [
            Cassandra(
                folder,
                profile=self.profile,
                settings={
                    **common,
                    "initial_token": f'"{token}"',
                    **({} if client_host is None else {"broadcast_rpc_address": client_host}),
                },
                host=f"127.0.0.{number}",
                replication=NODES,
                java_options=CASSANDRA_JAVA,
            )
            for number, (folder, token, client_host) in enumerate(
                zip(folders, TOKENS, self._client_hosts, strict=True), 1
            )
        ]

    @property
    def address(self) -> str:
        """Return the hosts and their common port, as in a URL of Tidebook."""
        hosts = ",".join(node.host for node in self.nodes)
        return f"{hosts}:{self.nodes[0].ports['client']}"

    @property
    def url(self) -> str:
        return f"cassandra://{self.address}/{KEYSPACE}"


class PostgresPair(ServerCluster):
    """A primary whose commits wait for a synchronous standby."""

    name: ClassVar[str] = "postgres"

    def make_nodes(self) -> Sequence[Server]:
        primary = Postgres(self.folder / "primary", profile=self.profile, settings=PRIMARY_SETTINGS)
        return [primary, PostgresStandby(self.folder / "standby", primary, profile=self.profile)]

    @property
    def address(self) -> str:
        return self.nodes[0].address

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        """Create the primary alone, since nothing commits without a standby; then copy it, and start both."""
        primary, standby = self.nodes
        if not (standby.folder / "ports.json").exists():
            alone = Postgres(primary.folder, profile=self.profile)
            alone.start()
            alone.stop()
        if not primary.adopt():
            standby.folder.mkdir(parents=True, exist_ok=True)
            standby.prepare()
            primary.prepare()
            primary.spawn()
            primary.wait_ready()
        if not standby.adopt():
            standby.start()


class SparkCluster(ServerCluster):
    """A master and two workers."""

    name: ClassVar[str] = "spark"

    def make_nodes(self) -> Sequence[Server]:
        master = SparkMasterNode(self.folder / "master", profile=self.profile)
        workers = [SparkWorkerNode(self.folder / f"worker-{n}", master, profile=self.profile) for n in (1, 2)]
        return [master, *workers]

    @property
    def address(self) -> str:
        return self.nodes[0].address

    @property
    def url(self) -> str:
        return self.nodes[0].url


def _start_if_ended(node: Server) -> None:
    if not node.alive():
        node.start()


CLUSTER_KINDS: dict[str, type[ServerCluster]] = {
    kind.name: kind for kind in (KafkaCluster, CassandraCluster, PostgresPair, SparkCluster)
}
