"""One process of a conversion by Megatron-Bridge: `python convert.py -- DIRECTION OPTIONS...`

DIRECTION is `hf-to-megatron` (a Hugging Face model becomes a torch_dist checkpoint without optimizer state, iteration
0) or `megatron-to-hf`. Bridge's AutoBridge makes the model and moves the weights. What is written lies beside --out
under another name until it is whole. Started like worker.py, after the same preparation, with the same exit codes.

A conversion that would lose something without a word is refused: parameters that Bridge does not map, tensors that one
side lacks, and settings without a shape (RoPE's base, the norm's epsilon) that differ.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.rank import bridge, worker
from fp8launch.injob.supervisor import checkpoints

TO_MEGATRON, TO_HF = DIRECTIONS = ("hf-to-megatron", "megatron-to-hf")
_HUB = "megatron.bridge.models.conversion.auto_bridge"
_SAVE = "megatron.bridge.training.model_load_save"
_LOAD = "megatron.bridge.training.checkpointing"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Sizes and settings that must be the same on both sides: by TransformerConfig's name, and by Megatron-LM's argument.
_SETTINGS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "normalization": "normalization",
    "layernorm_epsilon": "norm_epsilon",
    "qk_layernorm": "qk_layernorm",
    "gated_linear_unit": "swiglu",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rope_scaling": "use_rope_scaling",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
}
_OF_EXPERTS = frozenset(("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"))
# Files of a Hugging Face model beside its weights and configuration.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.tiktoken", "chat_template*")
_COPIED = (*_TOKENIZER, "config.json", "generation_config.json", "*.py")
# Hugging Face tensors that follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The direction and its options."""
    parser = argparse.ArgumentParser(prog="convert.py", allow_abbrev=False)
    parser.add_argument("direction", choices=DIRECTIONS)
    parser.add_argument("--model", required=True, help="folder or name on the hub")
    parser.add_argument("--checkpoint", type=Path, help="folder of one iteration, for megatron-to-hf")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=sorted(_DTYPES))
    parser.add_argument("--fingerprint", default="", help="kept in the record")
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    # torchrun's own parser takes the separator away.
    return parser.parse_args([word for word in words if word != "--"])


# --- The model ------------------------------------------------------------------------------------------------------


def open_model(name: str, with_weights: bool) -> Any:
    """AutoBridge for a Hugging Face model. Stops where it cannot be read or Bridge does not support it."""
    auto: Any = importlib.import_module(_HUB).AutoBridge
    transformers: Any = importlib.import_module("transformers")
    try:
        if with_weights:
            return auto.from_hf_pretrained(name)
        return auto.from_hf_config(transformers.AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as failure:
        reason = (str(failure).strip().splitlines() or [repr(failure)])[0]
        advice = "" if Path(name).is_dir() else "; name a local folder, or export HF_TOKEN before `fp8launch convert`"
        worker.stop(worker.MACHINE_LACKS if advice else worker.WRONG_REQUEST, f"{name}: {reason}{advice}")


def has_weights(model: str) -> bool:
    """Whether a model has weights to read: a folder with safetensors, or a name on the hub."""
    folder = Path(model)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def dtype_of(source: Any, stated: str | None) -> Any:
    """The type of the converted weights: the stated one, else the model's own, else bfloat16."""
    import torch

    if stated is not None:
        return getattr(torch, _DTYPES[stated])
    config = getattr(source.hf_pretrained, "config", source.hf_pretrained)
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    own = getattr(torch, own) if isinstance(own, str) else own
    return own if own in [getattr(torch, name) for name in _DTYPES.values()] else torch.bfloat16


def provider_of(source: Any, ours: argparse.Namespace, dtype: Any, load: bool) -> Any:
    """Bridge's configuration of the model, divided as asked."""
    import torch

    provider = source.to_megatron_provider(load_weights=load)
    provider.tensor_model_parallel_size = ours.tp
    provider.pipeline_model_parallel_size = ours.pp
    provider.expert_model_parallel_size = ours.ep
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = ours.tp > 1 and bool(getattr(provider, "num_moe_experts", None))
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    return provider


@contextlib.contextmanager
def without_gpu(provider: Any) -> Iterator[None]:
    """Build layers of torch's own modules meanwhile; afterwards the configuration is Bridge's again, for the record."""
    default: Any = importlib.import_module(bridge.PROVIDER).default_layer_spec
    if getattr(provider, "transformer_layer_spec", None) is not default:
        worker.stop(
            worker.MACHINE_LACKS,
            f"{type(provider).__name__} has layers of its own, which need Transformer Engine: convert on a GPU",
        )
    names = ("transformer_layer_spec", *bridge.ON_CPU)
    before = {name: getattr(provider, name) for name in names if hasattr(provider, name)}
    bridge.local_layers(provider)
    provider.sequence_parallel = False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(provider, name, value)


def build(provider: Any, device: str) -> list[Any]:
    """The model's parts on this rank, with the weights that the provider loads."""
    import torch

    # Bridge sends weights between GPUs by NCCL, from memory of the GPU: its mappings allocate what they receive there.
    on_host = device == "cpu"
    backend = "gloo" if on_host else "cpu:gloo,cuda:nccl"
    if not on_host:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=on_host)
    return model if isinstance(model, list) else [model]


# --- What must not be lost ------------------------------------------------------------------------------------------


def refuse_unmapped(source: Any, model: Sequence[Any]) -> set[str]:
    """Stop where a parameter of Megatron's model has no tensor of Hugging Face's; return the tensors that are used."""
    core: Any = importlib.import_module("megatron.core.utils")
    tasks = source._model_bridge.build_conversion_tasks(source.hf_pretrained, core.unwrap_model(list(model)))
    here = {task.global_param_name for task in tasks if task is not None and task.megatron_module is not None}
    everywhere: set[str] = set().union(*_of_all_ranks(here))
    lost = sum(task is None for task in tasks)
    names = sorted({task.global_param_name for task in tasks if task is not None} - everywhere)
    if lost or names:
        shown = f": {', '.join(names[:3])}" if names else ""
        worker.stop(
            worker.WRONG_REQUEST,
            f"{lost + len(names)} parameters of Megatron's model have no tensor in the Hugging Face model{shown}",
        )
    used: set[str] = set()
    for task in tasks:
        stated = task.mapping.hf_param
        used.update([stated] if isinstance(stated, str) else stated.values())
    return used


def unused_tensors(source: Any, used: set[str]) -> list[str]:
    """Tensors of the Hugging Face model that become no parameter of Megatron's."""
    config = source.hf_pretrained.config
    tied = bool(getattr(config, "tie_word_embeddings", False))
    found = []
    for name in sorted(source.hf_pretrained.state.keys()):
        if name not in used and not name.endswith(_DERIVED) and not (tied and name == "lm_head.weight"):
            found.append(name)
    return found


def refuse_other_tensors(checkpoint: Path, model: Sequence[Any], provider: Any) -> None:
    """Stop where the checkpoint has tensors that the model lacks: they would be dropped without a word."""
    dist: Any = importlib.import_module("megatron.core.dist_checkpointing")
    mapping: Any = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    utils: Any = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    core: Any = importlib.import_module("megatron.core.utils")
    stored = dist.load_tensors_metadata(str(checkpoint))
    mine: set[str] = set()
    for part in core.unwrap_model(list(model)):
        mine.update(
            each.key
            for each in utils.nested_values(part.sharded_state_dict())
            if isinstance(each, (mapping.ShardedTensor, mapping.ShardedTensorFactory))
        )
    mine = set().union(*_of_all_ranks(mine))
    others = [
        name
        for name in sorted(stored)
        if not name.startswith(("optimizer.", "chained_")) and "_extra_state" not in name
    ]
    left = [name for name in others if name not in mine]
    if left:
        worker.stop(
            worker.WRONG_REQUEST,
            f"{checkpoint} has {len(left)} tensors that the Hugging Face model lacks, such as {', '.join(left[:3])}; "
            "name the model that the run trained with --model",
        )
    rows = next(
        (each.global_shape[0] for name, each in stored.items() if name.endswith("word_embeddings.weight")), None
    )
    if rows is not None and rows < provider.vocab_size:
        worker.stop(
            worker.WRONG_REQUEST,
            f"{checkpoint} has {rows} token embeddings, the Hugging Face model {provider.vocab_size}; "
            "name the model that the run trained with --model",
        )


def settings_of(provider: Any) -> dict[str, Any]:
    """What a run must state of the model, by the names of Megatron-LM's arguments."""
    found = {}
    for name, argument in _SETTINGS.items():
        value = getattr(provider, name, None)
        if value is not None and (name not in _OF_EXPERTS or getattr(provider, "num_moe_experts", None)):
            found[argument] = value
    found["untie_embeddings_and_output_weights"] = not getattr(provider, "share_embeddings_and_output_weights", False)
    return found


def recorded_settings(checkpoint: Path) -> Mapping[str, Any]:
    """The same of a checkpoint, from Megatron-LM's arguments or from Bridge's configuration in it."""
    run_config = checkpoint / "run_config.yaml"
    if run_config.is_file():
        load: Any = importlib.import_module(_LOAD)
        stated = load.read_run_config(str(run_config)).get("model", {})
        found = {argument: stated.get(name) for name, argument in _SETTINGS.items()}
        if "share_embeddings_and_output_weights" in stated:
            found["untie_embeddings_and_output_weights"] = not stated["share_embeddings_and_output_weights"]
        return found
    dist: Any = importlib.import_module("megatron.core.dist_checkpointing")
    args = dist.load_common_state_dict(str(checkpoint)).get("args")
    if args is None:
        return {}
    found = {argument: getattr(args, argument, None) for argument in _SETTINGS.values()}
    found["untie_embeddings_and_output_weights"] = getattr(args, "untie_embeddings_and_output_weights", None)
    if not getattr(args, "group_query_attention", True):
        found["num_query_groups"] = found["num_attention_heads"]
    return found


def differences(model: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """Settings that both state, and differently."""
    found = []
    for name, wanted in model.items():
        there = checkpoint.get(name)
        if there is not None and there != wanted:
            found.append(f"{name} is {there} in the checkpoint and {wanted} in the model")
    return found


# --- The two directions ---------------------------------------------------------------------------------------------


def to_megatron(source: Any, model: list[Any], folder: Path, model_name: str) -> dict[str, Any]:
    """Write the weights as a checkpoint of iteration 0, with Bridge's configuration; return what the record adds."""
    unused = unused_tensors(source, refuse_unmapped(source, model))
    if unused and _rank() == 0:
        print(
            f"fp8launch: warning: {len(unused)} tensors of {model_name} are not a part of Megatron's model: "
            f"{', '.join(unused[:3])}",
            file=sys.stderr,
        )
    place = Path(model_name)
    tokenizer = not place.is_dir() or any(next(place.glob(pattern), None) for pattern in _TOKENIZER)
    save: Any = importlib.import_module(_SAVE)
    save.save_megatron_model(
        model, str(folder), hf_tokenizer_path=model_name if tokenizer else None, low_memory_save=True
    )
    return {"unused": unused}


def to_hf(source: Any, model: list[Any], checkpoint: Path, folder: Path, model_name: str, provider: Any) -> None:
    """Load a checkpoint into the model, and write it as Hugging Face does."""
    different = differences(settings_of(provider), recorded_settings(checkpoint))
    if different:
        worker.stop(worker.WRONG_REQUEST, f"{checkpoint} is not of this model: {'; '.join(different)}")
    refuse_other_tensors(checkpoint, model, provider)
    load: Any = importlib.import_module(_LOAD)
    load._load_model_weights_from_checkpoint(str(checkpoint), model)
    place = Path(model_name)
    if not place.is_dir():
        source.save_hf_pretrained(model, str(folder), show_progress=False)
        return
    # Bridge would load the tokenizer and save it again, which fails without one, or changes its files.
    if _rank() == 0:
        for file in {file for pattern in _COPIED for file in place.glob(pattern) if file.is_file()}:
            shutil.copyfile(str(file), str(folder / file.name))
    _wait()
    source.save_hf_weights(model, str(folder), show_progress=False)


def state_dtype(config: Path, dtype: Any) -> None:
    """Write the type of the weights into a model's config.json, where transformers looks for it."""
    stated = json.loads(config.read_text())
    key = "torch_dtype" if "torch_dtype" in stated else "dtype"
    stated[key] = str(dtype).rpartition(".")[2]
    config.write_text(json.dumps(stated, indent=2) + "\n")


# --- The output, whole or not at all --------------------------------------------------------------------------------


def unfinished(out: Path) -> Path:
    """Where this job writes until the output is whole; another job writes elsewhere."""
    job = os.environ.get("SLURM_JOB_ID") or f"{os.uname().nodename}-{os.environ['MASTER_PORT']}"
    return out.with_name(f".{out.name}.{job}.unfinished")


def begin_output(out: Path) -> Path:
    """Make the folder to write to. Stops where the output exists."""
    folder = unfinished(out)
    if _rank() == 0:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            worker.stop(worker.WRONG_REQUEST, f"{out} exists and is not empty")
        shutil.rmtree(str(folder), ignore_errors=True)  # of an earlier start of the same job
        folder.mkdir(parents=True)
    _wait()
    return folder


def finish_output(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    """Write the record, then give the output its name."""
    _wait()
    if _rank() == 0:
        with (folder / checkpoints.CONVERSION_RECORD).open("w") as file:
            json.dump(dict(record), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        try:
            folder.rename(out)  # fails on a folder that is not empty
        except OSError as failure:
            worker.stop(1, f"{out} cannot be given to the result, which stays in {folder}: {failure.strerror}")
        print(f"fp8launch: wrote {out}", flush=True)
    _wait()


def _rank() -> int:
    return int(os.environ["RANK"])


def _wait() -> None:
    import torch

    torch.distributed.barrier()


def _of_all_ranks(value: Any) -> list[Any]:
    import torch

    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def convert(ours: argparse.Namespace, device: str) -> None:
    """Convert, and write the output."""
    importing = ours.direction == TO_MEGATRON
    source = open_model(ours.model, importing or has_weights(ours.model))
    dtype = dtype_of(source, ours.dtype)
    provider = provider_of(source, ours, dtype, importing)
    with without_gpu(provider) if device == "cpu" else contextlib.nullcontext():
        model = build(provider, device)
    folder = begin_output(ours.out)
    record: dict[str, Any] = {
        "format": 1,
        "direction": ours.direction,
        "model": ours.model,
        "dtype": str(dtype).rpartition(".")[2],
        "fingerprint": ours.fingerprint,
        "settings": settings_of(provider),
    }
    if importing:
        record |= to_megatron(source, model, folder, ours.model)
        problem = checkpoints.torn(checkpoints.place(folder, 0)) if _rank() == 0 else None
        if problem is not None:
            worker.stop(1, f"the checkpoint that Megatron-Bridge wrote is not whole: it {problem}")
    else:
        record["checkpoint"] = str(ours.checkpoint)
        to_hf(source, model, ours.checkpoint, folder, ours.model, provider)
        if _rank() == 0:
            state_dtype(folder / "config.json", dtype)
    finish_output(folder, ours.out, record)


def main() -> None:
    ours = arguments(sys.argv[1:])
    device = worker.begin()
    bridge.check_bridge("")
    if device == "cuda":
        worker.check_gpu()
    worker.announce()
    worker.prepare(device)
    bridge.import_modules((_HUB, _SAVE, _LOAD))
    worker.run_to_the_end(lambda: convert(ours, device))


if __name__ == "__main__":
    main()
