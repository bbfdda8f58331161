"""The files of a release apart from its packages: the check of its version, its bill of materials, and its digests.

python scripts/release_files.py version                   the version, if package, changelog and files agree on it
python scripts/release_files.py sbom PYTHON > sbom.json   CycloneDX, of the environment of another interpreter
python scripts/release_files.py sums FOLDER               writes FOLDER/SHA256SUMS
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+) \((?P<date>[^)]+)\)$", re.MULTILINE)
LIST_PACKAGES = """
import importlib.metadata as m, json, re
def entry(d):
    names = [re.match(r"[\\w.-]+", r)[0] for r in d.requires or () if "extra ==" not in r]
    meta = d.metadata
    licence = meta.get("License-Expression") or (meta.get("License") or "").split("\\n")[0][:80]
    found = {"name": meta["Name"], "version": d.version, "licence": licence, "summary": meta.get("Summary") or ""}
    return {**found, "requires": names}
print(json.dumps([entry(d) for d in m.distributions()]))
"""


class ReleaseError(Exception):
    """A release that cannot be made; the message says what to correct."""


def version() -> str:
    """The version of pyproject.toml, if the package and the newest heading of the changelog have it too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "src" / "bifolio" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None or found[1] != project["version"]:
        raise ReleaseError(f"src/bifolio/__init__.py must have __version__ = {project['version']!r}")
    heading = HEADING.search((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if heading is None or heading["version"] != project["version"]:
        raise ReleaseError(f"CHANGELOG.md must begin with '## {project['version']} (DATE)'")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading["date"]):
        raise ReleaseError(f"CHANGELOG.md: {heading['version']} needs a date like 2026-11-18, not {heading['date']!r}")
    return str(project["version"])


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def bill_of_materials(packages: list[dict[str, Any]], name: str = "bifolio") -> dict[str, Any]:
    """CycloneDX 1.6: the package, the packages of its environment, and which needs which."""
    known = {normalised(package["name"]): package for package in packages}
    own = known[name]

    def reference(package: dict[str, Any]) -> str:
        return f"pkg:pypi/{normalised(package['name'])}@{package['version']}"

    def component(package: dict[str, Any], kind: str) -> dict[str, Any]:
        entry = {
            "type": kind,
            "bom-ref": reference(package),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(package),
        }
        if package["summary"]:
            entry["description"] = package["summary"]
        if package["licence"]:
            entry["licenses"] = [{"license": {"name": package["licence"]}}]
        return entry

    others = sorted(key for key in known if key != name and key not in ("pip", "setuptools", "wheel"))
    dependencies = [
        {
            "ref": reference(known[key]),
            "dependsOn": sorted(
                reference(known[normalised(need)]) for need in known[key]["requires"] if normalised(need) in known
            ),
        }
        for key in [name, *others]
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, reference(own))}",
        "version": 1,
        "metadata": {"component": component(own, "application")},
        "components": [component(known[key], "library") for key in others],
        "dependencies": dependencies,
    }


def packages_of(python: str) -> list[dict[str, Any]]:
    done = subprocess.run([python, "-c", LIST_PACKAGES], capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def sums(folder: Path) -> str:
    """Lines for `sha256sum --check`, one for each file of a release."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def main() -> None:
    try:
        match sys.argv[1:]:
            case ["version"]:
                print(version())
            case ["sbom", python]:
                print(json.dumps(bill_of_materials(packages_of(python)), indent=1))
            case ["sums", folder]:
                (Path(folder) / "SHA256SUMS").write_text(sums(Path(folder)), encoding="utf-8")
            case _:
                raise SystemExit(__doc__)
    except ReleaseError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
