"""An argument list or a launch script to a recipe in YAML, with what could not be carried over."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8launch import engines
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.arguments import as_parsed, takes_words
from fp8launch.megatron.argv import parse_argv, split_unknown
from fp8launch.megatron.schema import (
    DEFAULT_TOKENIZER,
    FlagSchema,
    load_schema,
    megatron_script,
    supported_versions,
)
from fp8launch.plugins.importer.from_values import Tree, Values, effective, recipe_from_values
from fp8launch.plugins.importer.launch import Launch
from fp8launch.plugins.importer.launch_script import read_launch
from fp8launch.plugins.importer.launch_sections import OWN_ENTRY
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe, recipe_class
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.recipe.yaml_source import parse_yaml
from fp8launch.untyped import as_mapping

MOST_PROBLEMS = 100


def import_text(text: str, name: str, megatron: str | None) -> tuple[str, list[Problem]]:
    """A recipe in YAML from an argument list, a JSON list of arguments or a launch script, none of which is run.

    `name` is the file's, for messages and the recipe's name. `megatron` is the Megatron-Core version whose flags
    count, the newest supported if None. Problems and comments report what could not be carried over.
    Raises UserError when `text` holds no Megatron argument or `megatron` is not supported.
    """
    schema = load_schema(megatron or supported_versions()[-1])
    launch = read_launch(text, name, schema)
    schema = load_schema(schema.version, _script(launch))
    argv, sections, more = _own_arguments(launch, schema)
    argv, spelled = with_dashes(argv, schema)
    more += spelled
    values, problems = effective_values(argv, schema)
    values, defaults = _entry_defaults(values, launch)
    recipe = recipe_from_values(values, schema, **sections)
    problems = [*more, *problems, *defaults]
    problems = [*launch.problems, *(replace(problem, where=problem.where or name) for problem in problems)]
    recipe = {"name": _recipe_name(name), "description": f"imported from {Path(name).name}", **recipe}
    if megatron:
        recipe["software"] = {"megatron": schema.minor}
    problems = _few([*dict.fromkeys(problems), *_differences(recipe, values, schema)], name)
    return write_yaml(recipe, _comments(recipe, problems)), problems


def _few(problems: list[Problem], name: str) -> list[Problem]:
    """As many problems as a user reads: where there are more, errors first."""
    if len(problems) <= MOST_PROBLEMS:
        return problems
    kept = sorted(problems, key=lambda problem: problem.severity)[:MOST_PROBLEMS]
    message = f"{len(problems) - len(kept)} more problems are not shown"
    return [*kept, Problem("warning", "import-more-problems", message, name)]


def with_dashes(argv: Sequence[str], schema: FlagSchema) -> tuple[list[str], list[Problem]]:
    """Spell the flags as Megatron does that a fork of it spells with underscores, and say which."""
    words: list[str] = []
    changed: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        flag = schema.find(name)
        if flag is None or name in flag.options or not name.startswith("--") or "_" not in name:
            words.append(word)
            continue
        changed.append(name)
        words.append(f"--{name[2:].replace('_', '-')}{equals}{value}")
    if not changed:
        return words, []
    message = f"{', '.join(dict.fromkeys(changed))}: Megatron spells these flags with dashes, and so does the recipe"
    return words, [Problem("warning", "import-underscores", message, None, "check that the script runs Megatron-LM")]


def _own_arguments(launch: Launch, schema: FlagSchema) -> tuple[Sequence[str], dict[str, Any], list[Problem]]:
    """Megatron's arguments, and the sections with the flags that a script of the user's adds to them."""
    sections = dict(launch.sections)
    section = sections.get("launch")
    script = _script(launch)
    if not isinstance(section, dict) or launch.script is None or (script and megatron_script(script)):
        return launch.argv, sections, []
    known, own = split_unknown(launch.argv, schema)
    if not own:
        return known, sections, []
    sections["launch"] = {**section, "arguments": own}
    flags = ", ".join(word for word in own if word.startswith("-"))
    message = f"{flags} are not Megatron flags; they are passed to {launch.script} as launch.arguments"
    return known, sections, [Problem("warning", "import-own-arguments", message, None, "check their spelling")]


def _script(launch: Launch) -> str | None:
    """The path of the script that the recipe names."""
    script = as_mapping(launch.sections.get("launch")).get("script")
    if not script:
        return None
    return str(script)


def _entry_defaults(values: Values, launch: Launch) -> tuple[Values, list[Problem]]:
    """What Megatron-LM's pretrain_gpt.py fills in and fp8launch's own entry does not."""
    # Of arguments without a script, files of a vocabulary show that they rely on it.
    relies = launch.script == OWN_ENTRY or (launch.script is None and "vocab_file" in values)
    if not relies or "tokenizer_type" in values:
        return values, []
    message = f"--tokenizer-type is not given, so {OWN_ENTRY} uses {DEFAULT_TOKENIZER}; the recipe sets it"
    problem = Problem("warning", "default-tokenizer", message, None, "check that this is intended")
    return {**values, "tokenizer_type": DEFAULT_TOKENIZER}, [problem]


def effective_values(argv: Sequence[str], schema: FlagSchema) -> tuple[Values, list[Problem]]:
    """The values of an argument list as Megatron takes them, and what is wrong or doubtful about the list."""
    values, problems = parse_argv(_one_word_each(argv, schema), schema)
    values, more = _last_of_each(values, schema)
    problems += more
    values, more = _whole_formats(values, schema)
    return values, [*problems, *more]


# --- what the arguments say


def _one_word_each(argv: Sequence[str], schema: FlagSchema) -> list[str]:
    """Several numbers or choices that stand in one word, such as "2 2", as a word each: no such value holds a space."""
    words: list[str] = []
    flag = None
    for word in argv:
        if word.startswith("--"):
            flag = schema.find(word.partition("=")[0])
        if flag is not None and not word.startswith("-") and takes_words(flag):
            words += word.split() or [word]
        else:
            words.append(word)
    return words


def _last_of_each(values: Values, schema: FlagSchema) -> tuple[Values, list[Problem]]:
    """Of two flags that set the same attribute, the last one counts, as in Megatron's parser."""
    by_dest: dict[str, str] = {}
    problems = []
    for flag in values:
        dest = flag
        if found := schema.find(flag):
            dest = found.dest
        if dest in by_dest:
            message = (
                f"{by_dest[dest]} and {flag} set the same value; Megatron uses the last one, {flag}, and so does the "
                "recipe"
            )
            problems.append(Problem("warning", "flag-set-twice", message, None, f"drop {by_dest[dest]}"))
        by_dest[dest] = flag
    return {flag: value for flag, value in values.items() if flag in by_dest.values()}, problems


def _whole_formats(values: Values, schema: FlagSchema) -> tuple[Values, list[Problem]]:
    """Says aloud what Megatron makes of an FP8 or FP4 format without its recipe, and of a recipe without its format."""
    values = dict(values)
    problems = []
    for kind in ("fp8", "fp4"):
        given, recipe = f"{kind}_format", f"{kind}_recipe"
        flag = schema.find(recipe)
        if given in values and recipe not in values and flag is not None and flag.default is not None:
            values[recipe] = str(flag.default)
            message = (
                f"--{kind}-format is given without --{kind}-recipe, so Megatron uses {flag.default}; the recipe sets it"
            )
            problems.append(Problem("warning", "format-without-recipe", message, None, "check that this is intended"))
        elif recipe in values and given not in values:
            message = (
                f"--{kind}-recipe {values.pop(recipe)} is given without --{kind}-format: Megatron trains in bf16, "
                "and so does the recipe"
            )
            fix = f"if {kind.upper()} was intended, set precision.recipe and precision.format"
            problems.append(Problem("warning", "recipe-without-format", message, None, fix))
    return values, problems


# --- the recipe as a whole


def _recipe_name(name: str) -> str:
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(name).stem).strip("._-")[:80]
    return stem or "imported"


def _differences(recipe: Tree, values: Values, schema: FlagSchema) -> list[Problem]:
    """What keeps the written recipe from giving the same arguments again; nothing, unless the arguments are faulty."""
    name = str(recipe["name"])
    try:
        tree = parse_yaml(write_yaml(recipe), f"recipe {name}", numbered=False)
        loaded = LoadedRecipe(recipe_class().from_node(tree), tree, ())
        again = as_parsed(engines.engine_of(loaded).translate(loaded).values, schema)
    except UserError as exc:
        return list(exc.problems)
    problems = []
    for flag in {**values, **again}:
        if repr(effective(values, flag, schema)) != repr(effective(again, flag, schema)):
            message = f"{flag}: the recipe's value differs from that of the argument list"
            problems.append(Problem("error", "import-differs", message))
    return problems


def _comments(recipe: Tree, problems: Sequence[Problem]) -> dict[str, list[str]]:
    notes = []
    for problem in problems:
        place = f"{problem.where}: " if problem.where else ""
        notes.append(f"- {place}{problem.message}")
    if notes:
        notes.insert(0, "Not imported unchanged:")
    comments = {"": notes}
    resources = recipe.get("resources", {})
    unsaid = [key for key in ("nodes", "gpus_per_node", "gpu") if key not in resources]
    if unsaid:
        defaults = {key: Recipe.model_fields["resources"].default.model_dump()[key] for key in unsaid}
        stated = ", ".join(f"{key}: {value}" for key, value in defaults.items())
        comments["resources"] = [f"not given there, so defaults apply: {stated}"]
    return comments
