"""The cost of tags for replication: the pipeline's job over single-event appends, with and without a tag."""

from __future__ import annotations

from bench.pipeline_parts.workload import fill
from bench.timing import Rounds, timed
from tidebook.pipeline.jobs.replicate import Replication
from tidebook.pipeline.session import job_session
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings

JOURNALS, ROUNDS = 10_000, 3


def tag_cost(settings: Settings, tag: str, count: int) -> dict[str, float]:
    """Return events per second: medians of alternating rounds with and without a tag, after a warm-up round."""
    rounds = Rounds()
    portal = BlockingPortal()
    book = Book(settings)
    portal.run(book.__aenter__())
    spark = job_session("tidebook bench tags", settings)
    try:
        for number in range(1 + ROUNDS):
            for name in ("plain", "tagged") if number % 2 else ("tagged", "plain"):
                topic, tags = f"job-{name}-{number}-{tag}", (f"job-{number}-{tag}",) if name == "tagged" else ()
                portal.run(fill(book, topic, appends=count, journals=JOURNALS, tags=tags))
                with timed(f"the pipeline's job, {count:,} appends, {name}") as watch:
                    Replication(spark, book, portal, topics=[topic]).run(once=True)
                if number:
                    rounds.add(f"job_{name}_per_s", watch.rate(count))
    finally:
        spark.stop()
        portal.run(book.__aexit__(None, None, None))
        portal.close()
    return rounds.medians()
