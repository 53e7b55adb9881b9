"""Shell completion of names. Each list is read only when the shell asks for it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from fp8launch.diagnostics import UserError

# bash inserts completions unquoted, and a word with a leading dash would be an option. Other users choose the names of
# their runs, so offer only names that every shell reads as one plain word. Slashes occur in the names of pack parts.
_PLAIN_WORD = re.compile(r"(?!-)[A-Za-z0-9._+/-]+")


def recipes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the pack's recipes and studies, else runs, else files."""
    return _items(_recipes(), incomplete) or _items(_runs(), incomplete, files=True)


def _recipes() -> list[str]:
    from fp8launch.recipe.load import pack_names

    return pack_names("", "studies")


def _runs() -> Iterator[str]:
    """Yield study ids, then run ids, newest first. The user's own come before those of other users."""
    from fp8launch.rundir.registry import all_runs, all_studies

    yield "latest"
    folders = [study.path for study in all_studies()]
    folders += [run.path for run in reversed(all_runs())]
    for folder in sorted(folders, key=_is_of_another_user):
        yield folder.name


def _is_of_another_user(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid != os.geteuid()
    except OSError:
        return True


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the pack's models, and files."""
    from fp8launch.recipe.load import pack_names

    return _items((name.removeprefix("models/") for name in pack_names("models")), incomplete, files=True)


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the ids of runs and studies, else recipes, else files."""
    return _items(_runs(), incomplete) or _items(_recipes(), incomplete, files=True)


def clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of the user's cluster profiles, and files."""
    from fp8launch.cluster.profile import cluster_files

    return _items(cluster_files(), incomplete, files=True)


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete recipe keys; after `megatron.` and `model.`, complete the flags of the newest Megatron."""
    if "=" in incomplete:
        return []
    return _items(_keys(incomplete), incomplete)


def _keys(incomplete: str) -> Iterator[str]:
    from fp8launch.recipe.schema import section_fields

    section = incomplete.partition(".")[0]
    if section in ("megatron", "model") and "." in incomplete:
        from fp8launch.megatron.schema import load_schema, supported_versions

        for flag in load_schema(supported_versions()[-1]).flags():
            yield f"{section}.{flag.dest}"
        return
    for name, fields in section_fields().items():
        yield from (f"{name}.{field}" for field in fields)
    for name in ("megatron", "megatron_extra", "model", "env"):
        yield f"{name}."


def _items(names: Iterable[str], incomplete: str, files: bool = False) -> list[CompletionItem]:
    """Return the plain-word names that start with `incomplete`. If there are none and `files` is set, the shell
    completes file names instead.
    """
    found: list[str] = []
    with contextlib.suppress(UserError, OSError):
        for name in dict.fromkeys(names):
            if name.startswith(incomplete) and _PLAIN_WORD.fullmatch(name):
                found.append(name)
    if files and not found:
        return [CompletionItem(incomplete, type="file")]
    return list(map(CompletionItem, found))
