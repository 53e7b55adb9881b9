"""The tests that need Megatron-Bridge's own code or lm-eval, run by the environments that have them.

`tools/setup.sh test` makes these in .cache, of the wheels of Megatron-Bridge, transformers and lm-eval. They are
separate, because Megatron imports transformers wherever it finds it, and every training of the suite would wait for
that.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.needs_plugin("rehearse")
@pytest.mark.needs_plugin("stages")
@pytest.mark.parametrize(
    ("environment", "files", "least"),
    [
        ("evaluate", "stages/test_five_stages.py", 1),
        ("evaluate", "evaluate/test_evaluate_program.py", 4),
        ("bridge", "rehearse/test_bridge_own_code.py", 17),
        ("bridge", "bridge/test_bridge_program.py", 13),
        ("bridge", "convert/test_convert_program.py", 11),
        # Both import Bridge into their own process.
        ("bridge", "bridge/test_bridge_configurations.py data/test_chat_with_bridge.py", 24),
    ],
)
def test_with_their_own_code(environment: str, files: str, least: int) -> None:
    python = TESTS.parent / ".cache" / environment / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no .cache/{environment}: tools/setup.sh found no index to download it from")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [TESTS / "plugins" / file for file in files.split()]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables["PYTHONPATH"] = str(TESTS.parent / "launchers")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= least, done.stdout[-2000:]
