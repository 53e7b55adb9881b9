"""Write which Hugging Face architectures Megatron-Bridge converts, each with its first release in the list.

    python tools/bridge_architectures.py RELEASE=CHECKOUT...

Reads the `source=` of every `register_bridge` and `register_bridge_implementation` in the source of each release, the
oldest first. Imports nothing.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from bridge_source import source_folder

OUT = Path(__file__).resolve().parent.parent / "launchers/fp8launch/plugins/convert/architectures.json"
REGISTER = ("register_bridge", "register_bridge_implementation")
# Registered too, but no language models.
NOT_TEXT = {"FluxTransformer2DModel", "WanTransformer3DModel"}


def registered(tree: ast.Module) -> Iterator[str]:
    """Return names in `register_bridge(source=Class)`, `source="Class"`, and `source=CONSTANT` of the same file."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if getattr(node.func, "attr", getattr(node.func, "id", "")) not in REGISTER:
            continue
        for keyword in node.keywords:
            if keyword.arg != "source":
                continue
            if isinstance(keyword.value, ast.Constant):
                yield str(keyword.value.value)
            elif isinstance(keyword.value, ast.Name):
                yield str(constants.get(keyword.value.id, keyword.value.id))


def main(releases: list[str]) -> None:
    since: dict[str, str] = {}
    for text in releases:
        release, _, checkout = text.partition("=")
        for file in sorted((source_folder(Path(checkout)) / "megatron/bridge").rglob("*.py")):
            for name in registered(ast.parse(file.read_text())):
                if name not in {*NOT_TEXT, "source"}:  # `source`: one of the two calls the other
                    since.setdefault(name, release)
    brought = {release: sorted(name for name in since if since[name] == release) for release in set(since.values())}
    OUT.write_text(json.dumps(dict(sorted(brought.items())), indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
