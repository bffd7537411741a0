"""Tests of the shop: its orders without a book, all parts together, and `tidebook up --demo` as a process."""

import ast
import json
import signal
import subprocess
import sys
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path

import pytest
from pyarrow.parquet import ParquetFile
from sqlalchemy import create_engine

import tidebook
from tidebook import Event
from tidebook.demo.measurements import MAILS, NAMESPACE, ORDER_SECONDS, REGION, Measurements
from tidebook.demo.order_table import TOPIC
from tidebook.demo.orders import Cancelled, Order, Paid, Placed, Refused
from tidebook.demo.sales import revenue
from tidebook.demo.shop import open_shop
from tidebook.domain.scenario import scenario

SOURCE = Path(str(find_spec("tidebook.demo").submodule_search_locations[0]))  # type: ignore[union-attr, index]


def test_an_order_is_paid_once() -> None:
    placed = Placed("lamp", 40)
    scenario(Order).given([]).when(Order.place, "lamp", 40).then([placed])
    scenario(Order).given([placed]).when(Order.cancel).then([Cancelled()])
    scenario(Order).given([placed, Paid(40)]).when(Order.pay).refused(Refused)
    scenario(Order).given([placed, Cancelled()]).when(Order.pay).refused(Refused)


async def test_a_payment_is_tagged(tmp_path: Path) -> None:
    state = Order()
    state.evolve(Placed("lamp", 40))
    assert state.pay() == Event(Paid(40), tags={"paid"})


async def test_all_parts_agree_on_the_sales(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    customers = 12
    async with tidebook.open(folder, create=True, replicate=True) as book, open_shop(book) as shop:
        async with book.running(shop.feed, shop.mails, shop.sales, shop.relay):
            for number in range(customers):
                await shop.serve_customer(f"o-{number}")
            await book.settle()
        orders = book.journal("shop-orders", events=[Placed, Paid, Cancelled])
        paid: dict[str, int] = {}
        for number in range(customers):
            first, second = [event.data async for event in orders.read(f"o-{number}")]
            assert isinstance(first, Placed)
            if isinstance(second, Paid):
                paid[first.article] = paid.get(first.article, 0) + second.price
        assert len(paid) > 0
        engine = create_engine(f"sqlite:///{folder / 'sales.db'}")
        found = {article: total for article, total in revenue(engine).items() if total}
        engine.dispose()
        assert found == paid
        payments = [event.id async for event in book.tags.read("paid")]
        messages = [message.key async for message in book.log_topic(TOPIC).read()]
        assert sorted(map(str, messages)) == sorted(str(f"o-{n}".encode()) for n in range(customers))
        region = await book.wal(NAMESPACE).open_region(REGION, writable=False)
        entries = [(each.table, json.loads(each.payload)["order"]) async for each in region.read()]
        await region.close()
        assert sorted(order for table, order in entries if table == MAILS) == sorted(payments)
        assert len([order for table, order in entries if table == ORDER_SECONDS]) == customers


async def test_a_process_that_lists_the_projections_takes_nothing_from_the_shop(tmp_path: Path) -> None:
    """`tidebook projection list --app tidebook.demo:shop` opens the shop, too."""
    folder = tmp_path / "shop"
    async with tidebook.open(folder, create=True, replicate=True) as book, open_shop(book) as shop:
        await shop.serve_customer("o-1")
        async with tidebook.open(folder) as other, open_shop(other) as looking:
            assert looking.sales.name == "shop-sales"
        await shop.serve_customer("o-2")


@pytest.mark.spark
@pytest.mark.timeout(300)
async def test_spark_moves_the_measurements_to_parquet_once(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    async with tidebook.open(folder, create=True) as book, aclosing(Measurements(book, folder)) as measurements:
        for number in range(3):
            await measurements.write(MAILS, order=f"o-{number}")
        assert await measurements.flush() == 0, (folder / "flush.log").read_text()
    files = [*(folder / "lake" / f"region={REGION}" / f"table={MAILS}").glob("*.parquet")]
    rows = [row for file in files for row in ParquetFile(file).read().to_pylist()]
    assert [json.loads(row["payload"])["order"] for row in rows] == ["o-0", "o-1", "o-2"]


@pytest.mark.timeout(180)
def test_the_demo_is_alive_and_stops_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidebook.cli", "up", "--demo", "--book", "shop", "--json", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        seen: set[str] = set()
        for line in map(json.loads, process.stdout):
            seen |= {*line}
            if {"demo", "url"} <= seen and any(topic["records"] > 4 for topic in line.get("topics", [])):
                break
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.wait()
    assert [each.name for each in tmp_path.iterdir()] == ["shop"]


def test_the_demo_is_refused_with_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidebook.cli", "up", "--demo", "--once", "--book", str(tmp_path / "shop")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--demo runs in an embedded book" in done.stderr
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize("file", sorted(SOURCE.glob("*.py")), ids=lambda file: file.name)
def test_the_shop_uses_only_the_public_api(file: Path) -> None:
    public = {"tidebook", "tidebook.outbox", "tidebook.queue"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        inside = [each for each in names if each.startswith("tidebook") and not each.startswith("tidebook.demo")]
        assert {*inside} <= public
