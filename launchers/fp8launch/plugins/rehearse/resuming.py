"""Save a checkpoint at the end of a rehearsal, load it into an untrained model, and train one more step.

Megatron's own code writes and reads real files in a temporary folder, and Transformer Engine's own code creates and
loads the FP8 state of each layer. One rank is rehearsed at a time, so the checkpoint holds only this rank's parts, and
this rank also does the coordinator's work. Rehearsals do not check that all ranks together write every part exactly
once.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

from fp8launch.plugins.rehearse import containment
from fp8launch.plugins.rehearse.checkpoint_plan import as_images, plan
from fp8launch.plugins.rehearse.failure import FailedElsewhere, NotRehearsed, described
from fp8launch.plugins.rehearse.shrink import ITERATIONS

CORE = "megatron.core.dist_checkpointing"
# Transformer Engine unpickles FP8 state only if this is set; jobs set it for their own run's checkpoints.
ALLOWS_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def install(transformer_engine: str, place: Path) -> None:
    """Make Megatron's training loop save a checkpoint at its end, load it and continue.

    `transformer_engine` is the release, or "" if there is none. The checkpoint is written below `place`, which is
    deleted with all rehearsals if this process is killed. A resumed run starts from an untrained model, so the process
    that loads the checkpoint is forked before the first step.
    """
    as_images(transformer_engine)
    training: Any = importlib.import_module("megatron.training.training")
    train = training.train

    def train_save_and_continue(step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **named: Any) -> Any:
        args = training.get_args()
        if args.use_torch_fsdp2 or args.ckpt_format not in ("torch_dist", "torch"):
            # An FSDP rank may hold no part of a tensor, so a checkpoint with only its parts cannot be loaded.
            result = train(step, model, optimizer, scheduler, *rest, **named)
            plan(args, model, optimizer, scheduler)
            return result
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=place) as folder:

            def resume() -> None:
                os.environ.setdefault(ALLOWS_PICKLE, "1")
                args.load = folder
                with one_rank():
                    args.iteration, args.num_floating_point_operations_so_far = training.load_checkpoint(
                        model, optimizer, scheduler, checkpointing_context={}
                    )
                if args.iteration != ITERATIONS:
                    raise RuntimeError(f"the checkpoint of iteration {ITERATIONS} was loaded as {args.iteration}")
                args.train_iters += 1
                train(step, model, optimizer, scheduler, *rest, **named)

            resumed = later(resume)
            result = train(step, model, optimizer, scheduler, *rest, **named)
            args.save = folder
            with one_rank():
                training.save_checkpoint(
                    ITERATIONS, model, optimizer, scheduler, 0.0, checkpointing_context={},
                    preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
                )  # fmt: skip
            args.save = None
            # In the format `torch`, only one of the ranks that hold the same weights writes them.
            file = importlib.import_module("megatron.training.checkpointing").get_checkpoint_name(folder, ITERATIONS)
            resumed(args.ckpt_format != "torch" or Path(file).exists())
        return result

    training.train = train_save_and_continue


def later(work: Callable[[], None]) -> Callable[[bool], None]:
    """Fork a process that keeps the current state, and return a function that lets it continue.

    The function takes a bool. If it is true, the process does `work`, and the function raises the failure that ended
    it. If it is false, the process ends without doing anything.
    """
    go, started = os.pipe()
    answer, answered = os.pipe()
    parent = os.getpid()
    sys.stdout.flush()  # otherwise both processes would write the buffered output
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(started)
            containment.end_with_parent(parent)
            if os.read(go, 1):
                _answer(work, answered)
        finally:
            os._exit(0)
    os.close(go)
    os.close(answered)

    def run(needed: bool) -> None:
        if needed:
            with suppress(BrokenPipeError):
                os.write(started, b"\n")
        os.close(started)
        with os.fdopen(answer, "rb") as file:
            text = file.read()
        _, status = os.waitpid(pid, 0)
        if not needed:
            return
        if not text:
            raise NotRehearsed(f"the process that continues from the checkpoint ended with status {status}")
        result = json.loads(text)
        if not result["ok"]:
            raise FailedElsewhere({**result, "message": f"continuing from its checkpoint: {result['message']}"})

    return run


def _answer(work: Callable[[], None], answered: int) -> None:
    result: dict[str, Any] = {"ok": True}
    try:
        work()
    except BaseException as failure:
        result = described(failure)
    sys.stdout.flush()
    with os.fdopen(answered, "wb") as file:
        file.write(json.dumps(result).encode())


@contextmanager
def one_rank() -> Iterator[None]:
    """Let this rank save and load alone: it coordinates, and it writes and reads all parts that it holds."""
    distributed: Any = importlib.import_module("torch.distributed")
    wrapper: Any = importlib.import_module("torch.distributed.checkpoint.utils")._DistWrapper
    planner: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")
    strategies: Any = importlib.import_module(f"{CORE}.strategies.torch")
    parallel: Any = importlib.import_module(f"{CORE}.strategies.fully_parallel")
    files: Any = importlib.import_module(f"{CORE}.strategies.filesystem_async")
    rank_of, connect, validate = distributed.get_rank, wrapper.__init__, planner._validate_global_plan
    resolve = planner.DefaultSavePlanner.resolve_data

    def rank(group: Any = None) -> Any:
        return 0 if group is None else rank_of(group)

    def alone(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        connect(self, None, False, 0)

    def accept(*plan_and_metadata: Any) -> Any:
        # Newer torch releases return a list of errors, older ones return whether the plan is valid.
        return [] if isinstance(validate(*plan_and_metadata), list) else True

    def plain(self: Any, item: Any) -> Any:
        # Megatron's writer dequantizes tensors on a GPU only.
        data = resolve(self, item)
        return data.dequantize() if "dequantize" in type(data).__dict__ else data

    def load_all(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.base_strategy.load(*arguments, **named)

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...]
    with ExitStack() as patches:
        replaced = (
            (distributed, "get_rank", rank),
            (wrapper, "__init__", alone),
            # The other ranks' parts are missing.
            (planner, "_validate_global_plan", accept),
            (planner.DefaultSavePlanner, "resolve_data", plain),
            (strategies, "is_main_replica", lambda replica: True),
            (parallel.FullyParallelSaveStrategyWrapper, "apply_saving_parallelization", lambda *_: None),
            (parallel.FullyParallelLoadStrategyWrapper, "load", load_all),
            # Megatron's queue would start a process that outlives this one. The writers are threads, so they can share
            # a plain queue.
            (files, "get_write_results_queue", lambda *_: Queue()),
        )
        for place, name, new in replaced:
            patches.enter_context(patch.object(place, name, new))
        for module in ("serialization", "state_dict_utils", "validation", "strategies.fully_parallel"):
            place = importlib.import_module(f"{CORE}.{module}")
            for name, new in (
                ("determine_global_metadata", lambda state, *_, **__: (state, [state])),
                ("validate_sharding_integrity", lambda *_, **__: None),
            ):
                if hasattr(place, name):
                    patches.enter_context(patch.object(place, name, new))
        yield
