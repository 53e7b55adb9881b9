"""Run the core's tests without plugins, and each plugin's tests with only the plugins that it requires.

    python tools/test_selections.py                  # everything
    python tools/test_selections.py core plan tune   # these
    python tools/test_selections.py plan -- -m slow  # with other options for pytest

Exits with 1 if tests of any selection fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fp8launch.plugin_registry import _BUILT_IN, SELECTION

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["-m", "not slow and not train and not slurm and not drill"]


def tests_of(name: str) -> list[str]:
    """Return pytest's arguments for the tests of a plugin or of the core."""
    if name == "core":
        return ["tests", "--ignore", "tests/plugins"]
    # Folders called nemo_run and submitit would hide the packages with these names.
    folders = [f"tests/plugins/{folder}" for folder in (name, f"{name}_backend")]
    return [folder for folder in folders if (ROOT / folder).is_dir()]


def main() -> int:
    words = sys.argv[1:]
    options = QUICK
    if "--" in words:
        words, options = words[: words.index("--")], words[words.index("--") + 1 :]
    unknown = set(words) - {"core", *_BUILT_IN}
    if unknown:
        print(f"no such plugin: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    results = {}
    for name in words or ["core", *_BUILT_IN]:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *tests_of(name), *options]
        environment = {**os.environ, SELECTION: "" if name == "core" else name}
        # 5: none of its tests were selected.
        results[name] = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode in (0, 5)
    failed = [name for name, passed in results.items() if not passed]
    print(f"failed: {', '.join(failed) or 'none'} of {len(results)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
