"""The commands for a server: tokens of existing books, what 'serve' refuses, and what 'doctor' finds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

import tidebook
from tests.integration.server.running import served_by_command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line."""
    return subprocess.run([sys.executable, "-m", "tidebook.cli", *arguments], capture_output=True, text=True)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the findings of 'doctor --json' by check."""
    return {each["check"]: each for each in map(json.loads, done.stdout.splitlines())}


def test_a_token_of_a_mistyped_book_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    refused = command("token", "create", "ops", "--book", str(tmp_path / "nobook"))
    assert refused.returncode == 4
    assert "--new-book" in refused.stderr
    assert not (tmp_path / "nobook").exists()
    made = command("token", "create", "ops", "--new-book", "--book", str(tmp_path / "book"))
    assert made.returncode == 0
    assert command("token", "create", "dev", "--book", str(tmp_path / "book")).returncode == 0


def test_a_book_of_another_server_is_not_served(tmp_path: Path) -> None:
    refused = command("serve", "--port", "0", "--book", "http://127.0.0.1:8470")
    assert refused.returncode == 2
    assert "is already served" in refused.stderr


def test_doctor_checks_the_file_of_the_server_and_a_remote_server(tmp_path: Path) -> None:
    book = tmp_path / "book"
    assert command("token", "create", "ops", "--role", "admin", "--new-book", "--book", str(book)).returncode == 0
    local = findings(command("doctor", "--json", "--book", str(book)))
    assert local["file server.db"]["ok"] is True
    (book / "server.db").write_bytes(b"no database" * 100)
    damaged = command("doctor", "--json", "--book", str(book))
    assert damaged.returncode == 1
    assert findings(damaged)["file server.db"]["ok"] is False

    with served_by_command("--book", str(tmp_path / "other")) as (url, _):
        found = command("doctor", "--json", "--book", url)
        assert found.returncode == 0, found.stderr
        assert {"server: server", "server: log", "server: store", "book", "files"} <= findings(found).keys()
        assert findings(found)["server version"] == {
            "check": "server version", "ok": True, "detail": f"Tidebook {tidebook.__version__}"
        }  # fmt: skip
        assert findings(found)["server clock"]["ok"] is True
        assert "not checked here" in findings(found)["files"]["detail"]
        unknown = httpx.get(url + "/v1/nothing/here", verify=False)
        assert unknown.status_code == 404
        assert unknown.json()["type"] == "urn:tidebook:error:not-found"
    gone = command("doctor", "--json", "--book", url)
    assert gone.returncode == 1
    assert "does not answer" in findings(gone)["server"]["detail"]


def test_no_payload_and_no_secret_reaches_the_logs(tmp_path: Path) -> None:
    canary, book = "canary-4711", str(tmp_path / "book")
    made = command("token", "create", "ops", "--role", "admin", "--new-book", "--book", book)
    token = json.loads(made.stdout)["token"]
    headers = {"authorization": f"Bearer {token}"}
    with served_by_command("--log-json", "--book", book) as (url, process):
        with httpx.Client(base_url=url, headers=headers, verify=False) as http:
            body = {"events": [{"payload": {"card": canary}, "metadata": {"note": canary}}]}
            assert http.post("/v1/journals/orders/o-1/events", json=body).status_code == 200
            assert http.get("/v1/journals/orders/o-1/events").status_code == 200
            assert (
                http.post("/v1/journals/orders/o-1/events", json={"events": [{"payloads": canary}]}).status_code == 400
            )
            assert http.post("/v1/queues/mail/entries", json={"entries": [{"data": canary}]}).status_code == 200
            [job] = http.post("/v1/queues/mail/claims").json()["jobs"]
            failed = http.post("/v1/queues/mail/failures", json={"leases": [job["lease"]], "reason": "no"})
            assert failed.status_code == 200
            wrong = http.get("/v1/topics", headers={"authorization": f"Bearer tb_{canary}{canary}"})
            assert wrong.status_code == 401
        process.terminate()
        _, logged = process.communicate(timeout=60)
    assert process.returncode == 0
    assert canary not in logged
    assert token not in logged
