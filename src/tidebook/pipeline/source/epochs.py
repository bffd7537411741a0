"""Offsets with their epoch: {"orders": {"epoch": 2, "0": 17, "1": 5}}.

An adopted topic restarts at offset 0 in a new epoch, so offsets alone do not identify what was read.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.pipeline.source.records import Offsets

#: The key of the epoch, next to the partition numbers, which are text.
EPOCH = "epoch"


def in_epoch(numbers: Mapping[str, int], epoch: int) -> dict[str, int]:
    """Return a topic's offsets with their epoch added."""
    return {EPOCH: epoch, **numbers}


def epoch_of(numbers: Mapping[str, int]) -> int:
    """Return the epoch of a topic's offsets; offsets without one belong to the first epoch."""
    return numbers.get(EPOCH, FIRST_EPOCH)


def partition_offsets(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return a topic's offsets by partition, without the epoch."""
    return {number: offset for number, offset in numbers.items() if number != EPOCH}


def without_epochs(offsets: Offsets) -> Offsets:
    """Return the offsets of all topics by partition, without the epochs."""
    return {topic: partition_offsets(numbers) for topic, numbers in offsets.items()}


def positions(numbers: Mapping[str, int], epoch: int) -> dict[int, Position]:
    """Return positions by partition, in the offsets' own epoch if they have one, else in `epoch`."""
    named = numbers.get(EPOCH, epoch)
    return {int(number): Position(named, offset) for number, offset in partition_offsets(numbers).items()}
