"""Options of Slurm for one submission: they reach the script, win over the profile, and never a recipe's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.cli import run
from fp8launch.diagnostics import Problem
from fp8launch.submit.destination import destination


@pytest.fixture
def profile(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    file = tmp_path / "site.yaml"
    file.write_text("partition: gpu\naccount: mine\nexclude: node9\noptions: {mail-type: END, nice: 5}\n")
    return file


def options(capsys: pytest.CaptureFixture[str], profile: Path, *arguments: str) -> set[str]:
    """The #SBATCH options of a dry run."""
    asked = ["submit", "tiny_cpu", "--dry-run", "--backend", "sbatch", "--cluster", str(profile), *arguments]
    assert run(asked) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


def test_they_win_over_the_profile(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = options(capsys, profile)
    assert {"--partition=gpu", "--account=mine", "--exclude=node9", "--mail-type=END", "--nice=5"} <= plain
    stated = options(
        capsys, profile, "--partition", "debug", "--qos", "short", "--time", "00:05:00", "--exclude", "node[1-2]",
        "--reservation", "mine", "--nodelist", "node4", "--nice", "7", "--slurm", "mail-type=FAIL",
        "--slurm", "contiguous",
    )  # fmt: skip
    assert {
        "--partition=debug", "--account=mine", "--qos=short", "--time=00:05:00", "--exclude='node9,node[1-2]'",
        "--reservation=mine", "--nodelist=node4", "--nice=7", "--mail-type=FAIL", "--contiguous",
    } <= stated  # fmt: skip
    assert not {"--partition=gpu", "--mail-type=END", "--nice=5"} & stated


def test_an_option_of_the_profile_by_the_same_name_gives_way(tmp_path: Path, profile: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    profile.write_text("options: {partition: gpu}\n")
    assert "--partition=debug" in options(capsys, profile, "--partition", "debug")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slurm", "nodes=2"], "use --nodes"),
        (["--slurm", "gpus_per_node=2"], "resources.gpus_per_node"),
        (["--slurm", "=2"], "must look like KEY=VALUE"),
        (["--slurm", "Foo=2"], "the long name of an sbatch option"),
        (["--slurm", "array=1-3"], "--array"),
        (["--partition", "a b"], "--partition: error"),
        (["--time", "never"], "Slurm time"),
    ],
)
def test_bad_ones_are_refused(
    profile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["submit", "tiny_cpu", "--dry-run", "--backend", "sbatch", *arguments]) in (1, 2)
    assert words in capsys.readouterr().err


def test_they_are_refused_where_there_is_no_slurm(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", "tiny_cpu", "--dry-run", "--backend", "local", "--qos", "short"]) == 2
    assert "--qos would have no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--sweep", "train.lr=x,y"], "--sweep train.lr=x: error"),
        (["--seeds", "1,2", "--sweep", "train.lrr=1"], "--sweep train.lrr=1: error"),
        (["--time", "never"], "--time never: error"),
        (["--slurm", "mail-tpe="], "--slurm mail-tpe=: error: 'mail-tpe' has no value after '='"),
        (["--set", "train.lr=x"], "--set train.lr=x: error"),
    ],
)
def test_mistakes_are_blamed_on_the_option(
    profile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], place: str
) -> None:
    assert run(["submit", "tiny_cpu", "--dry-run", "--backend", "sbatch", *arguments]) == 2
    assert place in capsys.readouterr().err


def test_axes_of_a_recipe_are_blamed_on_their_line(
    home: Path, write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write("r.yaml", "extends: [tiny_cpu]\naxes:\n  train.lr: [x, 1.0e-3]\n")
    assert run(["submit", recipe, "--dry-run", "--backend", "local"]) == 2
    assert f"{recipe}:3: error: 'train.lr' must be a number, not 'x'" in capsys.readouterr().err


def test_what_slurm_refuses_is_blamed_on_the_option(profile: Path) -> None:
    slurm = {"partition": "nosuch", "extra": ("mail-tpe=END",)}
    found, _ = destination("submit", str(profile), "sbatch", slurm, lambda problems: None)
    fix = "set `partition:` in the cluster profile to one of them"
    blamed = found.blamed(Problem("error", "slurm-partition", "no partition", "cluster profile: partition", fix))
    assert (blamed.where, blamed.fix) == ("--partition", "set --partition to one of them")
    refused = Problem("error", "slurm-refuses", "unrecognized option '--mail-tpe=END'", "hardware/cpu.yaml:2")
    assert found.blamed(refused).where == "--slurm mail-tpe"
    own = Problem("error", "slurm-account", "no account", "cluster profile: account")
    assert found.blamed(own) == own


@pytest.mark.needs_plugin("ssh")
def test_remote_is_blamed_for_its_cluster(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--remote", "nosuch", "runs"]) == 2
    assert "--remote: error: no cluster profile 'nosuch'" in capsys.readouterr().err
