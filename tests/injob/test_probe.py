"""What a job says of FP8 after its first iteration: on real training, and on modules as Transformer Engine leaves them.

Transformer Engine cannot be imported without a GPU, so here stand classes with its names and attributes; what real ones
say is in the logs `h200` of `tests/data/logs.tar.xz`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train_jobs import LAUNCHERS, MOCK, OLDER, OLDER_RELEASES, Run, forked, worker

from fp8launch.injob.rank import probe

torch = pytest.importorskip("torch")

HYBRID = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "num_layers": 4}


def probes(run: Run) -> list[dict[str, Any]]:
    lines = [line for line in run.output.splitlines() if line.startswith(probe.PROBE)]
    return [json.loads(line.removeprefix(probe.PROBE)) for line in lines]


# --- In real training


@pytest.mark.train
def test_bf16_training_says_that_no_linear_ran_in_fp8(megatron: None) -> None:
    run = worker([*MOCK, "--train-iters", "3"]).succeeded()
    (found,) = probes(run)
    assert found["iteration"] == 1
    assert found["totals"] == {
        "linears": 8, "fp8": 0, "explained": 8, "unexplained": 0, "weights": 9, "fp8_weights": 0,
    }  # fmt: skip
    said = {group["modules"]: group for group in found["groups"]}
    assert said["decoder.layers.*.mlp.linear_fc1"]["layers"] == "1-2"
    assert said["decoder.layers.*.mlp.linear_fc1"]["why"] == "FP8 was not requested"
    assert said["output_layer"]["role"] == "lm head"
    assert said["embedding.word_embeddings"]["role"] == "embedding"


@pytest.mark.train
@pytest.mark.parametrize("version", OLDER_RELEASES)
def test_older_megatron_says_the_same(megatron: None, version: str) -> None:
    if not (OLDER / version).is_dir():
        pytest.skip(f"megatron-core {version} is not unpacked")
    run = forked(1, [*MOCK, "--train-iters", "3"], PYTHONPATH=str(OLDER / version)).succeeded()
    assert [found["totals"]["linears"] for found in probes(run)] == [8]


@pytest.mark.train
def test_one_rank_of_each_pipeline_stage_speaks_and_data_parallel_copies_are_silent(megatron: None) -> None:
    pipeline = forked(2, [*MOCK, "--train-iters", "3", "--pipeline-model-parallel-size", "2"]).succeeded()
    said = {p["pp"]: {(g["modules"], g.get("layers")) for g in p["groups"]} for p in probes(pipeline)}
    assert said.keys() == {0, 1}
    assert ("decoder.layers.*.mlp.linear_fc1", "1") in said[0]
    assert ("decoder.layers.*.mlp.linear_fc1", "2") in said[1]
    copies = forked(2, [*MOCK, "--train-iters", "3"]).succeeded()
    assert [p["rank"] for p in probes(copies)] == [0]


@pytest.mark.train
def test_losses_are_the_same_with_and_without(megatron: None) -> None:
    watched, alone = (forked(1, [*MOCK, "--train-iters", "4"], FP8LAUNCH_PROBE=on).succeeded() for on in "10")
    assert len(probes(watched)) == 1
    assert probes(alone) == []
    assert watched.losses == alone.losses
    assert len(alone.losses) == 4


def script(folder: Path, *lines: str) -> tuple[str, str]:
    """A training script that does something to the probe, trains, and looks at what is left of it."""
    path = folder / "script.py"
    path.write_text("\n".join(["import sys, time", f"sys.path.insert(0, {str(LAUNCHERS)!r})", *lines]) + "\n")
    return "--script", str(path)


@pytest.mark.train
def test_a_failing_probe_is_reported_once_and_training_continues(megatron: None, tmp_path: Path) -> None:
    own = script(
        tmp_path,
        "from fp8launch.injob.rank import pretrain, probe",
        "def fails(*arguments): raise RuntimeError('broken for the test')",
        "probe.probe = fails",
        "pretrain.main(time.time())",
    )
    run = worker([*MOCK, "--train-iters", "3"], own).succeeded()
    assert list(run.losses) == [1, 2, 3]
    assert probes(run) == []
    assert run.output.count("the FP8 probe failed, training continues: RuntimeError: broken for the test") == 1
    assert "Traceback" not in run.output


@pytest.mark.train
def test_megatrons_own_step_is_back_after_the_first_iteration(megatron: None, tmp_path: Path) -> None:
    own = script(
        tmp_path,
        "import megatron.training.training as training",
        "from fp8launch.injob.rank import pretrain",
        "before = type(training.train_step).__name__",
        "pretrain.main(time.time())",
        "print('step was', before, 'and is', type(training.train_step).__name__)",
    )
    assert "step was _ObservedStep and is function" in worker([*MOCK, "--train-iters", "3"], own).succeeded().output


@pytest.mark.train
def test_reading_a_module_takes_less_than_a_millisecond(megatron: None) -> None:
    """An 8B model has 130 of them and an iteration of seconds."""
    (found,) = probes(forked(1, [*MOCK, "--train-iters", "3"]).succeeded())
    assert found["ms"] / sum(group["n"] for group in found["groups"]) < 1


# --- On modules as Transformer Engine leaves them


def engine_class(name: str, module_name: str = "transformer_engine.pytorch.module") -> type:
    return type(name, (torch.nn.Module,), {"__module__": module_name})


class Float8Tensor(torch.nn.Parameter):  # type: ignore[misc, unused-ignore]
    """Named like Transformer Engine's."""


class Float8CurrentScaling:
    fp8_dpa = False


class Float8CurrentScalingQuantizer:
    pass


TELinear = type("TEColumnParallelLinear", (engine_class("Linear"),), {"__module__": "megatron.core.extensions"})
TEGrouped = type("TEColumnParallelGroupedLinear", (engine_class("GroupedLinear"),), {"__module__": "megatron.core"})


def linear(fp8: bool, kind: type = TELinear, weight: type = torch.nn.Parameter, weights: int = 1) -> Any:
    made = kind()
    made.fp8 = fp8
    made.fp8_meta = {"recipe": Float8CurrentScaling()} if fp8 else {}
    made.quantizers = {"scaling_fwd": [Float8CurrentScalingQuantizer()] if fp8 else [], "scaling_bwd": []}
    for number in range(weights):
        made.register_parameter(f"weight{number}", weight(torch.zeros(4, 4)))
    return made


class TransformerLayer(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, number: int, **parts: Any) -> None:
        super().__init__()
        self.layer_number = number
        for name, part in parts.items():
            self.add_module(name, part)


def model(*layers: Any, **parts: Any) -> Any:
    whole = torch.nn.Module()
    whole.add_module("decoder", torch.nn.Module())
    whole.decoder.add_module("layers", torch.nn.ModuleList(layers))
    for name, part in parts.items():
        whole.add_module(name, part)
    return whole


def groups(found: dict[str, Any]) -> dict[tuple[str, bool], dict[str, Any]]:
    return {(group["modules"], group["ran_fp8"]): group for group in found["groups"]}


def test_layers_that_are_alike_are_one_group_with_their_recipe_and_quantizers() -> None:
    found = probe.probe([model(*(TransformerLayer(n, fc1=linear(True)) for n in (1, 2, 3)))], HYBRID)
    (group,) = found["groups"]
    assert (group["modules"], group["n"], group["layers"]) == ("decoder.layers.*.fc1", 3, "1-3")
    assert (group["recipe"], group["base"]) == ("Float8CurrentScaling", "transformer_engine.Linear")
    assert group["quantizers"]["scaling_fwd"] == ["Float8CurrentScalingQuantizer"]
    assert found["totals"]["fp8"] == 3


def test_first_and_last_layers_in_bf16_are_explained_and_a_layer_between_them_is_not() -> None:
    asked = {**HYBRID, "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    whole = model(*(TransformerLayer(n, fc1=linear(fp8)) for n, fp8 in ((1, False), (2, True), (3, False), (4, False))))
    found = probe.probe([whole], asked)
    assert found["totals"] | {"weights": 0} == {
        "linears": 4, "fp8": 1, "explained": 2, "unexplained": 1, "weights": 0, "fp8_weights": 0,
    }  # fmt: skip
    bf16 = [group for group in found["groups"] if not group["ran_fp8"]]
    assert {group["layers"]: "first or last" in group.get("why", "") for group in bf16} == {"1,4": True, "3": False}


def test_weights_that_are_fp8_tensors_are_counted_also_those_of_experts() -> None:
    whole = model(TransformerLayer(1, fc1=linear(True, TEGrouped, Float8Tensor, 8), fc2=linear(True)))
    found = probe.probe([whole], HYBRID)
    assert (found["totals"]["fp8_weights"], found["totals"]["weights"]) == (8, 9)
    assert groups(found)["decoder.layers.*.fc1", True]["weights"] == {"Float8Tensor": 8}


def test_router_head_and_embedding_are_named_and_never_counted_as_linears() -> None:
    router = type("TopKRouter", (torch.nn.Module,), {})()
    router.weight = torch.nn.Parameter(torch.zeros(4, 4))
    whole = model(
        TransformerLayer(1, router=router, fc1=linear(True)),
        embedding=torch.nn.Embedding(4, 4),
        output_layer=torch.nn.Linear(4, 4),
    )
    found = probe.probe([whole], HYBRID)
    assert found["totals"]["linears"] == 1
    why = {group["role"]: group.get("why") for group in found["groups"]}
    assert why.keys() == {"router", "embedding", "lm head", "linear"}
    assert all(why[role] for role in ("router", "embedding", "lm head"))


def test_fused_operations_count_in_place_of_the_modules_whose_weights_they_share() -> None:
    fc1 = linear(False)
    operation = engine_class("BasicLinear", "transformer_engine.pytorch.ops.basic")()
    operation.weight = fc1.weight0
    operation._fp8_metas = {"forward": {"recipe": Float8CurrentScaling()}, "backward": None}
    operation._quantizers = {"forward": [Float8CurrentScalingQuantizer()], "backward": []}
    mlp = torch.nn.Module()
    mlp.add_module("linear_fc1", fc1)
    mlp._fused_impl = (torch.nn.Sequential(operation),)
    found = probe.probe([model(TransformerLayer(1, mlp=mlp))], HYBRID)
    assert (found["totals"]["linears"], found["totals"]["fp8"], found["totals"]["unexplained"]) == (1, 1, 0)
    operation._quantizers = operation._fp8_metas = None
    found = probe.probe([model(TransformerLayer(1, mlp=mlp))], HYBRID)
    assert (found["totals"]["fp8"], found["totals"]["unexplained"]) == (0, 1)


def test_a_linear_that_is_not_transformer_engines_has_no_reason_to_be_in_bf16() -> None:
    found = probe.probe([model(TransformerLayer(1, fc1=torch.nn.Linear(4, 4)))], HYBRID)
    assert (found["totals"]["fp8"], found["totals"]["unexplained"]) == (0, 1)


def test_the_line_of_a_large_model_fits_into_one_write() -> None:
    layers = (TransformerLayer(n, fc1=linear(True), fc2=linear(n > 1), qkv=linear(True)) for n in range(1, 127))
    found = probe.probe([model(*layers)], HYBRID)
    assert len(json.dumps(found, separators=(",", ":"))) < 4096
