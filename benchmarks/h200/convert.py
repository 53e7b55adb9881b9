"""Convert two small random models from Hugging Face and back on GPUs: `convert.py FOLDER [GPU]` (default h200).

For a Llama (tensor parallel 2) and a Qwen3-MoE (expert parallel 2), both at once, by fp8launch's own commands: there
and back (the same bits?), the logits of both sides in bf16, ten iterations in FP8 from the converted weights, the
export of that run (its logits?), and three iterations more, once from the run's checkpoint and once from its export
converted again (the same losses?). Prints one JSON object a model. The job's Python needs Megatron-Bridge and
transformers.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LENGTH = 128
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "rope_theta": 500000.0}, "--tp", "models/llama3_8b"),
    "qwen3_moe": ("Qwen3Moe", {"rms_norm_eps": 1e-6, "rope_theta": 1e6, **EXPERTS}, "--ep", "models/qwen3_30b_a3b"),
}
RECIPE = """\
extends: [{base}, parts/pretrain, {experts}precision/{precision}, hardware/{gpu}]
name: {name}
model: {{num_layers: 4, hidden_size: 256, ffn_hidden_size: 512, num_attention_heads: 4, num_query_groups: 2,
         kv_channels: 64, vocab_size: 1023, max_position_embeddings: {length}{moe}}}
parallel: {{tp: 1, pp: 1, cp: 1}}
batch: {{micro: 2, global: 8, sequence: {length}}}
train: {{iterations: {iterations}, lr: 1.0e-3, min_lr: 1.0e-3, warmup: 0}}
checkpoint: {{dir: checkpoints, interval: {iterations}, load: {load}}}
megatron: {{finetune: true, num_workers: 0{cpu}}}
resources: {{nodes: 1, gpus_per_node: 1, time: "00:15:00"}}
"""
OF_EXPERTS = {"experts": "moe/alltoall, ", "moe": ", num_experts: 4, moe_ffn_hidden_size: 256, moe_router_topk: 2"}
# Fused kernels exist for GPUs only.
ON_CPU = {
    "precision": "bf16",
    "experts": "",
    "cpu": ", cross_entropy_loss_fusion: null, cross_entropy_fusion_impl: null",
}


def make(name: str, folder: Path) -> None:
    """A random model in bf16 whose norms are not all ones, and whose logits are not all near 0."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    kind, more, _, _ = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def same_bits(one: Path, other: Path) -> bool:
    load: Any = importlib.import_module("safetensors.torch").load_file
    mine, theirs = (
        {k: v for file in at.glob("*.safetensors") for k, v in load(str(file)).items()} for at in (one, other)
    )
    return mine.keys() == theirs.keys() and all(bool((mine[k] == theirs[k]).all()) for k in mine)


def compare_logits(model_name: str, checkpoint: str) -> None:
    """Print how far the logits of Megatron's model are from transformers', in bf16, on the device of the job."""
    from fp8launch.injob.rank import worker
    from fp8launch.plugins.bridge.injob import bridge
    from fp8launch.plugins.convert.injob import convert

    device = worker.begin()
    worker.prepare(device)
    bridge.import_modules(("megatron.bridge.models.conversion.auto_bridge", "megatron.bridge.training.checkpointing"))
    import contextlib

    import torch

    transformers: Any = importlib.import_module("transformers")
    source = convert.open_model(model_name, with_weights=False)
    ours = convert.arguments(["megatron-to-hf", "--model", model_name, "--out", "nowhere"])
    provider = convert.provider_of(source, ours, torch.bfloat16, load=False)
    with convert.without_gpu(provider) if device == "cpu" else contextlib.nullcontext():
        model = convert.build(provider, device)
        loading: Any = importlib.import_module("megatron.bridge.training.checkpointing")
        loading._load_model_weights_from_checkpoint(checkpoint, model)
        ids = (torch.arange(LENGTH).view(1, -1) * 7 % 1024).to(device)
        places = torch.arange(LENGTH, device=device).view(1, -1)
        future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
        with torch.no_grad():
            mine = model[0].to(device).eval()(ids, places, future).float()
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        other = transformers.AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype).to(device).eval()
        with torch.no_grad():
            theirs = other(ids).logits.float()
        found[str(dtype).rpartition(".")[2]] = theirs
    largest = found["float32"].abs().max().item()
    apart = (found["bfloat16"] - mine).abs()
    rounding = (found["bfloat16"] - found["float32"]).abs()
    whole = {
        "largest_logit": largest,
        "megatron_from_transformers": apart.max().item() / largest,
        "median": apart.median().item() / largest,
        "transformers_bf16_from_fp32": rounding.max().item() / largest,
        "rounding_median": rounding.median().item() / largest,
    }
    print("logits", json.dumps(whole), flush=True)


def run(words: list[str], folder: Path, **more: str) -> str:
    environment = {**os.environ, "FP8LAUNCH_RUNS": str(folder / "runs"), **more}
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
    return done.stdout


class Model:
    """One of MODELS in its folder, converted and trained by fp8launch's commands as jobs of this machine."""

    def __init__(self, name: str, folder: Path, gpu: str) -> None:
        self.name, self.folder, self.gpu = name, folder, gpu
        self.seconds: dict[str, float] = {}
        folder.mkdir(parents=True)

    def command(self, *words: str) -> str:
        began = time.monotonic()
        text = run([sys.executable, "-m", "fp8launch", *words], self.folder)
        self.seconds[" ".join(words[:4])] = round(time.monotonic() - began, 1)
        return text

    def convert(self, *words: str) -> None:
        self.command("convert", *words, "--gpu", self.gpu, "--backend", "local", "--wait", "--json")

    def train(self, label: str, load: Path, iterations: int) -> tuple[Path, dict[str, float]]:
        """Train from weights: the run's folder of checkpoints, and its losses."""
        given = {"base": MODELS[self.name][3], "gpu": self.gpu, "name": label, "length": LENGTH, "load": load}
        given |= {"experts": "", "moe": ""} if self.name == "llama" else OF_EXPERTS
        given |= {"precision": "tensorwise", "cpu": ""} if self.gpu != "cpu" else ON_CPU
        (self.folder / f"{label}.yaml").write_text(RECIPE.format(**given, iterations=iterations))
        made = json.loads(self.command("submit", f"{label}.yaml", "--backend", "local", "--wait", "--json"))[0]["run"]
        rows = csv.DictReader(io.StringIO(self.command("logs", made, "--metrics")))
        return self.folder / "runs" / made / "checkpoints", {row["iteration"]: float(row["lm loss"]) for row in rows}

    def logits(self, model: str, checkpoint: Path, port: int) -> Any:
        words = [sys.executable, str(Path(__file__).resolve()), "--logits", str(self.folder / model), str(checkpoint)]
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        ranks |= {"FP8LAUNCH_DEVICE": "cpu" if self.gpu == "cpu" else "cuda", "LOCAL_WORLD_SIZE": "1"}
        text = run(words, self.folder, **ranks, MASTER_PORT=str(port))
        return json.loads(next(line for line in text.splitlines() if line.startswith("logits "))[7:])


def one(name: str, folder: Path, gpu: str, port: int) -> dict[str, Any]:
    """All that is asked of one model; what does not wait for each other runs at once."""
    model, size = Model(name, folder, gpu), MODELS[name][2]
    make(name, folder / "model")
    model.convert("hf-to-megatron", "model", "imported", size, "2")
    with ThreadPoolExecutor() as pool:
        compared = pool.submit(model.logits, "model", folder / "imported" / "iter_0000000", port)
        back = pool.submit(model.convert, "megatron-to-hf", "imported", "back")
        trained, losses = model.train("first", folder / "imported", 10)
        back.result()
        before = compared.result()
    model.convert("megatron-to-hf", str(trained), "exported", "--model", "model", size, "2")
    with ThreadPoolExecutor() as pool:
        compared = pool.submit(model.logits, "exported", trained / "iter_0000010", port)
        direct = pool.submit(model.train, "direct", trained, 3)
        model.convert("hf-to-megatron", "exported", "again")
        _, again = model.train("again", folder / "again", 3)
        after, (_, from_the_run) = compared.result(), direct.result()
    return {
        "name": name,
        "gpu": gpu,
        "same bits there and back": same_bits(folder / "model", folder / "back"),
        "export differs from the model": not same_bits(folder / "model", folder / "exported"),
        "logits of the import": before,
        "logits of the export": after,
        "losses": losses,
        "losses from the export": again,
        "losses from the run": from_the_run,
        "seconds": model.seconds,
    }


def main() -> None:
    if sys.argv[1] == "--logits":
        compare_logits(*sys.argv[2:])
        return
    top, gpu = Path(sys.argv[1]).resolve(), [*sys.argv[2:], "h200"][0]
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(one, name, top / name, gpu, 29700 + place) for place, name in enumerate(MODELS)]
        for job in jobs:
            try:
                print(json.dumps(job.result()), flush=True)
            except SystemExit as failure:
                print(failure, flush=True)


if __name__ == "__main__":
    main()
