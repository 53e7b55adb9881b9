"""YAML files with the configuration of a training: Megatron-LM's test cases are read, other formats are recognized."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.diagnostics import Problem, UserError, error
from fp8launch.megatron.schema import FlagSchema
from fp8launch.plugins.importer.launch import Launch
from fp8launch.plugins.importer.launch_sections import environment
from fp8launch.plugins.importer.shell_interpreter import read_list, read_script
from fp8launch.plugins.importer.unresolved import without_holes
from fp8launch.recipe.yaml_source import Node, parse_yaml
from fp8launch.untyped import as_mapping

# A line such as `MODEL_ARGS:` or `model: {...}`, which no launch script begins with.
_KEY = re.compile(r"""["']?[A-Za-z_][\w.-]*["']?:(\s|$)""")
_ARGUMENTS = "MODEL_ARGS"


@dataclass(frozen=True)
class _Format:
    """A configuration format of another project: how to recognize it, its name, and the advice for it."""

    what: str
    fix: str
    matches: Callable[[Mapping[str, Any], str], bool]


_FORMATS = (
    _Format(
        "is already a recipe of fp8launch",
        "use it as it is: `fp8launch check FILE`",
        lambda tree, text: len(set(tree) & {"extends", "precision", "parallel", "batch", "resources", "megatron"}) > 1,
    ),
    _Format(
        "is an experiment file of Primus (AMD), whose arguments come from presets that it names",
        "import the argument list instead: Primus prints Megatron's arguments when a run starts; what stands under "
        "`overrides` can go under `megatron:` of a recipe",
        lambda tree, text: "pre_trainer" in _keys(tree.get("modules")) or {"work_group", "exp_name"} <= set(tree),
    ),
    _Format(
        "is a configuration of Megatron-Bridge (NVIDIA): fields of its dataclasses, not Megatron-LM's arguments",
        "start from a recipe of `fp8launch recipes` for the same model and state these values in its sections",
        lambda tree, text: "_target_: megatron.bridge" in text,
    ),
    _Format(
        "is a configuration of NeMo, which names most settings otherwise than Megatron-LM does",
        "start from a recipe of `fp8launch recipes` for the same model and state these values in its sections",
        lambda tree, text: "_target_: nemo" in text or "exp_manager" in tree or {"trainer", "model"} <= set(tree),
    ),
    _Format(
        "is a configuration of NVIDIA's NeMo-Framework-Launcher, whose stages name other files",
        "import the file of the training stage's arguments or the script that it submits",
        lambda tree, text: {"defaults", "stages"} <= set(tree),
    ),
    _Format(
        "is a file for Megatron-LM's --yaml-cfg, which contains fields of its configuration classes, not its arguments",
        "import a launch script or an argument list that trains the same; a log of such a run prints all arguments",
        lambda tree, text: {"language_model", "model_parallel"} <= set(tree),
    ),
    _Format(
        "is a workload description of NVIDIA's DGX Cloud benchmarking recipes, without the training's arguments",
        "import the launch script of the workload",
        lambda tree, text: {"general", "run"} <= set(tree) and "workload" in _keys(tree["general"]),
    ),
)


def read_yaml_launch(text: str, name: str, schema: FlagSchema) -> Launch | None:
    """Read a YAML file; return None for any other text.

    Raises UserError for YAML without arguments, with the name of the format if it is known.
    """
    rows = [row for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")]
    first = rows[0] if rows else ""
    if not _KEY.match(first) and first.strip() != "---":
        return None
    try:
        # Some of Megatron-LM's test cases state a flag twice; their own reader takes the last one.
        tree = parse_yaml(text, name, unique=False)
    except UserError:
        if name.endswith((".yaml", ".yml")):
            raise
        return None
    if not isinstance(tree.value, dict):
        return None
    arguments = tree.value.get(_ARGUMENTS)
    if arguments is not None and isinstance(arguments.value, dict) and any(map(_is_flag, arguments.value)):
        return _test_case(tree.value, arguments.value, name, schema)
    plain = tree.plain()
    for known in _FORMATS:
        if known.matches(plain, text):
            raise error("import-format", known.what, name, known.fix)
    raise error(
        "import-format",
        "is YAML in an unknown format",
        name,
        "import a launch script, an argument list, or a file whose MODEL_ARGS maps flags to values",
    )


def _keys(value: Any) -> set[str]:
    return set(as_mapping(value))


def _is_flag(key: str) -> bool:
    return key.startswith("--")


# --- model_config.yaml of Megatron-LM's functional tests: MODEL_ARGS and ENV_VARS


def _test_case(tree: Mapping[str, Node], arguments: Mapping[str, Node], name: str, schema: FlagSchema) -> Launch:
    words, holes = read_list(_as_list(arguments, schema), name)
    words = _switches(words, schema)
    argv, problems = without_holes(words, holes, schema, name)
    variables = tree.get("ENV_VARS", Node({}, name)).value
    env: dict[str, int | str] = {}
    if isinstance(variables, dict):
        stated = "\n".join(f"export {key}={_quoted(_written(node))}" for key, node in variables.items())
        reading = read_script(f"{stated}\n:; run", name, {})
        env, _, more = environment(reading.commands[-1].env, reading.holes, name)
        problems += more
    for key in tree:
        if re.fullmatch(f"{_ARGUMENTS}_[0-9]+", key):
            message = f"{key}, the arguments of a later start, was not imported"
            fix = "import it separately"
            problems.append(Problem("warning", "import-other-command", message, tree[key].where, fix))
    sections = {"env": env} if env else {}
    return Launch(tuple(argv), sections, tuple(problems))


def _as_list(arguments: Mapping[str, Node], schema: FlagSchema) -> str:
    """Return flags and values as an argument list, each with its line in the file."""
    text = ""
    # Merged entries come from earlier lines.
    for flag, node in sorted(arguments.items(), key=lambda item: int(item[1].where.rpartition(":")[2])):
        if node.value is False or node.value == "false":
            continue
        line = int(node.where.rpartition(":")[2])
        known = schema.find(flag)
        # A variable decides whether a bare flag is on, so the two words belong together.
        between = "=" if known and not known.takes_value and "$" in _written(node) else " "
        text += "\n" * (line - 1 - text.count("\n")) + f"{flag}{between}{_value(node)}\n"
    return text


def _switches(words: Sequence[str], schema: FlagSchema) -> list[str]:
    """Return the words with a bare flag for `--flag=true`, and without `--flag=false`."""
    found = []
    for word in words:
        option, _, value = word.partition("=")
        flag = schema.find(option)
        if flag is None or flag.takes_value or value not in ("true", "false"):
            found.append(word)
        elif value == "true":
            found.append(option)
    return found


def _value(node: Node) -> str:
    """Return the words that Megatron-LM's test runner makes of a value: `[a b]` is two words."""
    if node.value is True or node.value == "true":
        return ""
    if isinstance(node.value, list):
        return " ".join(_quoted(_written(item)) for item in node.value)
    text = _written(node)
    if len(text) > 1 and text[0] == text[-1] == "'":
        # The launcher of Megatron-MoE-ModelZoo evaluates the value in a shell, which removes these quotes.
        text = text[1:-1]
        return _quoted(text)
    if text.startswith("[") and text.endswith("]"):
        return " ".join(map(_quoted, text[1:-1].split()))
    return _quoted(text)


def _written(node: Node) -> str:
    """Return a scalar as it is written in the file: 1e-2 stays 1e-2."""
    if node.text is not None:
        return node.text.strip()
    if node.value is None:
        return ""
    return str(node.value).strip()


def _quoted(text: str) -> str:
    """Quote a text for a shell with double quotes, in which variables are still expanded."""
    escaped = re.sub(r'(["\\`])|\$(?![A-Za-z_{])', lambda found: "\\" + found[0], text)
    return f'"{escaped}"'
