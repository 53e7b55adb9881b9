"""Every command that README and docs show is run, in order, as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_sites import megatron_site
from support import path_without_slurm

ROOT = Path(__file__).parents[2]
# Run by tests/slurm/test_init.py, on a cluster.
ON_SLURM = ("first_cluster.md",)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> list[tuple[str, int]]:
    """Return the lines of a page's bash blocks, each with the exit code that its comment states."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    found = []
    for line in (line for block in blocks for line in block.splitlines()):
        command, *comment = re.split(r"\s+#", line, maxsplit=1)
        code = re.search(r"exit code (\d+)", *comment) if comment else None
        if command.strip():
            found.append((command, int(code[1]) if code else 0))
    return found


@pytest.fixture
def shell_env(tmp_path: Path) -> dict[str, str]:
    """An empty home, no Slurm, and this interpreter's fp8launch first on PATH."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    command = binaries / "fp8launch"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fp8launch "$@"\n')
    command.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FP8LAUNCH", "XDG"))}
    # Whatever Slurm this machine has is not for these runs.
    path = path_without_slurm(tmp_path / "no-slurm")
    # Without its cache, each page would fetch Megatron again.
    kept = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    return {**env, **kept, "HOME": str(tmp_path), "PATH": f"{binaries}:{path}", "COLUMNS": "110"}


@pytest.mark.train
@pytest.mark.parametrize("page", [p for p in PAGES if commands(p) and p.name not in ON_SLURM], ids=lambda p: p.name)
def test_commands_work(page: Path, shell_env: dict[str, str], tmp_path: Path) -> None:
    for name in ("benchmarks", "recipes", "slurm", "tools", "docs", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "src").mkdir()
    (tmp_path / "src/my-megatron").symlink_to(megatron_site("0.19"))
    for line, exit_code in commands(page):
        if line.startswith("make "):
            continue  # the set-up itself: `make test` is what runs this test, `make demo` runs below
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=tmp_path, env=shell_env, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == exit_code, f"$ {line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.train
def test_the_demo_trains_and_reports(shell_env: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "tools/demo.sh"],
        cwd=ROOT, env={**shell_env, "FP8LAUNCH": "fp8launch"}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr  # `submit --wait` reports on stderr
    assert "iteration 300 of 300" in said
    first, last = map(float, re.search(r"loss ([\d.]+) to ([\d.]+)", said).groups())  # type: ignore[union-attr]
    assert last < first - 1.5
    assert done.stdout.count("The checkpoint") >= 2  # the prompt, and the text that continues it
    assert re.search(r"tokens/s/process +[\d,.]+", said)


def test_the_demos_set_up_installs_what_its_commands_import() -> None:
    """The tests' own environment has every extra, so the demo runs there in any case."""
    assert "run data tokenizer" in (ROOT / "tools/demo.sh").read_text(encoding="utf-8")
    script = (ROOT / "tools/setup.sh").read_text(encoding="utf-8")
    set_up = script[script.index("set_up_train() {") : script.index("set_up_test() {")]
    assert "pip_install --editable '.[data]'" in set_up


def test_the_readme_has_the_two_commands_of_a_fresh_machine() -> None:
    assert [line for line, _ in commands(ROOT / "README.md") if line.startswith("make")] == ["make demo", "make test"]


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
