"""The plugin of docs/plugins.md, built into a wheel and installed into a separate environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fp8launch import plugin_registry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
FILES = ("pyproject.toml", "acme_fp8launch/plugin.py", "acme_fp8launch/rules.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with fp8launch and the plugin of the page."""
    folder = tmp_path_factory.mktemp("acme")
    blocks = re.findall(r"^```(?:toml|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for name, text in zip(FILES, blocks, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "acme_fp8launch" / "__init__.py").touch()
    # The backend that the page names; without pip's isolation, which would download it.
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, check=True)
    wheel = folder / built.stdout.split()[-1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    # fp8launch and its dependencies come from this environment.
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    there = [str(ROOT / "launchers"), sysconfig.get_path("purelib")]
    (packages / "fp8launch.pth").write_text("\n".join(there) + "\n")
    return python


def codes(python: Path, *more: str) -> list[str]:
    command = [str(python), "-m", "fp8launch", "check", "tiny_cpu", "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "" or "acme" not in done.stderr
    return [problem["code"] for problem in json.loads(done.stdout)["problems"]]


def test_its_rule_speaks_where_it_is_installed(home: Path, python: Path) -> None:
    assert "acme-no-checkpoint" in codes(python, "--nodes", "4")
    assert "acme-no-checkpoint" not in codes(python)
    assert "acme-no-checkpoint" not in codes(Path(sys.executable), "--nodes", "4")


def test_the_page_lists_every_field() -> None:
    fields = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## What a plugin can add")[2], re.MULTILINE)
    assert set(fields) == set(plugin_registry.Plugin.__dataclass_fields__) - {"name"}
