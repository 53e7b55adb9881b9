"""One process of a training by Hugging Face Accelerate: `python accelerate_train.py -- MEGATRON-ARGUMENTS...`

The peers: the Llama or Qwen3, batch and tokens of a recipe, trained by Accelerate with FSDP2, DDP or DeepSpeed's ZeRO,
in bf16 or in FP8 by torchao or Transformer Engine. Weights and tokens are random. Started like worker.py, with the same
exit codes and environment. It prints iteration and memory lines as Megatron does, the FP8 modules, and how many
elements of weights and optimizer states each rank holds (`fp8launch-sharding: {json}`), so that the same commands read
it. Experts of Qwen3 run in grouped GEMMs, in bf16: neither library converts them.

The setup follows Accelerate (examples/torch_native_parallelism/fsdp2_fp8.py and benchmarks/fp8 of 1.15): layers sharded
and compiled one by one, master weights in fp32, compute in bf16, fused AdamW.
In addition, gradients are synchronized in the last micro batch only, and cuDNN's attention comes first. These variables
revert that, to see what each change is worth:

    PEER_ATTENTION=cudnn|flash   which of torch's attention kernels comes first (cudnn)
    PEER_NO_SYNC=1|0             gradients are reduced in the last micro batch only (1): faster, 12 GB more
    PEER_RESHARD=1|0             FSDP2 drops weights after forward and gathers them again for backward (1)
    PEER_COMPILE=1|0             layers are compiled by inductor (1; never with Transformer Engine, never on a CPU)
"""
# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: use the package's full names in imports, never bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.rank import probe, signals, worker
from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.plugins.accelerate.injob.accelerate_evidence import (
    SHARDING,
    iteration_line,
    memory_line,
    precision_of,
    sharding_of,
)
from fp8launch.plugins.accelerate.injob.accelerate_setup import (
    STAGES,
    accelerator_for,
    attention,
    model_for,
    prepared,
    switched,
)
from fp8launch.plugins.measure.injob.profiled_range import requested_range


def arguments(words: list[str]) -> argparse.Namespace:
    """Parse the Megatron arguments that define the computation, and two of this program's own."""
    parser = argparse.ArgumentParser(prog="accelerate_train.py", allow_abbrev=False)
    for flag in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length",
                 "micro-batch-size", "global-batch-size", "train-iters", "vocab-size"):  # fmt: skip
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--num-query-groups", type=int)
    parser.add_argument("--kv-channels", type=int)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
    parser.add_argument("--use-rope-scaling", action="store_true")
    parser.add_argument("--rope-scaling-factor", type=float, default=8.0)
    parser.add_argument("--qk-layernorm", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("full",))
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--moe-ffn-hidden-size", type=int)
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--norm-epsilon", type=float, default=1e-5)
    parser.add_argument("--init-method-std", type=float, default=0.02)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--adam-beta1", type=float, default=0.9)
    parser.add_argument("--adam-beta2", type=float, default=0.999)
    parser.add_argument("--adam-eps", type=float, default=1e-8)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"))
    parser.add_argument("--fp8-recipe", choices=("tensorwise", "rowwise", "delayed", "mxfp8"))
    parser.add_argument("--fp8-param-gather", action="store_true")
    parser.add_argument("--fp8-amax-history-len", type=int, default=1024)
    parser.add_argument("--fp8-amax-compute-algo", default="max")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    parser.add_argument("--sharding", choices=("ddp", "fsdp2", *STAGES), required=True)
    parser.add_argument("--fp8-library", choices=("torchao", "transformer_engine"))
    return parser.parse_args([word for word in words if word != "--"])


def check_packages(args: argparse.Namespace) -> None:
    """Exit if a package that these arguments need is not installed."""
    needed = ["torch", "accelerate", "transformers"]
    if args.sharding in STAGES:
        needed.append("deepspeed")
    if args.fp8_format:
        needed.append(args.fp8_library)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        message = f"not installed for {sys.executable}: {', '.join(missing)}; use an image that has them"
        worker.stop(worker.MACHINE_LACKS, message)


def train(args: argparse.Namespace, on_cpu: bool) -> None:
    import torch

    world = int(os.environ["WORLD_SIZE"])
    micro_batches = args.global_batch_size // (args.micro_batch_size * world)
    accelerator = accelerator_for(args, micro_batches, on_cpu)
    device, rank = accelerator.device, int(os.environ["RANK"])
    torch.manual_seed(args.seed)
    model = model_for(args, device)
    # ZeRO 3 divides weights when they are created.
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    model, optimizer = prepared(args, accelerator, model)
    model.train()
    random = torch.Generator(device=device).manual_seed(args.seed + rank)
    observer = attempt("the profile", requested_range)
    for iteration in range(1, args.train_iters + 1):
        if observer is not None:
            observer.before_step(model, iteration)
        began = time.perf_counter()
        loss = step(args, accelerator, model, optimizer, micro_batches, random)
        milliseconds = (time.perf_counter() - began) * 1e3
        if observer is not None and not observer.after_step(model, iteration):
            observer = None
        if rank == 0:
            print(iteration_line(args, iteration, milliseconds, loss), flush=True)
            if iteration in (1, 2, args.train_iters):
                print(memory_line(iteration, on_cpu), flush=True)
        if iteration == 1 and switched("FP8LAUNCH_PROBE"):
            sharding = sharding_of(args, model, optimizer, parameters)
            if rank == 0:
                say(probe.PROBE, precision_of(args, model))
                say(SHARDING, sharding)
    accelerator.end_training()


def step(
    args: argparse.Namespace, accelerator: Any, model: Any, optimizer: Any, micro_batches: int, random: Any
) -> float:
    """Run an optimizer step over all micro batches of this rank. Return the mean loss, which waits for the device."""
    import torch

    total = torch.zeros((), device=accelerator.device)
    for _ in range(micro_batches):
        shape = (args.micro_batch_size, args.seq_length)
        tokens = torch.randint(args.vocab_size, shape, device=accelerator.device, generator=random)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)  # divides by the number of micro batches
            if args.clip_grad and accelerator.sync_gradients and args.sharding not in STAGES:
                accelerator.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    return float(total) / micro_batches


def main() -> None:
    args = arguments(sys.argv[1:])
    on_cpu = worker.begin() == "cpu"
    check_packages(args)
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        worker.check_gpu()
    signals.tie_helpers_to_rank()
    signals.answer_with_stack()
    worker.announce()
    worker.collect_garbage()

    def training() -> None:
        with attention(on_cpu):
            train(args, on_cpu)

    worker.run_to_the_end(training)


if __name__ == "__main__":
    main()
