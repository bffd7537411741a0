"""The queue on PostgreSQL compared with its peers, and in a folder with huey: draining, wake-ups, the time of a claim.

All queues use the same server and durability (every commit is synced) in one run; the best round of each is reported.
`./dev bench` starts the server unless one is running.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from bench.queue_parts.claims import churn, many
from bench.queue_parts.drain import drain, singles
from bench.queue_parts.embedded import embedded
from bench.queue_parts.figures import Run
from bench.queue_parts.wakes import idle, timers
from bench.servers import database, running
from bench.timing import report

PARTS = ("drain", "singles", "idle", "timers", "embedded", "many", "churn")
#: Each ratio is the first figure divided by the second, or the figure itself.
RATIOS = {
    "drain_vs_pgqueuer": ("tidebook_drain_per_s", "pgqueuer_drain_per_s"),
    "drain_vs_pgmq": ("tidebook_drain_per_s", "pgmq_drain_per_s"),
    "drain_vs_procrastinate": ("tidebook_drain_per_s", "procrastinate_drain_per_s"),
    "drain_vs_bare": ("tidebook_drain_per_s", "bare_drain_per_s"),
    "put_vs_pgqueuer": ("tidebook_put_per_s", "pgqueuer_put_per_s"),
    "singles_vs_pgqueuer": ("tidebook_singles_per_s", "pgqueuer_singles_per_s"),
    "idle_p50_vs_pgqueuer": ("tidebook_idle_p50_ms", "pgqueuer_idle_p50_ms"),
    "timer_p50_ms": ("timer_p50_ms", None),
    "timer_p99_ms": ("timer_p99_ms", None),
    "embedded_vs_huey": ("embedded_singles_per_s", "huey_singles_per_s"),
    "embedded_hundreds_vs_huey": ("embedded_drain_per_s", "huey_singles_per_s"),
    "claim_many_vs_few": ("claim_many_ms", "claim_few_ms"),
    "claim_churned_vs_fresh": ("claim_churned_ms", "claim_fresh_ms"),
    "claim_late_in_period_vs_fresh": ("claim_late_in_period_ms", "claim_fresh_again_ms"),
}
#: Minimums, except those of times and of ratios of times, which are maximums.
TARGETS = {
    "drain_vs_pgqueuer": 3.0,
    "drain_vs_pgmq": 1.5,
    "drain_vs_procrastinate": 10.0,
    "drain_vs_bare": 0.4,
    "put_vs_pgqueuer": 0.8,
    "singles_vs_pgqueuer": 1.5,
    "idle_p50_vs_pgqueuer": 1.0,
    "timer_p50_ms": 10.0,
    "timer_p99_ms": 50.0,
    "embedded_vs_huey": 5.0,
    "claim_many_vs_few": 2.0,
    "claim_churned_vs_fresh": 1.5,
}


def main(argv: list[str]) -> None:
    """Run all parts, or some, and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench queue", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=f"one of: {', '.join(PARTS)}")
    parser.add_argument("--waiting", type=int, default=5_000_000, help="entries that wait in the part `many`")
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of the work, a twenty-fifth of the waiting entries"
    )
    options = parser.parse_args(argv)
    with database(running()["postgres"]["url"], "queue") as url:
        run = Run(url, options.quick, {})
        waiting = options.waiting // 25 if options.quick else options.waiting
        asyncio.run(_parts(run, options.only or PARTS, waiting))
    figures = run.figures
    ratios = {
        name: figures[first] / (1.0 if second is None else figures[second])
        for name, (first, second) in RATIOS.items()
        if first in figures
    }
    report("queue", ratios, {name: round(value, 3) for name, value in figures.items()}, TARGETS)


async def _parts(run: Run, parts: Sequence[str], waiting: int) -> None:
    for part in PARTS:
        if part not in parts:
            continue
        print(f"{part}:", file=sys.stderr)
        match part:
            case "drain":
                await drain(run)
            case "singles":
                await singles(run)
            case "idle":
                await idle(run)
            case "timers":
                await timers(run)
            case "embedded":
                await embedded(run)
            case "many":
                await many(run, waiting)
            case "churn":
                with database(running()["postgres"]["url"], "queue_fresh") as fresh_url:
                    await churn(run, fresh_url)
