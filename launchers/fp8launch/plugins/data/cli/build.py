"""`fp8launch data build`: tokenize text into a dataset for Megatron."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fp8launch.cli.output import eprint, json_option
from fp8launch.diagnostics import error
from fp8launch.plugins.data.build import (
    EngineChanged,
    Outcome,
    already_built,
    build_here,
    complete,
    cores,
    engine_for,
    prepare,
)
from fp8launch.plugins.data.cli.build_chat import build_conversations, refuse_others
from fp8launch.plugins.data.cli.progress import shown_progress
from fp8launch.plugins.data.cli.report import report
from fp8launch.plugins.data.cli.source_options import source_options
from fp8launch.plugins.data.documents import Reading
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import only_one
from fp8launch.plugins.data.find_tokenizer import find_tokenizer
from fp8launch.plugins.data.plan import BuildPlan, make_folder
from fp8launch.plugins.data.sources import Format, find_files, shards_of
from fp8launch.plugins.data.tokenizer import PATTERNS, TokenizerSpec

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
@source_options
@click.option("--eod/--no-eod", "append_eod", default=True, help="End documents with a token (default: yes).")
@click.option("--eod-token", metavar="TOKEN", help="Token that ends a document (default: the tokenizer's).")
@click.option(
    "--special-tokens/--no-special-tokens",
    default=True,
    help="Add the special tokens of the tokenizer's template (default: yes).",
)
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="N", help="Treat token ids from N on as bad input.")
@click.option("--pattern", default="auto", type=click.Choice(PATTERNS), hidden=True)
@click.option(
    "--on-error", type=click.Choice(["fail", "skip"]), default="fail", help="What to do with bad input (default: fail)."
)
@click.option(
    "--max-document",
    type=click.IntRange(1, 1024),
    default=16,
    metavar="MIB",
    help="Largest document (default: 16 MiB).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker processes (default: all cores); with --cluster, CPUs of each task.",
)
@click.option("--engine", default="auto", type=click.Choice(["auto", "gigatoken", "tokenizers"]), hidden=True)
@click.option("--shard-bytes", type=click.IntRange(min=1), metavar="N", hidden=True)
@click.option("--chat", is_flag=True, help="Build conversations for fine-tuning in the folder --out.")
@click.option("--chat-template", metavar="FILE", help="With --chat: Jinja template (default: the tokenizer's).")
@click.option("--sequence", type=click.IntRange(min=1), metavar="N", help="With --chat: sequence length of the run.")
@click.option("--pack", is_flag=True, help="With --chat: pack conversations into sequences of this length.")
@click.option(
    "--pad-to", type=click.IntRange(min=1), default=1, metavar="N", help="With --pack: pad each one to a multiple of N."
)
@click.option(
    "--split",
    default="98,1,1",
    metavar="A,B,C",
    help="With --chat: shares of training, validation and test (default: 98,1,1).",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=1234, help="With --chat: seed (default: 1234).")
@click.option("--overwrite", is_flag=True, help="Replace a dataset that was built from other input.")
@click.option("--restart", is_flag=True, help="Discard an unfinished build and start again.")
@click.option("--cluster", help="Build with a Slurm job array on this cluster, below its storage.data.")
@click.option("--time", "limit", default="04:00:00", metavar="TIME", help="Time limit of each job (default: 04:00:00).")
@click.option("--jobs", type=click.IntRange(min=1), default=16, help="Tasks of the job array (default: 16).")
@click.option("--wait", is_flag=True, help="With --cluster: wait for the jobs.")
@json_option
@click.pass_context
def build(
    context: click.Context,
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
    chat: bool,
    chat_template: str | None,
    sequence: int | None,
    pack: bool,
    pad_to: int,
    split: str,
    seed: int,
    overwrite: bool,
    restart: bool,
    cluster: str | None,
    limit: str,
    jobs: int,
    wait: bool,
    as_json: bool,
) -> int:
    """Tokenize text into an indexed dataset, or conversations (--chat) for fine-tuning.

    Sources are JSON lines, Parquet, plain text, .gz and .zst of these, and Hugging Face datasets. To continue an
    interrupted build, repeat the command: finished shards are kept. Files get their names when they are complete.
    """
    refuse_others(context, chat)
    if chat:
        return build_conversations(
            sources, tokenizer, out, patterns, chat_template, split, seed, sequence, pack, pad_to, on_error,
            max_document, workers, overwrite, as_json,
        )  # fmt: skip
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
        report(Outcome(there, [], built=False), None, as_json)
        return 0
    if cluster is not None:
        from fp8launch.plugins.data.cli.array import build_on_cluster

        return build_on_cluster(
            plan, engine, on_error, restart, overwrite, cluster, limit, jobs, workers, wait, as_json
        )
    begun = time.monotonic()
    outcome = _build(plan, engine, processes, on_error == "skip", restart, overwrite)
    report(outcome, time.monotonic() - begun, as_json)
    return 0


def _prefix(out: str, cluster: str | None) -> Path:
    path = (_place(cluster, out) / Path(out).expanduser()).absolute()
    if path.suffix in _ENDINGS:
        fix = f"--out {path.with_suffix('')}"
        raise error("data-out", "--out is the part of the names before .bin and .idx", "--out", fix)
    if out.endswith("/") or path.is_dir():
        message = f"{out} is a folder, but --out must be a prefix of file names"
        raise error("data-out", message, "--out", f"a name in it, such as {path / 'text'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _place(cluster: str | None, out: str) -> Path:
    """Return the folder for a relative --out: with a cluster, its data storage."""
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
        message = f"the end of document has id {spec.eod}, but the vocabulary has only {limit} tokens"
        raise error("data-eod", message, "--vocab-size", "use the model's vocabulary size, or another --eod-token")
    return limit


def _build(plan: BuildPlan, engine: str, processes: int, skip: bool, restart: bool, overwrite: bool) -> Outcome:
    make_folder(plan.folder)
    with only_one(plan.folder):
        # Another process may have built it since this command looked.
        if (there := already_built(plan, overwrite)) is not None:
            return Outcome(there, [], built=False)
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
