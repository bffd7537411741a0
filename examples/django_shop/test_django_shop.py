"""The commands of the README: migrate, two requests, and a worker that relays and sends the mail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUESTS = """
import django
django.setup()
from django.db import connection
from django.test import Client
from examples.django_shop.book import book, close_book
client = Client()
assert client.post("/orders/", {"id": "o-1", "total": "3"}).status_code == 201
try:
    client.post("/orders/", {"id": "o-1", "total": "4"})  # the row exists: neither it nor an event is written
except Exception as error:
    assert type(error).__name__ == "IntegrityError", error
else:
    raise AssertionError("a second order with the same id")
assert client.get("/orders/o-1/").json() == {"id": "o-1", "total": 3, "events": []}
assert book().outbox.relay(once=True) == 1
print(client.get("/orders/o-1/").content.decode())
close_book()
connection.close()
"""


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ, "PYTHONPATH": path, "SHOP_BOOK": str(folder), "PYTHONUNBUFFERED": "1",
        "DJANGO_SETTINGS_MODULE": "examples.django_shop.settings",
    }  # fmt: skip


def test_a_row_and_an_event_are_written_together_and_the_mail_is_sent(tmp_path: Path) -> None:
    inside = environment(tmp_path / "book")
    migrate = [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"]
    subprocess.run(migrate, env=inside, cwd=ROOT, check=True, timeout=60)
    requests = subprocess.run(
        [sys.executable, "-c", REQUESTS], env=inside, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert requests.returncode == 0, requests.stderr
    assert json.loads(requests.stdout) == {"id": "o-1", "total": 3, "events": [{"total": 3}]}
    work = subprocess.Popen(
        [sys.executable, "-m", "django", "work"], env=inside, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert work.stdout is not None
        assert work.stdout.readline() == "mail about o-1\n"
        work.send_signal(signal.SIGTERM)
        assert work.wait(60) == 0
    finally:
        work.kill()
        work.wait()
        assert work.stdout is not None
        work.stdout.close()
