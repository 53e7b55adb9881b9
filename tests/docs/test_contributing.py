"""CONTRIBUTING.md leads to files and names that exist, LICENSE and CHANGELOG.md are what they should be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# Where a file named without its folder is.
PLACES = (
    "",
    "launchers/fp8launch/",
    "launchers/fp8launch/megatron/",
    "launchers/fp8launch/check/rules/",
    "launchers/fp8launch/plugins/plan/",
    "tests/slurm/",
)


def named(pattern: str) -> list[str]:
    return sorted(set(re.findall(pattern, TEXT)))


@pytest.mark.parametrize("path", named(r"`([\w./-]+\.(?:py|md|toml|sh))`") + named(r"`(\w[\w/-]*/)`"))
def test_every_file_that_it_names_is_there(path: str) -> None:
    made_by_the_reader = path.endswith(("engine.py", "NAME.yaml"))
    assert made_by_the_reader or any((ROOT / place / path).exists() for place in PLACES)


@pytest.mark.parametrize("name", named(r"`([A-Z][A-Z_]{3,}|_[A-Z][A-Z_]+|[A-Z][a-z]+[A-Z]\w+)`"))
def test_every_name_that_it_mentions_is_in_the_code(name: str) -> None:
    found = subprocess.run(
        ["grep", "-rqw", name, "launchers", "tools", "tests/submit", "tests/pack"], cwd=ROOT, check=False
    )
    assert found.returncode == 0


def test_links_lead_somewhere() -> None:
    for target in named(r"\]\(([^)#:]+)\)"):
        assert (ROOT / target).exists(), target


def test_every_how_to_is_there() -> None:
    titles = [
        line.removeprefix("## Add a").removeprefix("n").strip() for line in TEXT.splitlines() if "## Add a" in line
    ]
    assert titles == [
        "plugin",
        "rule",
        "failure",
        "GPU",
        "precision",
        "Megatron version",
        "scheduler",
        "engine",
        "column to compare",
    ]


def test_the_licence_is_the_one_that_the_package_states() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'license = "Apache-2.0"' in project
    licence = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert licence.startswith("Apache License Version 2.0, January 2004 http://www.apache.org/licenses/")
    assert "END OF TERMS AND CONDITIONS" in licence


def test_the_changelog_knows_the_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    assert version is not None
    titles = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert titles[0] == "Unreleased"
    assert version[1] in titles
