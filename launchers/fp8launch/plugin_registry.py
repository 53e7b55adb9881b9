"""What extends fp8launch, and how the core finds it.

A plugin is a `Plugin` value that names what it adds by strings `module:name`. Such an object is imported when it is
used, so a listing such as `--help` imports nothing but the `Plugin` values. The core describes its own commands,
engines and schedulers in the same way (`fp8launch.core`), so there is one way to look anything up.

The plugins that come with fp8launch are listed here. A package of a site adds a plugin through an entry point of the
group `fp8launch.plugins`. `FP8LAUNCH_PLUGINS` selects plugins by name: empty for none, `a,b` for these and what they
require; unset, all are active. A site plugin that cannot be used is reported once on stderr and left out.

Python's standard library only: jobs of a checkout import this module with the Python of their image.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fp8launch.diagnostics import MACHINE_LACKS, UserError, did_you_mean, error

if TYPE_CHECKING:
    import importlib.metadata

ENTRY_POINTS = "fp8launch.plugins"
SELECTION = "FP8LAUNCH_PLUGINS"

_CORE = "fp8launch.core:PLUGIN"
_BUILT_IN = (
    "diff",
    "estimate",
    "importer",
    "forks",
    "bridge",
    "measure",
    "accelerate",
    "convert",
    "evaluate",
    "stages",
    "data",
    "archive",
    "housekeeping",
    "advisories",
    "tracking",
    "plots",
    "images",
    "doctor",
    "init",
    "notify",
    "plan",
    "prove",
    "rehearse",
    "tune",
    "validators",
    "watch",
    "ssh",
    "submitit",
    "nemo_run",
    "tensorboard",
    "validation_loss",
)

# `module:name`, or the object itself for a plugin that is made at run time.
Target: TypeAlias = "str | Callable[..., Any]"


@dataclass(frozen=True)
class Command:
    """A command: the click command, and its heading and line in `fp8launch --help`.

    `before` is the command of the same heading that follows it there. By default a plugin's command comes last.
    """

    target: Target
    group: str
    help: str
    before: str | None = None


@dataclass(frozen=True)
class Plugin:
    """What a plugin adds, mostly by the names that users write.

    docs/plugins.md#what-a-plugin-can-add describes each field and the type of its objects.
    """

    name: str
    requires: tuple[str, ...] = ()
    commands: Mapping[str, Command] = field(default_factory=dict)
    engines: Mapping[str, Target] = field(default_factory=dict)
    schedulers: Mapping[str, Target] = field(default_factory=dict)
    rules: Mapping[str, Target] = field(default_factory=dict)
    log_dialects: Mapping[str, Target] = field(default_factory=dict)
    event_files: Mapping[str, Target] = field(default_factory=dict)
    precisions: Mapping[str, Target] = field(default_factory=dict)
    check_layers: Mapping[str, Target] = field(default_factory=dict)
    validators: Mapping[str, Target] = field(default_factory=dict)
    memory_models: Mapping[str, Target] = field(default_factory=dict)
    estimates: Mapping[str, Target] = field(default_factory=dict)
    run_costs: Mapping[str, Target] = field(default_factory=dict)
    verifications: Mapping[str, Target] = field(default_factory=dict)
    report_fields: Mapping[str, Target] = field(default_factory=dict)
    comparison_columns: Mapping[str, Target] = field(default_factory=dict)
    comparison_files: Mapping[str, Target] = field(default_factory=dict)
    run_listeners: Mapping[str, Target] = field(default_factory=dict)
    setup_lines: Mapping[str, Target] = field(default_factory=dict)
    end_commands: Mapping[str, Target] = field(default_factory=dict)
    recipe_sections: Mapping[str, Target] = field(default_factory=dict)
    recipe_kinds: Mapping[str, Target] = field(default_factory=dict)
    recipe_sources: Mapping[str, Target] = field(default_factory=dict)
    published_recipes: Mapping[str, Target] = field(default_factory=dict)
    relays: Mapping[str, Target] = field(default_factory=dict)
    measurements: Mapping[str, str] = field(default_factory=dict)
    in_job: tuple[str, ...] = ()


class Offer(NamedTuple):
    """Something that an active plugin adds: a `Command`, or the target of another kind."""

    plugin: Plugin
    value: Any


# Fields of `Plugin` that map names of users to what has these names.
_KINDS = tuple(each.name for each in fields(Plugin) if each.name not in ("name", "requires", "in_job"))
_added: list[Plugin] = []


def add(plugin: Plugin) -> None:
    """Activate a plugin that neither comes with fp8launch nor has an entry point."""
    _added.append(plugin)


def active() -> tuple[Plugin, ...]:
    """Return the core and the active plugins. Raises UserError if FP8LAUNCH_PLUGINS names an unknown one."""
    return (*_selected(os.environ.get(SELECTION)), *_added)


def offered(kind: str) -> dict[str, Offer]:
    """Return what active plugins add to a field of `Plugin`, such as "engines", by name."""
    return {name: Offer(plugin, value) for plugin in active() for name, value in getattr(plugin, kind).items()}


def option_of(name: str) -> str:
    """Return the option of a command, from the name under which a plugin adds it: `--require-proof`."""
    return f"--{name.replace('_', '-')}"


def absent_plugin(kind: str, name: str) -> str | None:
    """Return the plugin of fp8launch that would add `name` if it were active."""
    return absent(kind).get(name)


def absent_error(kind: str, name: str, what: str, where: str | None) -> UserError | None:
    """Return the error for something that a plugin of fp8launch would add if it were active; None for anything else."""
    plugin = absent_plugin(kind, name)
    if plugin is None:
        return None
    return error("absent-plugin", needs(what, plugin), where, how_to_activate(plugin))


def needs(what: str, plugin: str) -> str:
    """Return the message about something that an inactive plugin of fp8launch would add."""
    return f"{what} needs the plugin {plugin}, which is not active"


def how_to_activate(plugin: str) -> str:
    """Return the fix that follows the message of `needs`."""
    return f"add {plugin} to {SELECTION}, or unset that variable"


def absent(kind: str) -> dict[str, str]:
    """Return what plugins of fp8launch that are not active would add to a field of `Plugin`, with their names."""
    inactive = [plugin for plugin in map(_built_in, _BUILT_IN) if plugin not in active()]
    return {name: plugin.name for plugin in inactive for name in getattr(plugin, kind)}


def load(offer: Offer) -> Any:
    """Import what an offer names. Raises UserError if it is a site's and cannot be imported."""
    target = offer.value.target if isinstance(offer.value, Command) else offer.value
    try:
        return load_target(target)
    except Exception as broken:
        if offer.plugin.name in ("core", *_BUILT_IN):
            raise
        message = f"the plugin {offer.plugin.name} is broken: {target}: {type(broken).__name__}: {broken}"
        fix = f"correct or remove it, or leave it out with {SELECTION}"
        raise error("broken-plugin", message, offer.plugin.name, fix, MACHINE_LACKS) from broken


def loaded(kind: str) -> Iterator[tuple[str, Any]]:
    """Import everything of a kind. What cannot be imported from a site's plugin is reported and left out."""
    for name, offer in offered(kind).items():
        try:
            found = load(offer)
        except UserError as broken:
            _report(broken.problems[0].message)
            continue
        yield name, found


def in_job_packages() -> dict[str, Path]:
    """Return the packages that jobs import, by their full names, with their folders."""
    found = {}
    for plugin in active():
        for package in plugin.in_job:
            spec = importlib.util.find_spec(package)
            if spec is None or not spec.submodule_search_locations:
                fix = f"install it again, or leave it out with {SELECTION}"
                message = f"the plugin {plugin.name} is broken: there is no package {package}"
                raise error("broken-plugin", message, plugin.name, fix, MACHINE_LACKS)
            found[package] = Path(spec.submodule_search_locations[0])
    return found


def load_target(target: Target) -> Any:
    """Return the object that `module:name` names."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _selected(selection: str | None) -> tuple[Plugin, ...]:
    core: Plugin = load_target(_CORE)
    if selection is None:
        wanted, entry_points = list(_BUILT_IN), _entry_points()
    else:
        chosen = [name.strip() for name in selection.split(",") if name.strip()]
        entry_points = [] if set(chosen) <= set(_BUILT_IN) else _entry_points()
        known = [*_BUILT_IN, *(entry.name for entry in entry_points)]
        for name in chosen:
            if name not in known:
                fix = did_you_mean(name, known, f"choose from {', '.join(known) or 'none'}")
                raise error("unknown-plugin", f"there is no plugin '{name}'", SELECTION, fix)
        wanted = [name for name in _BUILT_IN if name in _with_required(chosen)]
        entry_points = [entry for entry in entry_points if entry.name in chosen]
    found = [core, *map(_built_in, wanted)]
    for plugin in _site_plugins(entry_points):
        if reason := _conflict(plugin, found):
            _report(f"the plugin {plugin.name} is left out: {reason}")
        else:
            found.append(plugin)
    return tuple(found)


@functools.cache
def _built_in(name: str) -> Plugin:
    found = load_target(f"fp8launch.plugins.{name}.plugin:PLUGIN")
    assert isinstance(found, Plugin)
    return found


def _with_required(names: list[str]) -> set[str]:
    """Return names of plugins and of all plugins of fp8launch that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            if name in _BUILT_IN:
                waiting += _built_in(name).requires
    return found


def _conflict(plugin: Plugin, others: list[Plugin]) -> str | None:
    """Return why a site's plugin cannot be active with these."""
    names = [other.name for other in others]
    if plugin.name in (*names, *_BUILT_IN):
        return "another plugin has this name"
    for name in plugin.requires:
        if name not in names:
            return f"it requires the plugin {name}, which is not active"
    for kind in _KINDS:
        for other in others:
            both = getattr(plugin, kind).keys() & getattr(other, kind).keys()
            if both:
                return f"{other.name} already has {', '.join(sorted(both))} in its {kind}"
    return None


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the plugins of installed packages, none of them imported."""
    if not _any_entry_point():
        return []
    import importlib.metadata

    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS))


def _site_plugins(entry_points: list[importlib.metadata.EntryPoint]) -> Iterator[Plugin]:
    for entry in entry_points:
        try:
            found = entry.load()
            if not isinstance(found, Plugin):
                raise TypeError(f"{entry.value} is a {type(found).__name__}, not a fp8launch.plugins.Plugin")
            if found.name != entry.name:
                raise ValueError(f"its entry point is called {entry.name}, but it is the plugin {found.name}")
        except Exception as broken:
            _report(f"the plugin {entry.name} is broken and left out: {type(broken).__name__}: {broken}")
            continue
        yield found


def _any_entry_point() -> bool:
    """Return whether an installed package may have a plugin.

    importlib.metadata needs about 45 ms to say so with a hundred packages, as long as `fp8launch --help` takes in all.
    """
    header = f"[{ENTRY_POINTS}]".encode()
    for folder in sys.path:
        for file in Path(folder or ".").glob("*.*-info/entry_points.txt"):
            try:
                if header in file.read_bytes():
                    return True
            except OSError:
                continue
    return False


@functools.cache
def _report(message: str) -> None:
    """Say once on stderr that something of a plugin is left out."""
    print(f"fp8launch: {message}", file=sys.stderr)
