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
    """What a plugin adds, by the names that users write.

    requires         names of plugins that this one imports
    engines          classes that implement `fp8launch.engines.base.Engine`
    schedulers       functions that return a `fp8launch.schedulers.base.Scheduler`
    rules            functions with the decorator `fp8launch.check.rule.rule`, by their codes
    log_dialects     values of `fp8launch.logs.dialects.Dialect`
    event_files      functions of the type `fp8launch.logs.event_files.Reader`, by a part of the names of such files
    precisions       values of `fp8launch.hardware.quantization.QuantizationRecipe` with a `factory`
    check_layers     values of `fp8launch.check.extra_layers.ExtraLayer`, by the options of `check` and `submit` that
                     request them
    validators       functions of the type `fp8launch.check.validation.Validator`, by the names that engines give in
                     their `EngineDescription.validators`
    memory_models    a `fp8launch.check.memory.MemoryModel`, by the name of the layer of `check` that it runs: memory
    estimates        functions of the type `fp8launch.plugins.estimate.estimates.Estimator`, by the JSON field that they
                     fill
    run_costs        functions of the type `fp8launch.plugins.estimate.estimates.RunCost`, by the JSON field that they
                     fill
    verifications    functions of the type `fp8launch.report.verify.Verifier`, by the JSON field that they fill
    report_fields    functions that take the logs of a run, oldest first, and return a
                     `fp8launch.report.run_report.ReportField` or None, by the field of `parse --json`
    comparison_columns  values of `fp8launch.report.columns.Column`, by their names
    comparison_files values of `fp8launch.report.comparison_files.ComparisonFile`, by the options of `compare`
    run_listeners    functions that return a `fp8launch.report.run_listeners.RunListener`, or None if the user has not
                     configured it
    setup_lines      functions that take a placed job, its recipe and its cluster profile, and return lines of its
                     script, before the profile's
    end_commands     functions that take a placed job and its scheduler, and return a command that the job's script runs
                     when it ends, or None
    recipe_sections  subclasses of `fp8launch.recipe.sections.Section`, whose fields all have defaults
    recipe_kinds     values of `fp8launch.submit.recipe_kinds.RecipeKind`, by the top-level key that marks such recipes
    recipe_sources   values of `fp8launch.recipe.load.NamedRecipes`, by the prefix of the names
    relays           functions that run a command line on the login node of a cluster profile and return its exit code,
                     by the option of `fp8launch` in front of the command
    published_recipes  functions of the type `fp8launch.cli.recipes.Listing`, by the engine whose project publishes them
    measurements     descriptions such as "kernel profile", by the keys of a recipe that request them. A module
                     `measurements` in the in-job package of the plugin installs them (`injob/rank/training_loop.py`)
    in_job           packages that jobs import: they are copied into every run folder, and import nothing but each
                     other, `fp8launch.injob` and what the image has
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
        if _is_ours(offer.plugin):
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


def _is_ours(plugin: Plugin) -> bool:
    return plugin.name == "core" or plugin.name in _BUILT_IN


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
