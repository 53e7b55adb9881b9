"""One process of an evaluation by lm-evaluation-harness: `python evaluate.py -- --model=... --tasks=... OPTIONS...`

With --backend=hf, a single process converts the checkpoint to a Hugging Face model with the program of the plugin
`convert`, unless --checkpoint is missing, and evaluates that. With --backend=megatron, every process has a part of the
model, which lm-eval's own Megatron backend loads. Started like worker.py, with the same exit codes.

Writes `evaluations/` in the run folder, and a copy of the result in the folder of the evaluated run (--run).
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: use the package's full names in imports, never bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.rank import worker
from fp8launch.injob.supervisor import checkpoints
from fp8launch.plugins.evaluate.injob import tiny_task
from fp8launch.plugins.evaluate.injob.folders import EVALUATIONS
from fp8launch.plugins.evaluate.injob.programs import run_program

# Results of the tested releases have the same structure; `pyproject.toml` has the same range.
TESTED = "0.4.13"
_CONVERT = "fp8launch.plugins.convert.injob.convert"
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_NAMES_SHOWN = 5
# Results with the same values of these can be compared.
_SETTINGS = ("backend", "model", "tasks", "fewshot", "limit", "max_length", "dtype")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the options of an evaluation."""
    found = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    found.add_argument("--backend", choices=("hf", "megatron"), default="hf")
    found.add_argument("--model", required=True, help="folder or name on the hub")
    found.add_argument("--checkpoint", type=Path, help="folder of one iteration")
    found.add_argument("--run", type=Path, help="folder of the run that wrote the checkpoint")
    found.add_argument("--tasks", required=True, type=lambda text: text.split(","))
    found.add_argument("--task_folder", type=Path)
    found.add_argument("--dtype", choices=sorted(_DTYPES))
    for name in ("fewshot", "limit", "max_length"):
        found.add_argument(f"--{name}", type=int)
    for name in ("batch_size", "tp", "pp", "ep"):
        found.add_argument(f"--{name}", type=int, default=1)
    return found


def arguments(words: Sequence[str]) -> argparse.Namespace:
    known = parser("evaluate.py")
    known.add_argument("--name", help="of the results (default: the run folder's)")
    known.add_argument("--out", type=Path, default=Path("model"), help="folder for the converted model")
    # torchrun's own parser removes the separator.
    return known.parse_args([word for word in words if word != "--"])


def settings_of(ours: argparse.Namespace) -> dict[str, Any]:
    """Return the settings on which the numbers of a checkpoint depend."""
    return {name: getattr(ours, name) for name in _SETTINGS}


def written_at(checkpoint: Path) -> int:
    """Return when a distributed checkpoint was written, in nanoseconds since 1970; 0 if it has no metadata."""
    try:
        return checkpoints.again((checkpoint / ".metadata").stat).st_mtime_ns
    except OSError:
        return 0


def check_packages(names: Sequence[str]) -> None:
    """Stop if a package is missing; warn of an untested lm-eval."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            advice = "pip install 'fp8launch[evaluate]' into the Python or image of the job"
            worker.stop(worker.MACHINE_LACKS, f"{name} is not installed for {sys.executable}: {advice}")
    there = importlib.metadata.version("lm-eval")
    if there != TESTED and os.environ["RANK"] == "0":
        print(f"fp8launch: warning: lm-eval {there} is not a tested version ({TESTED})", file=sys.stderr)


def find_tasks(wanted: Sequence[str], folder: Path | None) -> Any:
    """Return lm-eval's task manager. Exits if it does not know one of the tasks."""
    own = Path(EVALUATIONS, "tasks")
    if tiny_task.NAME in wanted and os.environ["RANK"] == "0":
        tiny_task.write(own)
    own.mkdir(parents=True, exist_ok=True)
    folders = [str(own)]
    if folder is not None:
        folders.append(str(folder))
    tasks: Any = importlib.import_module("lm_eval.tasks")
    # Reading lm-eval's own task files takes several seconds. Groups of a user's tasks may refer to them.
    manager = tasks.TaskManager(include_path=folders, include_defaults=False)
    if not set(wanted) <= set(manager.all_subtasks):
        manager = tasks.TaskManager(include_path=folders)
    for name in wanted:
        if name not in manager.all_tasks and name != tiny_task.NAME:
            near = difflib.get_close_matches(name, manager.all_tasks, _NAMES_SHOWN)
            known = f"{len(manager.all_tasks)} tasks are known"
            if near:
                known = f"similar names: {', '.join(near)}"
            worker.stop(worker.WRONG_REQUEST, f"evaluate.tasks: lm-eval has no task {name}; {known}")
    return manager


def convert(ours: argparse.Namespace) -> Path:
    """Convert the checkpoint to a Hugging Face model in the run folder, once. Exits as the conversion does."""
    out: Path = ours.out.resolve()
    if (out / "config.json").is_file():
        if (out / "config.json").stat().st_mtime_ns > ours.written:
            return out  # of an earlier start of the same job
        shutil.rmtree(str(out))  # since then, the run went back and wrote this iteration again
    program = importlib.util.find_spec(_CONVERT)
    assert program is not None and program.origin is not None
    words = ["megatron-to-hf", f"--model={ours.model}", f"--checkpoint={ours.checkpoint}", f"--out={out}"]
    if ours.dtype is not None:
        words.append(f"--dtype={ours.dtype}")
    print(f"fp8launch: converting {ours.checkpoint}", flush=True)
    out.parent.mkdir(exist_ok=True)
    status = run_program(Path(program.origin), words)
    if status:
        worker.stop(status, "the conversion to a Hugging Face model failed; its reason is above")
    return out


def hugging_face(ours: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the model and arguments of lm-eval's Hugging Face backend."""
    model = ours.model
    if ours.checkpoint is not None:
        model = str(convert(ours))
    # transformers and accelerate would join a process group of one.
    for name in _OF_RANK:
        os.environ.pop(name, None)
    stated: dict[str, Any] = {"pretrained": model}
    if ours.dtype is not None:
        stated["dtype"] = _DTYPES[ours.dtype]
    if ours.max_length is not None:
        stated["max_length"] = ours.max_length
    return {"model": "hf", "model_args": stated, "device": device}


def megatron(ours: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the model and arguments of lm-eval's Megatron backend, which needs a GPU for each process."""
    found = importlib.util.find_spec("megatron.training")
    if found is None or not found.submodule_search_locations:
        worker.stop(worker.MACHINE_LACKS, f"megatron.training is not installed for {sys.executable}")
    # The backend puts this folder on Python's path.
    os.environ.setdefault("MEGATRON_PATH", str(Path(found.submodule_search_locations[0]).resolve().parents[1]))
    place = ours.checkpoint.resolve()
    stated: dict[str, Any] = {
        "load": str(place.parent),
        "ckpt_step": int(place.name.rpartition("_")[2]),
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": ours.model,
        "devices": int(os.environ["WORLD_SIZE"]),
        "tensor_model_parallel_size": ours.tp,
        "pipeline_model_parallel_size": ours.pp,
        "expert_model_parallel_size": ours.ep,
        "micro_batch_size": ours.batch_size,
    }
    if ours.max_length is not None:
        stated["seq_length"] = ours.max_length
    return {"model": "megatron_lm", "model_args": stated, "device": device}


def evaluate(ours: argparse.Namespace, device: str) -> None:
    """Evaluate, and write the results."""
    rank = int(os.environ["RANK"])
    ours.written = ours.checkpoint and written_at(ours.checkpoint)
    manager = find_tasks(ours.tasks, ours.task_folder)
    prepare = hugging_face if ours.backend == "hf" else megatron
    stated = prepare(ours, device)
    evaluator: Any = importlib.import_module("lm_eval.evaluator")
    found = evaluator.simple_evaluate(
        **stated,
        tasks=ours.tasks,
        num_fewshot=ours.fewshot,
        batch_size=ours.batch_size,
        limit=ours.limit,
        log_samples=False,
        task_manager=manager,
    )
    if rank != 0 or found is None:
        return
    utils: Any = importlib.import_module("lm_eval.utils")
    raw = "lm_eval.json" if ours.name is None else f"{ours.name}.lm_eval.json"
    Path(EVALUATIONS, raw).write_text(json.dumps(found, indent=1, default=utils.handle_non_serializable) + "\n")
    write_result(record(ours, found), ours.run)


def record(ours: argparse.Namespace, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what reports read: one entry for each requested task, with all of its metrics."""
    iteration = None
    if ours.checkpoint is not None:
        with contextlib.suppress(ValueError):
            iteration = int(ours.checkpoint.name.rpartition("_")[2])
    return {
        "format": 1,
        "evaluation": ours.name or Path.cwd().name,
        "settings": settings_of(ours),
        "model": ours.model,
        "checkpoint": ours.checkpoint and str(ours.checkpoint),
        "iteration": iteration,
        "written": ours.written,
        "backend": ours.backend,
        "lm_eval": importlib.metadata.version("lm-eval"),
        "limit": ours.limit,
        "tasks": [task_result(name, found) for name in ours.tasks],
    }


def task_result(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a task or group, in lm-eval's order. A standard error may be unknown."""
    results = found["results"].get(name) or found.get("groups", {}).get(name) or {}
    metrics = []
    for key, value in results.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = results.get(f"{metric}_stderr,{chosen}")
        if not isinstance(error, int | float):
            error = None
        metrics.append({"metric": metric, "filter": chosen, "value": value, "stderr": error})
    return {
        "task": name,
        "version": found.get("versions", {}).get(name),
        "fewshot": found.get("n-shot", {}).get(name),
        "samples": found.get("n-samples", {}).get(name, {}).get("effective"),
        "metrics": metrics,
    }


def write_result(result: Mapping[str, Any], run: Path | None) -> None:
    """Write the result to this run's folder and to the evaluated run's."""
    name = f"{result['evaluation']}.json"
    folders = [Path(EVALUATIONS)]
    if run is not None:
        folders.append(run / EVALUATIONS)
    for folder in folders:
        folder.mkdir(exist_ok=True)
        unfinished = folder / f".{name}.unfinished"
        unfinished.write_text(json.dumps(dict(result), indent=1) + "\n")
        unfinished.rename(folder / name)
    for task in result["tasks"]:
        for each in task["metrics"]:
            print(f"fp8launch: {task['task']} {each['metric']} {each['value']} ± {each['stderr']}", flush=True)


def main() -> None:
    ours = arguments(sys.argv[1:])
    device = worker.begin()
    check_packages(("torch", "lm_eval", "transformers"))
    if device == "cuda":
        worker.check_gpu()
    elif ours.backend == "megatron":
        worker.stop(worker.WRONG_REQUEST, "lm-eval's Megatron backend needs CUDA; use --engine hf on a CPU")
    worker.announce()
    if ours.backend == "megatron":
        worker.prepare(device)
    else:
        worker.prepare_process(device)
    worker.run_to_the_end(lambda: evaluate(ours, device))


if __name__ == "__main__":
    main()
