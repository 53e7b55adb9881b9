"""The plan of a build: a dataset's inputs and shards, kept in PREFIX.build/ until the dataset is complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp8launch.datasets.index_format import TYPES, code_of
from fp8launch.datasets.manifest import read_json
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, error
from fp8launch.injob.ownership import why_not_own
from fp8launch.plugins.data.documents import Reading
from fp8launch.plugins.data.files import write_json
from fp8launch.plugins.data.sources import Shard, SourceFile
from fp8launch.plugins.data.tokenizer import TokenizerSpec

PLAN_VERSION = 1
# A plan names each input file twice; this is enough for a million files.
_LARGEST_PLAN = 1 << 30


@dataclass(frozen=True)
class BuildPlan:
    """Everything that determines the bytes of the dataset. Ids must be below `vocab_limit`."""

    prefix: str
    files: tuple[SourceFile, ...]
    shards: tuple[Shard, ...]
    tokenizer: TokenizerSpec
    reading: Reading
    vocab_limit: int

    @property
    def token_type(self) -> str:
        return _smallest_type(max(self.tokenizer.vocab_size, (self.tokenizer.eod or 0) + 1))

    @property
    def token_bytes(self) -> int:
        return TYPES[code_of(self.token_type)][1]

    @property
    def folder(self) -> Path:
        return work_folder(Path(self.prefix))

    def decides(self) -> dict[str, Any]:
        """Return the inputs that determine the dataset. How it is cut into shards does not matter."""
        tokenizer = {key: value for key, value in asdict(self.tokenizer).items() if key not in ("file", "name")}
        return {
            "sources": list(map(asdict, self.files)),
            "tokenizer": tokenizer,
            "reading": asdict(self.reading),
            "vocab_limit": self.vocab_limit,
        }

    def fingerprint(self) -> str:
        """Return a checksum of `decides`, equal for builds of the same dataset."""
        return hashlib.sha256(json.dumps(self.decides(), sort_keys=True).encode()).hexdigest()


def work_folder(prefix: Path) -> Path:
    """Return the folder of an unfinished build."""
    return prefix.with_name(f"{prefix.name}.build")


def save_plan(plan: BuildPlan) -> None:
    write_json(plan.folder / "plan.json", {"version": PLAN_VERSION, **asdict(plan)})


def load_plan(folder: Path) -> BuildPlan | None:
    """Return the plan in a build's folder, or None. Raises UserError if it cannot be read."""
    try:
        content = read_json(folder / "plan.json", _LARGEST_PLAN)
        if content is None:
            return None
        if content.pop("version") != PLAN_VERSION:
            raise ValueError("another version of fp8launch wrote it")
        shards = []
        for each in content["shards"]:
            shards.append(Shard(**{**each, "files": tuple(each["files"])}))
        return BuildPlan(
            prefix=content["prefix"],
            files=tuple(SourceFile(**each) for each in content["files"]),
            shards=tuple(shards),
            tokenizer=TokenizerSpec(**content["tokenizer"]),
            reading=Reading(**content["reading"]),
            vocab_limit=content["vocab_limit"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        message = f"the plan in {folder} cannot be read: {exc}"
        fix = f"remove {folder}, and build again"
        raise error("data-plan", message, str(folder / "plan.json"), fix, ANSWER_IS_NO) from None


def make_folder(folder: Path) -> None:
    """Create a build's folder if it does not exist. Raises UserError if it is not this user's own."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    require_own(folder)


def require_own(folder: Path) -> None:
    """Raise UserError if other users could have written to a build's folder, its scripts or its plan."""
    for path in (folder, *folder.glob("*.json"), *folder.glob("*.sbatch")):
        reason = why_not_own(path)
        if not reason:
            continue
        message = f"other users could change the parts of this build: {reason}"
        fix = f"remove {folder}, or choose another --out"
        raise error("not-yours", message, str(folder), fix, MACHINE_LACKS)


def require_same(old: BuildPlan, new: BuildPlan) -> None:
    """Raise UserError if an unfinished build has other input or another tokenizer."""
    before, now = old.decides(), new.decides()
    differs = [name for name in before if before[name] != now[name]]
    if differs:
        message = f"{old.folder} is an unfinished build with other {' and '.join(differs)}"
        fix = "repeat the command that began it to finish it, or add --restart to begin again"
        raise error("data-plan", message, "--out", fix, ANSWER_IS_NO)


def unchanged(files: Sequence[SourceFile]) -> str | None:
    """Return the first file that changed since the build was planned, or None."""
    for file in files:
        try:
            state = os.stat(file.path)  # noqa: PTH116 (a million files: no Path for each)
        except OSError:
            return file.path
        if (state.st_size, state.st_mtime_ns) != (file.bytes, file.modified_ns):
            return file.path
    return None


def _smallest_type(vocab_size: int) -> str:
    """Return the type that Megatron's own builder chooses for a vocabulary (`DType.optimal_dtype`)."""
    if vocab_size < 65500:
        return "uint16"
    return "int32"
