"""Scripts of runs in phases: what each phase's processes get, byte for byte, and how phases follow without Slurm."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.cluster.profile import Cluster
from fp8launch.job.batch_script import batch_script, local_script
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, prepare

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
# Stands in for the training: it says what it got, and leaves the checkpoint that a phase ends with.
TRAINING = """#!/bin/bash
{ printf '%s\\0' "$@"; } > "$ATTEMPTS/$(ls "$ATTEMPTS" | wc -l).args"
env -0 > "$ATTEMPTS/$(ls "$ATTEMPTS" | wc -l).env"
mkdir -p ckpt
while [ $# -gt 0 ]; do
    case "$1" in --exit-interval) end=$2 ;; --train-iters) total=$2 ;; esac
    shift
done
echo "${END:-${end:-$total}}" > ckpt/latest_checkpointed_iteration.txt
exit "${STATUS:-0}"
"""


@pytest.fixture
def prepared(write: Callable[[str, str], str]) -> Prepared:
    return prepare(write("r.yaml", RECIPE))


def job(one: Prepared, folder: Path, runtime: str = "none") -> Job:
    return plan(
        one.loaded, one.args, Cluster(), folder, phases=one.phases,
        runtime=runtime, check_paths=False,  # type: ignore[arg-type]
    )  # fmt: skip


def test_common_and_own_arguments_are_each_phase_s_list(prepared: Prepared) -> None:
    planned = job(prepared, Path("/r/x"))
    for phase, own in zip(prepared.phases, planned.phases, strict=True):
        mine = sorted(argument.words for argument in (*planned.arguments, *own.arguments))
        assert mine == sorted([*(argument.words for argument in phase.args.arguments), ("--exit-signal-handler",)])
        assert (own.name, own.end) == (phase.name, phase.end)
    environment = dict(planned.environment)
    assert environment["ALL"] == "of $HOME, 'all'" and "SOME" not in environment
    assert [dict(own.environment).get("SOME") for own in planned.phases] == ["outer", "the body's; $(date)", None]


def test_every_phase_has_its_iteration_profiled(write: Callable[[str, str], str]) -> None:
    planned = job(prepare(write("r.yaml", RECIPE + "launch: {profile_iteration: 5}\n")), Path("/r/x"))
    found = [dict(own.environment)["FP8LAUNCH_PROFILE_ITERATION"] for own in planned.phases]
    assert found == ["5", "15", "25"]


def test_shells_find_nothing_to_say(prepared: Prepared, shellcheck: Callable[[str], None]) -> None:
    for runtime in ("none", "apptainer", "pyxis"):
        planned = job(prepared, Path("/r/x"), runtime)
        shellcheck(batch_script(planned))
        shellcheck(local_script(planned))


def test_a_portable_script_has_no_phases(prepared: Prepared) -> None:
    problem = only(refused(plan, prepared.loaded, prepared.args, Cluster(), None, phases=prepared.phases, exit_code=1))
    assert problem.code == "portable-phases"


def test_what_images_must_be_told_holds_for_every_phase(write: Callable[[str, str], str]) -> None:
    one = prepare(write("r.yaml", RECIPE + "container: {image: nemo-26.04}\n"))
    script = batch_script(job(one, Path("/r/x"), "pyxis"))
    names = next(line for line in script.splitlines() if "--container-env=" in line)
    assert {"ALL", "SOME", "MORE"} <= set(names.partition("=")[2].strip("' \\").split(","))
    apptainer = batch_script(job(one, Path("/r/x"), "apptainer"))
    variables = apptainer[apptainer.index("environment=(") : apptainer.index("# All processes meet")]
    prefixed = next(line for line in apptainer.splitlines() if "/#/APPTAINERENV_" in line)
    seen = {}
    for phase in one.phases:
        text = f"phase={phase.name}\n{variables}\n{prefixed}\nprintf '%s\\0' \"${{environment[@]}}\""
        words = subprocess.run(["bash", "-c", text], stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
        seen[phase.name] = dict(word.split("=", 1) for word in words if word)
    assert [found.get("APPTAINERENV_SOME") for found in seen.values()] == ["outer", "the body's; $(date)", None]
    assert {found["APPTAINERENV_ALL"] for found in seen.values()} == {"of $HOME, 'all'"}


@pytest.fixture
def run(prepared: Prepared, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Runs the local script with a stand-in for the Python of the job; its status and the folder of what was got."""

    def start(**env: str) -> tuple[int, Path]:
        folder, seen = tmp_path / "a run", tmp_path / "seen"
        for each in (folder, seen):
            each.mkdir(exist_ok=True)
        python = tmp_path / "python"
        python.write_text(TRAINING)
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        planned = job(prepared, folder)
        script = folder / "job.sh"
        script.write_text(local_script(planned).replace(f"python={shlex.quote(planned.python)}", f"python={python}"))
        environment = {**os.environ, "ATTEMPTS": str(seen), **env}
        return subprocess.run(["bash", str(script)], env=environment, check=False).returncode, seen

    return start


def got(seen: Path, number: int) -> tuple[list[str], dict[str, str]]:
    words = (seen / f"{2 * number}.args").read_bytes().decode().split("\0")[:-1]
    pairs = (seen / f"{2 * number + 1}.env").read_bytes().decode().split("\0")[:-1]
    return words, dict(pair.split("=", 1) for pair in pairs)


def test_phases_follow_without_slurm(run: Callable[..., tuple[int, Path]], tmp_path: Path) -> None:
    status, seen = run()
    assert status == 0
    environments = []
    for number, end in enumerate(["10", "20", None]):
        words, environment = got(seen, number)
        environments.append(environment)
        assert (words[words.index("--exit-interval") + 1] if "--exit-interval" in words else None) == end
        # From the second on, from the checkpoint of the one before.
        assert ("--load" in words) == (number > 0)
    assert [e.get("SOME") for e in environments] == ["outer", "the body's; $(date)", None]
    assert [e.get("MORE") for e in environments] == [None, "*", None]
    assert {e["ALL"] for e in environments} == {"of $HOME, 'all'"}
    assert "a 'b' $c" in got(seen, 1)[0]
    assert sorted(f.name for f in (tmp_path / "a run" / "logs").glob("*.exit")) == [f"local-{i}.exit" for i in range(3)]


@pytest.mark.parametrize(("changes", "status"), [({"STATUS": "7"}, 7), ({"END": "9"}, 75)])
def test_nothing_follows_a_phase_that_failed_or_left_early(
    run: Callable[..., tuple[int, Path]], tmp_path: Path, changes: dict[str, str], status: int
) -> None:
    assert run(**changes)[0] == status
    (left,) = (tmp_path / "a run" / "logs").glob("*.exit")
    assert left.read_text().strip() == str(status)


def test_a_phase_that_is_done_is_not_done_again(run: Callable[..., tuple[int, Path]], tmp_path: Path) -> None:
    (tmp_path / "a run" / "ckpt").mkdir(parents=True)
    (tmp_path / "a run" / "ckpt" / "latest_checkpointed_iteration.txt").write_text("15")
    status, seen = run()
    assert status == 0
    assert got(seen, 0)[1]["MORE"] == "*"
    assert len(list(seen.glob("*.args"))) == 2
