"""Values are data: no shell, no git and no Slurm command reads them as anything else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.runs.provenance import checkout_of

Say = Callable[..., tuple[int, str, str]]


def test_bash_does_run_what_a_number_has_in_brackets(tmp_path: Path) -> None:
    """Why Slurm's variables are refused: the script reckons with them."""
    word = f"a[$(touch {tmp_path}/canary)]"
    subprocess.run(["bash", "-c", "export N=$1; echo $((20000 + N % 10))", "x", word], check=True, capture_output=True)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "name",
    ["SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "BASH_ENV", "ENV", "IFS", "PS4", "PROMPT_COMMAND"],
)
@pytest.mark.parametrize("where", ["recipe", "profile"])
def test_variables_that_shells_run_or_reckon_with_are_refused(say: Say, tmp_path: Path, name: str, where: str) -> None:
    text = f"env: {{{name}: 'a[$(touch {tmp_path}/canary)]'}}\n"
    (tmp_path / "r.yaml").write_text("extends: tiny_cpu\nname: r\n" + (text if where == "recipe" else ""))
    (tmp_path / "c.yaml").write_text(text if where == "profile" else "{}\n")
    submit = ("submit", str(tmp_path / "r.yaml"), "--backend", "local", "--cluster", str(tmp_path / "c.yaml"))
    code, _, err = say(*submit)
    assert (code, "[reserved-variable]" in err, name in err) == (1, True, True)  # the check's answer
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["SLURM_CPU_BIND", "SLURM_MPI_TYPE", "OMP_NUM_THREADS"])
def test_other_variables_of_slurm_may_be_set(say: Say, name: str) -> None:
    assert say("render", "tiny_cpu", "--as", "sbatch", "--set", f"env.{name}=1")[0] == 0


@pytest.mark.parametrize("option", ["array", "wrap", "wait", "parsable", "test-only"])
def test_options_that_would_hide_a_job_from_us_are_refused(say: Say, tmp_path: Path, option: str) -> None:
    (tmp_path / "c.yaml").write_text(f"options: {{{option}: '1'}}\n")
    code, _, err = say("render", "tiny_cpu", "--as", "sbatch", "--cluster", str(tmp_path / "c.yaml"))
    assert (code, "[reserved-option]" in err) == (2, True)


def test_git_runs_nothing_of_a_foreign_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unpacked archive with a .git of its own: filters, text conversion and file system monitors are programs."""
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")):
        monkeypatch.setenv(name, value)
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "r.yaml").write_text("name: r\n")
    mine = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*mine, *words], check=True)
    (folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    run = f"sh -c 'touch {tmp_path}/canary; cat'"
    settings = {
        "filter.evil.clean": run, "filter.evil.smudge": run, "filter.evil.required": "true", "diff.evil.textconv": run,
        "diff.evil.command": run, "core.fsmonitor": run, "diff.external": run, "core.pager": run,
    }  # fmt: skip
    for name, value in settings.items():
        subprocess.run([*mine, "config", name, value], check=True)
    (folder / "r.yaml").write_text("name: other\n")
    state, diff = checkout_of(folder / "r.yaml")
    assert state is not None and state["dirty"]
    assert "+name: other" in diff
    assert not (tmp_path / "canary").exists()


def test_a_path_may_begin_with_a_dash(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-x.yaml").write_text("extends: tiny_cpu\nname: x\n")
    assert say("render", "--", "-x.yaml")[0] == 0
