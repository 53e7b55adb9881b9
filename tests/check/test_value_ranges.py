"""Values that Megatron's validators accept and that stop a run later: refused, once each, and nothing that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from sets import MOE, RULES, Set

from fp8launch.check.checker import CheckResult, check_all
from fp8launch.check.rules.value_ranges import _SIZES, _SIZES_OR_NONE, RANGES, ValueRange
from fp8launch.megatron.schema import load_schema

# What a flag needs before its value matters.
NEEDS = {
    "tensorboard_log_interval": {"tensorboard_dir": "/logs"},
    "adlr_autoresume_interval": {"adlr_autoresume": True},
    "sgd_momentum": {
        "optimizer": "sgd",
        **dict.fromkeys(("use_distributed_optimizer", "overlap_param_gather", "fp8_param_gather")),
    },
    "moe_router_topk": MOE,
    "expert_model_parallel_size": {**MOE, "expert_model_parallel_size": None},
    "expert_tensor_parallel_size": {**MOE, "expert_model_parallel_size": 1},
}
# The base's own flags that exclude one of these.
WITHOUT = {"lr_warmup_fraction": {"lr_warmup_iters": None}}


def edges(allowed: ValueRange) -> tuple[list[float], list[float]]:
    """Values just outside and just inside."""
    whole = load_schema("0.19").setting(allowed.dest)[0].type == "int"
    step = 1 if whole else 0.5
    outside: list[float] = []
    inside: list[float] = []
    for least in (n for n in (allowed.least, allowed.above) if n is not None):
        outside.append(least - step)
        inside.append(least if allowed.least is not None else least + step)
    for most in (n for n in (allowed.most, allowed.below) if n is not None):
        outside.append(most + (step if allowed.most is not None else 0))
        inside.append(most - 0.1)
    if allowed.above is not None:
        outside.append(allowed.above)
    return [int(n) if whole else float(n) for n in outside], [int(n) if whole else float(n) for n in inside]


def cases(which: int) -> dict[str, Set]:
    found = {}
    for allowed in RANGES:
        for value in edges(allowed)[which]:
            flags = {**NEEDS.get(allowed.dest, {}), **WITHOUT.get(allowed.dest, {}), allowed.dest: value}
            if allowed.dest.startswith(("lr_decay_samples", "lr_warmup_samples")):
                flags |= {**dict.fromkeys(("train_iters", "lr_warmup_iters", "lr_decay_iters")), "train_samples": 6400}
            found[f"{allowed.dest} {value}"] = Set(flags)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckResult]:
    folder: Path = tmp_path_factory.mktemp("ranges")
    everything = {**cases(0), **cases(1)}
    prepared = [case.prepare(folder, f"r{i}") for i, case in enumerate(everything.values())]
    return dict(zip(everything, check_all(prepared, layers=RULES), strict=True))


@pytest.mark.parametrize("name", cases(0))
def test_a_value_outside_is_the_one_error(name: str, results: dict[str, CheckResult]) -> None:
    errors = [p for p in results[name].problems if p.severity == "error"]
    assert [p.code for p in errors] == ["value-range"], [str(p) for p in errors]
    assert name.split()[0] in errors[0].message


@pytest.mark.parametrize("name", cases(1))
def test_a_value_inside_is_no_error(name: str, results: dict[str, CheckResult]) -> None:
    assert "value-range" not in [p.code for p in results[name].problems]


@pytest.mark.parametrize("name", [*_SIZES, *_SIZES_OR_NONE])
def test_a_size_below_its_least_is_refused(name: str, tmp_path: Path) -> None:
    assert load_schema("0.19").setting(name), name
    for value, wrong in ((-16, True), (0, name in _SIZES), (16, False)):
        recipe = Set({**NEEDS.get(name, {}), name: value})
        found = check_all([recipe.prepare(tmp_path, "r")], layers=RULES)[0].problems
        assert ("model-size" in [problem.code for problem in found]) == wrong, value


def test_every_range_is_of_a_flag_and_has_a_bound() -> None:
    schema = load_schema("0.19")
    for allowed in RANGES:
        assert schema.setting(allowed.dest), allowed.dest
        assert str(allowed), allowed.dest
        assert len(allowed.source) > 8
