"""Record what one rank computes: losses, gradient norms, batches, and what each tensor adds to the gradient norm.

Nothing of Megatron's training is replaced. Its functions are wrapped to note what they return, at full precision: the
log has seven digits, and its second line after a start is a mean of two iterations.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from fp8launch.plugins.prove import repairs, sharded, te_layers
from fp8launch.plugins.prove.settings import CPU

# Position of the gradient norm in what Megatron's `train_step` returns (0.17 to 0.19).
_GRAD_NORM = 5
# Spread of what is added to initial weights. Norms start at one and biases at zero, where some errors do not show.
_NOISE = 0.02
# Tokens of a document, at most, if the recipe treats the ends of documents.
_LONGEST_DOCUMENT = 24
_SETTING = re.compile(r"\bconfig\.([a-z_0-9]+)")


def install(wanted: dict[str, Any], device: str) -> dict[str, Any]:
    """Wrap Megatron's functions and return the dictionary that they fill. `device` is cpu or cuda.

    wanted   `like_te`: see `te_layers`
             `noise` (a seed, or None): make the initial weights of this run random everywhere
             `epsilon` (a seed, or None): change every weight by one machine epsilon, up or down
             `members`: measure the gradient norm with all gradients but one tensor's set to zero, tensor by tensor
             `kinds`: note the classes of the modules that hold each tensor, whose source `settings_read` reads
             `save_loaded`: save what was loaded and stop
             `start`: the checkpoint that a model of Megatron-FSDP starts from, whose end is saved as whole tensors
             `unused_weights`: keep weights that nothing reads, with which Megatron cannot save some models
    """
    lists = ("losses", "norms", "batches", "random", "rates", "microbatches")
    record: dict[str, Any] = {**{name: [] for name in lists}, "members": {}}
    training: Any = importlib.import_module("megatron.training.training")
    if device == CPU:
        te_layers.install(wanted["like_te"])
        repairs.save_empty_optimizers()
        repairs.exchange_uneven_parts()
    if not wanted.get("unused_weights"):
        repairs.leave_out_unused_output_weights()
    _record_steps(training, record)
    _record_batches(record)
    _shorten_data()
    _let_loaders_draw_nothing()
    sharded.install(device, wanted.get("start"))
    _save_whole_at_the_end(training, wanted, record)
    _change_start(training, wanted, record)
    return record


def _record_steps(training: Any, record: dict[str, Any]) -> None:
    train_step = training.train_step
    calculator: Any = importlib.import_module("megatron.core.num_microbatches_calculator")

    @functools.wraps(train_step)
    def recorded(*arguments: Any, **named: Any) -> Any:
        optimizer = inspect.signature(train_step).bind(*arguments, **named).arguments["optimizer"]
        record["microbatches"].append(calculator.get_num_microbatches())
        record["rates"].append([group["lr"] for group in optimizer.param_groups])
        result = train_step(*arguments, **named)
        record["losses"].append({name: float(value) for name, value in result[0].items()})
        norm = result[_GRAD_NORM]
        record["norms"].append(None if norm is None else float(norm))
        record["random"].append(_random_states())
        return result

    training.train_step = recorded


def _random_states() -> dict[str, str]:
    """Return a digest of the state of each stream of random numbers of this rank, by the name of the stream."""
    tracker = importlib.import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    states = {"cpu": torch.get_rng_state(), **tracker.get_states()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    digests = {}
    for name, state in states.items():
        # Transformer Engine's tracker holds generators.
        values = state.get_state() if isinstance(state, torch.Generator) else state
        digests[name] = hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()[:16]
    return digests


def _record_batches(record: dict[str, Any]) -> None:
    """Note a digest of every micro batch that this rank embeds."""
    gpt_data: Any = importlib.import_module("fp8launch.injob.rank.gpt_data")
    batch_for_this_rank = gpt_data.batch_for_this_rank

    def recorded(*arguments: Any, **named: Any) -> Any:
        batch = batch_for_this_rank(*arguments, **named)
        tokens = batch.get("tokens")
        if tokens is not None:
            record["batches"].append(hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:16])
        return batch

    gpt_data.batch_for_this_rank = recorded


def _shorten_data() -> None:
    """Let documents end within a sequence if the recipe treats their ends, and epochs of shuffled data in a course."""
    gpt_data: Any = importlib.import_module("fp8launch.injob.rank.gpt_data")
    gpt_dataset: Any = importlib.import_module("megatron.core.datasets.gpt_dataset")
    args_of = importlib.import_module("megatron.training").get_args
    datasets = gpt_data.datasets

    @functools.wraps(datasets)
    def shortened(*arguments: Any, **named: Any) -> Any:
        args = args_of()
        if args.eod_mask_loss or args.reset_attention_mask or args.reset_position_ids:
            gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = _LONGEST_DOCUMENT
        train, valid, test = datasets(*arguments, **named)
        if args.dataloader_type == "cyclic" and train is not None:
            # The second iteration begins a new epoch, whose number of samples no number of ranks divides.
            train = torch.utils.data.Subset(train, range(args.global_batch_size + 1))
        return train, valid, test

    gpt_data.datasets = shortened


def _let_loaders_draw_nothing() -> None:
    """Keep data loaders from drawing the CPU's random numbers, which a model on a CPU would share with them.

    Each iterator of a loader draws a seed for its processes, and a resumed run creates one more iterator.
    """
    loader = torch.utils.data.DataLoader
    make_iterator = loader.__iter__

    @functools.wraps(make_iterator)
    def iterator(self: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return make_iterator(self)

    loader.__iter__ = iterator


def _change_start(training: Any, wanted: dict[str, Any], record: dict[str, Any]) -> None:
    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def changed(*arguments: Any, **named: Any) -> Any:
        model, optimizer, scheduler = setup(*arguments, **named)
        if wanted.get("noise") is not None:
            _add(model, optimizer, wanted["noise"], lambda weight, noise: _NOISE * noise)
        if wanted.get("epsilon") is not None:
            seed = wanted["epsilon"]
            _add(model, optimizer, seed, lambda weight, noise: torch.finfo(weight.dtype).eps * weight * noise.sign())
        if wanted.get("kinds"):
            record["kinds"] = _kinds(model)
        if wanted.get("members"):
            _measure_members(model, optimizer, record["members"])
        if wanted.get("save_loaded"):
            _save_and_stop(training, model, optimizer, scheduler)
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = changed


def _add(model: Any, optimizer: Any, seed: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Change every weight. Only for one rank: the random numbers depend on the order of the tensors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for chunk in model:
            for weight in chunk.parameters():
                noise = torch.randn(weight.shape, generator=generator).to(weight.device)
                weight.add_(change(weight, noise).to(weight.dtype))
    optimizer.reload_model_params()


def _save_whole_at_the_end(training: Any, wanted: dict[str, Any], record: dict[str, Any]) -> None:
    """Save the last checkpoint in the format in which every tensor is whole.

    The usual format of the distributed optimizer holds buckets, whose padding is never set. A checkpoint holds one copy
    of each tensor, so what this rank has is noted as well.
    """
    save_checkpoint = training.save_checkpoint

    @functools.wraps(save_checkpoint)
    def save(iteration: int, model: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        args = training.get_args()
        if iteration != args.train_iters:
            return save_checkpoint(iteration, model, optimizer, *arguments, **named)
        stated = args.dist_ckpt_optim_fully_reshardable
        args.dist_ckpt_optim_fully_reshardable = args.use_distributed_optimizer
        try:
            if wanted.get("start"):
                sharded.save(model[0], optimizer, Path(args.save, f"iter_{iteration:07d}"))
            else:
                with _whole_buckets():
                    save_checkpoint(iteration, model, optimizer, *arguments, **named)
            record["weights"] = _summaries(model)
        finally:
            args.dist_ckpt_optim_fully_reshardable = stated

    training.save_checkpoint = save


def _unwrapped(model: Any) -> Any:
    return importlib.import_module("megatron.core.utils").unwrap_model(model)


def _summaries(model: Any) -> dict[str, list[float]]:
    """Return the norm and the sum of every part of a weight on this rank, by its name and its place in the tensor."""
    nested_values = importlib.import_module("megatron.core.dist_checkpointing.dict_utils").nested_values
    mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    if sharded.is_sharded(model[0]):
        states = [sharded.whole_weights(model[0])]
    else:
        states = [chunk.sharded_state_dict() for chunk in _unwrapped(model)]
    found = {}
    for state in states:
        mapping.apply_factories(state)
        for entry in nested_values(state):
            if isinstance(entry, mapping.ShardedTensor) and entry.data.is_floating_point():
                data = entry.data.detach().double()
                found[f"{entry.key} {entry.global_offset}"] = [float(data.norm()), float(data.sum())]
    return found


@contextmanager
def _whole_buckets() -> Iterator[None]:
    """Let Megatron save the states of parameters that are behind the padding of a bucket.

    Its fully reshardable format gathers them without the padding, and reads them at offsets with it (0.17 to 0.19,
    Megatron-LM pull request 5077). A recipe that uses the format meets this in its own checkpoints, see `resuming`.
    """
    optimizer: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    gathered = optimizer.get_parameter_state_dp_zero

    def padded(self: Any, *arguments: Any, **named: Any) -> Any:
        state = gathered(self, *arguments, **named)
        for number, buffer in enumerate(self.buffers):
            for tensors in (state or {}).get(number, {}).values():
                for key, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        tensors[key] = _with_padding(tensor, buffer.buckets)
        return state

    optimizer.get_parameter_state_dp_zero = padded
    try:
        yield
    finally:
        optimizer.get_parameter_state_dp_zero = gathered


def _with_padding(tensor: torch.Tensor, buckets: Any) -> torch.Tensor:
    parts = []
    for part, bucket in zip(tensor.split([bucket.numel_unpadded for bucket in buckets]), buckets, strict=True):
        parts.append(torch.nn.functional.pad(part, (0, bucket.grad_data.numel() - bucket.numel_unpadded)))
    return torch.cat(parts)


def _save_and_stop(training: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
    args = training.get_args()
    named: dict[str, Any] = {"checkpointing_context": {}}
    named["preprocess_common_state_dict_fn"] = training.preprocess_common_state_dict
    args.async_save = False
    training.save_checkpoint(args.iteration, model, optimizer, scheduler, 0, **named)
    args.train_iters = args.iteration


# --- Membership in the gradient norm --------------------------------------------------------------------------------


def _measure_members(model: Any, optimizer: Any, found: dict[str, float]) -> None:
    """Before the first step, measure the gradient norm of each tensor alone, as the optimizer computes it."""
    step = optimizer.step

    def measured() -> Any:
        optimizer.step = step
        found.update(_members(model, optimizer))
        return step()

    optimizer.step = measured


def _members(model: Any, optimizer: Any) -> dict[str, float]:
    gradients: dict[str, list[torch.Tensor]] = {}
    for key, weight in _named_weights(model):
        gradients.setdefault(key, []).append(_gradient(weight))
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, sorted(gradients))
    every = [gradient for several in gradients.values() for gradient in several]
    kept = [gradient.clone() for gradient in every]
    norms = {}
    with torch.no_grad():
        # All ranks go through the same tensors, because the norm is a collective.
        for key in sorted({key for keys in everywhere for key in keys}):
            for gradient, value in zip(every, kept, strict=True):
                gradient.zero_()
                if any(gradient is one for one in gradients.get(key, ())):
                    gradient.copy_(value)
            optimizer.prepare_grads()
            norms[key] = float(optimizer.get_grad_norm())
        for gradient, value in zip(every, kept, strict=True):
            gradient.copy_(value)
    return norms


def _gradient(weight: Any) -> torch.Tensor:
    """Return what the optimizer reads as the gradient of a weight, or of the part of it that this rank has."""
    if not hasattr(weight, "orig_param"):
        gradient: torch.Tensor = weight.main_grad
        return gradient
    # Without a part of the weight there is no gradient.
    return torch.empty(0) if weight.grad is None else weight.grad._local_tensor


def _named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield every trained weight of this rank with its name in a checkpoint, which no layout changes."""
    if sharded.is_sharded(model[0]):
        yield from sharded.named_weights(model[0])
        return
    for chunk in _unwrapped(model):
        entries = sharded.entries_of(chunk)
        for name, weight in chunk.named_parameters():
            if weight.requires_grad:
                yield entries[name].key if entries[name] else name, weight


# --- The settings that concern a tensor -----------------------------------------------------------------------------


def _kinds(model: Any) -> dict[str, list[str]]:
    """Return for each tensor the class of its module and the class of the module around it, as `module:name`."""
    found: dict[str, list[str]] = {}
    keys = {id(weight): key for key, weight in _named_weights(model)}
    for chunk in model:
        modules = dict(chunk.named_modules())
        for name, module in modules.items():
            around = modules.get(name.rpartition(".")[0], module)
            for weight in module.parameters(recurse=False):
                if id(weight) in keys:
                    classes = dict.fromkeys([_name_of(type(module)), _name_of(type(around))])
                    found.setdefault(keys[id(weight)], list(classes))
    return found


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def settings_read(kind: str) -> list[str]:
    """Return the attributes of the configuration that the source of a class and of its bases reads.

    `kind` is `module:name`. Reading source is slow, so no training does it.
    """
    module, _, name = kind.partition(":")
    names: dict[str, None] = {}
    for base in attrgetter(name)(importlib.import_module(module)).__mro__:
        if base.__module__.startswith("megatron.core.") and base.__name__ != "MegatronModule":
            names |= dict.fromkeys(_SETTING.findall(inspect.getsource(base)))
    return list(names)
