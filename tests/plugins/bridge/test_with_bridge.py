"""The tests that need Megatron-Bridge's own code, run by the environment that has it: .cache/bridge.

`tools/setup.sh test` makes that environment of the wheels of Megatron-Bridge and transformers. It is separate, because
Megatron imports transformers wherever it finds it, and every training of the suite would wait for that.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
PYTHON = TESTS.parent / ".cache" / "bridge" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.needs_plugin("rehearse")
@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("rehearse/test_bridge_own_code.py", 17),
        ("bridge/test_bridge_configurations.py", 8),
        ("bridge/test_bridge_program.py", 12),
        ("data/test_chat_with_bridge.py", 16),
    ],
)
@pytest.mark.skipif(not PYTHON.is_file(), reason="no .cache/bridge: tools/setup.sh found no index to download it from")
def test_with_the_wheel_of_bridge(file: str, least: int) -> None:
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", TESTS / "plugins" / file]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(TESTS.parent / "launchers")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= least, done.stdout[-2000:]
