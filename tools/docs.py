"""`./dev docs`: the documentation as a site, built by Zensical in a separate environment."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.environment import ROOT, refuse, say
from tools.tool_environment import ensure_tools

#: A separate environment, because neither Tidebook nor its tests import Zensical.
VENV = ROOT / "build" / "docs-venv"
CONFIG = "zensical.toml"
#: The folders of docs, in the order of the site's navigation.
SECTIONS = ("tutorial", "howto", "reference", "explanation", "benchmarks", "decisions")
_LINK = re.compile(r"\]\(([\w-]+\.md)\)")
_TITLE = re.compile(r"^# (.+)$", re.M)


def docs(arguments: list[str]) -> int:
    """Build the site into `site`, or serve it; a broken link fails the build."""
    if arguments not in ([], ["serve"]):
        return refuse("docs takes no argument but serve")
    ensure_zensical()
    if arguments:
        serve = [str(VENV / "bin" / "zensical"), "serve", "--config-file", str(write_config(ROOT))]
        return subprocess.run(serve, cwd=ROOT, check=False).returncode
    problem = build_site(ROOT)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    say("the site is in site/index.html; ./dev docs serve shows it with search")
    return 0


def ensure_zensical(venv: Path = VENV) -> Path:
    """Install Zensical, unless it is installed, and return the environment."""
    return ensure_tools("docs", "the site builder (about 20 MB)", venv=venv)


def build_site(root: Path, *, venv: Path = VENV) -> str | None:
    """Build the site of a folder with `zensical.toml`; return Zensical's message if a link or an anchor is wrong."""
    config = write_config(root)
    shutil.rmtree(root / "site", ignore_errors=True)
    command = [str(venv / "bin" / "zensical"), "build", "--clean", "--strict", "--config-file", str(config)]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return None if done.returncode == 0 else done.stdout.partition("Traceback")[0]


def write_config(root: Path) -> Path:
    """Write a copy of `zensical.toml` that contains the navigation, and return its path."""
    config = root / f".{CONFIG}"
    text = (root / CONFIG).read_text()
    config.write_text(text.replace("nav = []", f"nav = {_toml(navigation(root / 'docs'))}"))
    return config


def navigation(docs: Path) -> list[dict[str, object]]:
    """Return the site's navigation: for each section its README.md, and the pages that it lists, in its order."""
    nav: list[dict[str, object]] = [{"Tidebook": "README.md"}]
    for section in SECTIONS:
        index = docs / section / "README.md"
        listed = dict.fromkeys(_LINK.findall(index.read_text()))
        pages = [f"{section}/{name}" for name in listed if (docs / section / name).exists()]
        nav.append({_title(index): [f"{section}/README.md", *({_title(docs / page): page} for page in pages)]})
    nav.extend({_title(page): page.name} for page in sorted(docs.glob("*.md")) if page.name != "README.md")
    return nav


def _title(page: Path) -> str:
    found = _TITLE.search(page.read_text())
    return found[1].replace("`", "") if found else page.stem


def _toml(value: object) -> str:
    """Return lists, dictionaries and text as TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_toml(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)
