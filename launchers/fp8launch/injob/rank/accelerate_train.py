"""One process of a training by Hugging Face Accelerate: `python accelerate_train.py -- MEGATRON-ARGUMENTS...`

The peers: the Llama, batch and tokens of a recipe, trained by Accelerate with FSDP2, DDP or DeepSpeed's ZeRO, in bf16
or in FP8 by torchao or Transformer Engine. Weights and tokens are random. Started like worker.py, with the same exit
codes and environment. It prints iteration and memory lines as Megatron does, the FP8 modules, and how many elements of
weights and optimizer states each rank holds (`fp8launch-sharding: {json}`), so that the same commands read it.

Set up as Accelerate says (examples/torch_native_parallelism/fsdp2_fp8.py and benchmarks/fp8 of 1.15): layers sharded
and compiled one by one, master weights in fp32, compute in bf16, fused AdamW, no activation checkpointing.
Beyond it: no gradient synchronisation but in the last micro batch, cuDNN's attention first. These variables take that
back, to see what each is worth:

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
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.rank import probe, signals, worker
from fp8launch.injob.rank.compat import cache_folders

SHARDING = "fp8launch-sharding: "
MIB = 2**20
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def arguments(words: list[str]) -> argparse.Namespace:
    """Those of Megatron's arguments that say what is computed, and two of this program."""
    parser = argparse.ArgumentParser(prog="accelerate_train.py", allow_abbrev=False)
    for flag in ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length",
                 "micro-batch-size", "global-batch-size", "train-iters", "vocab-size"):  # fmt: skip
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.add_argument("--num-query-groups", type=int)
    parser.add_argument("--kv-channels", type=int)
    parser.add_argument("--rotary-base", type=float, default=10000.0)
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


def switched(name: str) -> bool:
    return os.environ.get(name, "1") != "0"


def check_packages(args: argparse.Namespace) -> None:
    """Stop where a package is not installed that these arguments need."""
    needed = ["torch", "accelerate", "transformers"]
    if args.sharding in STAGES:
        needed.append("deepspeed")
    if args.fp8_format:
        needed.append(args.fp8_library)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        message = f"not installed for {sys.executable}: {', '.join(missing)}; use an image that has them"
        worker.stop(worker.MACHINE_LACKS, message)


# --- Model, Accelerator and optimizer --------------------------------------------------------------------------------


def model_for(args: argparse.Namespace, device: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


def zero_config(args: argparse.Namespace, micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's configuration, with the communication that its documentation recommends."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": args.clip_grad,
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": STAGES[args.sharding],
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": 10**9,
    }


def fp8_handler(args: argparse.Namespace, on_cpu: bool) -> Any:
    """What tells Accelerate the library and the recipe of FP8."""
    if args.fp8_library == "torchao":
        from accelerate.utils import AORecipeKwargs
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(args.fp8_recipe)
        # Without tensor cores torchao computes the products of the rounded values in fp32.
        values = {name: getattr(config, name) for name in config.__dataclass_fields__}
        values |= {"enable_fsdp_float8_all_gather": args.fp8_param_gather, "emulate": on_cpu}
        return AORecipeKwargs(config=Float8LinearConfig(**values))
    from accelerate.utils import TERecipeKwargs

    if args.fp8_recipe == "mxfp8":
        return TERecipeKwargs(fp8_format=args.fp8_format.upper(), use_mxfp8_block_scaling=True)
    return TERecipeKwargs(
        fp8_format=args.fp8_format.upper(),
        amax_history_len=args.fp8_amax_history_len,
        amax_compute_algo=args.fp8_amax_compute_algo,
    )


def accelerator_for(args: argparse.Namespace, micro_batches: int, on_cpu: bool) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        TorchDynamoPlugin,
    )

    if on_cpu:
        distribute_on_cpu(args.sharding)
    options: dict[str, Any] = {}
    if args.sharding == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=switched("PEER_RESHARD"),
            cpu_ram_efficient_loading=False,  # torchao's weights cannot be loaded so
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    elif args.sharding in STAGES:
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=zero_config(args, micro_batches))
    if args.fp8_format:
        options["kwargs_handlers"] = [fp8_handler(args, on_cpu)]
    if not on_cpu and args.fp8_library != "transformer_engine" and switched("PEER_COMPILE"):
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    precision = "fp8" if args.fp8_format else ("bf16" if args.bf16 else "no")
    accumulation = GradientAccumulationPlugin(num_steps=micro_batches, sync_each_batch=not switched("PEER_NO_SYNC"))
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_plugin=accumulation, **options)
    if args.sharding in STAGES and accelerator.te_recipe_handler is not None:
        tell_deepspeed_the_recipe(accelerator)
    return accelerator


def tell_deepspeed_the_recipe(accelerator: Any) -> None:
    """`_prepare_deepspeed` of 1.15 reads another name than the other paths, and so would always take delayed scaling.

    `fp8_backend` then asks what has this name for its library. The class answers, because each attribute of the
    settings themselves becomes an argument of the recipe.
    """
    settings = accelerator.te_recipe_handler
    type(settings).backend = "TE"
    accelerator.fp8_recipe_handler = settings


def distribute_on_cpu(sharding: str) -> None:
    """Have Accelerate shard on a CPU, for tests: `AcceleratorState` of 1.15 knows FSDP on accelerators only.

    With ACCELERATE_USE_CPU it drops the plugins of FSDP and DeepSpeed without a message: `verify` sees that.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if sharding in STAGES:
        import deepspeed

        # Its operator for shared memory is compiled at the start, by every rank; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true"):
        PartialState(cpu=True)
        if sharding == "fsdp2":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def prepared(args: argparse.Namespace, accelerator: Any, model: Any) -> tuple[Any, Any]:
    import torch

    betas = (args.adam_beta1, args.adam_beta2)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.sharding == "fsdp2" and args.fp8_library == "transformer_engine":
        # `_prepare_fsdp2` of 1.15 converts the layers and never turns FP8 on for them, as `prepare_model` does for DDP.
        from accelerate.utils import apply_fp8_autowrap

        model = apply_fp8_autowrap(model, accelerator.te_recipe_handler)
    return model, optimizer


def attention(on_cpu: bool) -> Any:
    """torch's attention kernels, the wanted one first; the others stay for shapes that it refuses."""
    if on_cpu:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if os.environ.get("PEER_ATTENTION", "cudnn") == "flash":
        kernels.reverse()
    return sdpa_kernel(kernels, set_priority=True)


# --- The training loop -----------------------------------------------------------------------------------------------


def train(args: argparse.Namespace, on_cpu: bool) -> None:
    import torch

    world = int(os.environ["WORLD_SIZE"])
    micro_batches = args.global_batch_size // (args.micro_batch_size * world)
    accelerator = accelerator_for(args, micro_batches, on_cpu)
    device, rank = accelerator.device, int(os.environ["RANK"])
    torch.manual_seed(args.seed)
    model = model_for(args, device)
    # ZeRO 3 divides weights as they are made.
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    model, optimizer = prepared(args, accelerator, model)
    model.train()
    random = torch.Generator(device=device).manual_seed(args.seed + rank)
    profiled = int(os.environ.get("FP8LAUNCH_PROFILE_ITERATION") or 0)
    for iteration in range(1, args.train_iters + 1):
        profile = started_profile() if iteration == profiled and rank == 0 else None
        began = time.perf_counter()
        loss = step(args, accelerator, model, optimizer, micro_batches, random)
        milliseconds = (time.perf_counter() - began) * 1e3
        if profile is not None:
            probe._say(probe.KERNELS, {"v": 1, "rank": 0, "iteration": iteration, **profile.stop()})
        if rank == 0:
            print(iteration_line(args, iteration, milliseconds, loss), flush=True)
            if iteration in (1, 2, args.train_iters):
                print(memory_line(iteration, on_cpu), flush=True)
        if iteration == 1 and switched("FP8LAUNCH_PROBE"):
            sharding = sharding_of(args, model, optimizer, parameters)
            if rank == 0:
                probe._say(probe.PROBE, precision_of(args, model))
                probe._say(SHARDING, sharding)
    accelerator.end_training()


def step(
    args: argparse.Namespace, accelerator: Any, model: Any, optimizer: Any, micro_batches: int, random: Any
) -> float:
    """One optimizer step over all micro batches of this rank; the mean loss, which also waits for the device."""
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


# --- Evidence, and lines as Megatron prints them ---------------------------------------------------------------------


def sharding_of(args: argparse.Namespace, model: Any, optimizer: Any, parameters: int) -> dict[str, Any]:
    """What was asked for, what is in effect, and how many elements each rank holds, of `parameters` in all.

    The optimizer's elements are those of its first moments, after its first step. Every rank calls this.
    """
    import torch

    names = []
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        names.append(type(optimizer).__name__)
        optimizer = optimizer.optimizer
    names.append(type(optimizer).__name__)
    moments = sum(held(state["exp_avg"]) for state in optimizer.state.values() if "exp_avg" in state)
    weights = sum(held(parameter) for parameter in model.parameters())
    counts: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    if len(counts) > 1:
        torch.distributed.all_gather_object(counts, (moments, weights))
    else:
        counts = [(moments, weights)]
    return {
        "v": 1,
        "rank": 0,
        "iteration": 1,
        "asked": args.sharding,
        "in_effect": in_effect(model),
        "optimizer": names,
        "parameters": parameters,
        "optimizer_elements": [each[0] for each in counts],
        "weight_elements": [each[1] for each in counts],
    }


def held(tensor: Any) -> int:
    """Elements of a tensor on this rank: FSDP2's tensors have a local part, and ZeRO 3 keeps its part beside them."""
    if hasattr(tensor, "ds_tensor"):
        return int(tensor.ds_tensor.numel())
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel())


def in_effect(model: Any) -> str:
    """How the prepared model is sharded, by what it has become."""
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    if hasattr(model, "zero_optimization_stage"):
        return f"zero{int(model.zero_optimization_stage())}"
    if isinstance(model, FSDPModule):
        return "fsdp2"
    return "ddp" if isinstance(model, DistributedDataParallel) else "none"


def precision_of(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """How many linears ran in FP8, in the terms of fp8launch's probe."""
    import torch

    asked = {"fp8": args.fp8_format, "fp8_recipe": args.fp8_recipe, "num_layers": args.num_layers,
             "fp8_param_gather": args.fp8_param_gather}  # fmt: skip
    totals = {"linears": 0, "fp8": 0, "explained": 0, "unexplained": 0, "weights": 0, "fp8_weights": 0}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for name, module in model.named_modules():
        kind, head = type(module).__name__, name.endswith("lm_head")
        te_linear = kind == "Linear" and type(module).__module__.startswith("transformer_engine")
        if not (isinstance(module, torch.nn.Linear) or te_linear):
            continue
        weight = getattr(module.weight, "_local_tensor", module.weight)
        totals["weights"] += 1
        # torchao's class of a weight that FSDP2 gathers in FP8, or a quantized tensor of Transformer Engine.
        totals["fp8_weights"] += "Float8" in type(weight).__name__
        found = {"class": kind, **fp8_of(module, args)}
        if not found["ran_fp8"]:
            found["why"] = reason(args, head, te_linear)
        if head and not found["ran_fp8"]:
            continue
        totals["linears"] += 1
        totals["fp8" if found["ran_fp8"] else "explained" if found["why"] else "unexplained"] += 1
        key = tuple(sorted((k, str(v)) for k, v in found.items()))
        group = groups.setdefault(key, {"modules": "linears of the layers", "role": "linear", "n": 0, **found})
        group["n"] += 1
    return {"v": 1, "rank": 0, "tp": 0, "pp": 0, "iteration": 1, "asked": asked, "software": software(),
            "totals": totals, "groups": list(groups.values())}  # fmt: skip


def fp8_of(module: Any, args: argparse.Namespace) -> dict[str, Any]:
    if type(module).__name__ == "Float8Linear":
        return {"ran_fp8": True, "recipe": f"torchao.{args.fp8_recipe}"}
    found = probe.facts(module)
    return {"ran_fp8": found["ran_fp8"], "recipe": found["recipe"]}


def reason(args: argparse.Namespace, head: bool, te_linear: bool) -> str | None:
    """Why a linear layer did not run in FP8; None if there is no reason."""
    if not args.fp8_format:
        return "FP8 is not asked for"
    if args.fp8_library == "torchao" and not te_linear:
        return "the LM head" if head else "Accelerate keeps the first linear in bf16"
    return None


def software() -> dict[str, Any]:
    names = ("torch", "accelerate", "transformers", "deepspeed", "torchao", "transformer_engine")
    return {name: getattr(sys.modules[name], "__version__", None) for name in names if name in sys.modules}


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
    import torch

    counts = {
        "allocated": torch.cuda.memory_allocated,
        "max allocated": torch.cuda.max_memory_allocated,
        "reserved": torch.cuda.memory_reserved,
        "max reserved": torch.cuda.max_memory_reserved,
    }
    sizes = (f"{name}: {0 if on_cpu else count() / MIB:.2f}" for name, count in counts.items())
    return f"[Rank 0] (after {iteration} iterations) memory (MB) | " + " | ".join(sizes)


def started_profile() -> Any:
    """fp8launch's profile of one iteration by kernel, if there is a GPU."""
    from fp8launch.injob.rank.profile_once import Profile

    profile = Profile()
    try:
        profile.start()
    except RuntimeError as problem:
        print(f"fp8launch: no profile: {problem}", file=sys.stderr)
        return None
    return profile


def main() -> None:
    args = arguments(sys.argv[1:])
    on_cpu = worker.begin() == "cpu"
    check_packages(args)
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    else:
        worker.check_gpu()
        cache_folders.give_triton_a_cache()
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
