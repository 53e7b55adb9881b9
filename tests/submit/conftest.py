"""fp8launch on any scheduler: the same commands on this machine's processes, and on a dictionary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher_site import Site
from launcher_site import in_memory as in_memory
from launcher_site import memory as memory

from fp8launch import schedulers
from fp8launch.rundir.run_dir import RunFolder


@pytest.fixture(params=["memory", "local"])
def site(request: pytest.FixtureRequest, in_memory: Site, tmp_path: Path) -> Iterator[Site]:
    """Every scheduler that needs no daemon. Its jobs run until the test ends them."""
    if request.param == "memory":
        yield in_memory
        return
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nwhile [ ! -e end ]; do sleep 0.02; done\nexit $(cat end)\n")
    python.chmod(0o755)
    local = Site("local", in_memory.capsys, in_memory.home, ("--set", f"launch.python={python}"))
    yield local
    for file in local.home.rglob("manifest.json"):
        schedulers.of_run(RunFolder(file.parent)).cancel([RunFolder(file.parent)])
