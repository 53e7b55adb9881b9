"""`fp8launch data inspect`: show what a dataset holds, and verify its files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from fp8launch.cli.output import echo, json_option, show_json
from fp8launch.datasets.index_format import Index
from fp8launch.datasets.manifest import Manifest, dataset_file, read_manifest, sha256, size_differences
from fp8launch.diagnostics import UserError, exit_code
from fp8launch.plugins.data.cli.inspect_chat import inspect_conversations, is_chat_folder
from fp8launch.plugins.data.encoders import encoder_of
from fp8launch.plugins.data.find_tokenizer import find_tokenizer
from fp8launch.plugins.data.lengths import (
    Bucket,
    Lengths,
    TokenUse,
    count_tokens,
    document,
    measure,
    open_index,
    prefix_of,
)
from fp8launch.plugins.data.tokenizer import TokenizerSpec, sha256_of

BAR = 40
# The length of the shown part of a document.
SAMPLE_TOKENS, SAMPLE_CHARACTERS = 400, 600


@click.command()
@click.argument("prefix")
@click.option("--sample", type=click.IntRange(min=0), metavar="N", help="Document to show (default: the first).")
@click.option("--tokenizer", metavar="NAME", help="Decode with this tokenizer (default: the manifest's).")
@click.option("--verify", is_flag=True, help="Read everything: checksums, token ids, entropy.")
@json_option
def inspect(prefix: str, sample: int | None, tokenizer: str | None, verify: bool, as_json: bool) -> int:
    """Show the documents, tokens and lengths of a dataset and one decoded document, and verify its files.

    For a folder of conversations, show which tokens are trained on. The exit code is 1 if the files do not match the
    manifest.
    """
    if is_chat_folder(Path(prefix)):
        return inspect_conversations(Path(prefix).absolute(), sample or 0, tokenizer, verify, as_json)
    path = prefix_of(prefix)
    index = open_index(path)
    lengths = measure(path, index)
    manifest, wrong = _compare(path, verify)
    use = None
    if verify:
        use = count_tokens(path, index)
    if manifest is not None and manifest.vocab_limit and use is not None:
        wrong += _beyond(use.largest, manifest.vocab_limit)
    number = min(sample or 0, index.sequences - 1)
    ids = document(path, index, number, SAMPLE_TOKENS)
    text, why_not = _decoded(ids, manifest, tokenizer)
    if as_json:
        show_json(
            {
                "prefix": str(path),
                **asdict(index),
                "lengths": asdict(lengths),
                "manifest": manifest and manifest.raw,
                "verified": verify and manifest is not None and not wrong,
                "problems": wrong,
                "largest_token": use and use.largest,
                "different_tokens": use and use.different,
                "unigram_entropy": use and use.unigram_entropy,
                "sample": {"document": number, "ids": ids, "text": text},
            }
        )
        return exit_code(not wrong)
    _show(path, index, lengths, manifest)
    for line in _state(manifest, use, wrong):
        echo(line)
    title = f"\ndocument {number:,}, from its start"
    if why_not:
        title += f" ({why_not})"
    echo(title)
    if text is None:
        text = " ".join(map(str, ids))
    echo(_shortened(text))
    return exit_code(not wrong)


def _compare(path: Path, verify: bool) -> tuple[Manifest | None, list[str]]:
    try:
        manifest = read_manifest(path)
    except ValueError as exc:
        return None, [f"the manifest cannot be read: {exc}"]
    if manifest is None:
        return None, []
    wrong = size_differences(path, manifest)
    if verify and not wrong:
        wrong = _content_differences(path, manifest)
    return manifest, wrong


def _content_differences(prefix: Path, manifest: Manifest) -> list[str]:
    """Describe each file whose checksum differs from the manifest. Reads the files completely."""
    found = []
    for ending in ("bin", "idx"):
        now = sha256(dataset_file(prefix, ending))
        if now != manifest.files[ending][1]:
            found.append(f"the .{ending} has another sha256 than when it was made ({now[:12]}...)")
    return found


def _beyond(largest: int, vocab_size: int) -> list[str]:
    if largest < vocab_size:
        return []
    return [f"token id {largest} is outside the vocabulary of {vocab_size}"]


def _decoded(ids: list[int], manifest: Manifest | None, tokenizer: str | None) -> tuple[str | None, str]:
    """Return the text of ids, or the reason why there is none."""
    try:
        if tokenizer is not None:
            spec = find_tokenizer(tokenizer, append_eod=False, vocab_size=1 << 31)
        elif manifest is None or manifest.tokenizer is None:
            return None, "as ids: no manifest names the tokenizer; add --tokenizer"
        else:
            known = manifest.raw["tokenizer"]
            spec = TokenizerSpec(**{name: known[name] for name in TokenizerSpec.__dataclass_fields__})
            if spec.file is not None and (not Path(spec.file).is_file() or sha256_of(Path(spec.file)) != spec.sha256):
                return None, f"as ids: the tokenizer {spec.file} is not there any more, or has changed"
        return encoder_of(spec).decode(ids), ""
    except (UserError, KeyError, TypeError) as exc:
        return None, f"as ids: {exc}"


def _show(path: Path, index: Index, lengths: Lengths, manifest: Manifest | None) -> None:
    echo(f"{path}")
    echo(f"{index.documents:,} documents, {index.tokens:,} tokens of {index.token_type}")
    echo(f"tokens in a document: {lengths.shortest:,} to {lengths.longest:,}, mean {lengths.mean:,.1f}\n")
    most = max(bucket.documents for bucket in lengths.buckets)
    width = max(map(len, map(_range, lengths.buckets)))
    for bucket in lengths.buckets:
        bar = "█" * max(round(BAR * bucket.documents / most), min(bucket.documents, 1))
        echo(f"{_range(bucket):>{width}} {bar:<{BAR}} {bucket.documents:,}")
    if manifest is not None and manifest.tokenizer is not None:
        known: dict[str, Any] = manifest.raw["tokenizer"]
        end = known["eod"]
        if end is None:
            end = "none"
        echo(f"\ntokenizer {known['name']}")
        echo(f"{known['kind']}, {known['vocab_size']:,} tokens, end of document {end}")


def _range(bucket: Bucket) -> str:
    if bucket.end - bucket.begin <= 1:
        return f"{bucket.begin:,}"
    return f"{bucket.begin:,}-{bucket.end - 1:,}"


def _state(manifest: Manifest | None, use: TokenUse | None, wrong: list[str]) -> list[str]:
    lines = []
    if use is not None:
        lines.append(f"{use.different:,} different tokens, the largest id is {use.largest}")
        lines.append(
            f"unigram entropy {use.unigram_entropy:.3f} nats: a model that has learnt anything has a lower loss"
        )
    for words in wrong:
        lines.append(f"damaged: {words}")
    if wrong:
        return lines
    if manifest is None:
        return [*lines, "no manifest: another program made it"]
    if use is None:
        return ["sizes agree with the manifest; --verify reads the content"]
    return [*lines, "files have the manifest's checksums"]


def _shortened(text: str) -> str:
    if len(text) <= SAMPLE_CHARACTERS:
        return text
    return f"{text[:SAMPLE_CHARACTERS]} ..."
