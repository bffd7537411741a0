"""docs/ as a site: it is built strictly, loads nothing from elsewhere, and its navigation has every page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tools.docs import CONFIG, SECTIONS, build_site, ensure_zensical, navigation

ROOT = Path(__file__).resolve().parents[2]
#: What a browser loads by itself; a link that a reader may follow is no request.
LOADED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]*)""")

#: The first run downloads Zensical.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_zensical(tmp_path_factory.mktemp("docs") / "venv")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / CONFIG, folder)
    return folder


def test_the_site_is_built_without_a_warning_and_loads_nothing_from_other_hosts(root: Path, venv: Path) -> None:
    assert build_site(root, venv=venv) is None
    pages = [*(root / "site").rglob("*.html")]
    assert len(pages) > len([*(ROOT / "docs").rglob("*.md")]) - 1
    assert {found for page in pages for found in LOADED.findall(page.read_text())} == set()
    index = json.loads((root / "site" / "search.json").read_text())
    assert "kafka-journal" in json.dumps(index)


def test_a_broken_link_fails_the_build(venv: Path, tmp_path: Path) -> None:
    for section in SECTIONS:
        (tmp_path / "docs" / section).mkdir(parents=True)
        (tmp_path / "docs" / section / "README.md").write_text(f"# {section}\n")
    (tmp_path / "docs" / "README.md").write_text("# Home\n\n[away](howto/README.md#no-such-heading)\n")
    shutil.copy(ROOT / CONFIG, tmp_path)
    problem = build_site(tmp_path, venv=venv)
    assert problem is not None
    assert "README.md" in problem


def test_the_navigation_has_every_page() -> None:
    text = json.dumps(navigation(ROOT / "docs"))
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in sorted(pages) if f'"{page}"' not in text and "0000-template" not in page]
    assert missing == []
