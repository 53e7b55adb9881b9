"""`fp8launch data tokenizer`: train a tokenizer on text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fp8launch.cli.output import echo, json_option, show_json
from fp8launch.diagnostics import ANSWER_IS_NO, error
from fp8launch.plugins.data.bad_input import BadInput
from fp8launch.plugins.data.cli.source_options import source_options
from fp8launch.plugins.data.documents import Reading, documents
from fp8launch.plugins.data.extras import load
from fp8launch.plugins.data.files import write_json
from fp8launch.plugins.data.sources import Format, find_files, shards_of
from fp8launch.rundir.atomic_io import write_atomically

END = "<|endoftext|>"


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--vocab-size", type=click.IntRange(min=257), required=True, metavar="N", help="Total number of tokens.")
@click.option("--out", required=True, metavar="DIR", help="Folder for tokenizer.json and its configuration.")
@source_options
@json_option
def tokenizer(
    sources: tuple[str, ...],
    vocab_size: int,
    out: str,
    field: str,
    form: Format | None,
    patterns: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a byte-level BPE tokenizer on text, for experiments.

    It can encode any text; <|endoftext|> ends a document. The same sources give the same tokenizer. The words of the
    text and their counts must fit in memory.
    """
    library: Any = load("tokenizers", "training a tokenizer")
    folder = Path(out).expanduser().absolute()
    if (folder / "tokenizer.json").exists():
        message = f"{folder / 'tokenizer.json'} already exists"
        raise error("data-exists", message, "--out", "choose another folder, or remove it", ANSWER_IS_NO)
    parts = (library.pre_tokenizers.ByteLevel, library.decoders.ByteLevel)
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer, trained.decoder = parts[0](add_prefix_space=False), parts[1]()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=parts[0].alphabet(), show_progress=False
    )
    trained.train_from_iterator(_texts(sources, field, form, patterns), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)
    write_atomically(folder / "tokenizer.json", trained.to_str(pretty=True))
    size = trained.get_vocab_size(with_added_tokens=True)
    if as_json:
        show_json({"folder": str(folder), "vocab_size": size})
        return
    echo(f"{folder}: {size:,} tokens")


def _texts(sources: tuple[str, ...], field: str, form: Format | None, patterns: tuple[str, ...]) -> Iterator[str]:
    reading = Reading(field)
    for shard in shards_of(find_files(sources, form, patterns), 1):
        for each in documents(shard, reading):
            if not isinstance(each, BadInput):
                yield str(each.content)
