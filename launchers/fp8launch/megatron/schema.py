"""The flags of each supported Megatron-Core version, from the compressed JSON that `tools/flag_schemas.py` writes.

A schema finds wrong flags as well as Megatron's own parser, and loads in a few milliseconds because entries stay raw
JSON until they are used.
"""

from __future__ import annotations

import functools
import json
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fp8launch.diagnostics import error
from fp8launch.megatron.versions import DEFAULT, SUPPORTED

SCHEMAS = Path(__file__).with_name("schemas")
SCRIPT_FLAGS = Path(__file__).with_name("scripts.json.xz")
# Megatron-LM's training scripts. For these an unknown flag is an error; other scripts may define more flags.
SCRIPTS = (
    "pretrain_bert.py",
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "pretrain_ict.py",
    "pretrain_mamba.py",
    "pretrain_retro.py",
    "pretrain_t5.py",
    "pretrain_vision_classify.py",
    "pretrain_vlm.py",
    "train_rl.py",
    "examples/multimodal/train.py",
    "examples/mimo/train.py",
)
# The tokenizer that Megatron-LM's pretrain_gpt.py uses for an argument list without one.
DEFAULT_TOKENIZER = "GPT2BPETokenizer"

Action = Literal["store", "store_true", "store_false", "boolean"]
Type = Literal["str", "int", "float", "bool", "pattern", "ints"]
Default = bool | int | float | str | list[Any] | None

# Old name to new name of settings that Megatron renamed, from the parsers of 0.11 to 0.19 and the help of deprecated
# flags.
RENAMED: Mapping[str, str] = {
    "cuda_graph_scope": "cuda_graph_modules",
    "hybrid_override_pattern": "hybrid_layer_pattern",
    "inference_dynamic_batching_cuda_graph_max_tokens": "inference_cuda_graph_max_tokens",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
    "moe_deepep_num_sms": "moe_flex_dispatcher_num_sms",
    "moe_hybridep_num_sms": "moe_flex_dispatcher_num_sms",
    "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
    "muon_use_nesterov": "muon_nesterov",
    "tiktoken_special_tokens": "tokenizer_special_tokens",
    "use_custom_fsdp": "use_megatron_fsdp",
}


@dataclass(frozen=True)
class Flag:
    """One option of Megatron's parser.

    `options` are its names; the first is canonical. `dest` is the attribute that it sets, often with another name.
    `type` is None for a bare flag; `pattern` is a whole number or a list expression such as `([0]*3+[1])*8`, `ints` is
    whole numbers joined by commas. `nargs` is None for one value, a count, "+" or "*". `needs` names an optional
    package without which Megatron lacks the flag.
    """

    options: tuple[str, ...]
    dest: str
    action: Action = "store"
    type: Type | None = None
    choices: tuple[str | int, ...] | None = None
    nargs: int | Literal["+", "*"] | None = None
    default: Default = None
    required: bool = False
    hidden: bool = False
    deprecated: bool = False
    needs: str | None = None

    @property
    def name(self) -> str:
        """The canonical name in recipes: the first name, in snake_case."""
        return normalize(self.options[0])

    @property
    def takes_value(self) -> bool:
        return self.action == "store"

    @property
    def const(self) -> bool | None:
        """The value that a bare flag stores under its first name."""
        if self.takes_value:
            return None
        return self.action != "store_false"


@dataclass(frozen=True)
class FlagSchema:
    """The flags of one Megatron-Core version.

    `version` is the release that the schema was made from. It holds for the whole `minor` version, because patch
    releases do not move flags. `added_by_parse_args` are attributes of Megatron's arguments that no flag sets.
    `config_only` maps the plain fields of TransformerConfig that no flag sets to their types.
    """

    version: str
    added_by_parse_args: tuple[str, ...]
    config_only: Mapping[str, str]
    _raw: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _built: dict[str, Flag] = field(default_factory=dict, repr=False, compare=False)

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])

    def find(self, name: str) -> Flag | None:
        """Return the flag of that name, with dashes or underscores, with or without leading dashes; None if unknown."""
        key = normalize(name)
        if key not in self._raw:
            return None
        if key not in self._built:
            flag = _build(self._raw[key])
            self._built.update((normalize(option), flag) for option in flag.options)
        return self._built[key]

    def names(self) -> Iterator[str]:
        """Return every name of every flag, in snake_case."""
        return iter(self._raw)

    def flags(self) -> Iterator[Flag]:
        """Return every flag once, by name."""
        for name in self._raw:
            flag = self.find(name)
            if flag is not None and flag.name == name:
                yield flag

    def defaults(self) -> dict[str, Default]:
        """Return the parser's defaults by attribute, without building every flag."""
        entries = (entry for name, entry in self._raw.items() if normalize(entry["flags"][0]) == name)
        return {_dest(entry): _default(entry) for entry in entries}

    def setting(self, dest: str) -> tuple[Flag, ...]:
        """Return the flags that set this attribute of Megatron's arguments."""
        return tuple(flag for flag in self.flags() if flag.dest == dest)

    def negative(self, flag: Flag) -> str | None:
        """Return the name that turns a bare flag off, if Megatron has one."""
        if flag.action == "boolean":
            return next((option for option in flag.options if option.startswith("--no-")), None)
        if flag.takes_value:
            return None
        bare = (other for other in self.setting(flag.dest) if not other.takes_value)
        return next((other.options[0] for other in bare if other.const is not flag.const), None)


def normalize(name: str) -> str:
    """Return a flag's name without leading dashes and with underscores."""
    return name.lstrip("-").replace("-", "_")


def supported_versions() -> tuple[str, ...]:
    """Return the supported minor versions, oldest first."""
    return tuple(SUPPORTED)


def load_schema(version: str, script: str | None = None) -> FlagSchema:
    """Return the schema of a Megatron-Core version such as "0.19" or "0.19.2".

    With the path of one of Megatron-LM's scripts, the schema includes that script's own flags. Raises `UserError` for
    an unsupported version.
    """
    match = re.match(r"v?(\d+\.\d+)(?![\d])", version.strip())
    if match is None or match[1] not in supported_versions():
        supported = supported_versions()
        raise error(
            "megatron-version",
            f"Megatron-Core {version!r} is not supported; supported are {', '.join(supported)}",
            fix=f"set software.megatron to one of them, for example {DEFAULT!r}",
        )
    known = megatron_script(script or "")
    if known is None:
        return _load(match[1])
    return _with_script(match[1], known)


@functools.cache
def parser_defaults(version: str) -> Mapping[str, Any]:
    """Return the defaults of a Megatron release's parser, by attribute name."""
    return load_schema(version).defaults()


def value_of(arguments: Mapping[str, Any], name: str) -> Any:
    """Return the value of one of Megatron's arguments, by attribute name; None if this version lacks it.

    Raises KeyError for a name that no supported version has: a misspelled name would silently disable a rule.
    """
    if name in arguments:
        return arguments[name]
    if not any(name in _attributes(version) for version in reversed(supported_versions())):
        raise KeyError(f"no supported Megatron has an argument {name!r}")
    return None


@functools.cache
def _attributes(minor: str) -> frozenset[str]:
    schema = _load(minor)
    return frozenset([*schema.defaults(), *schema.added_by_parse_args, *schema.config_only])


def versions_with(name: str) -> tuple[str, ...]:
    """Return the supported minor versions whose parser has a flag of this name, oldest first."""
    return tuple(version for version in supported_versions() if _load(version).find(name))


def other_names(name: str, schema: FlagSchema) -> tuple[Flag, ...]:
    """Return the flags that replace `name` of a newer or older version in this one; empty if none is known."""
    key = normalize(name)
    candidates = [old for old, new in RENAMED.items() if new == key]
    if key in RENAMED:
        candidates = [RENAMED[key]]
    return tuple(filter(None, map(schema.find, candidates)))


def megatron_script(path: str) -> str | None:
    """Return the name of the script of Megatron-LM that a path ends in; None for any other script."""
    return next((name for name in SCRIPTS if f"/{path}".endswith(f"/{name}")), None)


@functools.cache
def _with_script(minor: str, script: str) -> FlagSchema:
    base = _load(minor)
    own = json.loads(lzma.decompress(SCRIPT_FLAGS.read_bytes())).get(f"{minor} {script}", [])
    return FlagSchema(base.version, base.added_by_parse_args, base.config_only, {**base._raw, **by_name(own)})


def by_name(entries: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the entries of flags by each of their names."""
    found = {}
    for entry in entries:
        for option in entry["flags"]:
            found[normalize(option)] = entry
    return found


def schema_text(minor: str) -> str:
    """Read the JSON text of a minor version's schema, which has one flag per line."""
    return lzma.decompress((SCHEMAS / f"{minor}.json.xz").read_bytes()).decode()


@functools.cache
def _load(minor: str) -> FlagSchema:
    data = json.loads(schema_text(minor))
    raw = by_name(data["flags"])
    return FlagSchema(data["version"], tuple(data["added_by_parse_args"]), data["config_only"], raw)


def _dest(entry: Mapping[str, Any]) -> str:
    """Return the attribute that a flag sets."""
    stated: str | None = entry.get("dest")
    return stated or normalize(entry["flags"][0])


def _default(entry: Mapping[str, Any]) -> Default:
    """Return the default of a flag. For a bare flag without a stated default it is the opposite of the stored value."""
    bare: Default = None
    if entry.get("action", "store") != "store":
        bare = entry["action"] == "store_false"
    found: Default = entry.get("default", bare)
    return found


def _build(entry: Mapping[str, Any]) -> Flag:
    stated = {each.name: entry[each.name] for each in fields(Flag) if each.name in entry}
    stated |= {"options": tuple(entry["flags"]), "dest": _dest(entry), "default": _default(entry)}
    if entry.get("action", "store") == "store":
        stated.setdefault("type", "str")
    if entry.get("choices") is not None:
        stated["choices"] = tuple(entry["choices"])
    return Flag(**stated)
