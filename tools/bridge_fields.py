"""Write the fields of Megatron-Bridge's configuration and their types, by release and section.

    python tools/bridge_fields.py RELEASE=CHECKOUT

A CHECKOUT is a folder with the source of that release (`src/`), or an unpacked wheel. Bridge is imported, not run.
Needs torch, transformers, omegaconf, hydra-core and the megatron-core of that release's image: 0.17 for 0.4, 0.18 for
0.5. A section that may hold one of several classes, such as the model, gets the fields of all of them.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import logging
import lzma
import os
import sys
import types
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from bridge_source import source_folder

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "launchers" / "fp8launch" / "plugins" / "bridge" / "fields.json.xz"
DIFFUSION = "megatron.bridge.diffusion.models.wan.wan_provider"
# Bridge keeps data types and paths as text while it applies overrides.
LETTERS: dict[Any, str] = {
    bool: "b", int: "i", float: "f", str: "s", list: "l", tuple: "l", set: "l", type(None): "n",
    torch.dtype: "s", Path: "s",
}  # fmt: skip


def fields(checkout: Path) -> dict[str, dict[str, str]]:
    """Return the fields of each section of the configuration with their types (see `kind_of`)."""
    package_folder = source_folder(checkout)
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "launchers"), str(package_folder)]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    stubs = importlib.import_module("bridge_stubs")
    stubs.install()
    module = stubs.settled(lambda: stubs.load("megatron.bridge.training.config"))
    mixin = stubs.load("megatron.bridge.models.model_provider").ModelProviderMixin
    if (package_folder / DIFFUSION.replace(".", "/")).with_suffix(".py").is_file():
        stubs.load(DIFFUSION)  # derives a model from the mixin
    found: dict[str, dict[str, list[Any]]] = {}
    for section, hint in get_type_hints(module.ConfigContainer).items():
        held = found.setdefault(section, {})
        for kind in [*classes(hint), *(below(mixin) if section == "model" else ())]:
            if dataclasses.is_dataclass(kind):
                hints = hints_of(kind)
                for field in dataclasses.fields(kind):
                    held.setdefault(field.name, []).append(hints.get(field.name, Any))
                    if field.default is None:
                        held[field.name].append(type(None))
    return {
        section: {name: kind_of(hints) for name, hints in sorted(held.items())}
        for section, held in sorted(found.items())
    }


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields, or those of its base classes if they cannot be resolved here."""
    for each in kind.__mro__:
        try:
            return get_type_hints(each)
        except (NameError, TypeError):
            continue
    return {}


def kind_of(hints: Iterable[Any]) -> str:
    """Return a name for what a field of these types accepts, "" for anything.

    Letters: b(ool), i(nteger), f(loat), s(tring), l(ist), n(ull); after a colon the only strings if they are listed.
    """
    letters: set[str] = set()
    words: set[str] = set()
    listed = True
    for hint in (part for each in hints for part in parts(each)):
        origin = get_origin(hint)
        if origin is Literal:
            words.update(word for word in get_args(hint) if isinstance(word, str))
            letters.update(LETTERS[type(word)] for word in get_args(hint))
        elif hint in LETTERS:
            letters.add(LETTERS[hint])
            listed = listed and LETTERS[hint] != "s"
        elif origin in (list, tuple, set):
            letters.add("l")
        elif inspect.isclass(hint) and issubclass(hint, enum.Enum):
            letters.update("si")
            listed = False
        else:
            return ""
    return "".join(sorted(letters)) + (":" + "|".join(sorted(words)) if words and listed else "")


def parts(hint: Any) -> list[Any]:
    """Return the alternatives of a union type."""
    if get_origin(hint) in (Union, types.UnionType):
        return [part for each in get_args(hint) for part in parts(each)]
    return [hint]


def classes(hint: Any) -> list[type]:
    """Return the dataclasses in a type."""
    inside = [kind for part in get_args(hint) for kind in classes(part)]
    own = [hint] if inspect.isclass(hint) and dataclasses.is_dataclass(hint) else []
    return own + [each for kind in own for each in below(kind) if dataclasses.is_dataclass(each)] + inside


def below(kind: type) -> list[type]:
    """Return all subclasses of a class."""
    children: list[type] = kind.__subclasses__()
    return [each for child in children for each in (child, *below(child))]


def main() -> None:
    release, _, checkout = sys.argv[1].partition("=")
    os.environ["NO_VCS_VERSION"] = "1"
    known = json.loads(lzma.decompress(OUT.read_bytes())) if OUT.is_file() else {}
    known[release] = {
        section: " ".join(f"{name}={kind}" if kind else name for name, kind in names.items())
        for section, names in fields(Path(checkout).resolve()).items()
    }
    OUT.write_bytes(lzma.compress(json.dumps(known, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
