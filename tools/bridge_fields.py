"""Write the names of the fields of Megatron-Bridge's configuration, by release and section.

    python tools/bridge_fields.py RELEASE=CHECKOUT

A CHECKOUT is a folder with the source of that release (`src/`). Bridge is imported, not run. Needs torch,
megatron-core, transformers, omegaconf and hydra-core. A section that may hold one of several classes, such as the
model, gets the fields of all of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import lzma
import os
import sys
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "launchers" / "fp8launch" / "engines" / "bridge" / "fields.json.xz"


def fields(checkout: Path) -> dict[str, list[str]]:
    """The fields of each section of the configuration."""
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "launchers"), str(checkout / "src")]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    stubs = importlib.import_module("bridge_stubs")
    stubs.install()
    module = stubs.settled(lambda: stubs.load("megatron.bridge.training.config"))
    found: dict[str, set[str]] = {}
    for section, hint in get_type_hints(module.ConfigContainer).items():
        for kind in classes(hint):
            found.setdefault(section, set()).update(field.name for field in dataclasses.fields(kind))
    mixin = stubs.load("megatron.bridge.models.model_provider").ModelProviderMixin
    for kind in below(mixin):
        if dataclasses.is_dataclass(kind):
            found["model"].update(field.name for field in dataclasses.fields(kind))
    return {section: sorted(names) for section, names in sorted(found.items())}


def classes(hint: Any) -> list[type]:
    """The dataclasses in a type."""
    inside = [kind for part in get_args(hint) for kind in classes(part)]
    own = [hint] if inspect.isclass(hint) and dataclasses.is_dataclass(hint) else []
    return own + [each for kind in own for each in below(kind) if dataclasses.is_dataclass(each)] + inside


def below(kind: type) -> list[type]:
    """All classes derived from a class."""
    children: list[type] = kind.__subclasses__()
    return [each for child in children for each in (child, *below(child))]


def main() -> None:
    release, _, checkout = sys.argv[1].partition("=")
    os.environ["NO_VCS_VERSION"] = "1"
    known = json.loads(lzma.decompress(OUT.read_bytes())) if OUT.is_file() else {}
    known[release] = {section: " ".join(names) for section, names in fields(Path(checkout).resolve()).items()}
    OUT.write_bytes(lzma.compress(json.dumps(known, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
