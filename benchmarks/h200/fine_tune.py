"""Fine-tune a Llama 3.2 1B with random weights by Megatron-Bridge on one GPU: `fine_tune.py FOLDER [GPU]`.

By fp8launch's own commands, full fine-tuning and LoRA at once: check, submit, SIGKILL after the first checkpoint, the
supervisor's resume, and the export to Hugging Face (`convert`, and Bridge's own adapters merged by PEFT). transformers
then computes the loss of both on the validation conversations, next to Bridge's own. Last, `evaluate` on the same GPU.
With GPU `cpu` everything is tiny. Prints one JSON object a step; a step that fails does not end the others.

The conversations are headings and paragraphs of this repository's pages, and the tokenizer is trained on them.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[2]
RECIPES = {task: f"llama32_1b_{task}_1gpu_h100_bf16_config" for task in ("sft", "peft")}
# Headers and ends of messages as Llama 3 has them; `generation` marks what the loss counts.
TEMPLATE = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
MODEL: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
RECIPE = """\
engine: bridge
name: {task}
bridge: {{recipe: {recipe}, release: "0.6.2", model: {model}, data: {data}}}
checkpoint: {{pretrained_checkpoint: {model}, dir: ckpt, interval: 10, keep: 1}}
survive: {{attempts: 3}}
resources: {{gpu: {gpu}, gpus_per_node: 1}}
"""
SETTINGS = {
    "train.train_iters": 20,
    "optimizer.lr": 2e-4,
    "optimizer.min_lr": 2e-5,
    "scheduler.lr_warmup_iters": 3,
    "validation.eval_interval": 20,
    # All sequences of the validation data, two or three, two or three times each.
    "validation.eval_iters": 6,
    "validation.eval_global_batch_size": 1,
}
LOSS = re.compile(r"validation loss at iteration (\d+).*?lm loss value: ([0-9.E+-]+)")
WAIT_S = 240


def pairs() -> list[tuple[str, str]]:
    """Return the repository's headings with the paragraphs below them."""
    found = []
    for page in sorted((PAGES / "docs").glob("*.md")):
        heading = page.stem
        for block in re.split(r"\n\s*\n", page.read_text(encoding="utf-8")):
            text = block.strip()
            if text.startswith("#"):
                heading = text.lstrip("# ").splitlines()[0]
            elif len(text) > 80 and not text.startswith(("|", "```")):
                found.append((f"{page.stem}: {heading}?", " ".join(text.split())[:1500]))
    return found


def make_model(folder: Path, gpu: str) -> dict[str, Any]:
    """Write random weights in bf16, with a tokenizer of the pages and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers: Any = importlib.import_module("transformers")
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokens.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    size = 4000
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokens.train_from_iterator((text for pair in pairs() for text in pair), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token=SPECIAL[0], eos_token=SPECIAL[3], pad_token=SPECIAL[4]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(5)
    sizes = MODEL if gpu != "cpu" else {**MODEL, **TINY}
    config = transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=3, dtype="bfloat16")
    with torch.device("cuda" if gpu != "cpu" else "cpu"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def make_data(folder: Path) -> dict[str, Any]:
    """Write every ninth conversation for validation, the others for training."""
    folder.mkdir(parents=True)
    texts: dict[str, list[str]] = {"training": [], "validation": []}
    for index, (question, answer) in enumerate(pairs()):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        texts["training" if index % 9 else "validation"].append(json.dumps({"messages": messages}) + "\n")
    for name, lines in texts.items():
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: len(lines) for name, lines in texts.items()}


def fp8launch(folder: Path, *words: str) -> str:
    """Run a command of fp8launch and return what it printed; raise if it fails or takes too long."""
    command = [sys.executable, "-m", "fp8launch", *words]
    environment = {**os.environ, "FP8LAUNCH_RUNS": str(folder / "runs")}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=WAIT_S)
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(words[:3])}: exit {done.returncode}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        )
    return done.stdout


def kill_training(run: Path) -> int:
    """Send SIGKILL to the ranks that train in a run folder; return how many there were."""
    killed = 0
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(process.name)
            words = (process / "cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/bridge.py") for word in words) and (process / "cwd").readlink() == run.resolve():
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def log_of(run: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted((run / "logs").glob("*.log")))


def train(folder: Path, task: str, gpu: str) -> dict[str, Any]:
    """Check and submit, kill the training after its first checkpoint, and wait for the end of the resumed run."""
    model, data, recipe = folder / "model", folder / "data" / task, folder / f"{task}.yaml"
    recipe.write_text(RECIPE.format(task=task, recipe=RECIPES[task], model=model, data=data, gpu=gpu))
    settings: dict[str, Any] = dict(SETTINGS)
    if task == "peft":
        settings["checkpoint.also_save_hf_checkpoint"] = "true"
        settings["optimizer.lr"] = 1e-3
    if gpu == "cpu":
        settings["dataset.seq_length"] = 512
        settings["dataset.num_workers"] = 0
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    fp8launch(folder, "check", str(recipe), *words)
    began = time.monotonic()
    fp8launch(folder, "submit", str(recipe), *words, "--backend", "local", "--yes")
    run = next(path for path in sorted((folder / "runs").glob(f"{task}-*")) if (path / "manifest.json").is_file())
    tracker = run / "ckpt" / "latest_checkpointed_iteration.txt"
    wait_for(lambda: tracker.is_file() and "iteration       11/" in log_of(run), run)
    killed = kill_training(run)
    at = time.monotonic() - began
    wait_for(lambda: state_of(folder, run) not in ("running", "unknown"), run)
    attempts = json.loads((run / "attempts.json").read_text())
    return {
        "killed": killed,
        "killed_after_s": round(at),
        "took_s": round(time.monotonic() - began),
        "state": state_of(folder, run),
        "attempts": attempts,
        "validation": LOSS.findall(log_of(run)),
        "run": str(run),
    }


def state_of(folder: Path, run: Path) -> str:
    listed = json.loads(fp8launch(folder, "runs", "--json"))
    return next(str(one.get("state")) for one in listed if one["run"] == run.name)


def wait_for(condition: Callable[[], bool], run: Path) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{run.name}: nothing after {WAIT_S} s\n{log_of(run)[-3000:]}")
        time.sleep(1)


def export(folder: Path, task: str, gpu: str) -> dict[str, Any]:
    """Export the last checkpoint: convert the model, or merge Bridge's export of the adapters into the model."""
    run = next((folder / "runs").glob(f"{task}-*"))
    out = folder / f"{task}_hf"
    if task == "sft":
        words = ["--model", str(folder / "model"), "--gpu", gpu, "--backend", "local", "--wait"]
        fp8launch(folder, "convert", "megatron-to-hf", run.name, str(out), *words)
        return {"files": sorted(path.name for path in out.iterdir())}
    adapters = next(path for path in sorted((run / "ckpt").glob("iter_*/hf"), reverse=True))
    peft: Any = importlib.import_module("peft")
    transformers: Any = importlib.import_module("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    peft.PeftModel.from_pretrained(base, adapters).merge_and_unload().save_pretrained(out)
    shutil.copy(folder / "model" / "tokenizer.json", out)
    return {"files": sorted(path.name for path in adapters.iterdir())}


def losses(folder: Path, gpu: str) -> dict[str, Any]:
    """Return transformers' loss per token of the assistant's answers, of each model and type of weights."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "data" / "sft" / "validation.jsonl").read_text().splitlines()
    encoded = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for line in lines
    ]
    device = "cuda" if gpu != "cpu" else "cpu"
    found = {}
    for name in ("model", "sft_hf", "peft_hf"):
        for dtype in (torch.float32, torch.bfloat16):
            if not (folder / name / "config.json").is_file():
                continue
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype).to(device).eval()
            total, count = 0.0, 0
            for one in encoded:
                ids = torch.tensor([one["input_ids"]], device=device)
                counted = torch.tensor(one["assistant_masks"][1:], device=device, dtype=torch.bool)
                with torch.no_grad():
                    logits = model(ids).logits[0, :-1].float()
                each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                total, count = total + each[counted].sum().item(), count + int(counted.sum())
            found[f"{name} {str(dtype).rpartition('.')[2]}"] = total / count
            found["tokens"] = count
    return found


def evaluate(folder: Path, gpu: str) -> dict[str, Any]:
    words = ["--tasks", "fp8launch_tiny", "--gpu", gpu, "--backend", "local", "--wait", "--offline"]
    return {"said": fp8launch(folder, "evaluate", str(folder / "sft_hf"), *words)}


def report(folder: Path, task: str) -> dict[str, Any]:
    run = next((folder / "runs").glob(f"{task}-*")).name
    parsed = json.loads(fp8launch(folder, "parse", run, "--json"))
    verified = subprocess.run(
        [sys.executable, "-m", "fp8launch", "verify", run],
        env={**os.environ, "FP8LAUNCH_RUNS": str(folder / "runs")},
        capture_output=True,
        text=True,
        check=False,
    )
    return {"parse": parsed, "verify": (verified.stdout + verified.stderr)[-800:]}


@contextlib.contextmanager
def step(name: str) -> Iterator[dict[str, Any]]:
    """Print what a step found, or how it failed, and how long it took."""
    began, found = time.monotonic(), dict[str, Any](step=name)
    try:
        yield found
    except Exception as failure:
        found["failed"] = f"{type(failure).__name__}: {failure}"[-6000:]
    found["took_s"] = round(time.monotonic() - began, 1)
    print(json.dumps(found), flush=True)


def main() -> None:
    folder, gpu = Path(sys.argv[1]).resolve(), (sys.argv[2:] or ["h100"])[0]
    folder.mkdir(parents=True)
    with step("model") as found:
        found |= make_model(folder / "model", gpu)
    for task in RECIPES:
        with step(f"data {task}") as found:
            found |= make_data(folder / "data" / task)

    def finish(task: str) -> None:
        with step(f"train {task}") as found:
            found |= train(folder, task, gpu)
        with step(f"export {task}") as found:
            found |= export(folder, task, gpu)

    with ThreadPoolExecutor() as both:
        list(both.map(finish, RECIPES))
    with step("losses") as found:
        found |= losses(folder, gpu)
    with step("evaluate") as found:
        found |= evaluate(folder, gpu)
    for task in RECIPES:
        with step(f"report {task}") as found:
            found |= report(folder, task)


if __name__ == "__main__":
    main()
