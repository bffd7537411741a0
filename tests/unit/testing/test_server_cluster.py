"""The configuration of clusters of test servers, which are started only by the fault tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.testing.servers.__main__ import main
from tidebook.testing.servers.cluster import CassandraCluster, KafkaCluster, PostgresPair, SparkCluster
from tidebook.testing.servers.group import ServerGroup


def properties_of(cluster: KafkaCluster, index: int) -> dict[str, str]:
    node = cluster.nodes[index]
    return node._settings() | node._properties  # type: ignore[attr-defined]


def test_three_brokers_share_a_quorum_and_replicate_thrice(tmp_path: Path) -> None:
    cluster = KafkaCluster(tmp_path / "kafka")
    settings = [properties_of(cluster, index) for index in range(3)]
    assert [each["node.id"] for each in settings] == ["1", "2", "3"]
    assert len({each["controller.quorum.voters"] for each in settings}) == 1
    assert {(each["default.replication.factor"], each["min.insync.replicas"]) for each in settings} == {("3", "2")}
    assert len({node._cluster_id for node in cluster.nodes}) == 1  # type: ignore[attr-defined]
    assert len({each["listeners"] for each in settings}) == 3
    assert cluster.url.count(",") == 2
    assert KafkaCluster(tmp_path / "kafka").url == cluster.url  # requested later, by another process


def test_three_nodes_share_a_port_and_a_seed(tmp_path: Path) -> None:
    cluster = CassandraCluster(tmp_path / "cassandra")
    assert [node.host for node in cluster.nodes] == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert len({node.ports["client"] for node in cluster.nodes}) == 1
    assert len({node.ports["jmx"] for node in cluster.nodes}) == 3
    assert cluster.url == f"cassandra://127.0.0.1,127.0.0.2,127.0.0.3:{cluster.nodes[0].ports['client']}/tidebook"
    for node in cluster.nodes:
        node.prepare()
    texts = [(node.folder / "cassandra.yaml").read_text() for node in cluster.nodes]
    seeds = [line for text in texts for line in text.splitlines() if line.startswith("seed_provider")]
    assert len(set(seeds)) == 1
    tokens = [line for text in texts for line in text.splitlines() if line.startswith("initial_token")]
    assert len(set(tokens)) == 3


def test_the_primary_waits_for_its_standby(tmp_path: Path) -> None:
    pair = PostgresPair(tmp_path / "postgres")
    primary, standby = pair.nodes
    assert pair.url == primary.url
    assert primary._settings["synchronous_standby_names"] in standby._settings["primary_conninfo"]  # type: ignore[attr-defined]


def test_workers_name_their_master(tmp_path: Path) -> None:
    cluster = SparkCluster(tmp_path / "spark")
    master, *workers = cluster.nodes
    assert {worker.url for worker in workers} == {master.url} == {cluster.url}
    assert len({node.address for node in cluster.nodes}) == 3


def test_nothing_runs_and_nothing_is_created_before_the_start(tmp_path: Path) -> None:
    group = ServerGroup(tmp_path, cluster=True)
    assert group.status() == {"servers": {}, "book": None}
    assert not group.home.exists()


def test_a_cluster_has_no_mariadb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--cluster", "--only", "mariadb", "--home", str(tmp_path)]) == 2
    assert "mariadb" in capsys.readouterr().err
