"""Report what a build wrote and what it left out."""

from __future__ import annotations

from typing import Any

from fp8launch.cli.output import echo, eprint, show_json
from fp8launch.plugins.data.bad_input import BadInput, summary
from fp8launch.plugins.data.build import Outcome


def report(outcome: Outcome, seconds: float | None, as_json: bool) -> None:
    """Print the counts of a dataset, how fast it was built, and what was left out."""
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


def described(manifest: dict[str, Any], seconds: float | None = None) -> str:
    """Return a dataset's counts as one line."""
    took = ""
    if seconds is not None:
        took = f" in {seconds:.1f} s ({manifest['tokens'] / max(seconds, 1e-9) / 1e6:.2f} M tokens/s)"
    return f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens of {manifest['token_type']}{took}"


def report_skipped(skipped: dict[str, int], examples: list[BadInput]) -> None:
    """Print the documents that were left out to stderr: counts by reason, and the first few by position."""
    if not skipped:
        return
    eprint(f"left out: {summary(skipped)}")
    places(examples)


def places(examples: list[BadInput]) -> None:
    """Print where each document is and why it is listed, to stderr."""
    for bad in examples:
        try:
            eprint(f"  {bad.words()}")
        except OSError:
            eprint(f"  {bad.file}: {bad.reason}")
