"""Durable work queues: entries with a key, a priority, a process date, an expiry and a lease."""

from tidebook.queue.entry import Entry
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.retry import Retry
from tidebook.queue.worker import Worker

__all__ = ["Entry", "Job", "QueueSettings", "Retry", "Worker"]
