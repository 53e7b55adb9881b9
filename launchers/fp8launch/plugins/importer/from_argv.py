"""Turn an argument list or a launch script into a recipe in YAML, and report what could not be imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8launch import engines
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.arguments import FlagValue, Scalar, as_parsed, takes_words
from fp8launch.megatron.extra_flags import name_of
from fp8launch.megatron.flag_problems import check_values, unknown_flag
from fp8launch.megatron.schema import (
    DEFAULT_TOKENIZER,
    FlagSchema,
    load_schema,
    megatron_script,
    supported_versions,
)
from fp8launch.plugins.forks.store import Fork, fork_of, with_upstream
from fp8launch.plugins.importer.argv import flag_by_flag, parse_argv, split_fork_values, split_unknown
from fp8launch.plugins.importer.from_values import Tree, Values, effective, recipe_from_values
from fp8launch.plugins.importer.launch import Launch
from fp8launch.plugins.importer.launch_script import AS_IS, ScriptStart, read_launch
from fp8launch.plugins.importer.launch_sections import OWN_ENTRY
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe, recipe_class
from fp8launch.recipe.write_yaml import inline, write_yaml
from fp8launch.recipe.yaml_source import parse_yaml, resolve_plain_scalar
from fp8launch.untyped import as_mapping
from fp8launch.wording import and_more

MOST_PROBLEMS = 100


def import_text(text: str, name: str, megatron: str | None, start: ScriptStart = AS_IS) -> tuple[str, list[Problem]]:
    """Return a recipe in YAML for an argument list, a JSON list of arguments or a launch script. Nothing is executed.

    `name` is the file's, for messages and the recipe's name. `megatron` is the Megatron-Core version whose flags
    apply, or a fork such as 0.19+name; by default the newest supported one. Problems and comments report what could
    not be imported.
    Raises UserError if `text` holds no Megatron argument or `megatron` is not supported.
    """
    schema = load_schema(megatron or supported_versions()[-1])
    fork = fork_of(megatron)
    launch = read_launch(text, name, schema if fork is None else with_upstream(fork.schema, schema), start)
    schema = load_schema(schema.version, _script(launch))
    argv, sections, more = _own_arguments(launch, schema)
    argv, spelled = with_dashes(argv, schema)
    more += spelled
    argv, extra, unknown = _extra_flags(argv, schema, fork)
    more += unknown
    if extra:
        sections["megatron_extra"] = extra
    values, problems = effective_values(argv, schema)
    values, defaults = _entry_defaults(values, launch)
    recipe = recipe_from_values(values, schema, **sections)
    problems = [*more, *problems, *defaults]
    problems = [*launch.problems, *(replace(problem, where=problem.where or name) for problem in problems)]
    recipe = {"name": _recipe_name(name), "description": f"imported from {Path(name).name}", **recipe}
    if megatron:
        recipe["software"] = {"megatron": f"{schema.minor}+{fork.name}" if fork else schema.minor}
    problems = _few([*dict.fromkeys(problems), *_differences(recipe, values, schema)], name)
    return write_yaml(recipe, _comments(recipe, problems)), problems


def _few(problems: list[Problem], name: str) -> list[Problem]:
    """Limit the problems to as many as a user reads, errors first."""
    if len(problems) <= MOST_PROBLEMS:
        return problems
    kept = sorted(problems, key=lambda problem: problem.severity)[:MOST_PROBLEMS]
    message = f"{len(problems) - len(kept)} more problems are not shown"
    return [*kept, Problem("warning", "import-more-problems", message, name)]


def with_dashes(argv: Sequence[str], schema: FlagSchema) -> tuple[list[str], list[Problem]]:
    """Replace underscores by dashes in flags that a fork spells with underscores, and report these flags."""
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
    """Return Megatron's arguments, and the sections with the flags that the user's own script adds."""
    sections = dict(launch.sections)
    section = sections.get("launch")
    script = _script(launch)
    if not isinstance(section, dict) or launch.script is None or (script and megatron_script(script)):
        return launch.argv, sections, []
    known, own = split_unknown(launch.argv, schema, stray=True)
    if not own:
        return known, sections, []
    sections["launch"] = {**section, "arguments": own}
    flags = ", ".join(word for word in own if word.startswith("-"))
    message = f"{flags} are not Megatron flags; they are passed to {launch.script} as launch.arguments"
    return known, sections, [Problem("warning", "import-own-arguments", message, None, "check their spelling")]


def _extra_flags(
    argv: Sequence[str], schema: FlagSchema, fork: Fork | None
) -> tuple[list[str], dict[str, FlagValue], list[Problem]]:
    """Return the arguments of Megatron, and the flags that only a fork can know as `megatron_extra`.

    Flags and values of the named fork need no warning.
    """
    flags = fork.schema if fork else None
    known, unknown = split_unknown(argv, schema, fork=flags)
    known, with_fork_value = split_fork_values(known, schema, flags)
    owner = f"fork {fork.name} of Megatron-Core" if fork else "Megatron-Core"
    extra: dict[str, FlagValue] = {}
    problems: list[Problem] = []
    plain: list[str] = []
    for option, values in flag_by_flag(unknown):
        name = name_of(option)
        value: FlagValue = True
        if len(values) == 1:
            value = _as_number(values[0])
        elif values:
            value = [_as_number(word) for word in values]
        if name in extra and extra[name] != value:
            message = f"{option} is given more than once; the recipe keeps the last one"
            problems.append(Problem("warning", "import-repeated", message, None, "check what the fork makes of it"))
        if name not in extra and not (fork and fork.schema.find(option)):
            # Looking for similar names takes milliseconds, and nobody reads more of them.
            hint = unknown_flag(option, schema, None) if len(extra) < MOST_PROBLEMS else None
            if hint is None or (hint.fix is None and "; " not in hint.message):
                plain.append(option)
            else:
                message = f"{hint.message}; it is passed on under megatron_extra"
                problems.append(Problem("warning", "import-extra-flags", message, None, hint.fix))
        extra[name] = value
    if plain:
        message = (
            f"{owner} {schema.minor} has no flag {and_more(plain, MOST_PROBLEMS)}; "
            f"{'they are' if len(plain) > 1 else 'it is'} passed on under megatron_extra"
        )
        fix = "check the spelling, and run the fork that has these flags"
        problems.append(Problem("warning", "import-extra-flags", message, None, fix))
    for option, words in flag_by_flag(with_fork_value):
        given = list(map(_as_number, words))
        extra[name_of(option)] = given[0] if len(given) == 1 else list[Scalar](given)
        if fork and fork.schema.find(option):
            continue
        refusal = check_values({option: extra[name_of(option)]}, schema)[0]
        message = f"{refusal.message}; the value is passed on under megatron_extra"
        fix = refusal.fix or "check the spelling, and run the fork that has this value"
        problems.append(Problem("warning", "import-extra-values", message, None, fix))
    return known, extra, problems


def _as_number(text: str) -> str | int | float:
    """Return a number if the recipe would show it exactly as the script does, else the text."""
    value = resolve_plain_scalar(text)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and inline(value) == text:
        return value
    return text


def _script(launch: Launch) -> str | None:
    """Return the path of the training script that the recipe names."""
    script = as_mapping(launch.sections.get("launch")).get("script")
    if not script:
        return None
    return str(script)


def _entry_defaults(values: Values, launch: Launch) -> tuple[Values, list[Problem]]:
    """Return the defaults of Megatron-LM's pretrain_gpt.py that fp8launch's own entry does not have."""
    # Without a script, vocabulary files show that the arguments were meant for pretrain_gpt.py.
    relies = launch.script == OWN_ENTRY or (launch.script is None and "vocab_file" in values)
    if not relies or "tokenizer_type" in values:
        return values, []
    message = f"--tokenizer-type is not given, so {OWN_ENTRY} uses {DEFAULT_TOKENIZER}; the recipe sets it"
    problem = Problem("warning", "default-tokenizer", message, None, "check that this is intended")
    return {**values, "tokenizer_type": DEFAULT_TOKENIZER}, [problem]


def effective_values(argv: Sequence[str], schema: FlagSchema) -> tuple[Values, list[Problem]]:
    """Return the values of an argument list as Megatron reads them, and the problems of the list."""
    values, problems = parse_argv(_one_word_each(argv, schema), schema)
    values, more = _last_of_each(values, schema)
    problems += more
    values, more = _whole_formats(values, schema)
    return values, [*problems, *more]


# --- what the arguments say


def _one_word_each(argv: Sequence[str], schema: FlagSchema) -> list[str]:
    """Split words with several numbers or choices, such as "2 2". No valid value contains a space."""
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
    """Keep the last of several flags that set the same attribute, as Megatron's parser does."""
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
    """Add the default that Megatron uses for an FP8 or FP4 format without a recipe, or a recipe without a format."""
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
    """Return the differences between the recipe's arguments and the list's. Only faulty lists have any."""
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
            message = f"{flag}: the recipe's value differs from the argument list's"
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
