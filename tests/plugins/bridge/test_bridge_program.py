"""injob/bridge.py as the process that a job starts; its training where Megatron-Bridge is on PYTHONPATH."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import train_jobs

from fp8launch.plugins.bridge.index import releases
from fp8launch.plugins.bridge.injob import absent_packages, bridge, bridge_release

RECIPE = "megatron.bridge.perf_recipes.llama.h100.llama3:llama3_8b_pretrain_8gpu_h100_bf16_config"
OPTIONS = [f"--recipe={RECIPE}", "--step=megatron.bridge.training.gpt_step:forward_step", "--release=0.6.0"]
# The same recipe up to 0.5.
OLDER = "--recipe=configs.llama.llama3_llm_pretrain:llama3_8b_pretrain_config_h100"
INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
TINY = shlex.split("""
    train.global_batch_size=4 train.micro_batch_size=2 dataset.seq_length=64 model.seq_length=64
    model.context_parallel_size=1 validation.eval_iters=0 dataset.num_workers=0 scheduler.lr_warmup_iters=2
    tokenizer.vocab_size=512 checkpoint.save=ckpt checkpoint.save_interval=3
""")


def run_job(
    folder: Path, options: Sequence[str] = OPTIONS, words: Sequence[str] = (), path: str | None = None
) -> train_jobs.Run:
    # The packages of this environment that its own PYTHONPATH names are the job's too.
    path = os.environ.get("PYTHONPATH", "") if path is None else path
    return train_jobs.finish([train_jobs.start(bridge.__file__, ["--", *options, *words], (), folder, PYTHONPATH=path)])


@pytest.mark.parametrize("separator", [["--"], []])
def test_options_and_overrides_are_told_apart(separator: list[str]) -> None:
    """torchrun's own parser takes the separator away."""
    found = bridge.arguments([*separator, *OPTIONS, "train.train_iters=5", "--resume=ckpt", "+a.b=[1,2]"])
    assert found.overrides == ["train.train_iters=5", "+a.b=[1,2]"]
    assert found.resume == Path("ckpt") and found.recipe == RECIPE


def test_a_resume_goes_by_the_tracker_that_the_supervisor_mends(tmp_path: Path) -> None:
    assert bridge.resume(tmp_path) == [f'checkpoint.load="{tmp_path}"']
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert bridge.resume(tmp_path) == [f'checkpoint.load="{tmp_path}"', "checkpoint.ckpt_step=12"]


def test_it_leaves_before_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bridge.stop_in_time([]) == []
    monkeypatch.setenv("FP8LAUNCH_STOP_AT", "0")
    assert bridge.stop_in_time(["train.train_iters=1"]) == ["train.exit_duration_in_mins=1"]
    assert bridge.stop_in_time(["train.exit_duration_in_mins=9"]) == []


@pytest.mark.skipif(INSTALLED, reason="Megatron-Bridge is installed")
def test_a_machine_without_bridge_says_so(tmp_path: Path) -> None:
    run = run_job(tmp_path)
    assert run.codes == [3]
    assert "Megatron-Bridge is not installed" in run.output and "Traceback" not in run.output


def test_a_package_that_is_missing_is_replaced_and_a_needed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uses_missing.py").write_text(
        "import no_such_package.part as part\n"
        "class Reader(part.Base):\n    pass\n"
        "@part.decorated\ndef plain():\n    return 5\n"
        "@part.decorated(option=1)\ndef given():\n    return 6\n"
    )
    (tmp_path / "uses_needed.py").write_text("import no_such_torch\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    absent_packages.install()
    found = absent_packages.load("uses_missing")
    assert "no_such_package" in absent_packages.replaced()
    assert (found.plain(), found.given(), found.Reader.__name__) == (5, 6, "Reader")
    with pytest.raises(ModuleNotFoundError, match="no_such_torch"):
        absent_packages.load("uses_needed", {"no_such_torch"})


def test_arguments_of_a_recipe_of_older_releases() -> None:
    found = bridge.arguments([*OPTIONS, "--arguments=precision=fp8_mx,config_variant=v2"])
    assert found.arguments == {"precision": "fp8_mx", "config_variant": "v2"}
    assert bridge.arguments(OPTIONS).arguments == {}


def test_a_package_without_the_scripts_says_so(tmp_path: Path) -> None:
    """Recipes up to 0.5 are in scripts/performance next to `src`, which no wheel contains."""
    package = tmp_path / "src" / "megatron" / "bridge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    code = (
        "import sys, megatron; megatron.__path__.append(sys.argv.pop(1));"
        "from fp8launch.plugins.bridge.injob import bridge; bridge.find_scripts()"
    )
    command = [sys.executable, "-c", code, str(package.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RANK": "0"}, check=False)
    assert done.returncode == 3 and "has no `configs`" in done.stderr


def test_a_file_that_the_wheel_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel of 0.6.2 lacks te_quant.cfg. The job blamed the hub."""
    package = tmp_path / "megatron" / "bridge"
    (tmp_path / "recipe_without_file.py").write_text(f"def recipe():\n    open({str(package / 'te_quant.cfg')!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bridge_release, "installed", lambda: (package, "0.6.2"))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stopped:
        bridge.configuration("recipe_without_file:recipe", [], {})
    said = capsys.readouterr().err
    assert stopped.value.code == 3 and "te_quant.cfg" in said and "hub" not in said


@pytest.mark.train
@pytest.mark.parametrize("release", {each.rpartition(".")[0]: each for each in releases()}.values())
def test_a_recipe_of_nvidia_trains_and_resumes_on_the_cpu(release: str, tmp_path: Path) -> None:
    """.cache/bridge has the newest release (test_with_bridge.py). For 0.5 FP8LAUNCH_BRIDGE_0_5 is the PYTHONPATH
    MEGATRON:TRANSFORMERS:SITE:BRIDGE/src, and so on."""
    minor = release.rpartition(".")[0]
    path = os.environ.get(f"FP8LAUNCH_BRIDGE_{minor.replace('.', '_')}")
    found = bridge_release.installed()
    if path is None and (found is None or not found[1].startswith(f"{minor}.")):
        pytest.skip(f"no Megatron-Bridge {minor} here; .cache/bridge has the newest (test_with_bridge.py)")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    start, tiny = OPTIONS, TINY
    if release < "0.6":
        start = [OLDER, "--arguments=config_variant=v1,precision=bf16", OPTIONS[1], f"--release={release}"]
        tiny = [word.replace("dataset.seq_length", "dataset.sequence_length") for word in TINY]

    def job(folder: Path, *words: str) -> train_jobs.Run:
        return run_job(folder, start, words, path)

    words = [f"--model={tmp_path}", *tiny]
    first = job(tmp_path, *words, "train.train_iters=3").succeeded()
    assert sorted(first.losses) == [1, 2, 3]
    evidence = re.search(r"fp8launch-probe: (\{.*\})", first.output)
    assert evidence is not None and json.loads(evidence[1])["totals"]["linears"] == 8
    rest = job(tmp_path, *words, "train.train_iters=5", "--resume=ckpt").succeeded()
    assert sorted(rest.losses) == [4, 5]
    refused = job(tmp_path, *words, "train.no_such_field=1")
    assert refused.codes == [2] and "no_such_field" in refused.output
