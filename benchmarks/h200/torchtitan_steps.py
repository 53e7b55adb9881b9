"""Train a model with torchtitan 0.2.2 on one GPU and print its iterations and memory in Megatron's format.

    python3 torchtitan_steps.py --model llama3.2_3b --float8 tensorwise --compile --activation-checkpointing op

torchtitan builds the model, converts it to float8, compiles, shards and trains it: its `Trainer` runs unchanged. This
program supplies the configuration, random tokens and the output. Needs torchtitan, torchao and this checkout's
launchers/ on PYTHONPATH. Without a GPU, only the `tiny` models run, uncompiled and with emulated float8.

torchtitan 0.2.2 trains on a single GPU with autocast. Later releases call `fully_shard` there too, which keeps weights
and activations in bf16 between layers; `--mixed-precision fsdp`, the default, does this with the functions of 0.2.2.
Parameters, gradients and AdamW states are fp32 either way, or all bf16 with `--dtype bfloat16`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "launchers"))
RELEASE = "0.2.2"


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of torchtitan: the family and flavor, fields that differ from it, and the batch it is compared at."""

    family: str
    flavor: str
    fields: dict[str, Any]
    sequence: int = 8192
    batch: int = 16
    tied: bool = False
    experts: bool = False


_LLAMA3_3B = {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "ffn_dim_multiplier": None,
              "multiple_of": 256}  # fmt: skip
MODELS = {
    "llama3.2_3b": Model("llama3", "8B", _LLAMA3_3B, tied=True),
    "llama3_8b": Model("llama3", "8B", {"n_layers": 6}),
    "qwen3_4b": Model("qwen3", "4B", {}, sequence=4096, tied=True),
    "qwen3_30b_a3b": Model("qwen3", "30B-A3B", {"n_layers": 6}, sequence=4096, batch=32, experts=True),
    "tiny_llama": Model("llama3", "debugmodel", {"n_layers": 2}, sequence=64, batch=2),
    "tiny_llama_tied": Model("llama3", "debugmodel", {"n_layers": 2}, sequence=64, batch=2, tied=True),
    "tiny_qwen": Model("qwen3", "debugmodel", {"n_layers": 2}, sequence=64, batch=2, tied=True),
    "tiny_moe": Model("qwen3", "debugmodel_moe", {"n_layers": 2}, sequence=64, batch=2, experts=True),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--num-layers", type=int, help="default: all of a 3B and 4B, 6 of 8B and 30B-A3B")
    parser.add_argument("--train-iters", type=int, default=12)
    parser.add_argument("--warmup-iters", type=int, default=2, help="first iterations that the mean leaves out")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, help="default: 16, or 32 with experts")
    parser.add_argument("--seq-length", type=int, help="default: 8192 for Llama, 4096 for Qwen")
    parser.add_argument("--float8", choices=("none", "tensorwise", "rowwise", "rowwise_with_gw_hp"), default="none")
    parser.add_argument("--float8-gather", action="store_true", help="FSDP's copy of the weights is float8")
    parser.add_argument("--float8-skip", help="names of linears that stay bf16 (default: output, and router.gate)")
    parser.add_argument("--experts", choices=("bf16", "float8"), default="bf16", help="the grouped GEMMs")
    parser.add_argument("--force-load-balancing", action="store_true", help="each expert gets as many tokens")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--activation-checkpointing",
        default="none",
        metavar="none|op|N|budget:X|full",
        help="none, the operations that torchtitan selects, every Nth layer, a memory budget from 0 to 1, all layers",
    )
    parser.add_argument("--mixed-precision", choices=("fsdp", "autocast"), default="fsdp")
    parser.add_argument("--reshard", choices=("default", "never", "always"), default="default")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and states")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--profile", action="store_true", help="one more iteration; print its longest kernels")
    parser.add_argument("--dump-folder", default="torchtitan-outputs")
    args = parser.parse_args()
    model = MODELS[args.model]
    args.seq_length = args.seq_length or model.sequence
    args.global_batch_size = args.global_batch_size or model.batch
    if args.float8_skip is None:
        args.float8_skip = "output,router.gate" if model.experts else "output"
    for problem in problems(args, model):
        parser.error(problem)
    return args


def problems(args: argparse.Namespace, model: Model) -> Iterator[str]:
    """Yield combinations that torchtitan ignores or that fail late, with what to use instead."""
    if args.global_batch_size % args.micro_batch_size:
        yield f"global batch {args.global_batch_size} is not a multiple of micro batch {args.micro_batch_size}"
    if args.train_iters <= args.warmup_iters:
        yield f"{args.train_iters} iterations leave none after {args.warmup_iters} of warm-up; use --train-iters"
    if args.float8_gather and (args.float8 != "tensorwise" or args.mixed_precision != "fsdp"):
        yield "--float8-gather needs --float8 tensorwise and --mixed-precision fsdp"
    if args.experts == "float8" and not model.experts:
        yield f"--experts float8: {args.model} has no experts"
    kind, _, amount = args.activation_checkpointing.partition(":")
    try:
        known = kind in ("none", "op", "full") or (0 <= float(amount) <= 1 if kind == "budget" else int(kind) > 0)
    except ValueError:
        known = False
    if not known:
        yield f"--activation-checkpointing {args.activation_checkpointing} is none of none|op|N|budget:X|full"
    if kind == "budget" and not args.compile:
        yield "--activation-checkpointing budget:X is a setting of the compiler; add --compile"


def prepare_environment(args: argparse.Namespace) -> bool:
    """Check packages and the GPU, and be the only rank of a job. Return whether to run on the CPU."""
    needed = ["torch", "torchtitan"]
    if args.float8 != "none" or args.experts == "float8":
        needed.append("torchao")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"torchtitan_steps: not installed for {sys.executable}: {', '.join(missing)}")
    release = importlib.metadata.version("torchtitan")
    if release != RELEASE:
        sys.exit(f"torchtitan_steps: torchtitan is {release}, and its interfaces change: install {RELEASE}")
    # torchtitan's run_train.sh sets this too. It has to be set before torch starts CUDA.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(rank)
    import torch

    if torch.cuda.is_available():
        return False
    if not args.model.startswith("tiny"):
        sys.exit("torchtitan_steps: CUDA finds no GPU; without one, only the tiny models run")
    if args.experts == "float8" or args.float8.startswith("rowwise") or (args.compile and args.float8 != "none"):
        sys.exit("torchtitan_steps: without a GPU, only tensorwise float8 can be emulated, and only uncompiled")
    # torchtitan assumes CUDA if there is no accelerator, and waits for other ranks with a barrier of GPUs.
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **_: None
    return True


class Tokens:
    """Random tokens, on the host as torchtitan's own loaders leave them."""

    def __init__(self, args: argparse.Namespace, vocabulary: int) -> None:
        self.shape, self.vocabulary = (args.micro_batch_size, args.seq_length + 1), vocabulary

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        import torch

        random = torch.Generator().manual_seed(1234)
        while True:
            tokens = torch.randint(self.vocabulary, self.shape, generator=random)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Recorder:
    """Stands in for torchtitan's metrics: keeps the last loss, and lets the peak of memory stand."""

    def __init__(self) -> None:
        from torchtitan.tools import utils

        none = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
        self.device_memory_monitor = SimpleNamespace(device_name="", get_peak_stats=lambda: none)
        self.color = utils.NoColor()
        self.num_flops_per_token, self.ntokens_since_last_log = -1, 0
        self.data_loading_times: list[float] = []
        self.loss = float("nan")

    def should_log(self, step: int) -> bool:
        return True  # the loss is read in each iteration, which waits for the device

    def log(self, step: int, global_avg_loss: float, *rest: object, **more: object) -> None:
        self.loss = float(global_avg_loss)


def configuration(args: argparse.Namespace, model: Model, on_cpu: bool) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = args.dump_folder
    config.model.name, config.model.flavor = model.family, args.model
    config.training.local_batch_size = args.micro_batch_size
    config.training.global_batch_size = args.global_batch_size
    config.training.seq_len = args.seq_length
    config.training.steps = args.train_iters + args.profile
    config.training.dtype = args.dtype
    config.optimizer.lr = args.lr
    config.lr_scheduler.warmup_steps = 0
    config.lr_scheduler.min_lr_factor = 1.0
    config.compile.enable = args.compile
    config.parallelism.fsdp_reshard_after_forward = args.reshard
    config.debug.seed = 1234
    config.debug.moe_force_load_balance = args.force_load_balancing
    kind, _, amount = args.activation_checkpointing.partition(":")
    modes = {"none": "none", "full": "full", "budget": "memory_budget"}
    config.activation_checkpoint.mode = modes.get(kind, "selective")
    if kind == "budget":
        config.activation_checkpoint.memory_budget = float(amount)
    elif kind not in modes:
        config.activation_checkpoint.selective_ac_option = kind
    if args.float8 != "none":
        config.model.converters.append("quantize.linear.float8")
        float8 = config.quantize.linear.float8
        float8.filter_fqns = args.float8_skip.split(",")
        float8.emulate = on_cpu
        if args.float8 != "tensorwise":  # without a name, the recipe is tensorwise and may be gathered
            float8.recipe_name = args.float8
        float8.enable_fsdp_float8_all_gather = args.float8_gather
        float8.precompute_float8_dynamic_scale_for_fsdp = args.float8_gather
    if args.experts == "float8":
        config.model.converters.append("quantize.grouped_mm.float8")
        config.quantize.grouped_mm.float8.fqns = ["experts"]
    return config


def register_model(args: argparse.Namespace, model: Model, on_cpu: bool) -> Any:
    """Give torchtitan the model, random tokens instead of a dataset, and the recorder. Return the recorder."""
    from torchtitan.protocols import train_spec

    spec = train_spec.get_train_spec(model.family)
    fields = dict(model.fields)
    if args.num_layers:
        fields["n_layers"] = args.num_layers
    shape: Any = dataclasses.replace(spec.model_args[model.flavor], **fields)
    if model.experts and on_cpu:  # the kernel that pads groups needs Triton
        shape.moe_args = dataclasses.replace(shape.moe_args, use_grouped_mm=False)
    recorder = Recorder()
    registered = dataclasses.replace(
        spec,
        model_cls=tied_llama() if model.tied and model.family == "llama3" else spec.model_cls,
        model_args={args.model: shape},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: Tokens(args, shape.vocab_size),
        build_metrics_processor_fn=lambda *_: recorder,
        state_dict_adapter=None,
    )
    train_spec.register_train_spec(model.family, registered)
    return recorder


def tied_llama() -> type[Any]:
    """Return torchtitan's Llama with one matrix for embedding and output, which 0.2.2 has for Qwen only."""
    from torchtitan.models.llama3.model.model import Transformer

    class TiedLlama(Transformer):  # type: ignore[misc]
        def __init__(self, model_args: Any) -> None:
            super().__init__(model_args)
            self.output.weight = self.tok_embeddings.weight

        def init_weights(self, buffer_device: Any = None) -> None:
            # The model leaves the meta device with two matrices.
            self.output.weight = self.tok_embeddings.weight
            super().init_weights(buffer_device)

    return TiedLlama


def shard_on_one_gpu(model: Model) -> None:
    """Have torchtitan call `fully_shard` on one GPU, as releases after 0.2.2 do, with tied weights in one group."""
    from importlib import import_module

    from torchtitan import train
    from torchtitan.distributed import ParallelDims

    class OneGpu(ParallelDims):  # type: ignore[misc]
        fsdp_enabled = dp_shard_enabled = property(lambda self: True)

        def _mesh_exist(self, name: str, degree: int) -> bool:
            return name == "fsdp" or bool(super()._mesh_exist(name, degree))

    train.ParallelDims = OneGpu
    if model.tied:
        import_module(f"torchtitan.models.{model.family}.infra.parallelize").apply_fsdp = shard_tied


def shard_tied(
    model: Any,
    dp_mesh: Any,
    param_dtype: Any,
    reduce_dtype: Any,
    reshard_after_forward_policy: str = "default",
    **others: object,
) -> None:
    """Do what torchtitan's `apply_fsdp` does, with embedding and output in one group: two would untie them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchtitan.models.llama3.infra.parallelize import disable_fsdp_gradient_division

    options = {"mesh": dp_mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
    ends = [model.tok_embeddings, model.norm, model.output]
    fully_shard(ends, **options, reshard_after_forward=reshard_after_forward_policy == "always")
    for layer in model.layers.values():
        fully_shard(layer, **options, reshard_after_forward=reshard_after_forward_policy != "never")
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)


def convert_experts_with_current_torchao() -> None:
    """Replace the conversion of experts in 0.2.2, which asks torchao for a configuration that 0.17 renamed."""
    from torchtitan.components.quantization.float8 import Float8GroupedMMConverter

    def convert(self: Any, model: Any) -> None:
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization.quant_api import quantize_

        def chosen(module: Any, name: str) -> bool:
            return any(part in name for part in self.fqns)

        quantize_(model, config=Float8TrainingOpConfig(), filter_fn=chosen)

    Float8GroupedMMConverter.convert = convert


def float8_line(model: Any) -> str:
    """Say how many linears of the layers, and weights of experts, are converted to float8."""
    import torch

    linears = [type(module).__name__ for module in model.layers.modules() if isinstance(module, torch.nn.Linear)]
    gathered = experts = converted_experts = 0
    for name, parameter in model.layers.named_parameters():
        kind = type(getattr(parameter, "_local_tensor", parameter.data)).__name__
        gathered += kind == "WeightWithDynamicFloat8CastTensor"
        if ".experts." in name:
            experts += 1
            converted_experts += kind == "Float8TrainingWeightWrapperTensor"
    line = f"float8: {linears.count('Float8Linear')} of {len(linears)} linears of the layers are in float8"
    line += f", {gathered} weights are gathered in float8"
    if experts:
        line += f"; {converted_experts} of {experts} weights of grouped experts are in float8"
    return line


def train(args: argparse.Namespace, on_cpu: bool) -> None:
    model = MODELS[args.model]
    import torch
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from fp8launch.plugins.accelerate.injob.accelerate_evidence import iteration_line, memory_line

    init_logger()
    recorder = register_model(args, model, on_cpu)
    if args.mixed_precision == "fsdp":
        shard_on_one_gpu(model)
    if args.experts == "float8":
        convert_experts_with_current_torchao()
    times: list[float] = []

    class Timed(Trainer):  # type: ignore[misc]
        def train_step(self, data_iterator: Any) -> None:
            if self.step > args.train_iters:
                profiled(lambda: super(Timed, self).train_step(data_iterator))
                return
            began = time.perf_counter()
            super().train_step(data_iterator)  # ends by reading the loss, so the device has finished
            times.append((time.perf_counter() - began) * 1e3)
            print(iteration_line(args, self.step, times[-1], recorder.loss), flush=True)
            if self.step in (1, 2, args.train_iters):
                print(memory_line(self.step, on_cpu), flush=True)

    trainer = Timed(configuration(args, model, on_cpu))
    (part,) = trainer.model_parts
    print(f"torchtitan {RELEASE}, torch {torch.__version__}: {vars(args)}")
    print(f"parameters: {sum(parameter.numel() for parameter in part.parameters())}")
    print(float8_line(part), flush=True)
    trainer.train()
    mean = statistics.mean(times[args.warmup_iters :])
    tokens = args.global_batch_size * args.seq_length / mean * 1e3
    print(f"mean of iterations {args.warmup_iters + 1} to {len(times)}: {mean:.1f} ms, {tokens:.0f} tokens/s")
    torch.distributed.destroy_process_group()


def profiled(step: Any) -> None:
    """Run a step under torch's profiler and print the operations and kernels that took longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=100))


def main() -> None:
    args = arguments()
    on_cpu = prepare_environment(args)
    import torch

    try:
        train(args, on_cpu)
    except torch.OutOfMemoryError as error:
        peak = torch.cuda.max_memory_allocated() / 2**30
        sys.exit(f"torchtitan_steps: out of memory at a peak of {peak:.1f} GiB: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
