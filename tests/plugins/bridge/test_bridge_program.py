"""injob/bridge.py as the process that a job starts; its training where Megatron-Bridge is on PYTHONPATH."""

from __future__ import annotations

import functools
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


# A template for conversations that says which tokens the assistant wrote, which Bridge's loss counts.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)
FINE_TUNING = shlex.split("""
    train.global_batch_size=4 train.micro_batch_size=1 dataset.seq_length=64 dataset.num_workers=0
    scheduler.lr_warmup_iters=1 logger.tensorboard_dir=null checkpoint.save=ckpt checkpoint.save_interval=3
""")


def write_trained_model(folder: Path) -> None:
    """Write random weights of the tiny model, with a tokenizer that has a chat template, as Hugging Face does."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def write_conversations(folder: Path) -> None:
    folder.mkdir()
    conversation = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three two one"}]
    (folder / "training.jsonl").write_text((json.dumps({"messages": conversation}) + "\n") * 160)


# The packages of this environment that its own PYTHONPATH names are the job's too.
OWN_PATH = os.environ.get("PYTHONPATH", "")


def run_job(
    folder: Path, options: Sequence[str] = OPTIONS, words: Sequence[str] = (), path: str = OWN_PATH, **env: str
) -> train_jobs.Run:
    argv = ["--", *options, *words]
    return train_jobs.finish([train_jobs.start(bridge.__file__, argv, (), folder, PYTHONPATH=path, **env)])


def fork_job(folder: Path, options: Sequence[str], words: Sequence[str], **env: str) -> train_jobs.Run:
    """`run_job` without the imports of Bridge, which take longer than a training."""
    return train_jobs.forked(1, [*options, *words], folder, OWN_PATH, "bridge", bridge.__name__, **env)


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

    later = fork_job if path is None else functools.partial(run_job, path=path)
    words = [f"--model={tmp_path}", *tiny]
    first = run_job(tmp_path, start, [*words, "train.train_iters=3"], path or OWN_PATH).succeeded()
    assert sorted(first.losses) == [1, 2, 3]
    evidence = re.search(r"fp8launch-probe: (\{.*\})", first.output)
    assert evidence is not None and json.loads(evidence[1])["totals"]["linears"] == 8
    resumed = [*words, "train.train_iters=5", "--resume=ckpt"]
    measured = '{"tool": "torch", "start": 3, "end": 5, "ranks": [0]}'
    rest = later(tmp_path, start, resumed, FP8LAUNCH_PROFILE=measured).succeeded()
    assert sorted(rest.losses) == [4, 5]
    profile = re.search(r"fp8launch-profile: (\{.*\})", rest.output)
    assert profile is not None and json.loads(profile[1])["iteration"] == 4
    assert (tmp_path / json.loads(profile[1])["trace"]).is_file()
    refused = later(tmp_path, start, [*words, "train.no_such_field=1"])
    assert refused.codes == [2] and "no_such_field" in refused.output


def fine_tune(folder: Path, task: str, *words: str) -> train_jobs.Run:
    options = [
        f"--recipe=megatron.bridge.recipes.llama.h100.llama3:llama32_1b_{task}_1gpu_h100_bf16_config",
        *OPTIONS[1:2],
        "--release=0.6.2",
        f"--task={task}",
        f"--model={folder / 'model'}",
    ]
    return fork_job(folder, options, [*FINE_TUNING, *words])


NAMED = """
import sys
from pathlib import Path
from fp8launch.plugins.bridge.injob import bridge
recipe = "megatron.bridge.recipes.llama.h100.llama3:llama32_3b_pretrain_1gpu_h100_bf16_config"
words = [f"--recipe={recipe}", f"--step={bridge._LOOP}:pretrain", f"--model={sys.argv[1]}", *sys.argv[2:]]
bridge.worker.prepare(bridge.worker.begin())
ours = bridge.arguments(words)
bridge.import_bridge(ours)
precision = bridge.configured(ours).mixed_precision
print("precision", precision.bf16, precision.fp8, precision.fp8_recipe)
"""


@pytest.mark.skipif(not INSTALLED, reason="runs in .cache/bridge (test_with_bridge.py)")
def test_fields_of_a_precision_that_the_recipe_only_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    fields = ["mixed_precision.fp8=hybrid", "mixed_precision.fp8_recipe=tensorwise"]
    command = [sys.executable, "-c", NAMED, str(tmp_path), *fields]
    environment = train_jobs.job_environment(FP8LAUNCH_DEVICE="cpu", PYTHONPATH=os.environ["PYTHONPATH"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "precision True hybrid tensorwise"


@pytest.mark.train
@pytest.mark.skipif(not INSTALLED, reason="runs in .cache/bridge (test_with_bridge.py)")
@pytest.mark.parametrize("task", ["sft", "peft"])
def test_fine_tuning_starts_from_a_model_and_resumes_from_its_own_checkpoint(task: str, tmp_path: Path) -> None:
    write_trained_model(tmp_path / "model")
    write_conversations(tmp_path / "data")
    data = f"--data={tmp_path / 'data'}"
    base = f"checkpoint.pretrained_checkpoint={tmp_path / 'model'}"
    first = fine_tune(tmp_path, task, data, base, "checkpoint.load=null", "train.train_iters=3").succeeded()
    assert sorted(first.losses) == [1, 2, 3] and "loading HuggingFace-format checkpoint" in first.output
    again = [base] if task == "peft" else []
    rest = fine_tune(tmp_path, task, data, *again, "train.train_iters=5", "--resume=ckpt").succeeded()
    assert sorted(rest.losses) == [4, 5] and "from ckpt at iteration 3" in rest.output
    # Adapters are a part of the model; without them, all of it is trained.
    assert ("Trainable percentage" in rest.output) == (task == "peft")


@pytest.mark.train
@pytest.mark.skipif(not INSTALLED, reason="runs in .cache/bridge (test_with_bridge.py)")
def test_data_of_fine_tuning(tmp_path: Path) -> None:
    write_trained_model(tmp_path / "model")
    nothing = ("checkpoint.load=null", "checkpoint.save=null", "train.train_iters=2")
    measured = fine_tune(tmp_path, "sft", "--data=mock", *nothing).succeeded()
    assert sorted(measured.losses) == [1, 2] and "loading" not in measured.output.partition("iteration ")[0]
    data = tmp_path / "data"
    data.mkdir()
    missing = fine_tune(tmp_path, "sft", f"--data={data}", *nothing)
    assert missing.codes == [3] and "training.jsonl cannot be read: No such file" in missing.output
    (data / "training.jsonl").write_text('{"text": "one"}\n')
    refused = fine_tune(tmp_path, "sft", f"--data={data}", *nothing)
    assert refused.codes == [2] and "must be a JSON object with `messages`" in refused.output
    (data / "training.jsonl").write_text('{"prompt": "one", "completion": "two three"}\n' * 64)
    base = f"checkpoint.pretrained_checkpoint={tmp_path / 'model'}"
    packed = fine_tune(tmp_path, "sft", f"--data={data}", base, *nothing).succeeded()
    assert list(data.glob("packed/*/training_64.idx.parquet"))
    # The same pairs one by one: a sequence sees nothing of the others that it is packed with.
    plain = ("dataset.enable_offline_packing=false", "dataset.offline_packing_specs=null")
    one_by_one = fine_tune(tmp_path, "sft", f"--data={data}", base, *nothing, *plain).succeeded()
    assert packed.losses == pytest.approx(one_by_one.losses, rel=1e-5)
    assert sorted(packed.losses) == [1, 2]
