"""Folders of `fp8launch data build --chat`: their packed sequences and chat template, for the check and for the job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.injob.regular_files import read_regular

MANIFEST = "chat.manifest.json"
TEMPLATE = "chat_template.jinja"
FORMAT = 1
# The manifest counts conversations by their length.
_LARGEST_MANIFEST = 64 << 20
_LARGEST_TOKENIZER = 256 << 20
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class ChatData:
    """The parts of a manifest that a run depends on. `lengths` counts training conversations by their tokens.

    `packed` is None without packed sequences; they have `size` tokens, and each conversation a multiple of `multiple`.
    """

    folder: Path
    tokenizer: str
    tokenizer_sha256: str
    template_sha256: str
    lengths: Mapping[int, int]
    packed: Mapping[str, Any] | None

    def longer_than(self, sequence: int) -> int:
        """Count the training conversations that a sequence does not hold. Their last token is only a label."""
        return sum(count for length, count in self.lengths.items() if length - 1 > sequence)

    def packed_files(self, size: int, multiple: int) -> dict[str, Path] | None:
        """Return the fields of Bridge's PackedSequenceSpecs for packed files that fit a run; None if none do."""
        if self.packed is None or (self.packed["size"], self.packed["multiple"]) != (size, multiple):
            return None
        place = self.folder / "packed"
        found = {"packed_metadata_path": place / f"{size}_metadata.jsonl"}
        for split, name in (("training", "train"), ("validation", "val")):
            if split in self.packed:
                found[f"packed_{name}_data_path"] = place / f"{split}_{size}.idx.parquet"
        return found if all(file.is_file() for file in found.values()) else None


def read(folder: Path) -> ChatData | None:
    """Return what the manifest of a folder says; None if it has none. Raises OSError and ValueError."""
    try:
        raw = json.loads(read_regular(folder / MANIFEST, _LARGEST_MANIFEST))
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    try:
        if raw["format"] != FORMAT:
            raise ValueError(f"its format is {raw['format']}, and {FORMAT} is known here")
        lengths = {int(length): int(count) for length, count in raw["splits"]["training"]["lengths"]}
        tokenizer, packed = raw["tokenizer"], raw["packed"]
        if packed is not None:
            packed = {**packed, "size": int(packed["size"]), "multiple": int(packed["multiple"])}
        return ChatData(
            folder, str(tokenizer["file"]), str(tokenizer["sha256"]), str(tokenizer["template_sha256"]), lengths, packed
        )
    except (KeyError, TypeError, AttributeError) as exc:
        raise ValueError(f"it is not a manifest of conversations: {type(exc).__name__} {exc}") from None


def differs(data: ChatData, tokenizer: Path) -> str | None:
    """Say in what a run's tokenizer differs from the one that the data were built with.

    None also if the folder has no tokenizer.json.
    """
    try:
        if (
            hashlib.sha256(read_regular(tokenizer / _TOKENIZER, _LARGEST_TOKENIZER)).hexdigest()
            != data.tokenizer_sha256
        ):
            return "another tokenizer"
        template = _template(data.folder, tokenizer)
    except (OSError, ValueError):
        return None
    if template is not None and hashlib.sha256(template.encode()).hexdigest() != data.template_sha256:
        return "another chat template"
    return None


def _template(data: Path, tokenizer: Path) -> str | None:
    """Return the chat template of a run: the data's own one, else the tokenizer's."""
    for file in (data / TEMPLATE, tokenizer / TEMPLATE):
        if file.is_file():
            return read_regular(file, _LARGEST_MANIFEST).decode()
    config = json.loads(read_regular(tokenizer / "tokenizer_config.json", _LARGEST_MANIFEST))
    template = config.get("chat_template") if isinstance(config, dict) else None
    return template if isinstance(template, str) else None
