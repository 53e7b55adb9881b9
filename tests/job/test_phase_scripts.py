"""Scripts of runs in phases: what each phase's processes get, byte for byte."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.cluster.profile import Cluster
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.schedulers.local import local_script
from fp8launch.schedulers.slurm.batch_script import batch_script

RECIPE = """
extends: [tiny_cpu]
name: r
train: {iterations: 30}
checkpoint: {dir: ckpt, interval: 10}
env: {ALL: "of $HOME, 'all'", SOME: outer}
phases:
  warmup: {iterations: 10}
  body: {env: {SOME: "the body's; $(date)", MORE: "*"}, megatron: {wandb_project: "a 'b' $c"}}
  cool-down: {iterations: 10, env: {SOME: null}}
"""
# Stands in for the job's Python. As the supervisor it names the phase to continue with; as the training it says what it
# got.
PYTHON = """#!/bin/bash
case "$1 $2" in
*supervisor.py\\ begin) echo "0 $NEXT" ;;
*supervisor.py*) ;;
*) { printf '%s\\0' "$@"; } > "$SEEN.args"; env -0 > "$SEEN.env"; exit "${STATUS:-0}" ;;
esac
"""


@pytest.fixture
def prepared(write: Callable[[str, str], str]) -> Prepared:
    return prepare(write("r.yaml", RECIPE))


def job(one: Prepared, folder: Path, runtime: str = "none") -> Job:
    return plan(one, Cluster(), folder, runtime=runtime, check_paths=False)  # type: ignore[arg-type]


def test_common_and_own_arguments_are_each_phase_s_list(prepared: Prepared) -> None:
    planned = job(prepared, Path("/r/x"))
    for phase, own in zip(prepared.phases, planned.phases, strict=True):
        mine = sorted(argument.words for argument in (*planned.arguments, *own.arguments))
        assert mine == sorted([*(argument.words for argument in phase.args.arguments), ("--exit-signal-handler",)])
        assert (own.name, own.end) == (phase.name, phase.end)
    environment = dict(planned.environment)
    assert environment["ALL"] == "of $HOME, 'all'" and "SOME" not in environment
    assert [dict(own.environment).get("SOME") for own in planned.phases] == ["outer", "the body's; $(date)", None]


@pytest.mark.needs_plugin("measure")
def test_every_phase_has_its_iteration_profiled(write: Callable[[str, str], str]) -> None:
    planned = job(prepare(write("r.yaml", RECIPE + "launch: {profile_iteration: 5}\n")), Path("/r/x"))
    found = [json.loads(dict(own.environment)["FP8LAUNCH_PROFILE"]) for own in planned.phases]
    assert [(each["start"], each["end"]) for each in found] == [(5, 5), (15, 15), (25, 25)]


def test_shells_find_nothing_to_say(prepared: Prepared, shellcheck: Callable[[str], None]) -> None:
    for runtime in ("none", "apptainer", "pyxis"):
        planned = job(prepared, Path("/r/x"), runtime)
        shellcheck(batch_script(planned))
        shellcheck(local_script(planned))


def test_a_portable_script_has_no_phases(prepared: Prepared) -> None:
    problem = only(refused(plan, prepared, Cluster(), None, exit_code=1))
    assert problem.code == "portable-phases"


def test_what_images_must_be_told_holds_for_every_phase(write: Callable[[str, str], str]) -> None:
    one = prepare(write("r.yaml", RECIPE + "container: {image: nemo-26.04}\n"))
    script = batch_script(job(one, Path("/r/x"), "pyxis"))
    names = next(line for line in script.splitlines() if "--container-env=" in line)
    assert {"ALL", "SOME", "MORE"} <= set(names.partition("=")[2].strip("' \\").split(","))
    apptainer = batch_script(job(one, Path("/r/x"), "apptainer"))
    variables = apptainer[apptainer.index("environment=(") : apptainer.index("# All processes rendezvous")]
    prefixed = next(line for line in apptainer.splitlines() if "/#/APPTAINERENV_" in line)
    seen = {}
    for phase in one.phases:
        text = f"phase={phase.name}\n{variables}\n{prefixed}\nprintf '%s\\0' \"${{environment[@]}}\""
        words = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
        seen[phase.name] = dict(word.split("=", 1) for word in words if word)
    assert [found.get("APPTAINERENV_SOME") for found in seen.values()] == ["outer", "the body's; $(date)", None]
    assert {found["APPTAINERENV_ALL"] for found in seen.values()} == {"of $HOME, 'all'"}


def test_each_phase_gets_its_own_without_slurm(prepared: Prepared, tmp_path: Path) -> None:
    folder, python = tmp_path / "a run", tmp_path / "python"
    folder.mkdir()
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    planned = job(prepared, folder)
    script = folder / "job.sh"
    script.write_text(local_script(planned).replace(f"python={shlex.quote(planned.python)}", f"python={python}"))
    environments = []
    for phase, end in (("warmup", "10"), ("body", "20"), ("cool-down", None)):
        seen = tmp_path / phase
        environment = {**os.environ, "SEEN": str(seen), "NEXT": phase}
        subprocess.run(["bash", str(script)], env=environment, check=True)
        words = seen.with_suffix(".args").read_bytes().decode().split("\0")[:-1]
        pairs = seen.with_suffix(".env").read_bytes().decode().split("\0")[:-1]
        environments.append(dict(pair.split("=", 1) for pair in pairs))
        assert (words[words.index("--exit-interval") + 1] if "--exit-interval" in words else None) == end
        assert ("a 'b' $c" in words) == (phase == "body")
    assert [e.get("SOME") for e in environments] == ["outer", "the body's; $(date)", None]
    assert [e.get("MORE") for e in environments] == [None, "*", None]
    assert {e["ALL"] for e in environments} == {"of $HOME, 'all'"}
