"""Offsets with the epoch that they belong to: {"orders": {"epoch": 2, "0": 17, "1": 5}}.

A topic that was adopted starts over at offset 0, so offsets alone do not tell what has been read.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.pipeline.source.records import Offsets

#: Stands among the numbers of the partitions, which are text.
EPOCH = "epoch"


def in_epoch(numbers: Mapping[str, int], epoch: int) -> dict[str, int]:
    """The offsets of a topic as those of an epoch."""
    return {EPOCH: epoch, **numbers}


def epoch_of(numbers: Mapping[str, int]) -> int:
    """The epoch of a topic's offsets; those that name none are of the first."""
    return numbers.get(EPOCH, FIRST_EPOCH)


def numbers_of(numbers: Mapping[str, int]) -> dict[str, int]:
    """The offsets of a topic by partition, without the epoch."""
    return {number: offset for number, offset in numbers.items() if number != EPOCH}


def without_epochs(offsets: Offsets) -> Offsets:
    """The offsets of all topics by partition alone."""
    return {topic: numbers_of(numbers) for topic, numbers in offsets.items()}


def positions(numbers: Mapping[str, int], epoch: int) -> dict[int, Position]:
    """Positions by partition, in the epoch that the offsets name, else in the one that is given."""
    named = numbers.get(EPOCH, epoch)
    return {int(number): Position(named, offset) for number, offset in numbers_of(numbers).items()}
