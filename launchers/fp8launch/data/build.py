"""Building a dataset: plan it, build its shards in parallel, merge them in order, give it its name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from fp8launch.data.bad_input import HARMLESS, BadInput, summary
from fp8launch.data.gigatoken_engine import choose_engine
from fp8launch.data.manifest import new_manifest, read_manifest
from fp8launch.data.merge import Merged, files_record, finish, merge_finished, merged_so_far
from fp8launch.data.plan import BuildPlan, beside, load_plan, make_folder, require_same, save_plan, unchanged
from fp8launch.data.shard import ShardResult, examples_of, finished
from fp8launch.data.sources import bytes_of
from fp8launch.data.workers import Failure, WorkersEnded, build_shards, disk_failure
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, UserError, error

Say = Callable[[str], None]
_OWN_NAMES = re.compile(
    r"\.?(plan|merge|manifest|array)\.json.*|merged\.(bin|idx|lengths)|\.?\d{6}\..*|array\..*|slurm-.*"
)


@dataclass(frozen=True)
class Totals:
    """How far a build is; `of_bytes` is all its input."""

    documents: int
    tokens: int
    bytes: int
    of_bytes: int


@dataclass(frozen=True)
class Outcome:
    """A dataset that is there; `built` is false where it was there before."""

    manifest: dict[str, Any]
    examples: list[BadInput]
    built: bool = True


def cores() -> int:
    """Return how many processes this machine or job has for us."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def already_built(plan: BuildPlan, overwrite: bool) -> dict[str, Any] | None:
    """Return the manifest if this very dataset exists; raise UserError where something else has its name."""
    prefix = Path(plan.prefix)
    files = [beside(prefix, end) for end in ("bin", "idx", "manifest.json")]
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
    message = f"{' and '.join(there)} already exist, made of other input or by another program"
    fix = "choose another --out, or add --overwrite"
    raise error("data-exists", message, "--out", fix, ANSWER_IS_NO)


def _remove_left_folder(folder: Path) -> None:
    """Remove what a build left that was killed between its last file and its end."""
    if folder.is_dir():
        with contextlib.suppress(UserError, OSError):
            _clear(folder)
            (folder / ".lock").unlink(missing_ok=True)
            folder.rmdir()


def _named_by_this_build(plan: BuildPlan) -> bool:
    """A build was killed between naming the .bin and the .idx: its folder still has the manifest."""
    return (plan.folder / "manifest.json").exists()


def prepare(plan: BuildPlan, restart: bool) -> BuildPlan:
    """Make the build's folder, or take up the one that is there; return the plan to follow.

    The caller holds the folder. Raises UserError where it is of another build, or the input has changed since.
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
        # Prefix and tokenizer are where they are now: the folder may have been moved with what is in it.
        plan = replace(old, prefix=plan.prefix, tokenizer=plan.tokenizer)
    save_plan(plan)
    return plan


def _clear(folder: Path) -> None:
    """Remove the files of a build. Raises UserError where the folder holds anything else."""
    paths = [path for path in folder.iterdir() if path.name != ".lock"]
    for path in paths:
        if not _OWN_NAMES.fullmatch(path.name) or not path.is_file():
            message = f"{folder}, where the build keeps its parts, holds {path.name}, which no build wrote"
            raise error("data-folder", message, str(folder), "move it away, or choose another --out", ANSWER_IS_NO)
    for path in paths:
        path.unlink()


def _remove_partial(folder: Path) -> None:
    """Remove what killed processes of this machine left; others', and those of a job here, may still be written."""
    host = os.uname().nodename
    for path in folder.glob(f"*.{host}.*.partial"):
        process = path.name.split(".")[-2]
        if not process.isdecimal() or not Path("/proc", process).exists():
            path.unlink(missing_ok=True)


def engine_for(plan: BuildPlan, wanted: str, say: Say) -> str:
    """Return the engine to encode with, held against the tokenizer's own library first."""
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
    """Build the shards that are missing with the cores of this machine, all of them or `only` some.

    Merges as it goes unless it builds only some. Raises UserError; what is finished stays for the next time.
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
        message = f"{changed} was changed while the dataset was built"
        raise error("data-changed", message, changed, "build again with --restart", ANSWER_IS_NO)


def _built_before(plan: BuildPlan, numbers: Iterable[int], skip: bool) -> dict[int, ShardResult]:
    """The results of the shards that an earlier start finished; empty ones of those that are merged already."""
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
    """Stop where an earlier --on-error skip left documents out that this build may not."""
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
    """Two engines gave different ids in the middle of a build: it has to begin again with the slower one."""


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
    """Merge what is left, write the index, and give the dataset its name."""
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
            return new_manifest(plan, merged.documents, merged.tokens, files_record(parts), skipped, engine)

        return Outcome(finish(plan, manifest), examples)
    except OSError as exc:
        _raise(plan, disk_failure(plan, exc), len(plan.shards))
