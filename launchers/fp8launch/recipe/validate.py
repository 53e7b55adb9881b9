"""A tree of nodes to a frozen model, with every problem told at once by file, line and nearest valid name."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fp8launch.problems import Problem, UserError, nearest
from fp8launch.recipe.schema import PATTERNS_IN_WORDS
from fp8launch.recipe.source import Node

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], node: Node) -> Model:
    """`node` as a `model`. Raises UserError holding one problem for each thing that is wrong."""
    try:
        return model.model_validate(node.plain())
    except ValidationError as exc:
        # A value that fits no member of a union is reported once for each member: keep one problem a place.
        problems = {}
        for err in exc.errors(include_url=False):
            problems.setdefault((_real_path(node, err["loc"]), err["type"] == "missing" and err["loc"]), err)
        raise UserError(_problem(model, node, err) for err in problems.values()) from None


def _problem(model: type[BaseModel], node: Node, err: Any) -> Problem:
    # Pydantic adds the names of union members and the '[key]' mark to a location: only real steps point somewhere.
    path = _real_path(node, err["loc"])
    place = node.find(path).where
    dotted = ".".join(str(step) for step in path)
    kind, given, ctx = err["type"], err["input"], err.get("ctx", {})
    if len(err["loc"]) > len(path) and kind.endswith("_type"):
        return Problem("error", "bad-value", f"'{dotted}' must be {_SCALARS}, not {_shown(given)}", place)
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
    return Problem("error", "bad-value", f"'{dotted}' {_demand(kind, ctx)}, not {_shown(given)}", place)


def _real_path(node: Node, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    path: list[str | int] = []
    for step in loc:
        value = node.find(tuple(path)).value
        if (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        ):
            path.append(step)
    return tuple(path)


def _model_at(model: type[BaseModel], path: tuple[str | int, ...]) -> type[BaseModel]:
    for step in path:
        by_alias = {(f.alias or name): f for name, f in model.model_fields.items()}
        annotation = by_alias[str(step)].annotation
        candidates = [c for c in (annotation, *get_args(annotation)) if isinstance(c, type) and issubclass(c, BaseModel)]
        if not candidates:
            return model
        model = candidates[0]
    return model


def _fields(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


_SCALARS = "text, a number, true or false, or a list of these"

_DEMANDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text (quote it)",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def _demand(kind: str, ctx: dict[str, Any]) -> str:
    if kind == "literal_error":
        return f"must be one of {ctx['expected']}"
    if kind == "greater_than":
        return f"must be greater than {ctx['gt']}"
    if kind == "greater_than_equal":
        return f"must be at least {ctx['ge']}"
    if kind == "string_pattern_mismatch":
        return f"must be {PATTERNS_IN_WORDS.get(ctx['pattern'], ctx['pattern'])}"
    return _DEMANDS.get(kind, f"is not valid ({kind})")


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
