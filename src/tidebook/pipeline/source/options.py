"""The options of `format("tidebook")`: names, parsing and validation, and the events that they select.

Query filters are not pushed down: Spark 4.2.0 shares one reader between all scans of a DataFrame, so one query's filter
would affect the others (decision 0111). Options belong to the DataFrame, so they do not have this problem.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from difflib import get_close_matches
from typing import Literal, TypeVar, get_args

import msgspec

from tidebook.core.bounds import OFFSET_MAX
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.position import FIRST_EPOCH, Position
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.source.event_page import PAYLOAD_FORMS, PayloadForm
from tidebook.pipeline.source.records import EPOCH, Offsets, epoch_of, partition_offsets
from tidebook.wiring.settings import DEFAULT_BOOK, read_settings, settings_from_json, settings_to_json
from tidebook.wiring.spark import require_book

#: `settings` is internal to the pipeline's jobs: the settings as JSON, because workers may not have the file.
_ANY = ("book", "settings")
_BOUNDS = ("minSeqNr", "maxSeqNr", "minTimestamp", "maxTimestamp", "startingOffsets")
_EVENTS = (*_ANY, "topic", "id", "tag", "payload", *_BOUNDS)
TABLE = (*_EVENTS, "freshness", "asOfTimestamp", "asOfOffsets", "endingOffsets", "splits")
STREAM = (*_EVENTS, "maxRecordsPerTrigger")
WAL = (*_ANY, "wal", "region", "table")
_OFFSETS_EXAMPLE = '{"orders": {"0": 17, "1": 5}}'
INT_MAX = 2**62
SPLITS = 16
#: More tasks than this have no benefit: a task reads its split in pages.
SPLITS_MAX = 10_000

#: The content of a table: the events of the log, or only those that are already replicated.
Freshness = Literal["log", "store"]
Choice = TypeVar("Choice", bound=str)


def _is_number(partition: str) -> bool:
    """Return whether a string is a partition's number in canonical form: "01" would name the same partition as "1"."""
    return partition.isascii() and partition.isdecimal() and len(partition) < 10 and str(int(partition)) == partition


def check_offsets(name: str, offsets: Offsets, configs: Mapping[str, TopicConfig]) -> None:
    """Raise `InvalidInput` if an option's offsets name a topic that is not read, or a partition or epoch that it lacks.

    Such a bound would have no effect, and the read would return other rows than the caller expects.
    """
    for topic, numbers in offsets.items():
        if topic not in configs:
            raise InvalidInput(
                f"the option {name} names the topic {topic}, which is not read: add it to the option topic"
            )
        config = configs[topic]
        for number in partition_offsets(numbers):
            if int(number) >= config.partitions:
                raise InvalidInput(
                    f"the option {name} names partition {number} of topic {topic}: it has 0 to {config.partitions - 1}"
                )
        if epoch_of(numbers) > config.epoch:
            raise InvalidInput(
                f"the option {name} names epoch {epoch_of(numbers)} of topic {topic}, which is in epoch {config.epoch}"
            )


def positions(numbers: Mapping[str, int], epoch: int) -> dict[int, Position]:
    """Return positions by partition, in the offsets' own epoch if they have one, else in `epoch`."""
    named = numbers.get(EPOCH, epoch)
    return {int(number): Position(named, offset) for number, offset in partition_offsets(numbers).items()}


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The events that the options of a read select; bounds are inclusive, and None selects everything."""

    topics: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    tag: str | None = None
    seq_nr_from: int = 1
    seq_nr_to: int = INT_MAX
    time_from_ms: int = 0
    time_to_ms: int = INT_MAX

    @property
    def narrows(self) -> bool:
        """Return whether `takes` must be checked for each event."""
        return self != Selection(topics=self.topics, tag=self.tag)

    def takes(self, id: str, seq_nr: int, timestamp_ms: int) -> bool:
        """Return whether an event is selected by its id, number and time; the tag is not checked."""
        return (
            self.seq_nr_from <= seq_nr <= self.seq_nr_to
            and self.time_from_ms <= timestamp_ms <= self.time_to_ms
            and (self.ids is None or id in self.ids)
        )


class Options:
    """The options of one read; names are case-insensitive, as in Spark."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._given = {name.lower(): str(value) for name, value in options.items()}

    def check_names(self, known: Collection[str]) -> None:
        """Raise `InvalidInput` for an option that is not in `known`."""
        names = {name.lower(): name for name in known if name != "settings"}
        for name in self._given:
            if name in names or name == "settings":
                continue
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {names[near[0]]}?" if near else f"the options are {', '.join(sorted(names.values()))}"
            raise InvalidInput(f'format("tidebook"): the option {name} is unknown: {hint}')

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str) -> str | None:
        """Return the text of an option, or None if it is not set."""
        return self._given.get(name.lower())

    def number(self, name: str, default: int, *, least: int, most: int = INT_MAX) -> int:
        """Return an option as an integer from `least` to `most`."""
        text = self.text(name)
        if text is None:
            return default
        try:
            number = int(text)
        except ValueError:
            number = -1
        if not least <= number <= most:
            bounds = f"of at least {least}" if most == INT_MAX else f"from {least} to {most}"
            raise InvalidInput(f"the option {name} must be a whole number {bounds}, not {text[:40]!r}")
        return number

    def choice(self, name: str, known: Sequence[Choice]) -> Choice:
        """Return an option that is one of the known values; the first of them is the default."""
        text = self.text(name)
        for each in known:
            if text is None or text.lower() == each:
                return each
        raise InvalidInput(f"the option {name} must be one of {', '.join(known)}, not {text!r}")

    def freshness(self) -> Freshness:
        """Return the freshness of a table."""
        return self.choice("freshness", get_args(Freshness))

    def payload_form(self) -> PayloadForm:
        """Return the form in which payloads are delivered."""
        return self.choice("payload", PAYLOAD_FORMS)

    def names(self, name: str) -> frozenset[str] | None:
        """Return the comma-separated names of an option."""
        text = self.text(name)
        if text is None:
            return None
        names = frozenset(each.strip() for each in text.split(",") if each.strip())
        if not names:
            raise InvalidInput(f"the option {name} must have at least one name; separate several by commas")
        return names

    def time_ms(self, name: str, default: int) -> int:
        """Return an option that is an ISO 8601 time, in milliseconds since 1970."""
        text = self.text(name)
        if text is None:
            return default
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            time = None
        if time is None or time.tzinfo is None:
            raise InvalidInput(
                f"the option {name} must be a time with a zone, such as 2026-01-31T12:00:00+00:00, not {text!r}"
            )
        return round(time.timestamp() * 1000)

    def offsets(self, name: str, *, least: int = 0) -> Offsets:
        """Return an option that is a JSON object of offsets by topic and partition, each at least `least`."""
        text = self.text(name)
        if text is None:
            return {}
        expected = f"the option {name} must be JSON such as {_OFFSETS_EXAMPLE}, not {text!r}"
        try:
            offsets = msgspec.json.decode(text, type=Offsets)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{expected}: {error}") from error
        for numbers in offsets.values():
            for partition, offset in numbers.items():
                lowest = FIRST_EPOCH if partition == EPOCH else least
                if not (partition == EPOCH or _is_number(partition)) or not lowest <= offset <= OFFSET_MAX:
                    raise InvalidInput(expected)
        return offsets

    def splits(self) -> int:
        """Return the number of parts in which the store is read."""
        return self.number("splits", SPLITS, least=1, most=SPLITS_MAX)

    def _tag(self) -> str | None:
        """Return the tag; raise `InvalidInput` for an empty one, which would select everything."""
        if (tag := self.text("tag")) == "":
            raise InvalidInput("the option tag is empty: name a tag")
        return tag

    def selection(self) -> Selection:
        """Return the selection of events that the options describe."""
        return Selection(
            topics=self.names("topic"),
            ids=self.names("id"),
            tag=self._tag(),
            seq_nr_from=self.number("minSeqNr", 1, least=1),
            seq_nr_to=self.number("maxSeqNr", INT_MAX, least=1),
            time_from_ms=self.time_ms("minTimestamp", 0),
            time_to_ms=self.time_ms("maxTimestamp", INT_MAX),
        )

    def check_values(self) -> None:
        """Raise `InvalidInput` for a value that no table and no stream accepts."""
        self.selection()
        self.freshness()
        self.payload_form()
        self.time_ms("asOfTimestamp", 0)
        self.offsets("asOfOffsets", least=-1)
        self.offsets("endingOffsets")
        self.splits()
        self.number("maxRecordsPerTrigger", 1, least=1)

    def settings(self) -> str:
        """Return the book's settings as JSON for the workers; raise `NotFound` if there is no such book."""
        text = self.text("settings")
        if text is None:
            book = self.text("book")
            text = settings_to_json(read_settings(DEFAULT_BOOK if book is None else book))
        require_book(settings_from_json(text), parts=("log",) if "wal" in self else ("store",))
        return text


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report a user's mistake to the driver as its message alone, without the traceback of Spark's planning process.

    That process ends with the error, so hiding tracebacks in it affects nothing else.
    """
    try:
        yield
    except (InvalidInput, NotFound) as error:
        in_spark = any(name.startswith("PYTHON_WORKER_FACTORY_") for name in os.environ)
        if in_spark:
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        getattr(error, "__notes__", []).clear()  # a report would add a line
        raise error from None
