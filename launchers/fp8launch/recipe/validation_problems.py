"""Turn pydantic's errors into problems, each with its line and the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fp8launch import plugin_registry
from fp8launch.diagnostics import Problem, did_you_mean, nearest
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import UNQUANTIZED, quantization_recipes, selectable_recipes
from fp8launch.recipe.field_types import PATTERNS_IN_WORDS
from fp8launch.recipe.yaml_source import Node
from fp8launch.wording import shortened

Path: TypeAlias = "tuple[str | int, ...]"
# Finding the nearest name takes milliseconds, and nobody reads more messages than this.
MOST_PROBLEMS = 100
_REFERENCE = "docs/recipe_reference.md lists every field with its allowed values"


def validation_problems(model: type[BaseModel], node: Node, exc: ValidationError) -> Iterator[Problem]:
    """Yield one problem for each mistake that pydantic found in `node` as a `model`."""
    # Pydantic reports a value that fits no member of a union once per member; one problem per place is enough.
    places: dict[tuple[Path, object], list[Any]] = {}
    for err in exc.errors(include_url=False):
        path = _real_path(node, err["loc"])
        places.setdefault((path, err["type"] == "missing" and err["loc"]), []).append(err)
    above: set[Path] = set()
    for path, _ in places:
        above.update(path[:length] for length in range(len(path)))
    for count, ((path, _), errors) in enumerate(places.items()):
        if count == MOST_PROBLEMS:
            message = f"{len(places) - count} more values are wrong"
            yield Problem("error", "bad-value", message, node.find(path).where, "correct those above first")
            return
        if len(errors) == 1 and len(errors[0]["loc"]) == len(path):
            yield _problem(model, node, path, errors[0])
        # A problem inside a list is more helpful than the message that a list is not a scalar.
        elif path not in above:
            yield _union_problem(model, node, path, errors)


def _problem(model: type[BaseModel], node: Node, path: Path, err: Any) -> Problem:
    place = node.find(path).where
    dotted = ".".join(map(str, path))
    kind, given, ctx = err["type"], err["input"], err.get("ctx", {})
    if kind == "extra_forbidden":
        known = list(fields_by_name(_model_at(model, path[:-1])))
        if "phases" in known:
            known = ["extends", *known]  # only for a whole recipe, whose parents are read before it is validated
        fix = did_you_mean(str(path[-1]), known, f"valid keys: {', '.join(known)}")
        plugin = plugin_registry.absent_plugin("recipe_sections", dotted)
        if plugin is not None:
            fix = f"{plugin_registry.needs('it', plugin)}: {plugin_registry.how_to_activate(plugin)}"
        return Problem("error", "unknown-key", f"unknown key '{dotted}'", place, fix)
    if kind == "missing":
        name = ".".join((*map(str, path), str(err["loc"][-1])))
        return Problem("error", "missing-key", f"'{name}' is missing", place, f"add '{err['loc'][-1]}:'")
    if kind == "value_error":
        # The second argument of the error, if any, is the fix.
        message, *own = ctx["error"].args
        if own:
            fix = own[0]
        elif dotted:
            fix = f"correct `{dotted}`; {_REFERENCE}"
        else:
            fix = f"correct the recipe; {_REFERENCE}"
        return Problem("error", "bad-value", f"'{dotted or model.__name__.lower()}': {message}", place, fix)
    fix = _instead(kind, ctx, given, path)
    if path == ("precision", "recipe") and kind == "literal_error":
        fix = precision_fix(str(given), node.find(("resources", "gpu")).text)
    elif path == ("resources", "gpu") and kind == "literal_error":
        # GPU names look alike, so suggest no similar name: vr200 is not a misspelling of h200.
        fix = f"write one of {', '.join(GPUS)}"
    if kind == "string_type" and isinstance(given, (int, float)):
        written = node.find(path).text or given  # 0.20 is another text than the number 0.2.
        fix = f'quote it: {path[-1]}: "{written}"'
    return _mismatch(dotted or "the file", _demand(kind, ctx), given, place, fix)


def _mismatch(name: str, demand: str, given: object, place: str, fix: str) -> Problem:
    return Problem("error", "bad-value", f"'{name}' must be {demand}, not {_shown(given)}", place, fix)


def _union_problem(model: type[BaseModel], node: Node, path: Path, errors: list[Any]) -> Problem:
    """Return the problem for a value that fits none of several types, for a bad key, or for a missing entry."""
    kinds = {err["type"]: err for err in errors}
    if len(kinds) == 1:
        return _problem(model, node, path, errors[0])
    if "float_type" in kinds:
        kinds.pop("int_type", None)  # a whole number is a number
    demand = " or ".join(_demand(kind, err.get("ctx", {})) for kind, err in kinds.items())
    given = errors[0]["input"]
    first = next(iter(kinds))
    fix = _instead(first, kinds[first].get("ctx", {}), given, path)
    if isinstance(given, bool) and "string_type" in kinds:
        fix = "quote it, or write 1 or 0"
    dotted = ".".join(map(str, path))
    return _mismatch(dotted, demand, given, node.find(path).where, fix)


def _real_path(node: Node, loc: Path) -> Path:
    """Return the steps of a location that exist in the tree, without pydantic's union members and '[key]' marks."""
    path: list[str | int] = []
    for step in loc:
        value = node.find(tuple(path)).value
        is_key = isinstance(value, dict) and step in value
        is_index = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_key or is_index:
            path.append(step)
    return tuple(path)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    for step in path:
        fields = fields_by_name(model)
        if str(step) not in fields:
            continue  # a name chosen by the user, such as a phase; the mapping's model applies
        below = _model_of(fields[str(step)].annotation)
        if below is None:
            return model
        model = below
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the first model in a field's type, which may be a mapping or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for member in get_args(annotation):
        model = _model_of(member)
        if model is not None:
            return model
    return None


def fields_by_name(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their names in recipes."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


# What pydantic's kinds of errors demand, and an example.
_KINDS = {
    "int_type": ("a whole number", "8"),
    "int_from_float": ("a whole number", "8"),
    "float_type": ("a number", "1.0e-4"),
    "finite_number": ("a finite number", "1.0e-4"),
    "string_type": ("text (quote it)", "text"),
    "bool_type": ("true or false", "true"),
    "list_type": ("a list", "[a, b]"),
    "dict_type": ("a mapping", "{key: value}"),
    "model_type": ("a mapping", "{key: value}"),
    "model_attributes_type": ("a mapping", "{key: value}"),
    "none_required": ("null", "null"),
}


def _demand(kind: str, ctx: dict[str, Any]) -> str:
    if kind == "literal_error":
        expected = str(ctx["expected"])
        if " or " in expected:
            return f"one of {expected}"
        return expected
    if kind == "greater_than":
        return f"greater than {ctx['gt']}"
    if kind == "greater_than_equal":
        return f"at least {ctx['ge']}"
    if kind == "too_long":
        return f"at most {ctx['max_length']} entries"
    if kind == "too_short":
        return f"at least {ctx['min_length']} entries"
    if kind == "string_pattern_mismatch":
        return PATTERNS_IN_WORDS.get(ctx["pattern"], f"text of the form {ctx['pattern']}")
    return _KINDS[kind][0] if kind in _KINDS else f"valid ({kind})"


_FIXES_OF_LISTS = {"too_long": "shorten the list", "too_short": "add an entry, or remove the list"}
_EXAMPLES_OF_PATTERNS = {"a Slurm time": '"01:30:00"', "a version": '"0.19"', "a section and a key": "precision.recipe"}


def _instead(kind: str, ctx: dict[str, Any], given: object, path: Path) -> str:
    """Return the fix for an invalid value: an example or the allowed values."""
    key = "the file"
    if path:
        key = str(path[-1])
    if kind in _FIXES_OF_LISTS:
        return _FIXES_OF_LISTS[kind]
    if kind == "literal_error":
        return _allowed(key, ctx["expected"], given)
    if kind in ("int_type", "int_from_float") and isinstance(given, float) and abs(given) < 1e15:
        # Most whole numbers must be positive.
        return f"write {key}: {1 if 0 < given < 1 else round(given)}"
    if kind == "string_type":
        return f"write {key}: text"
    if kind == "greater_than":
        return f"write {key}: {ctx['gt'] + 1:g} or more, or remove it"
    if kind == "greater_than_equal":
        return f"write {key}: {ctx['ge']:g} or more, or remove it"
    if kind == "string_pattern_mismatch":
        return _matching(key, PATTERNS_IN_WORDS.get(ctx["pattern"], ""))
    return f"write a value such as {key}: {_KINDS[kind][1] if kind in _KINDS else '...'}, or remove it"


def _allowed(key: str, expected: str, given: object) -> str:
    """Return the fix for a word that is not one of the quoted words in `expected`."""
    allowed = re.findall(r"'([^']*)'", expected)
    near = nearest(str(given), allowed)
    if near:
        return f"write {key}: {near}"
    return f"write one of {', '.join(allowed) or expected}"


def precision_fix(given: str, gpu: str | None) -> str:
    """Return the fix for an unknown precision: a similar name, or the precisions that the recipe's GPU can compute."""
    able = list(selectable_recipes())
    if gpu in GPUS:
        able = [name for name in able if quantization_recipes()[name].runs_on(GPUS[gpu].capability)]
    near = nearest(given, [*UNQUANTIZED, *able])
    operands = [name for name in able if quantization_recipes()[name].operands == given.lower()]
    if near and not operands:
        return f"write {near}"
    return f"write one of {', '.join(operands or [*UNQUANTIZED, *able])}"


def _matching(key: str, words: str) -> str:
    """Return the fix for text that does not have the form described by `words`."""
    for start, example in _EXAMPLES_OF_PATTERNS.items():
        if words.startswith(start):
            return f"write for example {key}: {example}"
    return f"use {words or 'that form'}"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(repr(value), 80)
