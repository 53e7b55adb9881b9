"""Our FLOP model against published figures and against Megatron's own function."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8launch.diagnostics import UserError
from fp8launch.hardware.gpus import GPUS, gpu
from fp8launch.megatron.flops import flops_per_token, miscounted
from fp8launch.megatron.model_arithmetic import padded_vocab_size

REPOSITORY = Path(__file__).resolve().parents[2]


def model(layers: int, hidden: int, ffn: int, heads: int, **other: object) -> dict[str, object]:
    """Llama-like unless `other` says so."""
    sizes = {"num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads}
    llama = {"swiglu": True, "group_query_attention": True, "num_query_groups": 8, "vocab_size": 128256}
    return {**llama, "seq_length": 8192, **sizes, **other}


DEEPSEEK_V3 = model(
    61, 7168, 18432, 128, group_query_attention=False, multi_latent_attention=True, q_lora_rank=1536, kv_lora_rank=512,
    qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, vocab_size=129280, seq_length=4096, num_experts=256,
    moe_ffn_hidden_size=2048, moe_router_topk=8, moe_shared_expert_intermediate_size=2048,
    moe_layer_freq="[0]*3+[1]*58", mtp_num_layers=1,
)  # fmt: skip
QWEN3_30B = model(
    48, 2048, 6144, 32, kv_channels=128, num_query_groups=4, vocab_size=151936, seq_length=4096, num_experts=128,
    moe_ffn_hidden_size=768, moe_router_topk=8,
)  # fmt: skip
MIXTRAL = model(32, 4096, 14336, 32, vocab_size=32000, seq_length=4096, num_experts=8, moe_router_topk=2)
# Megatron counts its gated experts as two matrices, not three.
GPT_OSS_20B = model(
    24, 2880, 2880, 64, kv_channels=64, vocab_size=201088, seq_length=4096, swiglu=False, quick_geglu=True,
    num_experts=32, moe_ffn_hidden_size=2880, moe_router_topk=4,
)  # fmt: skip
MODELS = {
    "llama3-8b": (model(32, 4096, 14336, 32), 5.147e10),
    "llama3-8b, 4096": (model(32, 4096, 14336, 32, seq_length=4096), 4.825e10),
    "llama3-8b, 2048": (model(32, 4096, 14336, 32, seq_length=2048), 4.664e10),
    "llama3-70b": (model(80, 8192, 28672, 64), 4.492e11),
    "llama3.1-405b": (model(126, 16384, 53248, 128), 2.524e12),
    "qwen3-30b-a3b": (QWEN3_30B, 2.301e10),
    "mixtral-8x7b": (MIXTRAL, 7.971e10),
    "deepseek-v3, 1 MTP layer": (DEEPSEEK_V3, 2.600e11),
    "gpt-oss-20b": (GPT_OSS_20B, 1.927e10),
}


@pytest.mark.parametrize(("args", "per_token"), MODELS.values(), ids=MODELS)
def test_published_models(args: dict[str, object], per_token: float) -> None:
    """Per-token figures that Megatron's function gives for the published shapes, to their four digits."""
    assert flops_per_token(args) == pytest.approx(per_token, rel=2e-4)


def test_strings_from_a_log_or_flags_count_like_numbers() -> None:
    args, _ = MODELS["llama3-8b"]
    as_text = {k: str(v) if not isinstance(v, bool) else v for k, v in args.items()}
    assert flops_per_token(as_text) == flops_per_token(args)


def test_a_wrong_flop_count_is_reported() -> None:
    assert miscounted(MIXTRAL) == ()
    gate, window = miscounted({**GPT_OSS_20B, "window_size": [128, 0]})
    assert "quick GEGLU" in gate and "sliding-window" in window


@pytest.mark.parametrize("missing", ["num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"])
def test_what_cannot_be_known_is_none(missing: str) -> None:
    args = {k: v for k, v in MODELS["llama3-8b"][0].items() if k != missing}
    assert flops_per_token(args) is None


@pytest.mark.parametrize("pattern", ["M*MG", "M+M-", "M*M*/M/*", "Mamba"])
def test_models_that_are_not_counted_are_none(pattern: str) -> None:
    assert flops_per_token({**MODELS["llama3-8b"][0], "hybrid_layer_pattern": pattern}) is None


def test_a_mamba_layer_is_counted_as_twice_as_wide_as_the_hidden_size() -> None:
    hybrid = {**MODELS["llama3-8b"][0], "hybrid_layer_pattern": "M*M-", "mamba_head_dim": 64}
    assert miscounted({**hybrid, "mamba_num_heads": 128}) == ()
    (found,) = miscounted({**hybrid, "mamba_num_heads": 64})
    assert "Mamba" in found
    assert flops_per_token({**hybrid, "mamba_num_heads": 64}) < flops_per_token({**hybrid, "mamba_num_heads": 128})


@pytest.mark.parametrize(
    "frequency",
    ["__import__('os').getcwd()", "[1]*9999999999", "[1]*9999*9999*9999", "2**3", "", "[" * 1000, 0, -1, None, [1, 0]],
)
def test_odd_layer_patterns_are_none_and_run_nothing(frequency: object) -> None:
    assert flops_per_token({**MODELS["mixtral-8x7b"][0], "moe_layer_freq": frequency}) is None


def test_vocabulary_is_padded_for_tensor_parallel() -> None:
    assert padded_vocab_size({"vocab_size": 50257}) == 50304
    assert padded_vocab_size({"vocab_size": 50257, "tensor_model_parallel_size": 8}) == 51200
    assert padded_vocab_size({"vocab_size": 50257, "padded_vocab_size": 50432}) == 50432


def _site(version: str) -> Path | None:
    """Where this Megatron-Core lies unpacked; None means the environment's own."""
    if version == "installed":
        return None
    found = sorted((REPOSITORY / ".cache" / "megatron").glob(f"{version}.*"))
    if not found:
        pytest.skip(f"megatron-core {version} is not in .cache/megatron")
    return found[0]


# Reads argument sets, one a line, and answers with the FLOPs of a batch of three.
REAL = """
import json, sys, types
from fp8launch.injob.rank.compat import python311, triton_stub; python311.install(); triton_stub.install()
from megatron.training.training import num_floating_point_operations
print("ready", flush=True)
for line in sys.stdin:
    args = types.SimpleNamespace(**json.loads(line))
    print(float(num_floating_point_operations(args, 3)), flush=True)
"""
# What the function reads beside the sizes; none of these models has it.
ABSENT = {
    "is_hybrid_model": False, "hybrid_layer_pattern": None, "hybrid_override_pattern": None,
    "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0, "experimental_attention_variant": None,
    "attention_output_gate": False, "linear_attention_freq": None,
}  # fmt: skip
# And what it reads of a model that does not say it.
DEFAULTS: dict[str, object] = {
    **ABSENT, "kv_channels": None, "quick_geglu": False, "multi_latent_attention": False, "num_experts": None,
    "moe_layer_freq": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": None, "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": None, "mtp_num_layers": None,
}  # fmt: skip


@pytest.fixture(scope="module", params=["0.17", "0.18", "installed"])
def megatron(request: pytest.FixtureRequest):
    pytest.importorskip("torch")
    site = _site(request.param)
    if site is None and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    folders = [*([str(site)] if site else []), str(REPOSITORY / "launchers")]
    process = subprocess.Popen(
        [sys.executable, "-c", REAL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    while (said := process.stdout.readline()) != "ready\n":
        assert said, process.stderr.read()[-2000:]

    def flops(args: dict[str, object]) -> float:
        process.stdin.write(json.dumps(args) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, process.stderr.read()[-2000:]
        return float(answer)

    yield flops
    process.stdin.close()
    process.wait(60)


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    layers = draw(st.integers(1, 12))
    heads = draw(st.integers(1, 16))
    latent_attention = draw(st.booleans())
    grouped = not latent_attention and draw(st.booleans())
    experts = draw(st.sampled_from([None, 4, 64]))
    gated = draw(st.sampled_from(["", "swiglu", "quick_geglu"]))
    frequency = draw(st.one_of(st.integers(1, 4), st.lists(st.integers(0, 1), min_size=layers, max_size=layers)))
    maybe = lambda strategy: draw(st.one_of(st.none(), strategy))  # noqa: E731
    return {
        **ABSENT,
        "num_layers": layers,
        "hidden_size": draw(st.integers(1, 64)) * heads,
        "ffn_hidden_size": draw(st.integers(1, 4096)),
        "num_attention_heads": heads,
        "kv_channels": draw(st.integers(1, 256)),
        "group_query_attention": grouped,
        "num_query_groups": draw(st.integers(1, heads)) if grouped else None,
        "seq_length": draw(st.integers(1, 8192)),
        "swiglu": gated == "swiglu",
        "quick_geglu": gated == "quick_geglu",
        "attention_output_gate": not latent_attention and draw(st.booleans()),
        "padded_vocab_size": draw(st.integers(1, 200_000)),
        "mtp_num_layers": maybe(st.integers(1, 3)),
        "num_experts": experts,
        "moe_layer_freq": frequency,
        "moe_router_topk": draw(st.integers(1, 8)),
        "moe_ffn_hidden_size": maybe(st.integers(1, 2048)),
        "moe_latent_size": maybe(st.integers(1, 512)),
        "moe_shared_expert_intermediate_size": maybe(st.integers(1, 2048)),
        "multi_latent_attention": latent_attention,
        "q_lora_rank": maybe(st.integers(1, 1024)),
        "kv_lora_rank": draw(st.integers(1, 512)),
        "qk_head_dim": draw(st.integers(1, 256)),
        "qk_pos_emb_head_dim": draw(st.integers(1, 128)),
        "v_head_dim": draw(st.integers(1, 256)),
    }


@st.composite
def hybrid_shapes(draw: st.DrawFn) -> dict[str, object]:
    args = {**draw(shapes()), "multi_latent_attention": False, "quick_geglu": False, "attention_output_gate": False}
    layers = draw(st.text("M*-E|", min_size=1, max_size=12).filter(lambda text: text.strip("|")))
    depths = draw(st.integers(0, 2))
    return {
        **args,
        "is_hybrid_model": True,
        "hybrid_layer_pattern": layers + depths * ("/" + draw(st.text("M*-E", min_size=1, max_size=3))),
        "mtp_num_layers": depths,
        "num_experts": 64,
        "mamba_num_heads": draw(st.one_of(st.none(), st.integers(1, 64))),
        "mamba_head_dim": draw(st.sampled_from([32, 64])),
        "mamba_num_groups": draw(st.integers(1, 8)),
        "mamba_state_dim": draw(st.integers(1, 256)),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"), None),
        **dict.fromkeys(("linear_num_value_heads", "linear_conv_kernel_dim"), None),
    }


def flops_of_step(args: dict[str, object], batch: int) -> float:
    """Per step of `batch` sequences, as Megatron's function counts."""
    return flops_per_token(args) * int(str(args["seq_length"])) * batch


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_megatrons_own_function_agrees_on_published_models(megatron, name: str) -> None:
    args = {**DEFAULTS, **MODELS[name][0]}
    args["kv_channels"] = args["kv_channels"] or int(str(args["hidden_size"])) // int(str(args["num_attention_heads"]))
    args["padded_vocab_size"] = padded_vocab_size(args)
    if isinstance(args["moe_layer_freq"], str):
        args["moe_layer_freq"] = [0] * 3 + [1] * 58
    assert flops_of_step(args, 3) == pytest.approx(megatron(args), rel=1e-12)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(args=shapes())
def test_megatrons_own_function_agrees_on_any_shape(megatron, args: dict[str, object]) -> None:
    assert flops_of_step(args, 3) == pytest.approx(megatron(args), rel=1e-12)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(args=hybrid_shapes())
def test_megatrons_own_function_agrees_on_any_hybrid(megatron, args: dict[str, object]) -> None:
    assert flops_of_step(args, 3) == pytest.approx(megatron(args), rel=1e-12)


class TestGpus:
    def test_names_of_the_design(self) -> None:
        assert set(GPUS) == {"a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "vr200", "r100", "cpu"}

    def test_a_narrower_type_is_never_slower_and_needs_its_capability(self) -> None:
        for found in GPUS.values():
            peaks = [p for p in (found.bf16, found.fp8, found.fp4) if p]
            assert peaks == sorted(peaks)
            assert (found.fp8 is not None) == (found.capability >= (8, 9))
            assert (found.fp4 is not None) == (found.capability >= (10, 0))

    def test_an_unknown_name_is_answered_with_the_known(self) -> None:
        assert gpu("H200").peak("fp8") == 1979
        with pytest.raises(UserError, match="a100, h100") as caught:
            gpu("gb20")
        assert caught.value.problems[0].fix == "did you mean 'gb200'?"
