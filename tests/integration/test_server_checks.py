"""What `tidebook doctor` finds at real databases."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tidebook.wiring.outbox import make_outbox
from tidebook.wiring.server_checks import ServerCheck, check_servers
from tidebook.wiring.settings import Settings, read_settings


def settings(folder: Path, url: str) -> Settings:
    (folder / "tidebook.toml").write_text(f'[sql]\nurl = "{url}"\n')
    return read_settings(folder / "tidebook.toml")


async def findings(folder: Path, url: str) -> dict[str, ServerCheck]:
    return {each.check: each async for each in check_servers(settings(folder, url))}


@pytest.mark.mariadb
async def test_mariadb_is_checked(mariadb_url: str, tmp_path: Path) -> None:
    found = await findings(tmp_path, mariadb_url)
    assert {name: each.ok for name, each in found.items()} == {"sql": True, "sql clock": True, "sql permissions": True}
    assert found["sql"].detail.startswith("MariaDB ")
    outbox = make_outbox(settings(tmp_path, mariadb_url), lambda: None)
    outbox.create_tables()
    outbox.close()
    assert (await findings(tmp_path, mariadb_url))["sql permissions"].detail.startswith("the outbox's tables exist in ")


@pytest.mark.mariadb
async def test_a_mariadb_that_refuses_the_user_is_a_finding(mariadb_url: str, tmp_path: Path) -> None:
    found = await findings(tmp_path, f"mysql://nobody-there:x@{mariadb_url.partition('@')[2]}")
    assert (found["sql"].ok, "check the URL and the rights of its user" in found["sql"].detail) == (False, True)


@pytest.mark.postgres
async def test_the_rights_of_a_user_of_postgresql_are_checked(postgres_url: str, tmp_path: Path) -> None:
    user, schema = "doctor_user", "doctor_schema"
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        admin.execute(f"DROP ROLE IF EXISTS {user}")
        admin.execute(f"CREATE SCHEMA {schema}")
        admin.execute(f"CREATE ROLE {user} LOGIN")
        admin.execute(f"GRANT USAGE ON SCHEMA {schema} TO {user}")
        place = postgres_url.partition("@")[2]
        url = f"postgresql://{user}@{place}?options=-csearch_path%3D{schema}"
        try:
            found = await findings(tmp_path, url)
            assert {name: each.ok for name, each in found.items() if name.startswith("sql p")} == {
                "sql permissions": False
            }
            admin.execute(f"GRANT CREATE ON SCHEMA {schema} TO {user}")
            assert (await findings(tmp_path, url))["sql permissions"].ok
            admin.execute(f"CREATE TABLE {schema}.kafka_outbox ()")
            admin.execute(f"REVOKE CREATE ON SCHEMA {schema} FROM {user}")
            assert (await findings(tmp_path, url))[
                "sql permissions"
            ].detail == f"the outbox's tables exist in schema {schema}"
        finally:
            admin.execute(f"DROP SCHEMA {schema} CASCADE")
            admin.execute(f"DROP ROLE {user}")
