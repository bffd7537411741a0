"""Handlers for `tidebook queue work`."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tidebook.queue.job import Job


def note(text: str) -> None:
    with Path(os.environ["NOTES"]).open("a") as file:
        file.write(f"{text}\n")


def send(job: Job) -> None:
    note(f"sent {job.data}")


async def send_async(job: Job) -> None:
    note(f"sent {job.data}")


def refuse(job: Job) -> None:
    raise ValueError(f"no {job.data}")


async def slow(job: Job) -> None:
    note("begun")
    await asyncio.sleep(1.0)
    note("ended")


def hang(job: Job) -> None:
    note("begun")
    time.sleep(600)


class Mails:
    """A class with a method as handler."""

    @staticmethod
    def send(job: Job) -> None:
        send(job)


not_callable = 3
