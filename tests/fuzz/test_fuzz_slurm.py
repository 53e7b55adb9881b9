"""What Slurm's commands print, in any version and broken: states, checks and refusals, never more than words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox import Sandbox
from wild import damaged, share

from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.schedulers.slurm import inventory, slurm_cli, slurm_jobs

ANSWERS = {
    "squeue": b"12|RUNNING|None|tiny_cpu|fp8launch:r-1.s0-1\n13_2|PENDING|(Resources)|x|\n14|COMPLETED|None|r|(null)\n"
    b"12|fp8launch:r-1\n",
    "sacct": b"12|FAILED|7:0|NonZeroExitCode|tiny_cpu|\n12|CANCELLED by 0|0:15|None|tiny_cpu|fp8launch:r-1\n"
    b"14|OUT_OF_MEMORY|0:125|OutOfMemory|r|\n13_2|TIMEOUT|0:0|TimeLimit||\n",
    "scontrol": b"Slurmctld(primary) at head is UP\nMaxArraySize            = 1001\n"
    b"PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 "
    b"MinNodes=0 State=UP TotalNodes=4\n",
    "sinfo": b"main|node1|idle|gpu:h200:8(S:0-1)|64|a,b\nmain|node2|down*|(null)|64|(null)\n"
    b"main|node3|mixed~|gpu:8|1|x\n",
    "sbatch": b"slurm 22.05.8\n4242;cluster\nsbatch: error: Batch job submission failed: Invalid qos specification\n",
    "scancel": b"scancel: error: Kill job error on job id 5: Invalid job id specified\n",
}
PIECES = (
    b"|",
    b"||",
    b"\n",
    b"\xff",
    b"\x1b]0;x\x07",
    b"(null)",
    b"UNLIMITED",
    b"%",
    b"gpu:",
    b"=",
    b":",
    b"-1",
    b"+",
    b"\xb2".decode("latin1").encode(),
)


@pytest.fixture(scope="module")
def run(box: Sandbox) -> RunFolder:
    manifest = {
        "run_id": "r-1", "name": "tiny_cpu", "backend": "sbatch", "created": "2026-01-01T00:00:00+00:00",
        "jobs": [{"id": "12"}], "recipe": {}, "megatron": {"argv": []}, "layout": {},
    }  # fmt: skip
    return create_run_folder(box.runs, "r-1", {"job.sbatch": "#!/bin/bash\n"}, manifest)


VERBS = (
    ("runs",), ("runs", "r-1", "--json"), ("cancel", "r-1"), ("resume", "r-1"), ("doctor",), ("doctor", "--json"),
    ("submit", "tiny_cpu", "--backend", "sbatch", "--dry-run"), ("check", "llama8b_fp8", "--json"),
    ("submit", "tiny_cpu", "--backend", "sbatch"),
    ("submit", "tiny_cpu", "--backend", "sbatch", "--sweep", "megatron.seed=1,2", "--yes", "--retry-failed"),
)  # fmt: skip
WEIGHTS = (*VERBS[:6] * 4, *VERBS[6:])


@share(0.01)
@given(data=st.data(), verb=st.sampled_from(WEIGHTS))
def test_answers_of_slurm(
    box: Sandbox, run: RunFolder, talk: dict[str, tuple[int, str, str]], data: st.DataObject, verb: tuple[str, ...]
) -> None:
    inventory.read_site.cache_clear()
    run.update(jobs=[{"id": data.draw(st.sampled_from(("12", "13_2", "14", "99")))}])
    for name, real in ANSWERS.items():
        text = data.draw(st.sampled_from((real, b"")) | damaged([real], PIECES)).decode("utf-8", "replace")
        status = data.draw(st.sampled_from((0, 0, 0, 1, 124)))
        talk[name] = (status, text, text if status else "")
    box(*verb)


@pytest.fixture(scope="module")
def runs(box: Sandbox) -> list[RunFolder]:
    made = []
    for name, job in (("r-1", "12"), ("r-2", "13_2"), ("r-3", "14"), ("r-4", "99")):
        manifest = {"name": "tiny_cpu", "jobs": [{"id": job}], "study": {"name": "s"}}
        made.append(create_run_folder(box.root / "asked", name, {}, manifest))
    return made


@share(0.1)
@given(data=st.data())
def test_states(
    box: Sandbox, runs: list[RunFolder], talk: dict[str, tuple[int, str, str]], data: st.DataObject
) -> None:
    """The text alone, without a command around it: many more of them in the same time."""
    for name in ("squeue", "sacct", "scontrol", "sinfo"):
        text = data.draw(damaged([ANSWERS[name]], PIECES)).decode("utf-8", "replace")
        talk[name] = (data.draw(st.sampled_from((0, 0, 1))), text, "")
    box.cases += 1
    assert len(slurm_jobs.states(runs)) == len(runs)
    assert slurm_cli.array_limit() >= 1
    nodes = inventory.parse_nodes(talk["sinfo"][1])
    for partition in inventory.parse_partitions(talk["scontrol"][1], nodes):
        assert all(count >= 0 for node in partition.in_service for count in node.gpus.values())
