"""Recipes of Megatron-Bridge, rehearsed by Bridge's own code where this Python has it."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import types
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fp8launch.check.checker import check_all
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS
from fp8launch.engines.base import StepArguments
from fp8launch.job.prepared import prepare
from fp8launch.plugins.bridge.attributes import PARTS, _sizes, of_recipe
from fp8launch.plugins.bridge.index import recipes_of, releases
from fp8launch.plugins.bridge.injob import bridge, bridge_release
from fp8launch.plugins.bridge.own_program import PACKAGES, hub_models
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal
from fp8launch.plugins.rehearse.shrink import shrink

LLAMA = "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config"
# Configurations that Bridge built for recipes of five families (tools/bridge_configuration.py).
RECORD = Path(__file__).parents[1] / "bridge" / "bridge_configurations.json.xz"
BUILT: Mapping[str, Any] = json.loads(lzma.decompress(RECORD.read_bytes()))
FOUND = bridge_release.installed()
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
needs_bridge = pytest.mark.skipif(
    FOUND is None or not FOUND[1].startswith("0.6."),
    reason="runs in .cache/bridge (tests/plugins/bridge/test_with_bridge.py)",
)


def step(name: str, *sets: str) -> StepArguments:
    one = prepare(name, sets)
    return one.engine.rehearsal(one.args, one.layout, one.loaded)


def test_every_model_of_the_hub_has_the_sizes_that_the_pack_has(tmp_path: Path) -> None:
    # Kimi's configuration is read by code of its own from the hub: its recipes are rehearsed by arguments.
    assert hub_models().keys() == PARTS.keys() - {"moonshotai/Kimi-K2-Instruct"}
    seen: set[str] = set()
    for recipe in recipes_of("0.6.0").values():
        for hub in hub_models().keys() & set(recipe.hub) - seen:
            seen.add(hub)
            (tmp_path / "config.json").write_text(json.dumps(hub_models()[hub]))
            ours = of_recipe(recipe)
            theirs = _sizes(tmp_path)
            # Recipes set the sequence; latent attention has channels of its own.
            names = (theirs.keys() & ours.keys()) - {"max_position_embeddings", "kv_channels", *recipe.settings}
            assert len(names) >= 5
            assert {name: theirs[name] for name in names} == {name: ours[name] for name in names}, hub
    assert seen == hub_models().keys()


@needs_torch
@pytest.mark.parametrize("name", BUILT)
def test_a_configuration_of_bridge_shrinks_as_the_flags_do(name: str) -> None:
    """What Bridge built, recorded, beside the arguments that stand for the same recipe without Bridge."""
    from fp8launch.plugins.rehearse import bridge

    one = prepare(f"bridge:{name}")
    values = step(f"bridge:{name}").args.values
    built = BUILT[name]["model"]
    layout = one.layout
    config = types.SimpleNamespace(
        model=types.SimpleNamespace(**built),
        mixed_precision=types.SimpleNamespace(),
        train=types.SimpleNamespace(global_batch_size=layout.global_batch, train_iters=50, exit_interval=7),
        dataset=types.SimpleNamespace(sequence_length=4096, num_workers=8, blend=[["corpus"], None]),
        tokenizer=types.SimpleNamespace(vocab_size=built.get("vocab_size", values.get("vocab_size"))),
        checkpoint=types.SimpleNamespace(save="/runs/ckpt", load="/runs/ckpt"),
    )
    sizes = bridge.shrink_configuration(config, layout)
    flags = shrink(values, layout).sizes
    shared = sizes.keys() & flags.keys()
    assert {"hidden_size", "ffn_hidden_size", "global_batch_size"} <= shared
    assert {flag: sizes[flag] for flag in shared} == {flag: flags[flag] for flag in shared}
    # Megatron-LM computes the groups of latent attention; Bridge states them.
    assert sizes.keys() ^ shared <= {"num_query_groups", "seq_length", "vocab_size", "max_position_embeddings"}
    assert config.model.hidden_size == sizes["hidden_size"][1]
    experts = sizes.get("num_experts")
    assert experts is None or config.model.num_moe_experts == experts[1]
    assert config.train.train_iters in (2, 3) and config.train.exit_interval is None
    assert config.dataset.num_workers == 0 and config.dataset.blend is None
    assert config.checkpoint.save is None and config.checkpoint.load is None


@pytest.mark.parametrize(
    ("release", "why"),
    [
        ("0.5.0", "this Python has 0.5.0"),
        ("", "this Python has an unknown release"),
    ],
)
def test_another_release_is_not_taken_for_the_recipes(
    release: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bridge_release, "installed", lambda: (tmp_path, release))
    found = step(LLAMA)
    assert found.program is None and found.without[0].endswith(f"{why}, the recipe is of {releases()[-1]}")


def test_the_package_states_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later patch of the recipe's release is its own code; packages that it needs are named."""
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "package_info.py").write_text("__version__ = '0.6.7+abc'\n")
    megatron = pytest.importorskip("megatron")
    monkeypatch.setattr(megatron, "__path__", [str(package.parent)])
    assert bridge_release.installed() == (package, "0.6.7")
    monkeypatch.setenv("RANK", "0")
    bridge.check_bridge("0.6.0")
    assert tuple(capsys.readouterr()) == (" > Megatron-Bridge version ... 0.6.7\n", "")
    bridge.check_bridge("0.5.0")
    assert "the recipe is of Megatron-Bridge 0.5.0, this is 0.6.7" in capsys.readouterr().err
    missing = [name for name in PACKAGES if find_spec(name) is None]
    found = step(LLAMA)
    if missing:
        assert found.program is None and found.without[0].endswith(f"this Python lacks {', '.join(missing)}")
        return
    assert found.program is not None and found.program.title == "Megatron-Bridge 0.6.7"
    assert found.program.model == hub_models()["meta-llama/Meta-Llama-3-8B"]


@needs_torch
def test_a_bridge_that_cannot_be_imported_is_no_verdict_on_the_recipe(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise KeyError('flash_attn')")
    words = prepare(LLAMA).args.argv
    code = (
        "import sys, megatron; from fp8launch.plugins.rehearse import bridge, failure\n"
        f"megatron.__path__ = [{str(package.parent)!r}]\n"
        f"try: bridge.prepare({list(words)!r})\n"
        "except Exception as problem: print(failure.described(problem))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Megatron-Bridge cannot be imported" in done.stdout and "'unknown': True" in done.stdout, done.stderr


@needs_torch
@needs_bridge
@pytest.mark.train
def test_bridges_own_code_rehearses_its_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", LLAMA, "--rehearse", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rehearsal"]
    assert FOUND is not None and found["program"] == f"Megatron-Bridge {FOUND[1]}"
    assert [role["result"] for role in found["roles"]] == ["passed", "passed"]
    assert not [name for name in found["not_rehearsed"] if "Bridge" in name]


@needs_torch
@needs_bridge
@pytest.mark.train
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_30b_a3b_pretrain_64gpu_h100_bf16_config",
        "llama3_70b_pretrain_64gpu_gb200_fp8cs_config",  # FSDP
        "deepseek_v3_pretrain_256gpu_gb200_fp8mx_config",  # stages
    ],
)
def test_other_families_train_and_plan_a_checkpoint(name: str) -> None:
    one = prepare(f"bridge:{name}", ["checkpoint.dir=/scratch/ckpt"])
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert result.ok and result.layers[LAYER] == "ran", (result.problems, result.layers)
    assert result.extra["rehearsal"].program is not None


@needs_torch
@needs_bridge
@pytest.mark.train
def test_a_model_that_transformers_does_not_know_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow", "architectures": ["OfTomorrow"]}')
    assert run(["check", LLAMA, "--set", f"bridge.model={tmp_path}", "--rehearse"]) == MACHINE_LACKS
    assert "makes no configuration of the recipe here" in capsys.readouterr().err


@needs_torch
@needs_bridge
@pytest.mark.train
def test_what_only_bridge_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments of Megatron-LM have no such rule."""
    assert run(["check", LLAMA, "--set", "scheduler.end_weight_decay=0.001", "--rehearse"]) == 1
    shown = capsys.readouterr().out
    assert "assert self.end_weight_decay >= self.start_weight_decay (megatron/bridge/training/config.py:" in shown


@needs_torch
@needs_bridge
@pytest.mark.train
def test_what_megatron_core_refuses_is_said_by_both(
    unlearned: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--set",
        "model.moe_router_load_balancing_type=quantile_balancing",
        "--set",
        "model.moe_router_fusion=true",
    ]

    def refused() -> str:
        assert run(["check", "bridge:qwen3_30b_a3b_pretrain_64gpu_h100_bf16_config", *words, "--rehearse"]) == 1
        return capsys.readouterr().out.split("[rehearsal]")[0]

    by_bridge = refused()
    assert (
        "Quantile balancing routing does not support moe_router_fusion. (megatron/core/transformer/moe/router.py:"
        in by_bridge
    )
    monkeypatch.setattr(bridge_release, "installed", lambda: None)
    assert refused() == by_bridge
