"""A tree of nodes to a frozen model, with every problem told at once by file, line and nearest valid name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fp8launch.problems import Problem, UserError, nearest
from fp8launch.recipe.schema import PATTERNS_IN_WORDS
from fp8launch.recipe.source import Node

Model = TypeVar("Model", bound=BaseModel)
Path: TypeAlias = "tuple[str | int, ...]"


def validate(model: type[Model], node: Node) -> Model:
    """`node` as a `model`. Raises UserError holding one problem for each thing that is wrong."""
    try:
        return model.model_validate(node.plain())
    except ValidationError as exc:
        raise UserError(_problems(model, node, exc)) from None


def _problems(model: type[BaseModel], node: Node, exc: ValidationError) -> Iterator[Problem]:
    # A value that fits no member of a union is reported once for each member: one problem a place.
    places: dict[tuple[Path, object], list[Any]] = {}
    for err in exc.errors(include_url=False):
        path = _real_path(node, err["loc"])
        places.setdefault((path, err["type"] == "missing" and err["loc"]), []).append(err)
    for (path, _), errors in places.items():
        if len(errors) == 1 and len(errors[0]["loc"]) == len(path):
            yield _problem(model, node, path, errors[0])
        # What is wrong inside a list says more than that the list is not a scalar either.
        elif not any(len(other) > len(path) and other[: len(path)] == path for other, _ in places):
            yield _union_problem(model, node, path, errors)


def _problem(model: type[BaseModel], node: Node, path: Path, err: Any) -> Problem:
    place = node.find(path).where
    dotted = ".".join(str(step) for step in path)
    kind, given, ctx = err["type"], err["input"], err.get("ctx", {})
    if kind == "extra_forbidden":
        known = _fields(_model_at(model, path[:-1]))
        near = nearest(str(path[-1]), known)
        fix = f"did you mean '{near}'?" if near else f"known here: {', '.join(known)}"
        return Problem("error", "unknown-key", f"unknown key '{dotted}'", place, fix)
    if kind == "missing":
        name = ".".join((*map(str, path), str(err["loc"][-1])))
        return Problem("error", "missing-key", f"'{name}' is missing", place, f"add '{err['loc'][-1]}:'")
    if kind == "value_error":
        return Problem("error", "bad-value", f"'{dotted or model.__name__.lower()}': {ctx['error']}", place)
    message = f"'{dotted or 'the file'}' must be {_demand(kind, ctx)}, not {_shown(given)}"
    return Problem("error", "bad-value", message, place)


def _union_problem(model: type[BaseModel], node: Node, path: Path, errors: list[Any]) -> Problem:
    """The one problem of a place where none of several types fits, or of a key or a missing entry."""
    kinds = {err["type"]: err for err in errors}
    if len(kinds) == 1:
        return _problem(model, node, path, errors[0])
    # A whole number is a number.
    kinds = {kind: err for kind, err in kinds.items() if kind != "int_type" or "float_type" not in kinds}
    demand = " or ".join(_demand(kind, err.get("ctx", {})) for kind, err in kinds.items())
    given = errors[0]["input"]
    fix = "quote it, or write 1 or 0" if isinstance(given, bool) and "string_type" in kinds else None
    dotted = ".".join(str(step) for step in path)
    message = f"'{dotted}' must be {demand}, not {_shown(given)}"
    return Problem("error", "bad-value", message, node.find(path).where, fix)


def _real_path(node: Node, loc: Path) -> Path:
    """The steps of a location that are really in the tree: pydantic adds names of union members and '[key]' marks."""
    path: list[str | int] = []
    for step in loc:
        value = node.find(tuple(path)).value
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            path.append(step)
    return tuple(path)


def _model_at(model: type[BaseModel], path: Path) -> type[BaseModel]:
    for step in path:
        by_alias = {(f.alias or name): f for name, f in model.model_fields.items()}
        if str(step) not in by_alias:
            continue  # a name of one's own, such as a phase's: its model is the mapping's
        annotation = by_alias[str(step)].annotation
        members = (annotation, *get_args(annotation))
        candidates = [c for c in members if isinstance(c, type) and issubclass(c, BaseModel)]
        if not candidates:
            return model
        model = candidates[0]
    return model


def _fields(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


_DEMANDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text (quote it)",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}


def _demand(kind: str, ctx: dict[str, Any]) -> str:
    if kind == "literal_error":
        return f"one of {ctx['expected']}" if " or " in ctx["expected"] else str(ctx["expected"])
    if kind == "greater_than":
        return f"greater than {ctx['gt']}"
    if kind == "greater_than_equal":
        return f"at least {ctx['ge']}"
    if kind in ("too_long", "too_short"):
        return f"at most {ctx['max_length']} entries" if kind == "too_long" else f"at least {ctx['min_length']} entries"
    if kind == "string_pattern_mismatch":
        return PATTERNS_IN_WORDS.get(ctx["pattern"], f"text of the form {ctx['pattern']}")
    return _DEMANDS.get(kind, f"valid ({kind})")


def _shown(value: object) -> str:
    words = {None: "nothing", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
