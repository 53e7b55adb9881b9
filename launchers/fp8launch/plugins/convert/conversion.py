"""The input and output of a weight conversion, and the recipe for its job."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8launch import schedulers
from fp8launch.diagnostics import ANSWER_IS_NO, UserError, error
from fp8launch.injob.regular_files import read_regular
from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.checkpoint_owner import why_not_trusted
from fp8launch.injob.supervisor.run_records import json_mapping
from fp8launch.plugins.convert.section import ConvertDirection, ConvertDtype
from fp8launch.recipe.load import RecipeSource
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.recipe.yaml_source import MAX_BYTES, parse_yaml
from fp8launch.rundir.attempts import SURVIVE
from fp8launch.rundir.run_dir import RunFolder, run_folders
from fp8launch.rundir.trust import why_not_own_run

RUN_PREFIX = "convert_"
# Written by Megatron-Bridge into each checkpoint.
BRIDGES_CONFIG = "run_config.yaml"
GPUS_OF_A_NODE = 8
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Conversion:
    """A conversion. `model` is an absolute folder or a name on the hub, and `checkpoint` the folder of an iteration.

    `fingerprint` is a digest of the input files' names, sizes and times, or the name of a model on the hub.
    """

    direction: ConvertDirection
    model: str
    out: Path
    checkpoint: Path | None
    dtype: ConvertDtype | None
    fingerprint: str


def conversion(
    direction: ConvertDirection,
    model: str,
    out: Path,
    checkpoint: Path | None = None,
    dtype: ConvertDtype | None = None,
) -> Conversion:
    """Return the conversion for this input. Raises UserError if the output folder cannot be created."""
    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise error("convert-out", f"the folder {out.parent} does not exist", str(out), f"mkdir -p {out.parent}")
    digest = hashlib.sha256(f"{direction} {dtype} {model}".encode())
    for folder in (Path(model), checkpoint):
        if folder is not None and folder.is_dir():
            for file in sorted(folder.iterdir()):
                stat = file.stat()
                digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return Conversion(direction, model, out, checkpoint, dtype, digest.hexdigest()[:16])


def model_named(name: str, where: str) -> str:
    """Return an absolute folder, or the unchanged name of a model on the hub. Raises UserError for anything else."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fix = "pass the folder of a Hugging Face model, with its config.json and *.safetensors"
            raise error("convert-model", f"{folder} has no config.json", where, fix)
        return str(folder.resolve())
    first = name.split("/")[0]
    if _ON_THE_HUB.fullmatch(name) and not Path(first).is_dir():
        return name
    fix = "pass the folder of a Hugging Face model, or ORGANIZATION/NAME on the hub"
    raise error("convert-model", f"there is no folder {name}", where, fix)


def checkpoint_in(folder: Path, iteration: int | None) -> Path:
    """Return the folder of an iteration, by default the newest. Raises UserError if it is missing or incomplete."""
    folder = folder.expanduser().resolve()
    place = folder
    if not (folder / ".metadata").is_file():
        wanted = iteration
        if wanted is None:
            wanted = _newest(folder)
        place = checkpoints.place(folder, wanted)
        if not place.is_dir():
            there = ", ".join(map(str, checkpoints.iterations(folder))) or "none"
            message = f"{folder} has no iteration {wanted}; there are: {there}"
            raise error("convert-checkpoint", message, "--iteration", "choose one of them", ANSWER_IS_NO)
    problem = checkpoints.torn(place)
    if problem is not None:
        message = f"the checkpoint {place} cannot be read: it {problem}"
        raise error("convert-checkpoint", message, str(folder), "choose another --iteration", ANSWER_IS_NO)
    _require_torch_dist(place)
    return place


def is_own_work(source: Path, checkpoint: Path) -> bool:
    """Return whether the run in a run folder wrote this checkpoint and nobody else can have changed it.

    Only then may its FP8 state be unpickled without the user's consent. False if the folder does not belong to a run.
    """
    plan = json_mapping(source / SURVIVE)
    iteration = checkpoints.whole_number(checkpoint.name.rpartition("_")[2])
    if iteration is None or not isinstance(plan.get("owner"), dict) or why_not_own_run(source) is not None:
        return False
    return why_not_trusted(checkpoint.parent, plan["owner"], iteration) is None


def _newest(folder: Path) -> int:
    try:
        found = checkpoints.whole_number(checkpoints.read_tracker(folder))
    except (OSError, ValueError):
        found = None
    if found is None:
        message = f"{folder} is not a folder of checkpoints: no iteration in {checkpoints.TRACKER}"
        raise error("convert-checkpoint", message, str(folder), "pass a run, or its folder of checkpoints")
    return found


def _require_torch_dist(place: Path) -> None:
    stated = json_mapping(place / "metadata.json").get("sharded_backend", "torch")
    if stated != "torch_dist":
        message = f"{place} has the format {stated}, but only torch_dist can be converted"
        fix = "save with `--set megatron.ckpt_format=torch_dist`, or convert it with Megatron's `--ckpt-convert-format`"
        raise error("convert-format", message, str(place), fix, ANSWER_IS_NO)


def model_of(checkpoint: Path) -> str | None:
    """Return the Hugging Face model from which a checkpoint was converted or trained, or None if unrecorded."""
    for folder in (checkpoint, checkpoint.parent):
        record = json_mapping(folder / checkpoints.CONVERSION_RECORD)
        if isinstance(record.get("model"), str):
            return str(record["model"])
    config = checkpoint / BRIDGES_CONFIG
    try:
        stated = parse_yaml(read_regular(config, MAX_BYTES).decode(), str(config)).at(("model", "hf_model_id"))
    except (OSError, ValueError, UserError):
        return None
    if stated is None or not isinstance(stated.value, str):
        return None
    return stated.value


def is_finished(wanted: Conversion) -> bool:
    """Return whether this input has already been converted. Raises UserError if the output is something else."""
    out = wanted.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    record = json_mapping(out / checkpoints.CONVERSION_RECORD)
    if record.get("fingerprint") == wanted.fingerprint:
        return True
    what = "exists and is not empty"
    if record:
        what = "contains another conversion"
    raise error("convert-exists", f"{out} {what}", str(out), "choose another folder, or remove this one", ANSWER_IS_NO)


def unfinished_run(wanted: Conversion, root: Path) -> RunFolder | None:
    """Return the run that is currently writing this output. Raises UserError if it converts another input."""
    for run in run_folders(root):
        stated = _unfinished(run)
        if stated.get("out") != str(wanted.out):
            continue
        if stated.get("fingerprint") == wanted.fingerprint:
            return run
        message = f"the run {run.run_id} is writing {wanted.out} from another input"
        fix = f"wait for it, or `fp8launch cancel {run.run_id}`"
        raise error("convert-busy", message, str(wanted.out), fix, ANSWER_IS_NO)
    return None


def _unfinished(run: RunFolder) -> Mapping[str, Any]:
    """Return the section `convert` of a run that has not ended, or an empty mapping."""
    if not run.run_id.startswith(RUN_PREFIX):
        return {}
    try:
        stated = run.manifest().get("recipe", {}).get("convert")
        ended = schedulers.of_run(run).state(run).final
    except UserError:
        return {}
    if ended:
        return {}
    return stated or {}


def recipe_of(
    wanted: Conversion, sizes: Mapping[str, int], gpu: str, image: str | None, secrets: Iterable[str]
) -> RecipeSource:
    """Return the job's recipe, with one process for each part of the model."""
    processes = sizes["tp"] * sizes["pp"] * sizes["ep"]
    nodes = -(-processes // GPUS_OF_A_NODE)
    if processes % nodes:
        message = f"TP x PP x EP is {processes} processes, which do not fill nodes with {GPUS_OF_A_NODE} each"
        raise error("convert-world", message, "--tp, --pp, --ep", f"choose a multiple of {GPUS_OF_A_NODE}")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", wanted.out.name)[:40]
    stated: dict[str, Any] = {
        "name": f"{RUN_PREFIX}{name}",
        "description": f"{wanted.direction} by Megatron-Bridge",
        "engine": "convert",
        "convert": {key: str(value) for key, value in asdict(wanted).items() if value is not None},
        "parallel": dict(sizes),
        "resources": {"gpu": gpu, "nodes": nodes, "gpus_per_node": processes // nodes, "time": "04:00:00"},
        "secrets": list(secrets),
    }
    if image is not None:
        stated["container"] = {"image": image, "mounts": _mounts(wanted)}
    # PyYAML writes YAML 1.1, which does not quote a digest such as 567e354173013886. In YAML 1.2, it is a number.
    text = write_yaml(stated)
    return RecipeSource(Path(__file__), parse_yaml(text, "fp8launch convert", numbered=False), (Path(__file__),))


def _mounts(wanted: Conversion) -> list[str]:
    """Return the folders that the job reads and writes, including the targets of links, which the hub's cache uses."""
    found = [wanted.out.parent]
    if wanted.checkpoint:
        found.append(wanted.checkpoint)
    model = Path(wanted.model)
    if model.is_absolute():
        found += [model, *sorted({file.resolve().parent for file in model.iterdir()})]
    return list(map(str, dict.fromkeys(found)))
