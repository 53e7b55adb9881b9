"""The phases of a recipe: for each the whole recipe that holds while it lasts.

Every phase is told the length of the whole training, so that the learning rate's schedule and the size of the data set,
which decides the order of the samples, know nothing of phases. Megatron leaves at a phase's end by `--exit-interval`:
it exits at every multiple, and after the phase before has ended the first multiple of this phase's end is the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.megatron.schema import normalize
from fp8launch.recipe.load import LoadedRecipe, merge, switch_precision
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import Node

# What a recipe has for the whole run only.
_WHOLE = ("phases", "axes", "nodes")
# They too end a start of the training at an iteration.
_ENDS = ("exit_interval", "phase_transition_iterations")


@dataclass(frozen=True)
class PhaseRecipe:
    """Iterations `begin` + 1 to `end` of the training, and the recipe that holds for them."""

    name: str
    begin: int
    end: int
    loaded: LoadedRecipe


def phase_recipes(loaded: LoadedRecipe) -> tuple[PhaseRecipe, ...]:
    """The phases of a recipe in order, empty where it has none. Raises UserError with the problems of all."""
    if not loaded.recipe.phases:
        return ()
    ends = _ends(loaded)
    found: list[PhaseRecipe] = []
    problems: list[tuple[str, Sequence[Problem]]] = []
    for name, end in ends.items():
        try:
            tree = _laid(loaded, name, end, total=max(ends.values()))
            laid = replace(loaded, recipe=recipe_class().from_node(tree), tree=tree)
        except UserError as exc:
            problems.append((name, exc.problems))
            continue
        begin = 0
        if found:
            begin = found[-1].end
        found.append(PhaseRecipe(name, begin, end, laid))
    if problems:
        raise UserError(told_by_phase(problems, len(ends)))
    return tuple(found)


def told_by_phase(found: Iterable[tuple[str, Sequence[Problem]]], phases: int) -> list[Problem]:
    """The problems of phases, each once; one that not all of the `phases` have says which have it."""
    names: dict[Problem, list[str]] = {}
    for name, problems in found:
        for problem in dict.fromkeys(problems):
            names.setdefault(problem, []).append(name)
    told = []
    for problem, whose in names.items():
        if len(whose) != phases:
            problem = replace(problem, message=f"phase {', '.join(whose)}: {problem.message}")
        told.append(problem)
    return told


def _ends(loaded: LoadedRecipe) -> dict[str, int]:
    """The last iteration of each phase."""
    counts = {name: phase.iterations for name, phase in loaded.recipe.phases.items()}
    total, stated = loaded.recipe.train.iterations, sum(n or 0 for n in counts.values())
    rest = [name for name, count in counts.items() if count is None]
    where = loaded.where("train", "iterations")
    if len(rest) > 1:
        raise _bad_length(
            f"phases {', '.join(rest)} do not set iterations",
            loaded.where("phases", rest[1]),
            "set them; at most one phase may omit them",
        )
    if rest and total is None:
        where = loaded.where("phases", rest[0])
        raise _bad_length(
            f"phase {rest[0]} does not set iterations, and train.iterations is not set either", where, "set one of them"
        )
    if rest and total is not None and total <= stated:
        message = f"the other phases use {stated} of {total} iterations, so none are left for phase {rest[0]}"
        raise _bad_length(message, where, "set train.iterations to the sum of all phases")
    if not rest and total not in (None, stated):
        message = f"train.iterations is {total}, but the phases add up to {stated}"
        raise _bad_length(
            message, where, "remove train.iterations, or remove the iterations of one phase, which then gets the rest"
        )
    ends, end = {}, 0
    for name, count in counts.items():
        if count is None:
            count = (total or 0) - stated
        end += count
        ends[name] = end
    return ends


def _bad_length(message: str, where: str, fix: str) -> UserError:
    return error("phase-iterations", message, where, fix)


def _laid(loaded: LoadedRecipe, name: str, end: int, total: int) -> Node:
    """The recipe's tree with the values of a phase laid on it."""
    place = loaded.where("phases", name)
    phase = loaded.tree.find(("phases", name))
    own = phase.entries()
    if phase.at(("train", "iterations")):
        where = loaded.where("phases", name, "train", "iterations")
        raise _bad_length("train.iterations is the length of all phases", where, "write `iterations:` beside `train:`")
    tree = Node({key: node for key, node in loaded.tree.entries().items() if key not in _WHOLE}, loaded.tree.where)
    if choice := phase.at(("precision", "recipe")):
        tree = switch_precision(tree, choice)
    over = {key: node for key, node in own.items() if key != "iterations" and node.value is not None}
    tree = merge(tree, Node(over, place))
    flags = tree.at(("megatron",)) or Node({}, place)
    for flag, node in flags.entries().items():
        if normalize(flag) in _ENDS and node.value is not None:
            message = f"{flag} conflicts with phases, which already end the training at an iteration"
            raise error("phase-exit", message, node.where, "remove it, and set the phase's `iterations`")
    limits = {"train": Node({"iterations": Node(total, place)}, place)}
    if end < total:
        limits["megatron"] = Node({"exit_interval": Node(end, place)}, place)
    return merge(tree, Node(dict(limits), place))
