"""Write the flag schemas of the supported megatron-core versions, from the wheels that PyPI has.

    python tools/flag_schemas.py                 # newest patch release of each minor version, downloaded by pip
    python tools/flag_schemas.py --wheels DIR    # from a directory of wheels
    python tools/flag_schemas.py --check         # exit 1 when the committed schemas are stale
    python tools/flag_schemas.py --scripts DIR   # flags of Megatron-LM's other scripts, by DIR/0.19 ...

Megatron's own argparse parser is built in a separate process, with stand-ins for torch. Its flags are written without
help texts, one per line, sorted. The versions are those of megatron/versions.py.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import json
import lzma
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

PACKAGE = Path(__file__).resolve().parents[1] / "launchers" / "fp8launch"
MEGATRON = PACKAGE / "megatron"
VALIDATORS = PACKAGE / "plugins" / "validators"
# By its path: this file also runs in the bare process that holds a Megatron.
MINORS = tuple(runpy.run_path(str(MEGATRON / "versions.py"))["SUPPORTED"])
SCHEMAS = MEGATRON / "schemas"

# Environment variables that Megatron's parser reads for its defaults.
_READ_FOR_DEFAULTS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_ARGUMENTS = "megatron.training.arguments"

Json = Any


# --- flags of single scripts, which wheels do not have ---------------------------------------------------------------

# A script of Megatron-LM, the file and the function that add its flags, and the package that it needs for that.
_SCRIPTS: tuple[tuple[str, str, str, str | None], ...] = (
    ("pretrain_gpt.py", "megatron/post_training/arguments.py", "add_modelopt_args", "nvidia-modelopt"),
    ("pretrain_mamba.py", "megatron/post_training/arguments.py", "add_modelopt_args", "nvidia-modelopt"),
    ("pretrain_hybrid.py", "megatron/post_training/arguments.py", "add_modelopt_args", "nvidia-modelopt"),
    ("pretrain_vlm.py", "pretrain_vlm.py", "add_vlm_extra_args", None),
    ("train_rl.py", "megatron/inference/utils.py", "add_inference_args", None),
    ("examples/multimodal/train.py", "examples/multimodal/multimodal_args.py", "add_multimodal_extra_args", None),
    ("examples/mimo/train.py", "examples/mimo/train.py", "add_mimo_args", None),
)


def describe_scripts(checkout: Path) -> dict[str, Json]:
    """Return the flags that each script of a Megatron-LM checkout adds. Runs only the functions that add them."""
    found: dict[str, Json] = {}
    for script, file, name, needs in _SCRIPTS:
        source = checkout / file
        if not source.is_file() or not (checkout / script).is_file():
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        function = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name), None)
        if function is None:
            continue
        function.returns = None
        for argument in function.args.args:
            argument.annotation = None
        namespace: dict[str, Any] = {"argparse": argparse, "IMAGE_TOKEN": "<image>"}
        exec(compile(ast.Module([function], []), str(source), "exec"), namespace)
        parser = argparse.ArgumentParser(allow_abbrev=False)
        namespace[name](parser)
        flags = {action.option_strings[0]: _flag(action) for action in parser._actions if action.dest != "help"}
        extra = {"needs": needs} if needs else {}
        found[script] = [{**flags[flag], **extra} for flag in sorted(flags)]
    return found


def write_scripts(checkouts: Path) -> None:
    """Write scripts.json.xz from one checkout for each minor version."""
    lines = []
    for minor in MINORS:
        for script, flags in describe_scripts(checkouts / minor).items():
            rows = ",\n".join(json.dumps(flag) for flag in flags)
            lines.append(f"{json.dumps(f'{minor} {script}')}: [\n{rows}\n]")
    (MEGATRON / "scripts.json.xz").write_bytes(compressed("{\n" + ",\n".join(lines) + "\n}\n"))


def read(path: Path) -> Json:
    """Return a schema of the repository."""
    return json.loads(lzma.decompress(path.read_bytes()))


def compressed(text: str) -> bytes:
    """Pack a text for the repository; `xz -dc` shows it."""
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


# --- in the process that holds Megatron -----------------------------------------------------------------------------


def describe(site: Path) -> dict[str, Json]:
    """Return the parser of the Megatron unpacked at `site`, as JSON data. Imports it: call in a separate process."""
    sys.path[:0] = [str(site), str(VALIDATORS)]
    torch_stubs = importlib.import_module("torch_stubs")
    sys.path.remove(str(VALIDATORS))
    torch_stubs.install()
    torch_stubs.modernize_typing()
    arguments = importlib.import_module(_ARGUMENTS)
    kitchen = importlib.import_module("megatron.core.extensions.kitchen")

    def build() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        return parser

    plain = build()
    flags = {action.option_strings[0]: _flag(action) for action in plain._actions if action.dest != "help"}
    # nvidia-kitchen adds its own flags, which only images that contain it accept.
    kitchen.__dict__["HAVE_KITCHEN"] = True
    for action in build()._actions:
        if action.dest != "help" and action.option_strings[0] not in flags:
            flags[action.option_strings[0]] = {**_flag(action), "needs": "nvidia-kitchen"}
    kitchen.__dict__["HAVE_KITCHEN"] = False

    sys.argv = ["pretrain_gpt.py"]
    dests = {action.dest for action in plain._actions}
    return {
        # In a git work tree Megatron appends that tree's commit.
        "version": importlib.import_module("megatron.core.package_info").__version__.partition("+")[0],
        # What parse_args adds to the namespace besides the flags.
        "added_by_parse_args": sorted(set(vars(arguments.parse_args())) - dests),
        "config_only": _config_only(dests),
        "flags": [flags[name] for name in sorted(flags)],
    }


def _config_only(dests: set[str]) -> dict[str, str]:
    """Return the names and types of plain fields of TransformerConfig that no flag sets and nothing computes."""
    config = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    builder = next(
        module.core_transformer_config_from_args
        for module in map(importlib.import_module, ("megatron.training.argument_utils", _ARGUMENTS))
        if hasattr(module, "core_transformer_config_from_args")
    )
    computed = set(re.findall(r"kw_args\[['\"](\w+)['\"]\] *=", inspect.getsource(builder)))
    computed |= set(re.findall(r"\bargs\.(\w+) *=[^=]", inspect.getsource(importlib.import_module(_ARGUMENTS))))
    found = {}
    for field in dataclasses.fields(config):
        text = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        if text in ("", "Optional", "Union"):
            text = str(field.type)
        plain = re.fullmatch(r"(?:typing\.)?(?:Optional\[)?(bool|int|float|str)(?: \| None|\])?", text)
        if plain and field.init and field.name not in dests | computed:
            found[field.name] = plain[1]
    return dict(sorted(found.items()))


# Defaults of a flag's properties, by action; `const` of a bare flag follows from its action.
_USUAL: dict[str, dict[str, Json]] = {
    "store": {"type": "str", "default": None},
    "store_true": {"default": False},
    "store_false": {"default": True},
    "boolean": {"default": False},
}


def _flag(action: argparse.Action) -> dict[str, Json]:
    """Describe one flag, without properties that have the defaults of its kind."""
    kind, choices = _type(action)
    name = _action(action)
    entry = {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "action": name,
        "type": kind,
        "choices": choices,
        "nargs": None if action.nargs == 0 else action.nargs,
        "default": _plain(action.default),
        "required": action.required,
        "hidden": action.help is argparse.SUPPRESS,
        "deprecated": _deprecated(action),
    }
    usual = {
        "dest": action.option_strings[0].lstrip("-").replace("-", "_"),
        "action": "store",
        "type": None,
        "choices": None,
        "nargs": None,
        "required": False,
        "hidden": False,
        "deprecated": False,
        **_USUAL[name],
    }
    return {key: value for key, value in entry.items() if key not in usual or not _same(value, usual[key])}


def _same(a: Json, b: Json) -> bool:
    """Return whether two values are equal and of one type, so that 0 is not False."""
    return type(a) is type(b) and bool(a == b)


def _action(action: argparse.Action) -> str:
    """`store`, `store_true`, `store_false`, or `boolean` for a pair of `--x` and `--no-x`."""
    known = {
        argparse._StoreAction: "store",
        argparse._StoreTrueAction: "store_true",
        argparse._StoreFalseAction: "store_false",
        argparse.BooleanOptionalAction: "boolean",
    }
    try:
        return known[type(action)]
    except KeyError:
        raise SystemExit(f"{action.option_strings[0]}: argparse action {type(action).__name__} is new here") from None


def _type(action: argparse.Action) -> tuple[str | None, list[Json] | None]:
    """Return the name of the type in `fp8launch.megatron.arguments`, and the choices as a user types them.

    A conversion function of Megatron's is recognized by what it does to sample texts.
    """
    convert = cast("Callable[[str], Any] | None", action.type)
    if action.nargs == 0:
        return None, None
    if convert is None or convert in (str, int, float, bool):
        choices = None if action.choices is None else [_plain(choice) for choice in action.choices]
        return (convert or str).__name__, choices
    if action.choices is not None and all(isinstance(choice, enum.Enum) for choice in action.choices):
        return "str", [choice.name for choice in action.choices if choice.name not in _NEWER_PYTHON]
    if _result(convert, "[1]*2+[0]") == [1, 1, 0] and _result(convert, "3") == 3:
        return "pattern", None
    if _result(convert, "1,2") == (1, 2):
        return "ints", None
    words = [word for word in _words(convert) if _result(convert, word) is not _Refused]
    if words and _result(convert, "surely-no-such-word") is _Refused:
        return "str", words
    raise SystemExit(f"{action.option_strings[0]}: the conversion function {convert!r} is new here")


# Members of Python's own enums that Python 3.10 lacks: a schema does not depend on the Python that made it.
_NEWER_PYTHON = frozenset({"SIGSTKFLT"})


class _Refused:
    """What `_result` returns when the conversion raised."""


def _result(convert: Callable[[str], Any], text: str) -> Any:
    try:
        return convert(text)
    except Exception:
        return _Refused


def _words(convert: Callable[[str], Any]) -> list[str]:
    """Return every word that a conversion function might accept: names in Megatron's enums, and its own constants."""
    enums = importlib.import_module("megatron.core.transformer.enums")
    members = [
        member.name
        for value in vars(enums).values()
        if isinstance(value, type) and issubclass(value, enum.Enum)
        for member in value
    ]
    code = getattr(convert, "__code__", None)
    constants = [
        text
        for constant in (code.co_consts if code is not None else ())
        for text in (constant if isinstance(constant, frozenset) else (constant,))
        if isinstance(text, str) and re.fullmatch(r"\w+", text)
    ]
    return sorted({*members, *constants})


def _plain(value: Any) -> Json:
    """Return JSON for a default: enums by name, and null for values that JSON cannot hold."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _deprecated(action: argparse.Action) -> bool:
    help_text = str(action.help or "")
    return "deprecated" in action.dest or re.search(r"(^|[.(\[] ?)Deprecated\b", help_text, re.IGNORECASE) is not None


# --- in the tool's own process --------------------------------------------------------------------------------------


def schema_text(description: Mapping[str, Json]) -> str:
    """Return the schema file: one flag per line, so that a diff shows what a new version changed."""
    head = {key: value for key, value in description.items() if key != "flags"}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    flags = ",\n".join(json.dumps(flag) for flag in description["flags"])
    return "{\n" + "\n".join(lines) + '\n"flags": [\n' + flags + "\n]\n}\n"


def generate(wheels: Iterable[Path]) -> dict[str, str]:
    """Return texts by file name, for the newest of the `wheels` of each minor version."""
    newest: dict[str, Path] = {}
    for wheel in sorted(wheels, key=_release):
        newest[".".join(map(str, _release(wheel)[:2]))] = wheel
    missing = [minor for minor in MINORS if minor not in newest]
    if missing:
        _fail(f"no megatron-core wheel of version {', '.join(missing)} found")
    return {f"{minor}.json.xz": generate_one(newest[minor]) for minor in MINORS}


def generate_one(wheel: Path) -> str:
    """Return the schema of one wheel as text."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        environment = {k: v for k, v in os.environ.items() if k not in _READ_FOR_DEFAULTS and k != "PYTHONPATH"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--describe", folder],
            env=environment, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        _fail(f"the parser of {wheel.name} could not be read")
    # Megatron prints warnings to stdout; ours is the last line.
    return schema_text(json.loads(done.stdout.splitlines()[-1]))


def _release(wheel: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in wheel.name.split("-")[1].split(".") if part.isdigit())


def download(folder: Path) -> None:
    """Fetch the newest patch release of each minor version (2 MB each) into `folder`, without dependencies."""
    for minor in MINORS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
        command += ["--only-binary=:all:", "--dest", str(folder), f"megatron-core=={minor}.*"]
        if subprocess.run(command, check=False).returncode:
            _fail(f"pip could not download megatron-core {minor}")


def stale(files: Mapping[str, str]) -> list[str]:
    """Return names of schema files whose committed text differs from `files`, or that are not in `files`."""
    committed = {path.name: lzma.decompress(path.read_bytes()).decode() for path in SCHEMAS.glob("0.*.json.xz")}
    return sorted(name for name in files.keys() | committed.keys() if files.get(name) != committed.get(name))


def _fail(message: str) -> NoReturn:
    print(f"flag_schemas: {message}", file=sys.stderr)
    raise SystemExit(3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="directory of megatron-core wheels")
    parser.add_argument("--check", action="store_true", help="only compare with the committed schemas")
    parser.add_argument("--scripts", type=Path, metavar="DIR", help="directory of Megatron-LM checkouts, by version")
    parser.add_argument("--describe", type=Path, metavar="SITE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe(options.describe)))
        return 0
    if options.scripts:
        write_scripts(options.scripts)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if not options.wheels:
            download(Path(folder))
        files = generate((options.wheels or Path(folder)).glob("megatron_core-*.whl"))
    names = stale(files)
    if options.check:
        print(f"stale: {', '.join(names)}" if names else "the committed schemas are current")
        return 1 if names else 0
    SCHEMAS.mkdir(exist_ok=True)
    for name, text in files.items():
        (SCHEMAS / name).write_bytes(compressed(text))
    print(f"changed: {', '.join(names)}" if names else "nothing changed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
