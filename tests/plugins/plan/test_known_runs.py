"""What the errors of known runs say about a prediction, and what older releases make of it."""

from __future__ import annotations

import json

import pytest

from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.job.prepared import prepare
from fp8launch.plugins.plan.known_runs import Situation, extrapolations, known_runs, uncertainty
from fp8launch.plugins.plan.releases import older_releases, slower
from fp8launch.plugins.plan.step_time import StepTime, step_time

KNOWN = Situation("h200", "dense", "tensorwise", "4096 x 32", 4, 8192, 0.0)


def predicted(recipe: str, **changes: object) -> StepTime:
    resolved = resolve_run(prepare(recipe))
    step = step_time(
        {**resolved.arguments, **changes}, resolved.layout.world, resolved.layout.global_batch, resolved.gpu
    )
    assert step is not None
    return step


def test_a_run_like_the_measured_ones_is_more_certain_than_any_other() -> None:
    here = uncertainty(KNOWN)
    assert 0.02 < here < 0.06
    others = [
        Situation("gb300", "experts", "mxfp8", "unknown", 2048, 8192, 0.0),
        Situation("h200", "dense", "tensorwise", "unknown", 4096, 131072, 0.0),
        Situation("h200", "dense", "tensorwise", "4096 x 32", 4, 8192, 0.6),
    ]
    assert all(uncertainty(other) > here for other in others)


def test_another_dispatch_of_tokens_is_less_certain() -> None:
    """DeepSeek-V3 on GB300 was published with HybridEP only."""
    packed, capacity = (
        Situation("gb300", "experts", "mxfp8", "7168 x 61 x 256", 256, 4096, 0.0, dispatch)
        for dispatch in ("packed", "capacity")
    )
    assert uncertainty(packed) < uncertainty(capacity)
    steps = predicted("deepseek_v3_mxfp8_gb300"), predicted("mixtral_8x7b_tensorwise_h100")
    assert [step.situation.dispatch for step in steps] == ["packed", "all-to-all"]
    assert predicted("llama8b_fp8").situation.dispatch == ""


def test_a_gpu_whose_generation_was_never_measured_is_as_uncertain_as_an_unknown_run() -> None:
    a100, h100 = (uncertainty(Situation(name, "dense", "bf16", "4096 x 32", 8, 8192, 0.0)) for name in ("a100", "h100"))
    assert a100 == 0.3 > 2 * h100


def test_every_known_run_has_a_weight_and_a_plausible_error() -> None:
    runs = known_runs()
    assert len(runs) > 200
    assert all(0 < one.weight <= 1 and -0.9 < one.error < 2 and 0 <= one.situation.host < 1 for one in runs)


@pytest.mark.parametrize(
    ("situation", "sentences"),
    [
        (KNOWN, []),
        (Situation("a100", "dense", "bf16", "", 8, 8192, 0.0), ["no measured run on A100"]),
        (
            Situation("gb300", "experts", "mxfp8", "", 1024, 4096, 0.0),
            ["no measured run on GB300 with experts above 256 GPUs"],
        ),
        (
            Situation("h200", "dense", "mxfp8", "4096 x 32", 4, 2**20, 0.0),
            [
                "no measured run on H200 in mxfp8",
                "no measured run on H200 with a dense model above 32768 tokens per sequence",
            ],
        ),
        (
            Situation("b200", "dense", "delayed", "other", 8, 262144, 0.0),
            ["few measured runs are similar in model, GPU, precision and size"],
        ),
    ],
    ids=["known", "GPU", "scale", "precision and length", "few similar"],
)
def test_an_extrapolation_is_named(situation: Situation, sentences: list[str]) -> None:
    assert extrapolations(situation) == sentences


def test_estimate_states_release_extrapolation_and_an_untrained_router(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "megatron.moe_router_force_load_balancing=null", "--nodes", "128"]
    assert run(["estimate", "qwen3_235b_a22b_tensorwise_h100", *words]) == 0
    text = capsys.readouterr().out
    assert "Predicted for NeMo 26.06." in text
    assert "Until the router is trained, a step takes up to " in text
    assert run(["estimate", "qwen3_235b_a22b_tensorwise_h100", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(term["note"] for term in found["terms"])
    predicted = found["predicted"]
    basis = found["basis"]
    assert basis["release"] == "26.06"
    assert basis["extrapolations"] == []
    assert predicted["step_time_ms"] < predicted["step_time_ms_untrained_router"] <= predicted["step_time_ms_most"]
    older = basis["older_releases"]
    assert all(0 < one["speed"] < 1 and one["source"] for one in older)
    assert older[-1]["tokens_per_s_per_gpu"] == pytest.approx(older[-1]["speed"] * predicted["tokens_per_s_per_gpu"])


def test_older_attention_slows_long_sequences_more() -> None:
    oldest = older_releases("h100", "dense")[0]
    assert oldest.name == "24.03"
    ratios = []
    for length in (8192, 65536):
        step = predicted("llama8b_fp8", seq_length=length)
        ratios.append(slower({term.name: term.ms for term in step.terms}, oldest) / step.ms)
    assert 1.05 < ratios[0] < ratios[1] < 1.8


def test_a_trained_router_costs_little_and_an_untrained_one_much() -> None:
    """Balanced and free routing of Mixtral 8x22B differ by 4 %."""
    free = predicted("mixtral_8x7b_tensorwise_h100", moe_router_force_load_balancing=False)
    forced = predicted("mixtral_8x7b_tensorwise_h100", moe_router_force_load_balancing=True)
    assert free.first_ms is not None and forced.first_ms is None
    assert 1.01 < free.ms / forced.ms < 1.08 < free.first_ms / forced.ms


def test_releases_that_cannot_fuse_latent_attention_on_blackwell_are_slower() -> None:
    """Transformer Engine 2.2 to 2.4 refuses heads wider than 128 on Blackwell, Hopper fuses them."""
    latent, dense = predicted("deepseek_v3_mxfp8_gb300"), predicted("llama405b_nvfp4_gb300")
    assert latent.unfused_ms is not None and latent.unfused_ms > 1.2 * latent.ms
    assert dense.unfused_ms is None
    assert predicted("deepseek_v3_tensorwise_h100").unfused_ms is None
    releases = {release.name: release for release in older_releases("gb300", "experts")}
    terms = {term.name: term.ms for term in latent.terms}
    unfused = slower(terms, releases["25.04"], latent.unfused_ms)
    assert unfused == pytest.approx(latent.unfused_ms / releases["25.04"].speed)
    assert slower(terms, releases["25.07"], latent.unfused_ms) == pytest.approx(latent.ms / releases["25.07"].speed)
