"""Hugging Face Accelerate with FSDP2, and torchao's FP8: the same Llama, batch and tokens as a recipe of ours.

Started by fp8launch like any training script (`launch: {script: accelerate_fsdp2.py}`), with the arguments that
Megatron would get: it takes the shape, the batch, the learning rate and the precision from them, prints iteration and
memory lines as Megatron does, and so is parsed, verified and compared by the same commands. Weights and tokens are
random.

Set up as its own documentation says (Accelerate's example fsdp2_fp8.py, torchao's float8 page): each decoder layer
sharded and compiled by itself (inductor), master weights in fp32, compute and gradient reduction in bf16, FP8 weights
gathered in FP8 with their scales computed at once after the step, fused AdamW, no activation checkpointing. Beyond it,
where the example leaves speed on the table: no gradient synchronisation but in the last micro batch, cuDNN's attention
first. PEER_* variables below take that back, to see what each is worth.

    PEER_ATTENTION=cudnn|flash   which of torch's attention kernels comes first (cudnn)
    PEER_NO_SYNC=1|0             gradients are reduced in the last micro batch only (1): faster, 12 GB more
    PEER_RESHARD=1|0             weights are dropped after forward and gathered again for backward (1)
    PEER_FLOAT8_GATHER=1|0       FP8 weights are gathered in FP8 (1)
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20


def arguments() -> argparse.Namespace:
    """Those of Megatron's arguments that say what is computed. The others are about how Megatron computes it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length",
                 "micro-batch-size", "global-batch-size", "train-iters", "vocab-size"):  # fmt: skip
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--num-query-groups", type=int)
    parser.add_argument("--kv-channels", type=int)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    parser.add_argument("--init-method-std", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--adam-beta1", type=float, default=0.9)
    parser.add_argument("--adam-beta2", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--fp8-format")
    parser.add_argument("--fp8-recipe")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    args, _ = parser.parse_known_args()
    if args.fp8_format and (args.fp8_recipe, args.fp8_format) != ("tensorwise", "hybrid"):
        sys.exit(f"torchao's fastest recipe is tensorwise in hybrid format, not {args.fp8_recipe} in {args.fp8_format}")
    return args


def switched(name: str) -> bool:
    return os.environ.get(name, "1") != "0"


def model_for(args: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        num_hidden_layers=args.num_layers,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups or args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        max_position_embeddings=args.seq_length,
        rope_parameters={"rope_type": "default", "rope_theta": args.rotary_base},
        rms_norm_eps=args.norm_epsilon,
        initializer_range=args.init_method_std,
        vocab_size=args.vocab_size,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        attn_implementation="sdpa",
        use_cache=False,
    )
    # In fp32, which become the master weights: Accelerate's own upcast of bf16 ones fails for torchao's FP8 weights
    # (FSDP2: "expects uniform original parameter dtype"). On the device: a CPU takes minutes for 8 billion weights.
    with device:
        return LlamaForCausalLM._from_config(config, dtype=torch.float32)


def accelerator_for(args: argparse.Namespace, micro_batches: int, on_cpu: bool) -> Accelerator:
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=switched("PEER_RESHARD"),
        cpu_ram_efficient_loading=False,  # torchao's weights cannot be loaded so
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    float8 = Float8LinearConfig(
        enable_fsdp_float8_all_gather=not on_cpu and switched("PEER_FLOAT8_GATHER"),
        emulate=on_cpu,
    )
    return Accelerator(
        cpu=on_cpu,
        mixed_precision="fp8" if args.fp8_format else "bf16",
        gradient_accumulation_steps=micro_batches,
        fsdp_plugin=None if on_cpu else sharding,
        dynamo_plugin=None if on_cpu else TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
        kwargs_handlers=[AORecipeKwargs(config=float8)] if args.fp8_format else [],
    )


def attention(on_cpu: bool) -> Any:
    """torch's attention kernels, the wanted one first; the others stay for shapes that it refuses."""
    if on_cpu:
        return nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if os.environ.get("PEER_ATTENTION", "cudnn") == "flash":
        kernels.reverse()
    return sdpa_kernel(kernels, set_priority=True)


def train(args: argparse.Namespace) -> None:
    on_cpu = os.environ.get("FP8LAUNCH_DEVICE") == "cpu"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    micro_batches = args.global_batch_size // (args.micro_batch_size * world)
    accelerator = accelerator_for(args, micro_batches, on_cpu)
    device, rank = accelerator.device, accelerator.process_index
    torch.manual_seed(args.seed)
    model: Any = model_for(args, device)
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=betas, weight_decay=args.weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    random = torch.Generator(device=device).manual_seed(args.seed + rank)
    profiled = int(os.environ.get("FP8LAUNCH_PROFILE_ITERATION") or 0)
    for iteration in range(1, args.train_iters + 1):
        profile = started_profile() if iteration == profiled and rank == 0 else None
        began = time.perf_counter()
        loss = step(args, accelerator, model, optimizer, micro_batches, random)
        milliseconds = (time.perf_counter() - began) * 1e3
        if profile is not None:
            say("kernels", {"v": 1, "rank": 0, "iteration": iteration, **profile.stop()})
        if rank == 0:
            print(iteration_line(args, iteration, milliseconds, loss), flush=True)
            if iteration in (1, 2, args.train_iters):
                print(memory_line(iteration, on_cpu), flush=True)
            if iteration == 1:
                say("probe", precision_of(args, model))
    accelerator.end_training()


def step(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    micro_batches: int,
    random: torch.Generator,
) -> float:
    """One optimizer step over all micro batches of this rank; the mean loss, which also waits for the device."""
    total = torch.zeros((), device=accelerator.device)
    for micro_batch in range(micro_batches):
        shape = (args.micro_batch_size, args.seq_length)
        tokens = torch.randint(args.vocab_size, shape, device=accelerator.device, generator=random)
        last = micro_batch == micro_batches - 1
        quiet = not last and accelerator.is_fsdp2 and switched("PEER_NO_SYNC")
        with accelerator.no_sync(model) if quiet else nullcontext():
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)  # divides by the number of micro batches
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return float(total) / micro_batches


# --- Said as Megatron, and as fp8launch's own probe, say it ----------------------------------------------------------


def iteration_line(args: argparse.Namespace, iteration: int, milliseconds: float, loss: float) -> str:
    fields = (
        f" [{datetime.now()}] iteration {iteration:8d}/{args.train_iters:8d}",
        f"consumed samples: {iteration * args.global_batch_size:12d}",
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        f"learning rate: {args.lr:.6E}",
        f"global batch size: {args.global_batch_size:5d}",
        f"lm loss: {loss:.6E}",
    )
    return " | ".join(fields) + " |"


def memory_line(iteration: int, on_cpu: bool) -> str:
    counts = {
        "allocated": torch.cuda.memory_allocated,
        "max allocated": torch.cuda.max_memory_allocated,
        "reserved": torch.cuda.memory_reserved,
        "max reserved": torch.cuda.max_memory_reserved,
    }
    sizes = (f"{name}: {0 if on_cpu else count() / MIB:.2f}" for name, count in counts.items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | " + " | ".join(sizes)


def precision_of(args: argparse.Namespace, model: torch.nn.Module) -> dict[str, Any]:
    """How many linears torchao replaced by its FP8 ones, in the terms of fp8launch's probe."""
    linears = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    inside = [(name, m) for name, m in linears if not name.endswith("lm_head")]
    fp8 = [m for _, m in inside if isinstance(m, Float8Linear)]
    kept = len(inside) - len(fp8)
    asked = {"fp8": args.fp8_format, "fp8_recipe": args.fp8_recipe, "num_layers": args.num_layers}
    groups = [{"modules": "linears of the layers", "n": len(fp8), "role": "linear", "class": "Float8Linear",
               "ran_fp8": True, "recipe": "torchao.tensorwise"}] if fp8 else []  # fmt: skip
    if kept:
        why = "Accelerate keeps the first linear in bf16" if fp8 else "FP8 is not asked for"
        groups.append({"modules": "other linears of the layers", "n": kept, "role": "linear", "class": "Linear",
                       "ran_fp8": False, "why": why})  # fmt: skip
    totals = {"linears": len(inside), "fp8": len(fp8), "explained": kept, "unexplained": 0,
              "weights": len(linears), "fp8_weights": 0}  # fmt: skip
    return {"v": 1, "rank": 0, "tp": 0, "pp": 0, "iteration": 1, "asked": asked,
            "software": {"torch": torch.__version__}, "totals": totals, "groups": groups}  # fmt: skip


def say(kind: str, record: dict[str, Any]) -> None:
    sys.stdout.write(f"fp8launch-{kind}: {json.dumps(record, separators=(',', ':'))}\n")
    sys.stdout.flush()


def started_profile() -> Any:
    """fp8launch's profile of one iteration by kernel, if this was started by fp8launch and has a GPU."""
    try:
        from profile_once import Profile

        profile = Profile()
        profile.start()
    except (ImportError, RuntimeError) as problem:
        print(f"accelerate_fsdp2: no profile: {problem}", file=sys.stderr)
        return None
    return profile


if __name__ == "__main__":
    options = arguments()
    with attention(os.environ.get("FP8LAUNCH_DEVICE") == "cpu"):
        train(options)
