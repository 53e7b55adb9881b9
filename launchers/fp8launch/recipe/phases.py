"""Expand a recipe into its phases, each with the complete recipe that applies to it.

Every phase gets the length of the whole training. Otherwise, phases would change the learning rate schedule and the
size of the dataset, which determines the order of the samples. `--exit-interval` ends a phase: Megatron exits at every
multiple of it, and the first multiple after the end of the previous phase is the end of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.megatron.schema import normalize
from fp8launch.recipe.load import LoadedRecipe, merge, switch_precision
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import Node

# Sections that apply to the whole run.
_WHOLE = ("phases", "axes", "nodes")
# Flags that end training at an iteration, as phases do.
_ENDS = ("exit_interval", "phase_transition_iterations")


@dataclass(frozen=True)
class PhaseRecipe:
    """Iterations `begin` + 1 to `end` of the training, and their recipe."""

    name: str
    begin: int
    end: int
    loaded: LoadedRecipe


def phase_recipes(loaded: LoadedRecipe) -> tuple[PhaseRecipe, ...]:
    """Return the phases of a recipe, in order. Raises UserError with the problems of all phases."""
    if not loaded.recipe.phases:
        return ()
    ends = _ends(loaded)
    found: list[PhaseRecipe] = []
    problems: list[tuple[str, Sequence[Problem]]] = []
    for name, end in ends.items():
        try:
            tree = _phase_tree(loaded, name, end, total=max(ends.values()))
            own = replace(loaded, recipe=recipe_class().from_node(tree), tree=tree)
        except UserError as exc:
            problems.append((name, exc.problems))
            continue
        begin = 0
        if found:
            begin = found[-1].end
        found.append(PhaseRecipe(name, begin, end, own))
    if problems:
        raise UserError(merge_phase_problems(problems, len(ends)))
    return tuple(found)


def merge_phase_problems(found: Iterable[tuple[str, Sequence[Problem]]], phases: int) -> list[Problem]:
    """Merge equal problems of several phases. A problem that not all `phases` have names the phases it is about."""
    names: dict[Problem, list[str]] = {}
    for name, problems in found:
        for problem in dict.fromkeys(problems):
            names.setdefault(problem, []).append(name)
    merged = []
    for problem, whose in names.items():
        if len(whose) != phases:
            problem = replace(problem, message=f"phase {', '.join(whose)}: {problem.message}")
        merged.append(problem)
    return merged


def _ends(loaded: LoadedRecipe) -> dict[str, int]:
    """Return the last iteration of each phase."""
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


def _phase_tree(loaded: LoadedRecipe, name: str, end: int, total: int) -> Node:
    """Return the recipe's tree merged with the values of a phase."""
    place = loaded.where("phases", name)
    phase = loaded.tree.find(("phases", name))
    own = phase.entries()
    if phase.at(("train", "iterations")):
        where = loaded.where("phases", name, "train", "iterations")
        raise _bad_length("train.iterations is the length of all phases", where, "write `iterations:` next to `train:`")
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
