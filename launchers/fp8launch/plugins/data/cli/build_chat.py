"""`fp8launch data build --chat`: conversations for fine-tuning with Megatron-Bridge."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from fp8launch.cli.output import echo, eprint, show_json
from fp8launch.diagnostics import error
from fp8launch.plugins.data.build import cores
from fp8launch.plugins.data.chat.chat_tokenizer import load_chat_tokenizer
from fp8launch.plugins.data.chat.dataset import ChatOutcome, ChatPlan, build_chat
from fp8launch.plugins.data.chat.manifest import lengths_of
from fp8launch.plugins.data.chat.packing import Packing
from fp8launch.plugins.data.cli.progress import shown_progress
from fp8launch.plugins.data.cli.report import places, report_skipped
from fp8launch.plugins.data.documents import Reading
from fp8launch.plugins.data.find_tokenizer import tokenizer_file
from fp8launch.plugins.data.sources import find_files, shards_of

DEFAULT_SPLIT = "98,1,1"
CHAT_OPTIONS = ("split", "seed", "sequence", "pack", "pad_to", "chat_template")
# Options of `data build` that also apply to conversations.
_SHARED = (
    "sources",
    "chat",
    "tokenizer",
    "out",
    "patterns",
    "on_error",
    "max_document",
    "workers",
    "overwrite",
    "as_json",
)


def refuse_others(context: click.Context, chat: bool) -> None:
    """Raise UserError if an option is given that does not apply with, or without, --chat."""
    for option in context.command.params:
        name = str(option.name)
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if not given or name in _SHARED or (name in CHAT_OPTIONS) == chat:
            continue
        flag = option.opts[0]
        if chat:
            raise error("data-build", f"{flag} does not apply to conversations", flag, "leave it out, or --chat")
        raise error("data-build", f"{flag} is for conversations", flag, "add --chat, or leave it out")


def build_conversations(
    sources: Sequence[str],
    tokenizer: str,
    out: str,
    patterns: Sequence[str],
    template: str | None,
    split: str,
    seed: int,
    sequence: int | None,
    pack: bool,
    pad_to: int,
    on_error: str,
    max_document: int,
    workers: int | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Build a folder of conversations, and report it."""
    packing = None
    if pack:
        if sequence is None:
            raise error("data-build", "--pack needs the sequence length of the run", "--sequence", "add --sequence N")
        if pad_to > sequence:
            message = f"--pad-to {pad_to} is longer than --sequence {sequence}"
            raise error("data-build", message, "--pad-to", "use a smaller multiple")
        packing = Packing(sequence, pad_to, seed)
    file = tokenizer_file(tokenizer)
    template_file = None if template is None else Path(template).expanduser().absolute()
    loaded = load_chat_tokenizer(file.parent, template_file)
    files = find_files(sources, "jsonl", patterns)
    plan = ChatPlan(
        Path(out).expanduser().absolute(),
        tuple(files),
        tuple(shards_of(files, 1)),
        file,
        tokenizer,
        template_file,
        Reading(max_bytes=max_document << 20),
        _shares(split),
        seed,
        sequence,
        packing,
    )
    begun = time.monotonic()
    with shown_progress() as progress:
        outcome = build_chat(plan, loaded, workers or cores(), on_error == "skip", overwrite, progress)
    _report(plan, outcome, time.monotonic() - begun, as_json)
    return 0


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = ()
    if len(shares) != 3 or not shares[0] > 0 or not all(0 <= share < float("inf") for share in shares):
        message = f"'{text}' is not three shares for training, validation and test"
        raise error("data-split", message, "--split", f"such as {DEFAULT_SPLIT}; 0 leaves a split out")
    return shares


def _report(plan: ChatPlan, outcome: ChatOutcome, seconds: float, as_json: bool) -> None:
    manifest = outcome.manifest
    if as_json:
        examples = [{**bad.as_json(), "place": bad.place()} for bad in (*outcome.examples, *outcome.beyond)]
        show_json({**manifest, "folder": str(plan.out), "built": outcome.built, "examples": examples})
        return
    report_skipped(manifest["skipped"], outcome.examples)
    if outcome.beyond and plan.sequence is not None:
        longer = sum(lengths_of(split).longer_than(plan.sequence) for split in manifest["splits"].values())
        eprint(f"{longer:,} conversations are longer than {plan.sequence:,} tokens, such as")
        places(outcome.beyond)
    if not outcome.built:
        eprint("this data already exists")
    share = 100 * manifest["trained_tokens"] / manifest["tokens"]
    counts = ", ".join(f"{split['conversations']:,} {name}" for name, split in manifest["splits"].items())
    echo(f"{manifest['conversations']:,} conversations in {seconds:.1f} s: {counts}")
    echo(f"{manifest['tokens']:,} tokens, {share:.1f} % trained on; `fp8launch data inspect` shows which")
