"""The text of a first recipe, with a comment for each choice."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fp8launch.plugins.init.draft import Draft
from fp8launch.recipe.write_yaml import inline


def recipe_text(draft: Draft) -> str:
    """Return the recipe as commented YAML."""
    size = f"{draft.nodes} x {draft.gpus_per_node} {draft.gpu}"
    lines = [
        f"# {draft.source} on {size}. Written by `fp8launch init recipe`.",
        f"# Check it with `fp8launch check {draft.name}.yaml`; docs/recipe_reference.md has every key.",
    ]
    lines += [f"# Note: {note}." for note in draft.notes]
    lines.append("extends:")
    lines += [f"  - {inline(part)}" for part in draft.extends]
    lines.append(f"name: {inline(draft.name)}")
    lines.append(f"description: {inline(f'{draft.source}, {size}')}")
    if draft.model:
        lines += ["", "# The architecture, by Megatron's names.", "model:"]
        lines += [f"  {key}: {inline(value)}" for key, value in draft.model.items()]
    if draft.gather:
        lines += ["", "# Weights are gathered in FP8: half the bytes, and no bf16 copy of the weights.",
                  "precision: {param_gather: true}"]  # fmt: skip
    lines += ["", *_layout(draft), "", *_batch(draft), "", *_train(draft), "", *_data(draft), ""]
    if draft.saves:
        lines += ["# Checkpoints go into the run folder; `submit --attempts 5` continues from them after a time limit.",
                  "checkpoint: {dir: checkpoints, load: checkpoints, interval: 500}", ""]  # fmt: skip
    need = {"gpu": draft.gpu, "nodes": draft.nodes, "gpus_per_node": draft.gpus_per_node, "time": draft.time}
    lines += ["# The time limit bounds what the job can cost.", f"resources: {inline(need)}"]
    if draft.image is not None:
        lines += ["# A name in `fp8launch images`, a registry URI, or a file."]
        lines += [f"container: {inline({'image': draft.image})}"]
    if draft.flags:
        lines += ["", "# Any other flag of Megatron.", "megatron:"]
        lines += [f"  {key}: {inline(value)}" for key, value in draft.flags.items()]
    return "\n".join(lines) + "\n"


def _layout(draft: Draft) -> Sequence[str]:
    note = textwrap.wrap(draft.layout_note, 100)
    return [*(f"# {line}" for line in note), f"parallel: {inline(dict(draft.layout or {}))}"]


def _batch(draft: Draft) -> Sequence[str]:
    tokens = draft.batch * draft.sequence
    return [
        f"# {draft.batch} sequences of {draft.sequence} tokens are {tokens:,} tokens per step. With more nodes the",
        "# global batch grows (weak scaling).",
        f"batch: {inline({'micro': draft.micro, 'global': draft.batch, 'sequence': draft.sequence})}",
    ]


def _train(draft: Draft) -> Sequence[str]:
    warmup = 0
    if draft.iterations > 1:
        warmup = max(draft.iterations // 100, 1)
    return [
        "# A usual learning rate for 1 to 10 billion parameters; larger models take a smaller one.",
        f"train: {inline({'iterations': draft.iterations, 'lr': 3e-4, 'min_lr': 3e-5, 'warmup': warmup})}",
    ]


def _data(draft: Draft) -> Sequence[str]:
    if not draft.data:
        return [
            "# Generated tokens, for measuring. Your own: `fp8launch data build`, then",
            "# data: {kind: indexed, blend: [/absolute/prefix], tokenizer: {type: NullTokenizer}, split: \"100,0,0\"}",
            "data: {kind: mock}",
        ]  # fmt: skip
    tokenizer = {"type": "NullTokenizer"}
    if draft.tokenizer is not None:
        tokenizer = {"type": "HuggingFaceTokenizer", "model": draft.tokenizer}
    return [
        "# Prefixes of indexed datasets, which every node sees. All documents train: nothing is evaluated.",
        "data:",
        "  kind: indexed",
        f"  blend: {inline(list(draft.data))}",
        "  split: \"100,0,0\"",
        f"  tokenizer: {inline(tokenizer)}",
        "  cache: cache",
    ]  # fmt: skip
