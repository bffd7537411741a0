"""An error in the settings names the file, the line and the closest valid name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tidebook.core.errors import InvalidInput
from tidebook.journal.settings import JournalSettings
from tidebook.outbox.settings import OutboxSettings
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.wiring.adapters import open_log, open_store
from tidebook.wiring.queue import make_queues
from tidebook.wiring.settings import (
    Section,
    Settings,
    options_as,
    read_settings,
    settings_from_json,
    settings_to_json,
)


class Needy(msgspec.Struct):
    needed: int


def settings(tmp_path: Path, text: str) -> Settings:
    (tmp_path / "tidebook.toml").write_text(text)
    return read_settings(tmp_path / "tidebook.toml", environment={})


def failure(tmp_path: Path, text: str, name: str, type_: type) -> str:
    with pytest.raises(InvalidInput) as caught:
        options_as(settings(tmp_path, text).section(name), name, type_)
    return str(caught.value)


def test_an_unknown_option_is_reported_with_its_line_and_the_closest_name(tmp_path: Path) -> None:
    reported = failure(tmp_path, "# mine\n[journal]\nsegments = 8\npartitons = 2\n", "journal", JournalSettings)
    assert f"{tmp_path / 'tidebook.toml'}, line 4: [journal] partitons is unknown" in reported
    assert "did you mean partitions?" in reported


def test_an_unknown_option_without_a_close_name_is_reported_with_all_names(tmp_path: Path) -> None:
    reported = failure(tmp_path, "[outbox]\nxyz = 2\n", "outbox", OutboxSettings)
    assert "line 2" in reported
    assert "the options are" in reported
    assert "create_topics" in reported


def test_a_value_of_a_wrong_type_is_reported_with_its_line(tmp_path: Path) -> None:
    reported = failure(tmp_path, '[journal]\n\n  "partitions" = "two"\n', "journal", JournalSettings)
    assert "line 3: [journal] partitions: Expected `int`, got `str`" in reported


def test_a_missing_option_is_reported_with_the_line_of_its_section(tmp_path: Path) -> None:
    reported = failure(tmp_path, "\n[wal]\n", "wal", Needy)
    assert "line 2: [wal] needed is missing" in reported


def test_a_rule_over_several_options_is_reported_with_the_section(tmp_path: Path) -> None:
    reported = failure(tmp_path, "[outbox]\nlock_limit_s = 10.0\nfence_s = 9.0\n", "outbox", OutboxSettings)
    assert "line 1: [outbox]: " in reported
    assert "fence_s must be" in reported


def test_an_unknown_section_is_reported_with_its_line_and_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"line 3: \[jurnal\] is not a section: did you mean journal\?"):
        settings(tmp_path, "[log]\n\n[jurnal]\npartitions = 1\n")


@pytest.mark.parametrize(
    ("section", "url"),
    [("log", "kafka://"), ("store", "cassandra://"), ("sql", "postgresql://")],
)
def test_options_of_a_server_that_is_not_named_are_refused_instead_of_embedding(
    tmp_path: Path, section: str, url: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"line 2: \[{section}\] user has no effect without a url.*'url = \"{url}"):
        settings(tmp_path, f'[{section}]\nuser = "me"\n')
    with pytest.raises(InvalidInput, match=r"line 2: .*did you mean url\?"):
        settings(tmp_path, f'[{section}]\nulr = "{url}host"\n')
    assert settings(tmp_path, f"[{section}]\n").section(section).embedded


def test_options_may_be_in_the_file_if_the_url_is_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text("[log]\nreplication = 3\n")
    found = read_settings(tmp_path / "tidebook.toml", environment={"TIDEBOOK_LOG_URL": "kafka://host:9092"})
    assert found.section("log").options == {"replication": 3}


def test_a_database_has_no_options_except_its_url(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"line 3: \[sql\] pool is unknown: the only option is url"):
        settings(tmp_path, '[sql]\nurl = "postgresql://host/database"\npool = 3\n')


@pytest.mark.parametrize("text", ["\nfolder = 5\n", "\n[folder]\nname = 5\n"])
def test_a_folder_that_is_not_a_text_is_reported_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInput, match=r"tidebook\.toml, line 2: folder must be a string"):
        settings(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("folder.name = 5\n", "tidebook.toml: folder must be a string"),
        ("log = 5\n", r"line 1: log must be a section, \[log\]"),
        ("[[log]]\n", r"tidebook.toml: log must be a section, \[log\]"),
        ("[sql]\nurl = 5\n", r"line 2: url in \[sql\] must be a string"),
        ("sql.url = 5\n", r"tidebook.toml: url in \[sql\] must be a string"),
        ("sql = { url = 5 }\n", r"line 1: url in \[sql\] must be a string"),
    ],
)
def test_a_value_in_another_notation_is_reported_too(tmp_path: Path, text: str, reported: str) -> None:
    with pytest.raises(InvalidInput, match=reported):
        settings(tmp_path, text)


def test_a_mistyped_folder_is_reported_with_the_closest_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"line 1: \[foldr\] is not a section: did you mean folder\?"):
        settings(tmp_path, 'foldr = "data"\n')


def test_an_error_in_a_queue_table_is_reported_with_its_line(tmp_path: Path) -> None:
    found = settings(tmp_path, '[queue]\nschema = "q"\n[queue.mail]\nmax_timeout = 3\n')
    with pytest.raises(InvalidInput, match=r"line 4: \[queue.mail\] max_timeout is unknown: did you mean max_timeouts"):
        make_queues(found, clock=SystemClock(), ids=RandomIds(), metrics=Metrics())


@pytest.mark.parametrize(
    ("section", "url"), [("log", "kafka://host:9092"), ("store", "cassandra://host:9042/keyspace")]
)
async def test_errors_in_server_options_are_reported_with_their_lines(tmp_path: Path, section: str, url: str) -> None:
    found = settings(tmp_path, f'[{section}]\nurl = "{url}"\nusr = "me"\n')
    opening = (
        open_log(found, clock=SystemClock(), metrics=Metrics())
        if section == "log"
        else open_store(found, metrics=Metrics())
    )
    with pytest.raises(InvalidInput, match=rf"line 3: \[{section}\] usr is unknown: did you mean user\?"):
        await opening


def test_an_error_without_a_file_names_the_section(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^\[journal\] partitons is unknown"):
        options_as(Section(None, {"partitons": 1}), "journal", JournalSettings)


def test_settings_survive_encoding_as_json(tmp_path: Path) -> None:
    found = settings(tmp_path, "[journal]\npartitions = 2\n")
    again = settings_from_json(settings_to_json(found))
    assert again.section("journal") == found.section("journal")
