"""The files in deploy: their commands and options exist, their routes are served, their settings are read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tidebook.api.routes import ROUTES
from tidebook.cli.app import app
from tidebook.server.settings import ServerSettings
from tidebook.wiring.adapters import kafka_settings, server_settings
from tidebook.wiring.settings import read_settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def documents() -> Iterator[dict[str, Any]]:
    for file in MANIFESTS:
        yield from yaml.safe_load_all(file.read_text())


def workloads() -> list[dict[str, Any]]:
    return [each for each in documents() if each["kind"] in {"Deployment", "StatefulSet"}]


def command_lines() -> Iterator[list[str]]:
    for each in workloads():
        yield from (container["args"] for container in each["spec"]["template"]["spec"]["containers"])
    [start] = re.findall(r"^ExecStart=(.*)$", (DEPLOY / "systemd" / "tidebook.service").read_text(), re.M)
    yield shlex.split(start)[1:]
    for name in ("Containerfile", "Containerfile.spark"):
        [default] = re.findall(r"^CMD (.*)$", (DEPLOY / "container" / name).read_text(), re.M)
        yield yaml.safe_load(default)


@pytest.mark.parametrize("arguments", [*command_lines()], ids=" ".join)
def test_a_command_parses(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = [*arguments]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    context = command.make_context("tidebook", rest)
    assert context.params["book"]


@pytest.mark.parametrize("workload", workloads(), ids=lambda each: each["metadata"]["name"])
def test_a_workload_selects_its_pods_and_mounts_its_volumes(workload: dict[str, Any]) -> None:
    spec = workload["spec"]
    pod = spec["template"]["spec"]
    assert workload["apiVersion"] == "apps/v1"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == workload["metadata"]["labels"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates", [])]
    volumes = {*(each["name"] for each in pod["volumes"]), *claims}
    for container in pod["containers"]:
        assert {each["name"] for each in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"]["memory"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        given = " ".join(container["args"])
        assert all(re.search(rf"[:=]{port}\b", given) for port in ports.values())
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in container:
                request = container[probe]["httpGet"]
                assert request["port"] in ports
                assert request["path"] in {route.path for route in ROUTES}


def test_the_service_leads_to_the_server() -> None:
    [service] = [each for each in documents() if each["kind"] == "Service"]
    [server] = [each for each in workloads() if each["metadata"]["name"] == service["metadata"]["name"]]
    assert service["spec"]["selector"] == server["spec"]["template"]["metadata"]["labels"]
    names = [port["name"] for port in server["spec"]["template"]["spec"]["containers"][0]["ports"]]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == names


def test_the_settings_are_read(tmp_path: Path) -> None:
    [config] = [each for each in documents() if each["kind"] == "ConfigMap"]
    file = tmp_path / "tidebook.toml"
    file.write_text(config["data"]["tidebook.toml"])
    settings = read_settings(file, environment={})
    assert settings.options("server", ServerSettings).drain_s == 10
    assert kafka_settings(settings).user == "tidebook"
    module = "tidebook.store.cassandra.settings"
    assert server_settings(settings, "store", "cassandra", module, "CassandraSettings").replication == 3


def test_the_unit_restarts_and_gives_time_to_stop() -> None:
    unit = (DEPLOY / "systemd" / "tidebook.service").read_text()
    for line in ("Restart=on-failure", "TimeoutStopSec=60", "KillSignal=SIGTERM", "WantedBy=multi-user.target"):
        assert line in unit.splitlines()
    assert ServerSettings().shutdown_s < 60
