"""What the scripts look like. `pytest tests/job --update-golden` writes them again; the diff is for review."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fp8launch.cluster.profile import Cluster, load_cluster
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import prepare
from fp8launch.resources import pack_folder
from fp8launch.schedulers.local import local_script
from fp8launch.schedulers.slurm.batch_script import batch_script

PLAIN = Cluster(name="plain", python="/opt/venv/bin/python")


def job(recipe: str, cluster: Cluster, *overrides: str, nodes: int | None = None) -> Job:
    prepared = prepare(recipe, overrides, nodes)
    folder = Path(f"/shared/runs/{prepared.loaded.recipe.name}-20260101-120000-ab12")
    return plan(prepared, cluster, folder, runtime=cluster.runtime, check_paths=False)


def example(name: str) -> Cluster:
    return load_cluster(str(pack_folder("clusters") / f"{name}.yaml"))


def charliecloud() -> Cluster:
    images = {"nemo-26.04": "/shared/images/nemo 26.04.sqsh"}
    return PLAIN.model_copy(update={"runtime": "charliecloud", "images": images, "mounts": ["/shared/data:/data"]})


PHASES = (
    "checkpoint={dir: /shared/checkpoints/tiny, interval: 5}",
    "phases={warmup: {iterations: 5}, body: {batch: {micro: 1}, env: {LEVEL: two}}, cool-down: {iterations: 5}}",
)
CASES: Mapping[str, Callable[[], str]] = {
    "tiny_cpu_torchrun": lambda: batch_script(
        job(
            "tiny_cpu", PLAIN, "launch.mode=torchrun", "resources.gpus_per_node=2", "resources.cpus_per_task=2", nodes=2
        )
    ),
    "llama8b_fp8_pyxis_4_nodes": lambda: batch_script(job("llama8b_fp8", example("example_pyxis"), nodes=4)),
    "llama8b_fp8_apptainer": lambda: batch_script(job("llama8b_fp8", example("example_apptainer"), nodes=2)),
    "llama8b_fp8_charliecloud": lambda: batch_script(
        job("llama8b_fp8", charliecloud(), "launch.health_check=true", nodes=2)
    ),
    "words_that_need_quotes": lambda: batch_script(
        job(
            "tiny_cpu", PLAIN, "env.GREETING='it''s $(HOME); two'", "megatron.wandb_project='a b'", "secrets=[HF_TOKEN]"
        )
    ),
    "llama8b_delayed_local": lambda: local_script(
        job("llama8b_fp8", PLAIN, "precision.recipe=delayed", "checkpoint={dir: checkpoints, interval: 100}")
    ),
    "tiny_cpu_attempts": lambda: batch_script(
        job(
            "tiny_cpu",
            PLAIN.model_copy(update={"requeue": False}),
            "survive.attempts=5",
            "checkpoint={dir: /shared/checkpoints/tiny, interval: 100, load: /shared/checkpoints/base}",
            "megatron.finetune=true",
        )
    ),
    "tiny_cpu_phases": lambda: batch_script(job("tiny_cpu", PLAIN, *PHASES)),
    "tiny_cpu_phases_local": lambda: local_script(job("tiny_cpu", PLAIN, *PHASES)),
    "tiny_cpu_local": lambda: local_script(job("tiny_cpu", PLAIN, "resources.gpus_per_node=2")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_one_that_was_reviewed(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.sh" if name.endswith("local") else f"{name}.sbatch", CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_has_nothing_to_say(name: str, shellcheck: Callable[[str], None]) -> None:
    shellcheck(CASES[name]())


def test_no_golden_file_is_left_over() -> None:
    names = {path.stem for path in (Path(__file__).parent / "golden").iterdir()}
    assert names == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_lines_stay_readable(name: str) -> None:
    assert max(map(len, CASES[name]().splitlines())) < 400
