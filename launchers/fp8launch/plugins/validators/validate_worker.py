"""Run Megatron's own validators for a described machine: JSON requests on stdin, JSON verdicts on stdout, one a line.

    python -I validate_worker.py SITE [--real-torch]

SITE is a folder (or wheel) that holds the `megatron` package. `validators.py` starts this file by its path, in an
isolated interpreter, so that no torch, Megatron checkout or PYTHONPATH of the login node takes part. Of fp8launch it
imports only the stand-ins in its folder, and runs on Python 3.10 and later. With `--real-torch` only triton is
replaced; the test suite compares the verdicts.

The request describes the machine that the validators see: world size and environment, the compute capability of the
GPU, and the version of Transformer Engine with the functions that they look for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import io
import json
import linecache
import logging
import os
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = Any
# The first line of the answers. Megatron is then imported, so only a request can end the process from here on.
READY = "ready"

# pretrain_gpt.py hands these to Megatron; they fill in for flags that are not given.
ARGS_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
# Packages that a validator tries to import. The job may have them although the login node does not.
JOB_PACKAGES = {
    "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager": "LocalCheckpointManager",
    "torch_memory_saver": "torch_memory_saver",
}
# Kernels of Transformer Engine that `--apply-rope-fusion` needs.
ROTARY_EMBEDDING = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
# What `--moe-permute-fusion` looks for among the kernels of Transformer Engine 2.1 and newer.
PERMUTATION = (
    "fused_permute", "fused_permute_with_probs", "fused_unpermute",
    "fused_sort_chunks_by_index", "fused_sort_chunks_by_index_with_probs",
)  # fmt: skip


# Parts of Megatron that build models, train and serve them, move their weights and divide them, and event loops.
# Arguments and configurations import them without using them, which takes a third of the time. If a value of theirs
# took part in a verdict, the verdict would name it.
UNASKED = (
    "asyncio",
    "megatron.core.dist_checkpointing.mapping",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.distributed.fsdp",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "megatron.core.fp8_utils",
    "megatron.core.inference",
    "megatron.core.models.common.embeddings",
    "megatron.core.models.gpt",
    "megatron.core.optimizer.cpu_offloading",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.layer_wise_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.resharding",
    "megatron.core.tensor_parallel.data",
    "megatron.core.tensor_parallel.inference_layers",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.cuda_graphs",
    "megatron.core.transformer.experimental_attention_variant",
    "megatron.core.transformer.mlp",
    "megatron.core.transformer.moe",
    "megatron.core.transformer.multi_token_prediction",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.transformer_layer",
    "megatron.training.activation_logging",
    "megatron.training.async_utils",
    "megatron.training.dgrad_logging",
    "megatron.training.ft_integration",
    "megatron.training.inprocess_restart",
)


class Megatron:
    """The imported Megatron, and its checks in the order in which a run meets them."""

    def __init__(self, stubs: Any) -> None:
        self.stubs = stubs
        self.torch: Any = importlib.import_module("torch")
        self.utils: Any = importlib.import_module("megatron.core.utils")
        self.rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
        self.moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        self.arguments: Any = importlib.import_module("megatron.training.arguments")
        self.training: Any = importlib.import_module("megatron.training.training")
        self.distributed: Any = importlib.import_module("megatron.core.distributed")
        self.microbatches: Any = importlib.import_module("megatron.core.num_microbatches_calculator")
        self.version: Any = importlib.import_module("packaging.version")
        factory: Any = getattr(
            importlib.import_module("megatron.training.argument_utils"), "ArgumentGroupFactory", None
        )
        if hasattr(factory, "_get_field_docstrings"):
            # Building the parser spends nine tenths of its time on help texts, which it digs out of the source.
            factory._get_field_docstrings = lambda self, config: {}

    def stages(self, argv: list[str], made: dict[str, Any]) -> Iterator[tuple[str, Callable[[], None]]]:
        """Name and action of each stage; what they make lands in `made`: args, config, ddp and optimizer."""

        def parse() -> None:
            sys.argv = ["pretrain_gpt.py", *argv]
            made["args"] = self.arguments.parse_args()

        def validate() -> None:
            # Megatron complains about unused defaults, so pass only the ones that apply.
            unset = {name: value for name, value in ARGS_DEFAULTS.items() if getattr(made["args"], name) is None}
            self.arguments.validate_args(made["args"], unset)

        def transformer_config() -> None:
            # As injob/rank/pretrain.py does; Megatron builds its config from whatever attribute bears a field's name.
            for name, value in json.loads(os.environ.get("FP8LAUNCH_CONFIG") or "{}").items():
                setattr(made["args"], name, value)
            made["config"] = self.arguments.core_transformer_config_from_args(made["args"])

        def ddp_config() -> None:
            made["ddp"] = self._ddp_config(made["args"])

        def optimizer_config() -> None:
            # Since 0.18 it returns a pair; the second are overrides for parameters by name.
            config = self.training.get_megatron_optimizer_config(made["args"])
            made["optimizer"] = config[0] if isinstance(config, tuple) else config

        yield "parse_args", parse
        yield "validate_args", validate
        yield "TransformerConfig", transformer_config
        yield "DistributedDataParallelConfig", ddp_config
        yield "OptimizerConfig", optimizer_config
        yield "num_microbatches", lambda: self._num_microbatches(made["args"])

    def _ddp_config(self, args: Any) -> Any:
        if hasattr(self.training, "get_megatron_ddp_config"):
            return self.training.get_megatron_ddp_config(args)
        # 0.17 builds it in the middle of building the model; its arguments are these.
        if args.ddp_num_buckets is not None and args.ddp_bucket_size is not None:
            raise AssertionError("Cannot specify both --ddp-num-buckets and --ddp-bucket-size")
        if getattr(args, "use_torch_fsdp2", False):
            return None
        cls = self.distributed.DistributedDataParallelConfig
        values = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)}
        prefixed = ((f.name, f"ddp_{f.name}") for f in dataclasses.fields(cls))
        values |= {name: getattr(args, flag) for name, flag in prefixed if hasattr(args, flag)}
        values["grad_reduce_in_fp32"] = args.accumulate_allreduce_grads_in_fp32
        values["check_for_nan_in_grad"] = args.check_for_nan_in_loss_and_grad
        return cls(**values)

    def _num_microbatches(self, args: Any) -> None:
        build = self.microbatches._build_num_microbatches_calculator
        # Tensor parallel groups of generalized tensor parallelism (0.19) count as data parallel here.
        data_parallel = args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
        given = {"rank": 1, "data_parallel_size": data_parallel}
        build(**{name: given.get(name, getattr(args, name, None)) for name in inspect.signature(build).parameters})

    @contextlib.contextmanager
    def target(self, request: dict[str, Json]) -> Iterator[None]:
        """Let Megatron see the machine that the request describes; everything is put back afterwards."""
        major, minor = request["compute_capability"]
        te_version = request["te_version"]
        # As small as the validators need it: OptimizerConfig looks at the signature of TE's optimizer.
        modules = _transformer_engine(te_version) if te_version else {}
        modules |= _job_packages()
        properties = types.SimpleNamespace(major=major, minor=minor)
        cuda = self.torch.cuda
        has_permutation = te_version and self.version.Version(te_version) >= self.version.Version("2.1")
        fused = [(self.rope, name, _unreachable if te_version else None) for name in ROTARY_EMBEDDING]
        fused += [(self.moe, name, _unreachable if has_permutation else None) for name in PERMUTATION]
        # Each rank's own variables are set last, as at its start; the check refuses a recipe that sets them.
        environment = {**request["env"], "WORLD_SIZE": str(request["world_size"]), "RANK": "0", "LOCAL_RANK": "0"}
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (cuda, "get_device_capability", lambda *args, **kwargs: (major, minor)),
                (cuda, "get_device_properties", lambda *args, **kwargs: properties),
                (self.utils, "_te_version", self.version.Version(te_version) if te_version else None),
                (sys, "argv", sys.argv),
                *fused,
            ):
                stack.enter_context(_patched(owner, name, value))
            stack.enter_context(_replaced(sys.modules, modules))
            stack.enter_context(_replaced(os.environ, environment, only=True))
            yield


def _transformer_engine(version: str) -> dict[str, types.ModuleType]:
    class FusedAdam:
        def __init__(
            self, params: Any = None, lr: float = 1e-3, master_weights: bool = False, master_weight_dtype: Any = None,
            exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None, use_decoupled_grad: bool = False,
            store_param_remainders: bool = False,
        ) -> None: ...  # fmt: skip

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[0]].__dict__["__version__"] = version
    modules[names[2]].__dict__["FusedAdam"] = FusedAdam
    return modules


def _job_packages() -> dict[str, types.ModuleType]:
    """JOB_PACKAGES with the packages above them."""
    modules: dict[str, types.ModuleType] = {}
    for name, member in JOB_PACKAGES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = types.ModuleType(".".join(parts[:depth]))
            module.__path__ = []
            modules[module.__name__] = module
        modules[name].__dict__[member] = type(member, (), {})
    return modules


def _unreachable(*args: object, **kwargs: object) -> None:
    raise AssertionError("a validator called a kernel of Transformer Engine")


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _replaced(mapping: Any, values: dict[str, Any], only: bool = False) -> Iterator[None]:
    """`values` in a mapping for a while, instead of everything else in it with `only`."""
    before = dict(mapping)
    if only:
        mapping.clear()
    mapping.update(values)
    try:
        yield
    finally:
        if only:
            mapping.clear()
        else:
            for name in values:
                del mapping[name]
        mapping.update(before)


class _Records(logging.Handler):
    """Collects what Megatron logs as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def verdict(megatron: Megatron, request: dict[str, Json]) -> dict[str, Json]:
    """Run the stages up to the first that refuses, or up to the one that the request names as its last."""
    begin = time.perf_counter()
    made: dict[str, Any] = {"args": None, "config": None}
    refusal: dict[str, Json] = {"exception": None, "message": None, "at": None}
    printed, complained, records = io.StringIO(), io.StringIO(), _Records()
    asked = megatron.stubs.asked
    asked.clear()
    logging.getLogger().addHandler(records)
    with (
        megatron.target(request),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(complained),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for stage, run in megatron.stages(request["argv"], made):
            try:
                run()
            except (Exception, SystemExit) as exception:
                refusal = _refusal(exception, complained.getvalue() or printed.getvalue())
                break
            if stage == request["last_stage"]:
                break
    logging.getLogger().removeHandler(records)
    lines = [line for line in printed.getvalue().splitlines() if "warning" in line.lower()]
    spoken = [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)]
    answer = {
        "ok": refusal["exception"] is None,
        "stage": stage,
        **refusal,
        "unanswered": sorted(set(asked)),
        "warnings": list(dict.fromkeys(" ".join(text.split()) for text in (*spoken, *records.messages, *lines))),
        "seconds": round(time.perf_counter() - begin, 4),
    }
    if request["with_args"]:
        answer["args"] = _plain_attributes(made["args"])
        answer["config"] = _plain_attributes(made["config"])
    return answer


_RAISED_BY_MEGATRON = (AssertionError, ValueError, RuntimeError, ImportError, SystemExit)


def _refusal(exception: BaseException, complained: str) -> dict[str, Json]:
    """Return the message: the parser's, the exception's, or for a bare assert the line that asserts.

    Exceptions that Megatron does not raise itself, such as a TypeError, mention only Python's types, so the failing
    statement, which names the arguments, is added.
    """
    frame = traceback.extract_tb(exception.__traceback__)[-1]
    at = f"{frame.filename[frame.filename.rfind('megatron/') :]}:{frame.lineno}"
    if frame.filename == __file__:
        at = "megatron/training/training.py"  # of 0.17, whose lines `_ddp_config` repeats
    message = str(exception) or frame.line or ""
    if not isinstance(exception, _RAISED_BY_MEGATRON) and frame.lineno is not None:
        end = getattr(frame, "end_lineno", None) or frame.lineno
        lines = [linecache.getline(frame.filename, number).strip() for number in range(frame.lineno, end + 1)]
        message = f"{type(exception).__name__}: {message}, in `{' '.join(lines)}`"
    if isinstance(exception, SystemExit):
        last = (complained.strip().splitlines() or [f"exit {exception.code}"])[-1]
        message, at = last.partition("error: ")[2] or last, ""
    return {"exception": type(exception).__name__, "message": " ".join(message.split()), "at": at or None}


def _plain_attributes(thing: Any) -> dict[str, Json]:
    """Return the attributes that JSON can hold; enums by name, dtypes as text."""
    if thing is None:
        return {}
    found = {}
    for name, value in vars(thing).items():
        plain = _plain(value)
        if plain is not _NOT_PLAIN:
            found[name] = plain
    return found


_NOT_PLAIN = object()


def _plain(value: Any) -> Json:
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        items = list(map(_plain, value))
        return _NOT_PLAIN if any(item is _NOT_PLAIN for item in items) else items
    return repr(value) if repr(value).startswith("torch.") else _NOT_PLAIN


class _WhenUsed(types.ModuleType):
    """A module that is imported when one of its names is used."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def main(site: str, real_torch: bool) -> None:
    # Both are kept from Megatron: it prints to stdout, and Python's exit() closes stdin.
    answers, requests = sys.stdout, sys.stdin
    sys.stdin = io.StringIO()
    here = str(Path(__file__).parent)
    sys.path[:0] = [here, site]
    torch_stubs: Any = importlib.import_module("torch_stubs")
    sys.path.remove(here)
    if real_torch:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch_stubs.install(("triton",))
    else:
        torch_stubs.install((*torch_stubs.PACKAGES, *UNASKED))
    torch_stubs.modernize_typing()
    sys.modules["yaml"] = _WhenUsed("yaml")  # for the file of a quantization recipe
    logging.lastResort = None
    gc.disable()  # takes an eighth of the import, and finds nothing
    without_repr = functools.partial(
        dataclasses.dataclass, repr=False
    )  # would cover hundreds of fields, and is never used
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        _patched(dataclasses, "dataclass", without_repr),
    ):
        warnings.simplefilter("ignore")
        megatron = Megatron(torch_stubs)
    gc.freeze()
    gc.enable()
    print(READY, file=answers, flush=True)
    for line in requests:
        print(json.dumps(verdict(megatron, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--real-torch" in sys.argv[2:])
