"""Layouts of a model on a number of GPUs: changes to a run's arguments, with their predictions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from fp8launch.megatron.model_arithmetic import Arguments, layer_count, parse_layout, virtual_stages, whole
from fp8launch.plugins.estimate.activations import offloaded_layers
from fp8launch.plugins.estimate.memory import MemoryEstimate
from fp8launch.plugins.plan.change import Change
from fp8launch.plugins.plan.execution import LAYER_GRAPHS
from fp8launch.plugins.plan.step_time import StepTime
from fp8launch.wording import counted

_SHORT = {
    ("precision.param_gather", "true"): "param gather",
    ("precision.param_gather", "false"): "no param gather",
    ("optimizer.grad_reduce", "bf16"): "bf16 gradients",
    ("optimizer.exp_avg", "bf16"): "bf16 moments",
}


_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
)


def family_of(change: Change) -> Hashable:
    """Return a key that layouts share if they differ only in virtual stages and memory savings."""
    sizes = [whole(change.args, name) or 1 for name in _SIZES]
    return (*sizes, bool(change.args.get("use_megatron_fsdp")), change.overrides.get("precision.recipe"))


@dataclass(frozen=True)
class Layout:
    """A layout with its prediction."""

    change: Change
    step: StepTime
    memory: MemoryEstimate

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides for `--set`."""
        return tuple(f"{key}={value}" for key, value in self.change.overrides.items())

    @property
    def family(self) -> Hashable:
        """A key that layouts share if they differ only in virtual stages and memory savings."""
        return family_of(self.change)

    @property
    def sizes(self) -> str:
        """A short description of the division, without sizes of 1."""
        args = self.change.args
        pp = whole(args, "pipeline_model_parallel_size") or 1
        sizes = {
            "TP": whole(args, "tensor_model_parallel_size"),
            "PP": pp,
            "VP": virtual_stages(args, pp),
            "CP": whole(args, "context_parallel_size"),
            "EP": whole(args, "expert_model_parallel_size"),
        }
        words = [f"{name} {size}" for name, size in sizes.items() if size and size > 1]
        if args.get("use_megatron_fsdp"):
            words.append("FSDP")
        words.append(f"micro batch {whole(args, 'micro_batch_size')}")
        words += filter(None, [_lighter_end(args, pp)])
        return ", ".join(words)

    @property
    def short(self) -> str:
        """A short description of the layout: its division, memory savings and execution."""
        args, keys = self.change.args, self.change.overrides
        words = [self.sizes]
        if args.get("recompute_granularity") == "selective":
            words.append(f"recompute {'+'.join(args['recompute_modules'])}")
        elif args.get("recompute_granularity") == "full":
            words.append(_recomputed_layers(args))
        if offloaded := offloaded_layers(args):
            words.append(f"offload {offloaded} of {layer_count(args)} layers")
        if keys.get("megatron.moe_flex_dispatcher_backend") == "hybridep":
            words.append("HybridEP")
        if "megatron.cuda_graph_impl" in keys:
            words.append(_graphs(args))
        if "precision.recipe" in keys:
            words.append(keys["precision.recipe"])
        words += [name for (key, value), name in _SHORT.items() if keys.get(key) == value]
        return ", ".join(words)


def _recomputed_layers(args: Arguments) -> str:
    if args.get("recompute_method") != "block":
        return "recompute all"
    layers = whole(args, "recompute_num_layers") or 1
    if (whole(args, "pipeline_model_parallel_size") or 1) == 1:
        return f"recompute {layers} of {layer_count(args)} layers"
    # Megatron applies `recompute_num_layers` to each virtual stage.
    return f"recompute {counted(layers, 'layer')} a stage"


def _graphs(args: Arguments) -> str:
    if args.get("cuda_graph_impl") in LAYER_GRAPHS:
        return "layer graphs"
    return "no graphs"


def _lighter_end(args: Arguments, pp: int) -> str:
    """Return the layers of the last stage if a layout string gives it fewer than the others, else nothing."""
    pieces = parse_layout(str(args.get("pipeline_model_parallel_layout") or "")) or ()
    stages = ["".join(pieces[rank::pp]).count("t") for rank in range(pp)]
    if not pieces or stages[-1] >= max(stages):
        return ""
    return f"last stage {counted(stages[-1], 'layer')}"


@dataclass(frozen=True)
class Search:
    """The result of a search.

    `layouts` fit, best first. `misses` do not fit even with all memory savings, nearest first. `legal` is the number of
    legal divisions.
    """

    layouts: tuple[Layout, ...]
    misses: tuple[Layout, ...]
    legal: int
