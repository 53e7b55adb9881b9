"""Megatron accepts every run of the pack on its hardware, and any model with any precision, optimizer and data part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pack_support import HEADLINE, MODELS, PACK, STUDIES, long_run, name_of, recipe_of, runs

from fp8launch.check.resolved_run import ASSUMED_TE, installed_software
from fp8launch.hardware.gpus import gpu
from fp8launch.hardware.quantization import precision_names
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.schema import supported_versions
from fp8launch.plugins.validators.megatron_core import find_megatron
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request, validate
from fp8launch.recipe.load import load_recipe

BLACKWELL_ONLY = ("mxfp8", "nvfp4")


def request(prepared: Prepared) -> Request:
    """What a job of this run would ask of Megatron, on the hardware and software that the recipe names."""
    recipe = prepared.loaded.recipe
    te = installed_software(prepared.loaded).transformer_engine
    te_version = ".".join(map(str, te)) if te else ASSUMED_TE
    return Request(
        prepared.args.argv,
        world_size=recipe.resources.world_size,
        compute_capability=gpu(recipe.resources.gpu).capability,
        te_version=None if recipe.resources.gpu == "cpu" else te_version,
        env=recipe.environment,
    )


def verdicts(prepared: Sequence[Prepared]) -> list[MegatronVerdict]:
    """The verdict of each run's own version of Megatron. Skips the test where one of them is not installed."""
    found: dict[int, MegatronVerdict] = {}
    for version in sorted({p.args.version for p in prepared}):
        megatron = find_megatron(version)
        if megatron is None:
            pytest.skip(f"no megatron-core {version} in FP8LAUNCH_TEST_MEGATRON, in .cache/megatron or installed")
        mine = [i for i, p in enumerate(prepared) if p.args.version == version]
        answers = validate([request(prepared[i]) for i in mine], megatron)
        found.update(zip(mine, answers, strict=True))
    return [found[i] for i in range(len(prepared))]


@pytest.fixture(scope="module")
def answers() -> dict[Path, list[tuple[Prepared, MegatronVerdict]]]:
    """Megatron's verdicts on all runs of the pack, requested together because each Megatron takes a while to import."""
    prepared = [(file, run) for file in [*HEADLINE, *STUDIES] for run in runs(file)]
    found: dict[Path, list[tuple[Prepared, MegatronVerdict]]] = {}
    for (file, run), verdict in zip(prepared, verdicts([run for _, run in prepared]), strict=True):
        found.setdefault(file, []).append((run, verdict))
    return found


@pytest.mark.parametrize("file", [*HEADLINE, *STUDIES], ids=name_of)
def test_megatron_accepts_every_run(file: Path, answers: dict[Path, list[tuple[Prepared, MegatronVerdict]]]) -> None:
    for run, verdict in answers[file]:
        assert verdict.ok, (run.args.argv, verdict.stage, verdict.message)


def test_newer_megatron_accepts_them_too() -> None:
    """Images move on: nothing in the pack hangs on flags that the newest supported version has dropped."""
    newest = supported_versions()[-1]
    prepared = [prepare(str(file), [f'software.megatron="{newest}"']) for file in HEADLINE]
    for run, verdict in zip(prepared, verdicts(prepared), strict=True):
        assert verdict.ok, (run.loaded.recipe.name, verdict.stage, verdict.message)


def test_any_model_goes_with_any_precision(write: Callable[[str, str], str]) -> None:
    prepared = []
    for model in MODELS:
        for precision in precision_names():
            hardware = "hardware/b200" if precision in BLACKWELL_ONLY else "hardware/h100"
            parts = [f"models/{model}", "parts/pretrain", f"precision/{precision}", hardware, "images/nemo_26_06"]
            if "num_experts" in load_recipe(write("model.yaml", recipe_of(parts))).recipe.model:
                parts.append("moe/alltoall")
            prepared.append(prepare(write(f"{model}_{precision}.yaml", recipe_of(parts))))
    for run, verdict in zip(prepared, verdicts(prepared), strict=True):
        assert verdict.ok, (run.loaded.files[-1].name, verdict.stage, verdict.message)


@pytest.mark.parametrize("data", sorted(f.stem for f in (PACK / "data").glob("*.yaml")))
@pytest.mark.parametrize("optimizer", sorted(f.stem for f in (PACK / "optimizer").glob("*.yaml")))
def test_optimizer_data_and_long_run_go_together(optimizer: str, data: str, write: Callable[[str, str], str]) -> None:
    (verdict,) = verdicts([prepare(write("one.yaml", long_run(optimizer, data)))])
    assert verdict.ok, (verdict.stage, verdict.message)
