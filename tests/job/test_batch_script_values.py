"""Whatever text a recipe holds: it arrives in the processes byte for byte, and nothing of it is executed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from script_harness import Call, Harness

from fp8launch.engines.base import Entry
from fp8launch.job.job import Container, Job, Mount, Resources
from fp8launch.megatron.arguments import Argument
from fp8launch.schedulers.local import local_script
from fp8launch.schedulers.slurm.batch_script import batch_script

CODE = "a run/code/fp8launch/injob/rank"
ROOT = Path(__file__).parents[2]
NASTY = [
    "", " ", "\n", "\t", "-", "--", "-x", "--lr", "'", '"', "'\"'\"'", "\\", "\\\n", "a\\", "$", "$HOME", "${HOME}",
    "$$", "!", "!!", "\r\n", "\x01\x7f", "\u2028", "ü🙂", "\ufeff", "x" * 5000,
    "$(touch canary)", "`touch canary`", "; touch canary", "| touch canary", "&& touch canary #", "\ntouch canary\n",
    "'; touch canary; '", '"; touch canary; "', ") ; touch canary ; (", "<(touch canary)", ">canary",
    "EOF\ntouch canary",
    "*", "?", "[a-z]*", "{a,b}", "~", "~root", "a=b", "[x]=y", "#no", "a #b", "%j", "%%",
    "}", "a}b", "${x:-}", "$'\\n'", "0x10", "1,2", "a,b", "a b",
]  # fmt: skip
text = st.sampled_from(NASTY) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
# A mount's two sides cannot hold what separates them, and start at the root.
paths = text.map(lambda t: "/" + t.replace(":", "").replace(",", ""))
names = st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True).map(lambda n: f"X_{n}")
quickly = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    """A new harness for each call: Hypothesis runs many examples in one test."""
    with tempfile.TemporaryDirectory() as root:
        numbers = itertools.count()
        yield lambda status=0: Harness(Path(root) / f"h{next(numbers)}", status)


def job(harness: Harness, **changes: object) -> Job:
    plain = Job(
        name="r", description="", folder=str(harness.work / "a run"), resources=Resources(nodes=2, tasks_per_node=2),
        processes_per_node=2, mode="srun", python=harness.python,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def one_flag(words: Iterable[str]) -> tuple[Argument, ...]:
    return (Argument("", tuple(words)),)


def checkout(folder: Path) -> Path:
    """Make a folder that looks like a checkout of this project; the program that a rank starts there."""
    folder.mkdir(exist_ok=True)
    (folder / "launchers").symlink_to(ROOT / "launchers")
    return folder / "launchers/fp8launch/injob/rank/worker.py"


def one_call(harness: Harness, script: str, **environment: str) -> Call:
    outcome = harness.run(script, **environment)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stderr == ""
    assert not list(harness.work.rglob("canary"))
    assert len(outcome.calls) == 1
    return outcome.calls[0]


@pytest.mark.parametrize("value", NASTY, ids=lambda v: repr(v)[:20])
def test_a_nasty_value_arrives_everywhere_at_once(harness: Callable[..., Harness], value: str) -> None:
    place = harness()
    box = Container("pyxis", "/" + value, (Mount("/s" + value, "/t" + value),))
    call = one_call(
        place,
        batch_script(
            job(
                place, environment=(("X_A", value),), arguments=(Argument("flag", ("--flag", value)),), container=box,
                entry=Entry(options=("--script", value), script=value), python=place.python + value,
            )
        ),
    )  # fmt: skip
    assert call.environment["X_A"] == value
    assert call.argv[-2:] == ["--flag", value]
    assert f"--container-image=/{value}" in call.argv
    assert any(word.startswith(f"--container-mounts=/s{value}:/t{value},") for word in call.argv)
    assert call.argv[call.argv.index("--script") + 1] == value
    assert place.python + value in call.argv


@quickly
@given(env=st.dictionaries(names, text, max_size=4), words=st.lists(text, max_size=6))
@example(env={}, words=["--a", "-1", "--b", "", "--c"])
def test_environment_and_arguments_under_srun(
    harness: Callable[..., Harness], env: dict[str, str], words: list[str]
) -> None:
    place = harness()
    call = one_call(place, batch_script(job(place, environment=tuple(env.items()), arguments=one_flag(words))))
    assert {name: call.environment[name] for name in env} == env
    start = call.argv.index("--")
    assert call.argv[start + 1 :] == words
    assert call.argv[start - 2 : start] == [place.python, str(place.work / CODE / "worker.py")]
    assert call.folder == str(place.work / "a run")


@quickly
@given(env=st.dictionaries(names, text, max_size=3), words=st.lists(text, max_size=4))
def test_environment_and_arguments_on_this_machine(
    harness: Callable[..., Harness], env: dict[str, str], words: list[str]
) -> None:
    place = harness()
    call = one_call(
        place,
        local_script(job(place, resources=Resources(), environment=tuple(env.items()), arguments=one_flag(words))),
    )
    assert {name: call.environment[name] for name in env} == env
    assert call.argv == [
        "a python",
        str(place.work / CODE / "node.py"),
        "--nproc-per-node=2",
        "--",
        *words,
    ]


def test_a_program_with_an_equals_sign_in_its_path_is_no_variable(harness: Callable[..., Harness]) -> None:
    """`env`, which hands the variables over, would take it for one."""
    place = harness()
    folder = place.bin / "a=b"
    folder.mkdir()
    (place.bin / "a python").rename(folder / "a python")
    call = one_call(
        place, local_script(job(place, resources=Resources(), python=f"{folder}/a python", environment=(("X_A", "1"),)))
    )
    assert call.argv[0] == "a python"
    assert call.environment["X_A"] == "1"


@quickly
@given(source=paths, target=paths, image=paths, env=st.dictionaries(names, text, max_size=2))
def test_mounts_and_images_of_every_runtime(
    harness: Callable[..., Harness], source: str, target: str, image: str, env: dict[str, str]
) -> None:
    for runtime in ("pyxis", "apptainer", "charliecloud"):
        place = harness()
        read_only = runtime != "charliecloud"  # ch-run cannot
        mounts = (Mount(source, target), Mount("/plain", "/there", read_only))
        box = Container(runtime, image, mounts)
        call = one_call(place, batch_script(job(place, container=box, environment=tuple(env.items()))))
        own, pair = f"{place.work}/a run", f"{source}:{target}"
        if runtime == "pyxis":
            assert f"--container-image={image}" in call.argv
            assert f"--container-mounts={pair},/plain:/there:ro,{own}:{own}" in call.argv
            exported = next(w for w in call.argv if w.startswith("--container-env=")).partition("=")[2].split(",")
            assert exported == [*env, "MASTER_ADDR", "MASTER_PORT"]
        else:
            at = call.argv.index("apptainer" if runtime == "apptainer" else "ch-run")
            binds = [word for word in call.argv[at:] if word.startswith("--bind=")]
            mode = ":ro" if read_only else ""
            assert binds == [f"--bind={pair}", f"--bind=/plain:/there{mode}", f"--bind={own}:{own}"]
            assert call.argv[call.argv.index(binds[-1]) + 1] == image
        if runtime == "apptainer":
            wanted = {**env, "MASTER_ADDR": "node-a", "MASTER_PORT": "24242"}
            assert {name: call.environment[f"APPTAINERENV_{name}"] for name in wanted} == wanted


@quickly
@given(image=paths, python=text, words=st.lists(text, max_size=3))
def test_a_portable_script_takes_its_places_from_the_submission(
    harness: Callable[..., Harness], image: str, python: str, words: list[str]
) -> None:
    place = harness()
    worker = checkout(place.work)
    box = Container("pyxis", image)
    script = batch_script(job(place, folder=None, python=python, arguments=one_flag(words), container=box))
    call = one_call(place, script)
    assert f"--container-image={image}" in call.argv
    assert call.argv[-len(words) - 3 :] == [python, str(worker), "--", *words]
    assert call.folder == str(place.work / "runs/r-4242")


def test_a_portable_script_follows_its_variables(harness: Callable[..., Harness], tmp_path: Path) -> None:
    place = harness()
    worker = checkout(tmp_path / "my checkout")
    call = one_call(
        place,
        batch_script(job(place, folder=None, container=Container("pyxis", "a:b"))),
        FP8LAUNCH_HOME=str(tmp_path / "my checkout"),
        FP8LAUNCH_RUNS=str(tmp_path / "runs $(touch canary)"),
        FP8LAUNCH_PYTHON="py; touch canary",
        FP8LAUNCH_IMAGE="it's; touch canary",
    )
    assert call.folder == str(tmp_path / "runs $(touch canary)/r-4242")
    assert "--container-image=it's; touch canary" in call.argv
    assert call.argv[-3:] == ["py; touch canary", str(worker), "--"]


def test_a_portable_script_outside_a_checkout_says_what_to_set(harness: Callable[..., Harness]) -> None:
    place = harness()
    outcome = place.run(batch_script(job(place, folder=None)))
    assert outcome.status == 2
    assert "FP8LAUNCH_HOME" in outcome.stderr
    assert not outcome.calls


# --- what the script does besides passing values on ------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 7, 143])
@pytest.mark.parametrize("kind", [batch_script, local_script])
def test_the_exit_status_is_the_training_s_and_is_kept(
    harness: Callable[..., Harness], status: int, kind: Callable[[Job], str]
) -> None:
    place = harness(status)
    assert (
        place.run(kind(job(place, resources=Resources())), SLURM_RESTART_COUNT="3", FP8LAUNCH_START="3").status
        == status
    )
    assert (place.work / "a run/logs/4242-3.exit").read_text() == f"{status}\n"


def test_all_processes_meet_at_the_first_node(harness: Callable[..., Harness]) -> None:
    place = harness()
    call = one_call(place, batch_script(job(place)), SLURM_JOB_ID="70012")
    assert (call.environment["MASTER_ADDR"], call.environment["MASTER_PORT"]) == ("node-a", "20012")
    assert f"--output={place.work}/a run/logs/70012-0.log" in call.argv


def test_torchrun_mode_starts_one_process_per_node(harness: Callable[..., Harness]) -> None:
    place = harness()
    resources = Resources(nodes=2, cpus_per_task=6, options={"mpi": "none"})
    call = one_call(place, batch_script(job(place, mode="torchrun", resources=resources)))
    assert call.argv[-4:] == [
        place.python,
        f"{place.work}/{CODE}/node.py",
        "--nproc-per-node=2",
        "--",
    ]
    assert {"--cpus-per-task=6", "--mpi=none"} <= set(call.argv)


def test_a_secret_is_passed_on_and_a_missing_one_stops_the_job(harness: Callable[..., Harness]) -> None:
    place = harness()
    script = batch_script(job(place, secrets=("X_TOKEN",)))
    outcome = place.run(script)
    assert outcome.status != 0
    assert "the secret X_TOKEN did not reach the job" in outcome.stderr
    assert not outcome.calls
    assert one_call(place, script, X_TOKEN="$(touch canary)").environment["X_TOKEN"] == "$(touch canary)"


def test_setup_lines_are_shell_and_may_fail(harness: Callable[..., Harness]) -> None:
    place = harness()
    setup = (
        "export X_B='two  words'",
        "echo $UNSET_VARIABLE",
        "false",
        "grep -q x /dev/null",
        'export X_C="$X_B; $HOME"',
    )
    call = one_call(place, batch_script(job(place, setup=setup, environment=(("X_D", "d"),))), HOME="/h")
    assert (call.environment["X_B"], call.environment["X_C"]) == ("two  words", "two  words; /h")
    assert call.environment["X_D"] == "d"


def test_after_setup_a_mistake_stops_the_script(harness: Callable[..., Harness]) -> None:
    place = harness()
    (place.bin / "scontrol").write_text("#!/bin/bash\nexit 1\n")
    outcome = place.run(batch_script(job(place, setup=("true",))))
    assert outcome.status != 0
    assert not outcome.calls


def test_a_recipe_wins_over_what_setup_exports(harness: Callable[..., Harness]) -> None:
    place = harness()
    script = batch_script(job(place, setup=("export X_A=setup",), environment=(("X_A", "recipe"),)))
    assert one_call(place, script).environment["X_A"] == "recipe"


# --- #SBATCH lines ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")
@pytest.mark.parametrize(
    "value",
    ["two words", "it's", 'a "b" c', "#3", "a # b", "$HOME $(touch canary)", "a;b|c&d", "ü🙂", "50%", "=x", "-x"],
)
def test_sbatch_reads_option_values_as_they_were_written(value: str, tmp_path: Path) -> None:
    """The real sbatch tells what it found in the script, then looks for a controller that is not there."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/none\nCredType=cred/none\n"
        "NodeName=a\nPartitionName=p Nodes=a\n"
    )
    options = {"comment": value, "output": f"{tmp_path}/a b/slurm-%j.out"}
    resources = Resources(exclusive=True, options={"options": options})
    one = Job(
        "r", "", str(tmp_path), resources, 1, "srun", "python3", environment=(("X", "#SBATCH --comment=no"),)
    )  # fmt: skip
    script = batch_script(one)
    process = subprocess.Popen(
        ["sbatch", "-vvv", "--test-only"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf")}, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(script.encode())
    process.stdin.close()
    lines = []
    for line in process.stderr:
        lines.append(line.decode().rstrip("\n"))
        if "end of defined options" in lines[-1]:
            break
    process.kill()
    process.wait()
    process.stderr.close()
    mark = 'Found in script, argument "'
    found = [line.partition(mark)[2].removesuffix('"') for line in lines if mark in line]
    assert found == [
        "--job-name=r", "--nodes=1", "--ntasks-per-node=1", "--exclusive", f"--output={tmp_path}/a b/slurm-%j.out",
        "--open-mode=append", f"--comment=fp8launch:{tmp_path.name} {value}",
    ]  # fmt: skip
    assert not (tmp_path / "canary").exists()
