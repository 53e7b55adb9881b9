"""The demo runs with the packages that `make demo` installs, without those that only `make test` adds."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# Prints what set_up_train would install, a requirement per line.
LISTING = """
source <(sed '/^make_venv$/,$d' tools/setup.sh) train .venv
has() { true; }
say() { true; }
pip_install() { printf '%s\\n' "$@"; }
set_up_train
"""
WITHOUT = """
import os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in os.environ["MISSING"].split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def installed_for_the_demo() -> set[str]:
    """Return the distributions that `make demo` installs, with all that they require."""
    words = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", LISTING], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = [Requirement(word.replace(".[", "fp8launch[", 1)) for word in words if not word.startswith("--")]
    found: dict[str, set[str]] = {}
    while wanted:
        one = wanted.pop()
        extras = found.setdefault(canonicalize_name(one.name), set())
        if extras >= {"", *one.extras}:
            continue
        extras |= {"", *one.extras}
        try:
            required = distribution(one.name).requires or []
        except PackageNotFoundError:
            continue
        for each in map(Requirement, required):
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(each)
    return set(found)


@pytest.mark.train
@pytest.mark.slow
@pytest.mark.needs_plugin("rehearse")
def test_the_rehearsal_of_the_demo_needs_no_other_package(tmp_path: Path) -> None:
    ours = installed_for_the_demo()
    assert {"fp8launch", "torch", "numpy", "tokenizers"} <= ours
    missing = [
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier() and not ours.intersection(map(canonicalize_name, owners))
    ]
    assert "pytest" in missing
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MISSING": " ".join(missing)}
    command = [sys.executable, "-m", "fp8launch", "check", "llama8b_fp8", "--rehearse"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
