"""How long a fresh process takes to its first batch: `python -m tidebook.bench.pipeline_parts.start BOOK TOPIC`."""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Start Spark and the job; print what Spark's session and first job took, and all up to the first batch."""
    began = time.perf_counter()
    where, topic = sys.argv[1:]
    import tidebook
    from tidebook.core.portal import Portal
    from tidebook.pipeline.jobs.replicate import Replication
    from tidebook.pipeline.session import job_session

    portal = Portal()
    book = tidebook.open(where)
    portal.run(book.__aenter__())
    opened = time.perf_counter()
    spark = job_session("tidebook bench", book.settings)
    spark.range(1).count()
    spark_s = time.perf_counter() - opened
    first: list[float] = []
    job = Replication(
        spark, book, portal, topics=[topic], on_batch=lambda number, done: first.append(time.perf_counter() - began)
    )
    job.run(once=True)
    print(json.dumps({"spark_start_s": spark_s, "first_batch_s": first[0]}))
    spark.stop()
    portal.run(book.__aexit__(None, None, None))


if __name__ == "__main__":
    main()
