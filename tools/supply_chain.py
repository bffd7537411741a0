"""`./dev sbom` and `./dev audit`: list the dependencies of Tidebook, and look up their known vulnerabilities.

Both read the requirement files, which pin every package by version and hash, so the result is valid for every
installation, not just for one environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tools import environment
from tools.environment import ROOT, refuse, say
from tools.tool_environment import ensure_tools

#: The sets of packages: `base` for an embedded book and its server, `all` for every extra.
SETS = ("base", "all", "dev", "docs", "build", "audit", "sbom", "fuzz")
SBOM_SETS = ("base", "all")
#: Exit codes of the command: 0 if no vulnerability is known, 1 if some are, 5 if it could not be determined.
UNDETERMINED = 5


def sbom(arguments: list[str]) -> int:
    """Write a CycloneDX bill of materials of each set into `dist`, validated against the standard's schema."""
    if arguments:
        return refuse("sbom takes no argument")
    environment.ensure("all")  # the licences come from the installed packages
    venv = ensure_tools("sbom", "the generator of bills of materials (about 20 MB)")
    folder = ROOT / "dist"
    folder.mkdir(exist_ok=True)
    for name in SBOM_SETS:
        file = folder / f"tidebook-{name}.cdx.json"
        code = write_sbom(venv, name, file)
        if code != 0:
            return code
        components = len(json.loads(file.read_text())["components"])
        say(f"{file.relative_to(ROOT)}: {components} packages of requirements/{name}.txt")
    return 0


def write_sbom(venv: Path, name: str, file: Path) -> int:
    """Write the bill of materials of a requirement file, with the same bytes each time; return the tool's exit code."""
    command = [
        str(venv / "bin" / "cyclonedx-py"), "requirements", f"requirements/{name}.txt", "--pyproject", "pyproject.toml",
        "--mc-type", "library", "--spec-version", "1.6", "--output-format", "JSON", "--output-reproducible",
        "--validate", "--output-file", str(file),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return done.returncode
    document = json.loads(file.read_text())
    add_licences(document, installed_licences((environment.VENV / "lib").glob("python*/site-packages")))
    file.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    return 0


def add_licences(document: dict[str, Any], licences: Mapping[str, str]) -> None:
    """Add the licence of each package that has none; requirement files do not contain them."""
    for component in document["components"]:
        if "licenses" not in component and component["name"].lower() in licences:
            component["licenses"] = [{"license": {"name": licences[component["name"].lower()]}}]


def installed_licences(folders: Iterable[Path]) -> dict[str, str]:
    """Return the licence that each installed package declares, by its normalized name."""
    found: dict[str, str] = {}
    for package in distributions(path=[str(folder) for folder in folders]):
        metadata: Any = package.metadata
        text = metadata.get("License-Expression") or next(
            (each.rpartition(" :: ")[2] for each in metadata.get_all("Classifier", []) if "License" in each),
            (metadata.get("License") or "").partition("\n")[0],
        )
        if text:
            found[str(metadata["Name"]).lower().replace("_", "-")] = text
    return found


def audit(arguments: list[str]) -> int:
    """Look up known vulnerabilities of every pinned package; return 1 if some are known, 5 if they are undetermined."""
    service, sets = "pypi", list(arguments)
    if sets[:1] == ["--service"]:
        service, sets = (sets[1] if len(sets) > 1 else ""), sets[2:]
    if service not in {"pypi", "osv"} or set(sets) - set(SETS):
        return refuse(f"usage: audit [--service pypi|osv] [SET...]; the sets are {', '.join(SETS)}")
    venv = ensure_tools("audit", "the auditor (about 15 MB)")
    codes = {name: audit_set(venv, name, service) for name in sets or SETS}
    if undetermined := [name for name, code in codes.items() if code == UNDETERMINED]:
        say(
            f"NOT AUDITED: {', '.join(undetermined)}: {service} could not look them up (see above), "
            "so nothing is known about them"
        )
        return UNDETERMINED
    vulnerable = [name for name, code in codes.items() if code != 0]
    say(f"vulnerable: {', '.join(vulnerable)}" if vulnerable else f"no known vulnerability in {', '.join(codes)}")
    return 1 if vulnerable else 0


def audit_set(venv: Path, name: str, service: str) -> int:
    """Audit one requirement file; return 0, 1 if a vulnerability is known, or UNDETERMINED."""
    command = [
        str(venv / "bin" / "python"), "-m", "pip_audit", "--requirement", f"requirements/{name}.txt",
        "--require-hashes", "--disable-pip", "--strict", "--progress-spinner", "off", "--timeout", "15",
        "--format", "json", "--vulnerability-service", service,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return read_audit(name, done.returncode, done.stdout, done.stderr)


def read_audit(name: str, code: int, output: str, errors: str) -> int:
    """Print the result of the audit and return its code; an incomplete result counts as undetermined."""
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {code} without a result"
        say(f"{name}: {last}")
        return UNDETERMINED
    if skipped := [each for each in packages if "skip_reason" in each]:
        for each in skipped:
            say(f"{name}: {each['name']}: {each['skip_reason']}")
        return UNDETERMINED
    found = [(each["name"], each["version"], vulnerability) for each in packages for vulnerability in each["vulns"]]
    for package, version, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
        print(f"{name}: {package} {version}: {vulnerability['id']}, fixed in {fixed}")
    say(f"{name}: {len(packages)} packages, {len(found)} known vulnerabilities")
    return 1 if found else 0
