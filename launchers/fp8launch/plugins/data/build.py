"""Build a dataset: plan it, build its shards in parallel, merge them in order, and rename the result."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

from fp8launch import __version__
from fp8launch.datasets.manifest import FORMAT, dataset_file, read_manifest
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, UserError, error
from fp8launch.plugins.data.bad_input import HARMLESS, BadInput, summary
from fp8launch.plugins.data.gigatoken_engine import choose_engine
from fp8launch.plugins.data.merge import Merged, files_record, finish, merge_finished, merged_so_far
from fp8launch.plugins.data.plan import BuildPlan, load_plan, make_folder, require_same, save_plan, unchanged
from fp8launch.plugins.data.shard import ShardResult, examples_of, finished
from fp8launch.plugins.data.sources import bytes_of
from fp8launch.plugins.data.tokenizer import MEGATRON_TYPES
from fp8launch.plugins.data.workers import Failure, WorkersEnded, build_shards, disk_failure

Say = Callable[[str], None]
# A manifest names the first sources, and counts all of them.
MOST_SOURCES = 1000
_OWN_NAMES = re.compile(
    r"\.?(plan|merge|manifest|array)\.json.*|merged\.(bin|idx|lengths)|\.?\d{6}\..*|array\..*|slurm-.*"
)


@dataclass(frozen=True)
class Totals:
    """The progress of a build; `of_bytes` is the size of its input."""

    documents: int
    tokens: int
    bytes: int
    of_bytes: int


@dataclass(frozen=True)
class Outcome:
    """A finished dataset; `built` is false if it existed before."""

    manifest: dict[str, Any]
    examples: list[BadInput]
    built: bool = True


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def already_built(plan: BuildPlan, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest if exactly this dataset exists. Raises UserError if its name is taken by anything else."""
    prefix = Path(plan.prefix)
    files = [dataset_file(prefix, end) for end in ("bin", "idx", "manifest.json")]
    there = [str(file) for file in files if file.exists()]
    if not there:
        return None
    try:
        manifest = read_manifest(prefix)
    except ValueError:
        manifest = None
    if manifest is not None and manifest.raw.get("fingerprint") == plan.fingerprint() and len(there) == 3:
        _remove_left_folder(plan.folder)
        return manifest.raw
    if overwrite or _named_by_this_build(plan):
        return None
    message = f"{' and '.join(there)} already exist, from other input or another program"
    fix = "choose another --out, or add --overwrite"
    raise error("data-exists", message, "--out", fix, ANSWER_IS_NO)


def _remove_left_folder(folder: Path) -> None:
    """Remove the folder of a build that was killed after it renamed its last file."""
    if folder.is_dir():
        with contextlib.suppress(UserError, OSError):
            _clear(folder)
            (folder / ".lock").unlink(missing_ok=True)
            folder.rmdir()


def _named_by_this_build(plan: BuildPlan) -> bool:
    """Return whether a build was killed between renaming the .bin and the .idx: its folder still has the manifest."""
    return (plan.folder / "manifest.json").exists()


def prepare(plan: BuildPlan, restart: bool) -> BuildPlan:
    """Create the build's folder, or continue with the existing one. Return the plan to follow.

    The caller holds the folder's lock. Raises UserError if the folder belongs to another build or the input changed.
    """
    make_folder(plan.folder)
    old = None
    if not restart:
        old = load_plan(plan.folder)
    if old is None:
        _clear(plan.folder)
    else:
        require_same(old, plan)
        _remove_partial(plan.folder)
        # Use the current prefix and tokenizer paths, because the folder may have been moved.
        plan = replace(old, prefix=plan.prefix, tokenizer=plan.tokenizer)
    save_plan(plan)
    return plan


def _clear(folder: Path) -> None:
    """Remove the files of a build. Raises UserError if the folder holds anything else."""
    paths = [path for path in folder.iterdir() if path.name != ".lock"]
    for path in paths:
        if not _OWN_NAMES.fullmatch(path.name) or not path.is_file():
            message = f"{folder}, the folder of the build, contains {path.name}, which no build wrote"
            raise error("data-folder", message, str(folder), "move it away, or choose another --out", ANSWER_IS_NO)
    for path in paths:
        path.unlink()


def _remove_partial(folder: Path) -> None:
    """Remove partial files of dead processes of this machine. Other machines may still be writing theirs."""
    host = os.uname().nodename
    for path in folder.glob(f"*.{host}.*.partial"):
        process = path.name.split(".")[-2]
        if not process.isdecimal() or not Path("/proc", process).exists():
            path.unlink(missing_ok=True)


def engine_for(plan: BuildPlan, wanted: str, say: Say) -> str:
    """Return the encoding engine to use, after comparing it with the tokenizer's own library."""
    if plan.tokenizer.kind != "huggingface" or plan.tokenizer.file is None:
        return "auto"
    engine, why = choose_engine(Path(plan.tokenizer.file), wanted, plan.tokenizer.special_tokens)
    if why is not None:
        say(f"encoding with the library tokenizers, which is slower: {why}")
    return engine


def build_here(
    plan: BuildPlan,
    engine: str,
    processes: int,
    skip: bool,
    progress: Callable[[Totals], None],
    say: Say,
    only: Iterable[int] | None = None,
) -> None:
    """Build the missing shards with the cores of this machine: all, or those in `only`.

    Shards are merged as they finish, unless `only` is given. Raises UserError; finished shards are kept for the next
    attempt.
    """
    numbers: Iterable[int] = range(len(plan.shards))
    if only is not None:
        numbers = only
    known = _built_before(plan, numbers, skip)
    todo = [number for number in numbers if number not in known]
    before = _sum(known.values())
    of_bytes = bytes_of(map(plan.shards.__getitem__, numbers))

    def report(documents: int, tokens: int, read: int) -> None:
        progress(Totals(before[0] + documents, before[1] + tokens, before[2] + read, of_bytes))

    report(0, 0, 0)
    try:
        if only is None:
            merge_finished(plan, known)
        for number, result in build_shards(plan, todo, engine, processes, skip, report):
            if isinstance(result, Failure):
                _raise(plan, result, len(known))
            known[number] = result
            if only is None:
                merge_finished(plan, known)
    except WorkersEnded:
        message = f"a process of the build was killed; {_kept(plan, len(known))}"
        fix = "it most likely needed more memory: use fewer --workers or a smaller --max-document; then give the "
        raise error("data-killed", message, str(plan.folder), f"{fix}same command again", MACHINE_LACKS) from None
    except OSError as exc:
        _raise(plan, disk_failure(plan, exc), len(known))
    finally:
        _remove_partial(plan.folder)
    if changed := unchanged(plan.files):
        message = f"{changed} changed during the build"
        raise error("data-changed", message, changed, "build again with --restart", ANSWER_IS_NO)


def _built_before(plan: BuildPlan, numbers: Iterable[int], skip: bool) -> dict[int, ShardResult]:
    """Return the results of shards that an earlier attempt finished; empty results for merged shards."""
    merge_state = merged_so_far(plan.folder)
    known: dict[int, ShardResult] = {}
    for number in numbers:
        there = finished(plan.folder, number)
        if there is not None:
            _refuse_skipped(plan, there, skip)
            known[number] = there
        elif number < merge_state.shards:
            known[number] = ShardResult()
    return known


def _refuse_skipped(plan: BuildPlan, result: ShardResult, skip: bool) -> None:
    """Raise StopOnBadInput if an earlier attempt skipped documents that this one may not skip."""
    if skip:
        return
    for bad in result.examples:
        if bad.reason not in HARMLESS:
            _raise(plan, Failure(bad=bad), 0)


def _sum(results: Iterable[ShardResult]) -> tuple[int, int, int]:
    documents = tokens = read = 0
    for result in results:
        documents, tokens, read = documents + result.documents, tokens + result.tokens, read + result.bytes
    return documents, tokens, read


class EngineChanged(Exception):
    """The two engines gave different ids during a build, which must start again with the slower one."""


def _raise(plan: BuildPlan, failure: Failure, done: int) -> NoReturn:
    if failure.user_error is not None:
        raise UserError(failure.user_error, MACHINE_LACKS)
    if failure.differs is not None:
        raise EngineChanged(failure.differs)
    if failure.bad is not None:
        message = f"this document cannot be used: {failure.bad.why()}; {_kept(plan, done)}"
        fix = "correct the input, or leave such documents out with --on-error skip; then repeat the command"
        raise error(f"data-{failure.bad.reason}", message, failure.bad.place(), fix, ANSWER_IS_NO)
    number, words, file = failure.os_error or (0, "", "")
    message = f"{file}: {words}; {_kept(plan, done)}"
    fix = "correct this, then repeat the command"
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = f"{shutil.disk_usage(plan.folder).free / 1e6:,.0f} MB"
        fix = f"the file system of {plan.folder} has {free} free: make room, then repeat the command"
    raise error("data-disk", message, file, fix, MACHINE_LACKS)


def _kept(plan: BuildPlan, done: int) -> str:
    return f"{done} of {len(plan.shards)} shards are finished and kept"


def missing(plan: BuildPlan) -> list[int]:
    """Return the shards that are neither merged nor finished."""
    merged = merged_so_far(plan.folder).shards
    return [number for number in range(merged, len(plan.shards)) if finished(plan.folder, number) is None]


def complete(plan: BuildPlan, engine: str) -> Outcome:
    """Merge the remaining shards, write the index, and rename the dataset."""
    results = [finished(plan.folder, number) or ShardResult() for number in range(len(plan.shards))]
    skipped: dict[str, int] = {}
    for result in results:
        for reason, count in result.skipped.items():
            skipped[reason] = skipped.get(reason, 0) + count
    examples = examples_of(results)
    try:
        state = merge_finished(plan, dict(enumerate(results)))
        if not state.documents and not (plan.folder / "manifest.json").exists():
            message = "no document can be used"
            if examples:
                message += f": {summary(skipped)}; the first is {examples[0].words()}"
            raise error("data-nothing", message, "SOURCE", "name sources with text, or another --field", ANSWER_IS_NO)

        def manifest(merged: Merged, parts: dict[str, Path]) -> dict[str, Any]:
            return _new_manifest(plan, merged.documents, merged.tokens, files_record(parts), skipped, engine)

        return Outcome(finish(plan, manifest), examples)
    except OSError as exc:
        _raise(plan, disk_failure(plan, exc), len(plan.shards))


def _new_manifest(
    plan: BuildPlan, documents: int, tokens: int, files: dict[str, Any], skipped: dict[str, int], engine: str
) -> dict[str, Any]:
    """Return the manifest of a dataset that was built from sources."""
    tokenizer = plan.tokenizer
    return {
        "format": FORMAT,
        "made_by": f"fp8launch {__version__}",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "documents": documents,
        "tokens": tokens,
        "token_type": plan.token_type,
        "vocab_limit": plan.vocab_limit,
        "files": files,
        "tokenizer": {
            **tokenizer.as_json(),
            "engine": engine,
            "megatron_type": MEGATRON_TYPES[tokenizer.kind],
            "megatron_model": tokenizer.megatron_model,
        },
        "skipped": skipped,
        "field": plan.reading.field,
        "source_files": len(plan.files),
        "source_bytes": bytes_of(plan.files),
        "sources": [{"path": file.path, "bytes": file.bytes} for file in plan.files[:MOST_SOURCES]],
        "fingerprint": plan.fingerprint(),
    }
