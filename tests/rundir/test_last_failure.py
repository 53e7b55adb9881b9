"""Why a run failed, where no supervisor has written it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8launch.cli import run as command
from fp8launch.rundir.last_failure import last_failure
from fp8launch.rundir.run_dir import RunFolder

ITERATION = "0:  iteration 1/ 10 | consumed samples: 8 | elapsed time per iteration (ms): 12.0 | lm loss: 5.0E+00 |\n"
PEERS = "0: RuntimeError: [gloo/x.cc:1] Connection closed by peer\n"
KILLED = "srun: error: node2: task 1: Killed\nsrun: launch/slurm: _step_signal: Terminating StepId=5.0\n"
SCRIPT = "0: fp8launch: no such script: /not/mounted/train.py\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = tmp_path / "runs" / "tiny"
    (folder / "logs").mkdir(parents=True)
    manifest = {"name": "tiny", "backend": "local", "jobs": [], "recipe": {}, "megatron": {"argv": []}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return RunFolder(folder)


def wrote(run: RunFolder, log: str, batch: str = "", name: str = "5-0") -> None:
    (run.path / "logs" / f"{name}.log").write_text(log)
    (run.path / "logs" / f"{name}.exit").write_text("1\n")
    with (run.path / "logs" / f"slurm-{name.partition('-')[0]}.out").open("a") as file:
        file.write(batch)


@pytest.mark.parametrize(
    ("log", "batch", "code"),
    [
        (PEERS, KILLED, "killed"),
        (PEERS, "", "network"),
        (SCRIPT, "srun: error: node1: task 0: Exited with exit code 2\n", "missing-file"),
        ("", "slurmstepd: error: pyxis:     [ERROR] No such file or directory: /gone.sqsh\n", "container"),
        ("[after training is done]\n", "", None),
    ],
)
def test_log_and_batch_output_together_give_the_cause(run: RunFolder, log: str, batch: str, code: str | None) -> None:
    wrote(run, log, batch)
    failure = last_failure(run)
    assert (failure and failure.code) == code


def test_what_an_earlier_start_of_the_job_printed_explains_nothing(run: RunFolder) -> None:
    wrote(run, PEERS, KILLED)
    wrote(run, PEERS, "", "5-1")
    failure = last_failure(run)
    assert failure and failure.code == "network"
    said = (run.path / "logs" / "slurm-5.out").stat().st_size
    attempts = [{"name": "5-0", "job": "5"}, {"name": "5-1", "job": "5", "said": said}]
    (run.path / "attempts.json").write_text(json.dumps({"attempts": attempts}))
    wrote(run, PEERS, "srun: error: node1: task 0: Segmentation fault\n", "5-1")
    failure = last_failure(run)
    assert failure and failure.code == "segfault"


def test_a_task_of_an_array_prints_into_the_folder_of_its_study(run: RunFolder) -> None:
    (run.path / "logs" / "5_2-0.log").write_text(PEERS)
    (run.path.parent / "logs").mkdir()
    (run.path.parent / "logs" / "slurm-5_2.out").write_text(KILLED)
    failure = last_failure(run)
    assert failure and failure.code == "killed"


def test_parse_reports_what_srun_says(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    wrote(run, ITERATION + PEERS, KILLED)
    assert command(["parse", str(run.path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["failure"]["code"]) == ("failed", "killed")
