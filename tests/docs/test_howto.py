"""How-to guides for an embedded book run block by block as printed; other tests run the programs of the others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.docs.printed_page import run_page

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
#: The pages whose blocks are run one after another.
PAGES = (
    "backing-up.md", "journals.md", "moving-to-servers.md", "projections.md", "queue.md", "remote.md",
    "removing-data.md", "running.md", "server.md", "wal.md",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works(page: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_page(HOWTO / page, tmp_path, port=port)
