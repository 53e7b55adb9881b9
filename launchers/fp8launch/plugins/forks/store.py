"""Keep the flags of forks in the user's configuration, where `check` finds them by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fp8launch.cluster.profile import fork_schema_file
from fp8launch.diagnostics import error
from fp8launch.megatron.schema import FlagSchema, by_name, supported_versions
from fp8launch.megatron.versions import release


class Fork(NamedTuple):
    """A fork's flags. `uncertain` are the flags with a part that could not be read, such as a computed default."""

    name: str
    source: str
    schema: FlagSchema
    uncertain: frozenset[str]


def fork_of(version: str | None) -> Fork | None:
    """Return the fork that a Megatron version names, as in 0.19+name; None if no schema of that name was built."""
    if version is None or "+" not in version:
        return None
    file = fork_schema_file(version)
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        flags = data["flags"]
        schema = FlagSchema(data["version"], (), {}, by_name(flags))
        uncertain = frozenset(flag["flags"][0] for flag in flags if "unread" in flag)
        return Fork(version.partition("+")[2], data["source"], schema, uncertain)
    except (OSError, ValueError, LookupError, TypeError):
        fix = "build it again with `fp8launch schema build`"
        raise error("fork-schema", f"{file} is not a schema of flags", "software.megatron", fix) from None


def write(version: str, source: Path, in_source: str, flags: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write the flags of the fork that `version` names, replacing older ones, and return the file."""
    file = fork_schema_file(version)
    file.parent.mkdir(parents=True, exist_ok=True)
    head = f'"version": {json.dumps(in_source)},\n"source": {json.dumps(str(source))}'
    rows = ",\n".join(json.dumps(flags[name]) for name in sorted(flags))
    text = f'{{\n{head},\n"flags": [\n{rows}\n]\n}}\n'
    draft = file.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)
    return file


def with_upstream(fork: FlagSchema, base: FlagSchema) -> FlagSchema:
    """Return the fork's flags together with the flags of `base` that it lacks."""
    return replace(base, _raw={**base._raw, **fork._raw}, _built={})


def base_of(name: str) -> str | None:
    """Return the supported version that the built schema of this name is checked as; None if there is none."""
    if not name or label(name) != name:
        return None
    fork = fork_of(f"+{name}")
    return nearest_version(fork.schema.version) if fork else None


def label(name: str) -> str:
    """Return a fork's name as a version can hold it, in lower case."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip(".-")


def nearest_version(in_source: str | None) -> str:
    """Return the supported minor version that is nearest to a fork's; the oldest if it states none."""
    known = supported_versions()
    if in_source is None:
        return known[0]
    wanted = release(in_source)[:2]
    older = [one for one in known if release(one) <= wanted]
    return older[-1] if older else known[0]
