"""A job's output: its progress is kept apart from its lines, and its last line is its result."""

from __future__ import annotations

import sys

import pytest

from tidebook.api.pipeline import JobProgress
from tidebook.server.pipeline_jobs import PipelineJob, PipelineJobs

LINES = """
print('{"progress":{"tasks":3,"done":0}}')
print('{"what":"event missing","topic":"orders"}')
print('{"progress":{"tasks":4,"done":4}}')
print('{"progress":"a journal may be called so","topic":"orders"}')
print('{"left":1}')
exit(1)
"""


async def test_the_progress_of_a_job_is_not_among_the_lines_of_its_output() -> None:
    job = PipelineJob("verify")
    assert job.response().progress is None
    await job.run([sys.executable, "-c", LINES])
    found = job.response(after_line=0)
    assert (found.state, found.progress, found.line_count) == ("differences", JobProgress(4, 4), 3)
    assert found.lines[0] == {"what": "event missing", "topic": "orders"}
    assert (found.lines[-1], found.result) == ({"left": 1}, {"left": 1})


async def test_a_job_that_is_cancelled_before_its_process_exists_ends() -> None:
    job = PipelineJob("verify")
    await job.cancel()
    await job.run([sys.executable, "-c", "input()"])
    assert job.state == "cancelled"


async def test_a_topic_that_begins_with_a_hyphen_is_not_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = list[list[str]]()

    async def record(self: PipelineJob, command: list[str]) -> None:
        commands.append(command)

    monkeypatch.setattr(PipelineJob, "run", record)
    jobs = PipelineJobs("book", jobs_max=1)
    jobs.start("rebuild", ["--", "-orders"])
    await jobs.close()
    assert commands[0][-2:] == ["--", "-orders"]
