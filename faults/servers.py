"""The servers of a run: Kafka, Cassandra and PostgreSQL, single or as clusters, each node with a separate proxy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from faults.links import LinkProxy
from faults.proxy import TcpProxy
from tidebook.testing.servers.cassandra import KEYSPACE, Cassandra
from tidebook.testing.servers.cluster import CassandraCluster, KafkaCluster, PostgresPair
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.kafka import Kafka
from tidebook.testing.servers.postgres import DATABASE, USER, Postgres
from tidebook.testing.servers.server import Server

#: Clients find a Cassandra node by its address and the common port, so each proxy has a separate address.
PROXY_HOST = "127.0.1.{}"
#: The nodes of a ring use the address of a second proxy to connect to each other.
LINK_HOST = "127.0.2.{}"
#: A server that ends while it starts is started again for this long.
START_S_MAX = 300.0
#: The interval at which `close` kills servers that are being started, until their start has failed.
KILLED_AGAIN_S = 0.5
KAFKA_HEAP_MB = 256
CASSANDRA_JAVA = ("-Xms256m", "-Xmx512m")
MEMTABLES = {"memtable_heap_space": "64MiB", "memtable_offheap_space": "64MiB"}
SETTINGS = """folder = "data"
[log]
url = "kafka://{kafka}"
send_timeout_ms = 6000
request_timeout_ms = 4000
[store]
url = "cassandra://{cassandra}/{keyspace}"
[sql]
url = "{sql}"
[journal]
partitions = 2
[outbox]
lock_limit_s = {lock_limit_s}
rest_s = 0.5
poll_s = 0.2
[pipeline]
master = "local[2]"
wait_s = 10
spark = {{ "spark.driver.memory" = "512m", "spark.ui.enabled" = "false" }}
"""


class RunServers:
    """All servers of a run by name (`kafka-1`), and their proxies by the same name."""

    def __init__(self, folder: Path, *, cluster: bool) -> None:
        self._folder = folder
        self._cluster = cluster
        self._groups: dict[str, KafkaCluster | CassandraCluster | PostgresPair] = {}
        self.nodes: dict[str, Server] = {}
        self.proxies: dict[str, TcpProxy] = {}
        #: Calls in threads that start or stop servers; they continue even if no task waits for them any more.
        self._threads: set[asyncio.Future[Any]] = set()
        #: How many times a server ended while it started.
        self.failed_starts: dict[str, int] = {}
        #: The proxies between the nodes of each kind that is a cluster.
        self._links: dict[str, list[LinkProxy]] = {}

    @property
    def partitionable(self) -> list[str]:
        """The kinds whose nodes can be cut off from each other."""
        return [*self._links]

    @property
    def kinds(self) -> Mapping[str, list[str]]:
        """The names of the nodes by kind of server."""
        found: dict[str, list[str]] = {}
        for name in self.nodes:
            found.setdefault(name.rsplit("-", 1)[0], []).append(name)
        return found

    async def start(self) -> None:
        """Start all proxies, then all servers, which direct their clients to the proxies."""
        if self._cluster:
            await self._make_cluster()
        else:
            await self._make_single()
        async with asyncio.TaskGroup() as group:
            for each in (self._groups or self.nodes).values():
                group.create_task(self._in_thread(each.start))

    async def _make_single(self) -> None:
        broker = Kafka(self._folder / "kafka", heap_mb=KAFKA_HEAP_MB)
        await self._put("kafka-1", broker)
        broker.advertised = self.address("kafka-1")
        node = Cassandra(
            self._folder / "cassandra",
            settings={**MEMTABLES, "broadcast_rpc_address": PROXY_HOST.format(1)},
            java_options=CASSANDRA_JAVA,
        )
        await self._put("cassandra-1", node, PROXY_HOST.format(1))
        await self._put("postgres-1", Postgres(self._folder / "postgres"))

    async def _make_cluster(self) -> None:
        brokers = KafkaCluster(self._folder / "kafka")
        for number, broker in enumerate(brokers.nodes, 1):
            await self._put(f"kafka-{number}", broker)
        await self._link_brokers([node for node in brokers.nodes if isinstance(node, Kafka)])
        hosts = [PROXY_HOST.format(number) for number in (1, 2, 3)]
        ring = CassandraCluster(self._folder / "cassandra", client_hosts=hosts)
        for number, (node, host) in enumerate(zip(ring.nodes, hosts, strict=True), 1):
            await self._put(f"cassandra-{number}", node, host)
        await self._link_ring([node for node in ring.nodes if isinstance(node, Cassandra)])
        pair = PostgresPair(self._folder / "postgres")
        await self._put("postgres-1", pair.nodes[0])
        self.nodes["postgres-2"] = pair.nodes[1]  # the standby has no clients, so it needs no proxy
        self._groups = {"kafka": brokers, "cassandra": ring, "postgres": pair}

    async def _link_brokers(self, brokers: Sequence[Kafka]) -> None:
        """Configure brokers and controllers to connect to each other through proxies."""
        links: dict[str, list[str]] = {"internal": [], "controller": []}
        for number, broker in enumerate(brokers, 1):
            for port, addresses in links.items():
                proxy = await self._link("kafka", f"kafka-{number}", (broker.host, broker.ports[port]))
                addresses.append("{}:{}".format(*proxy.address))
        voters = ",".join(f"{number}@{address}" for number, address in enumerate(links["controller"], 1))
        for number, (broker, internal, controller) in enumerate(zip(brokers, *links.values(), strict=True), 1):
            client = self.address(f"kafka-{number}")
            broker.properties |= {
                "advertised.listeners": f"CLIENT://{client},INTERNAL://{internal},CONTROLLER://{controller}",
                "controller.quorum.voters": voters,
            }

    async def _link_ring(self, ring: Sequence[Cassandra]) -> None:
        """Configure the nodes of the ring to connect to each other through proxies."""
        for number, node in enumerate(ring, 1):
            host, port = LINK_HOST.format(number), node.ports["storage"]
            await self._link("cassandra", f"cassandra-{number}", (node.host, port), (host, port))
            # Every node is a seed: others give up after some seconds in which no seed answers, as on a busy machine.
            hosts = ",".join(f"{LINK_HOST.format(each)}:{port}" for each in range(1, len(ring) + 1))
            seeds = f'parameters: [{{seeds: "{hosts}"}}]'
            node.settings |= {
                "broadcast_address": host,
                "seed_provider": f"[{{class_name: org.apache.cassandra.locator.SimpleSeedProvider, {seeds}}}]",
            }

    async def _link(
        self, kind: str, name: str, target: tuple[str, int], address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> LinkProxy:
        proxy = LinkProxy(target, name, lambda: self._pids(kind))
        await proxy.start(*address)
        self._links.setdefault(kind, []).append(proxy)
        return proxy

    def _pids(self, kind: str) -> dict[str, int]:
        return {name: self.nodes[name].pid for name in self.kinds[kind] if self.nodes[name].alive()}

    def cut_off(self, name: str, *, sends: bool, receives: bool) -> None:
        """Cut a node off from the others of its kind; optionally it can still send to them, or receive from them."""
        kind = name.rsplit("-", 1)[0]
        others = [each for each in self.kinds[kind] if each != name]
        lost = [] if sends else [(name, other) for other in others]
        lost += [] if receives else [(other, name) for other in others]
        for proxy in self._links[kind]:
            proxy.cut(lost)

    def heal(self, kind: str) -> None:
        """Connect all nodes of a kind again."""
        for proxy in self._links[kind]:
            proxy.cut(())

    async def _put(self, name: str, node: Server, host: str = "127.0.0.1") -> None:
        port = node.ports["client"]
        proxy = TcpProxy((node.host, port))
        await proxy.start(host, port if host != "127.0.0.1" else 0)
        self.nodes[name], self.proxies[name] = node, proxy

    def address(self, name: str) -> str:
        """Return the address that the clients of a server use, which is that of its proxy."""
        host, port = self.proxies[name].address
        return f"{host}:{port}"

    @property
    def sql_url(self) -> str:
        """The URL of the database, through its proxy."""
        return f"postgresql://{USER}@{self.address('postgres-1')}/{DATABASE}"

    @property
    def brokers(self) -> str:
        """The addresses of the brokers, through their proxies."""
        return ",".join(map(self.address, self.kinds["kafka"]))

    def settings(self, lock_limit_s: float) -> str:
        """The settings of a book that uses these servers through their proxies."""
        hosts = [self.proxies[name].address for name in self.kinds["cassandra"]]
        return SETTINGS.format(
            kafka=self.brokers,
            cassandra=f"{','.join(host for host, _ in hosts)}:{hosts[0][1]}",
            keyspace=KEYSPACE,
            sql=self.sql_url,
            lock_limit_s=lock_limit_s,
        )

    async def kill(self, name: str) -> None:
        """Kill a server with SIGKILL."""
        await self._in_thread(self.nodes[name].kill9)

    async def restart(self, name: str) -> None:
        """Start a server that was killed, or stop a running one and start it again; return when it is ready."""
        node = self.nodes[name]
        await self._in_thread(node.stop)
        # The usual start would wait for a commit, which needs the standby to follow again.
        start = partial(_start_without_commit, node) if name == "postgres-1" and self._cluster else node.start
        deadline = time.monotonic() + START_S_MAX
        while True:
            try:
                await self._in_thread(start)
                return
            except ServerError:
                if node.alive() or time.monotonic() > deadline:
                    raise
                # It has ended, as a broker does if the controllers do not respond: a supervisor restarts it.
                self.failed_starts[name] = self.failed_starts.get(name, 0) + 1

    async def pause(self, name: str) -> None:
        """Stop a server with SIGSTOP."""
        await self._in_thread(self.nodes[name].pause)

    async def resume(self, name: str) -> None:
        """Let a server continue."""
        await self._in_thread(self.nodes[name].resume)

    async def _in_thread(self, act: Callable[[], object]) -> None:
        """Run a call in a thread; `close` waits for its end if the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(None, act)
        self._threads.add(future)
        future.add_done_callback(self._forget)
        await asyncio.shield(future)

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._threads.discard(future)
        future.exception()  # the caller that waits for it gets the error; there may be none

    async def close(self) -> None:
        """Kill all servers, including those that are being started, delete their data, and close the proxies."""
        while True:
            for node in self.nodes.values():
                await asyncio.to_thread(node.kill9)
            if not self._threads:
                break
            await asyncio.wait(self._threads, timeout=KILLED_AGAIN_S)
        for each in (self._groups or self.nodes).values():
            await asyncio.to_thread(each.remove)
        links = [proxy for proxies in self._links.values() for proxy in proxies]
        for proxy in [*self.proxies.values(), *links]:
            await proxy.close()


def _start_without_commit(node: Server) -> None:
    node.prepare()
    node.spawn()
    node.wait_ready()
