"""`fp8launch data build`: text becomes a dataset that Megatron reads."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fp8launch.cli.data_progress import shown_progress
from fp8launch.cli.data_report import described, report_skipped
from fp8launch.cli.output import echo, eprint, json_option, show_json
from fp8launch.data.build import (
    EngineChanged,
    Outcome,
    already_built,
    build_here,
    complete,
    cores,
    engine_for,
    prepare,
)
from fp8launch.data.documents import Reading
from fp8launch.data.extras import load
from fp8launch.data.files import only_one
from fp8launch.data.find_tokenizer import find_tokenizer
from fp8launch.data.plan import BuildPlan, make_folder
from fp8launch.data.sources import FORMATS, Format, find_files, shards_of
from fp8launch.data.tokenizer import PATTERNS, TokenizerSpec
from fp8launch.diagnostics import error

_ENDINGS = (".bin", ".idx")


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--tokenizer",
    required=True,
    metavar="NAME",
    help="File, folder, name in the Hugging Face cache, `bytes`, or `ids`.",
)
@click.option("--out", required=True, metavar="PREFIX", help="Write PREFIX.bin, PREFIX.idx, PREFIX.manifest.json.")
@click.option("--field", default="text", help="Field or column that holds the text (default: text).")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: by name. lines: each a document.")
@click.option("--glob", "patterns", multiple=True, metavar="PATTERN", help="Files of a folder; repeatable.")
@click.option("--eod/--no-eod", "append_eod", default=True, help="End documents with a token (default: yes).")
@click.option("--eod-token", metavar="TOKEN", help="The end of a document (default: the tokenizer's own).")
@click.option("--special-tokens/--no-special-tokens", default=True, help="Those of its template (default: yes).")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="N", help="Larger token ids are bad input.")
@click.option("--pattern", default="auto", type=click.Choice(PATTERNS), hidden=True)
@click.option("--on-error", type=click.Choice(["fail", "skip"]), default="fail", help="Bad input (default: fail).")
@click.option("--max-document", type=click.IntRange(1, 1024), default=16, metavar="MIB", help="Default: 16 MiB.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Processes (default: all cores); CPUs of each job."
)
@click.option("--engine", default="auto", type=click.Choice(["auto", "gigatoken", "tokenizers"]), hidden=True)
@click.option("--shard-bytes", type=click.IntRange(min=1), metavar="N", hidden=True)
@click.option("--overwrite", is_flag=True, help="Replace a dataset of other input.")
@click.option("--restart", is_flag=True, help="Drop what an unfinished build has done.")
@click.option("--cluster", help="Cluster profile: build by a Slurm job array, below its storage.data.")
@click.option("--time", "limit", default="04:00:00", metavar="TIME", help="Limit of each job (default: 04:00:00).")
@click.option("--jobs", type=click.IntRange(min=1), default=16, help="Tasks of the array (default: 16).")
@click.option("--wait", is_flag=True, help="With --cluster: follow the jobs to their end.")
@json_option
def build(
    sources: tuple[str, ...],
    tokenizer: str,
    out: str,
    field: str,
    form: Format | None,
    patterns: tuple[str, ...],
    append_eod: bool,
    eod_token: str | None,
    special_tokens: bool,
    vocab_size: int | None,
    pattern: str,
    on_error: str,
    max_document: int,
    workers: int | None,
    engine: str,
    shard_bytes: int | None,
    overwrite: bool,
    restart: bool,
    cluster: str | None,
    limit: str,
    jobs: int,
    wait: bool,
    as_json: bool,
) -> int:
    """Tokenize text into an indexed dataset: JSON lines, Parquet, text, .gz and .zst of them, Hugging Face datasets.

    The same command again continues after a kill: finished shards are kept. Files get their names when whole.
    """
    prefix = _prefix(out, cluster)
    spec = find_tokenizer(
        tokenizer,
        append_eod=append_eod,
        eod_token=eod_token,
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        pattern=pattern,
    )
    _require_packages(form)
    files = find_files(sources, form, patterns)
    processes = workers or cores()
    shards = shards_of(files, processes if cluster is None else 8 * jobs, shard_bytes)
    reading = Reading(field, spec.kind == "ids", max_document << 20)
    plan = BuildPlan(str(prefix), tuple(files), tuple(shards), spec, reading, _limit(spec, vocab_size))
    there = already_built(plan, overwrite)
    if there is not None:
        _report(Outcome(there, [], built=False), None, as_json)
        return 0
    if cluster is not None:
        from fp8launch.cli.data_array import build_on_cluster

        return build_on_cluster(plan, engine, on_error, restart, cluster, limit, jobs, workers, wait, as_json)
    begun = time.monotonic()
    outcome = _build(plan, engine, processes, on_error == "skip", restart)
    _report(outcome, time.monotonic() - begun, as_json)
    return 0


def _prefix(out: str, cluster: str | None) -> Path:
    path = (_place(cluster, out) / Path(out).expanduser()).absolute()
    if path.suffix in _ENDINGS:
        fix = f"--out {path.with_suffix('')}"
        raise error("data-out", "--out is the part of the names before .bin and .idx", "--out", fix)
    if out.endswith("/") or path.is_dir():
        message = f"{out} is a folder, and --out begins the names of files"
        raise error("data-out", message, "--out", f"a name in it, such as {path / 'text'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _place(cluster: str | None, out: str) -> Path:
    """Return the folder that a relative --out is below: with a cluster, its storage for data."""
    if cluster is None or out.startswith("."):
        return Path()
    from fp8launch.cluster.profile import load_cluster
    from fp8launch.cluster.storage import data_place

    return data_place(load_cluster(cluster)) or Path()


def _require_packages(form: Format | None) -> None:
    load("numpy", "building a dataset")
    if form in (None, "jsonl"):
        load("orjson", "reading JSON lines")


def _limit(spec: TokenizerSpec, vocab_size: int | None) -> int:
    limit = vocab_size or spec.vocab_size
    if spec.eod is not None and spec.eod >= limit:
        message = f"the end of document has id {spec.eod}, and the vocabulary has {limit}"
        raise error("data-eod", message, "--vocab-size", "use the model's vocabulary size, or another --eod-token")
    return limit


def _build(plan: BuildPlan, engine: str, processes: int, skip: bool, restart: bool) -> Outcome:
    make_folder(plan.folder)
    with only_one(plan.folder):
        plan = prepare(plan, restart)
        chosen = engine_for(plan, engine, eprint)
        try:
            with shown_progress() as progress:
                build_here(plan, chosen, processes, skip, progress, eprint)
        except EngineChanged as exc:
            eprint(f"{exc}: building again with the library tokenizers")
            plan = prepare(plan, restart=True)
            chosen = "tokenizers"
            with shown_progress() as progress:
                build_here(plan, chosen, processes, skip, progress, eprint)
        return complete(plan, chosen)


def _report(outcome: Outcome, seconds: float | None, as_json: bool) -> None:
    manifest = outcome.manifest
    if as_json:
        examples = [{**bad.as_json(), "place": bad.place()} for bad in outcome.examples]
        rate = manifest["tokens"] / seconds if seconds else None
        show_json({**manifest, "built": outcome.built, "examples": examples, "tokens_per_s": rate})
        return
    report_skipped(manifest["skipped"], outcome.examples)
    if not outcome.built:
        eprint("this dataset already exists")
    echo(described(manifest, seconds))
