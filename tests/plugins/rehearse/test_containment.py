"""What a rehearsed script can reach and use, and what is left of it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import wait_for

from fp8launch.check.checker import CheckResult, check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.containment import minimal_environment
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal
from fp8launch.plugins.rehearse.workers import Limits

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
    pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's means"),
    pytest.mark.slow,
]

RECIPE = """
name: scripted
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, hardware/h200]
precision: {recipe: bf16}
model: {num_layers: 2}
software: {megatron: "0.19", transformer_engine: "2.20"}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 1}
launch: {script: code/train.py}
"""
Rehearse = Callable[..., CheckResult]


@pytest.fixture
def rehearse(write: Callable[[str, str], str]) -> Rehearse:
    """Rehearses one script."""

    def call(script: str, limits: Limits | None = None) -> CheckResult:
        write("code/train.py", script)
        run = prepare(write("r.yaml", RECIPE))
        return with_rehearsal([run], check_all([run], layers=("schema",)), Cluster(), limits=limits or Limits())[0]

    return call


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_has_no_secrets_no_network_and_no_folder_of_the_user(
    rehearse: Rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_1234567890")
    monkeypatch.setenv("MY_SETTING", "value")
    monkeypatch.chdir(tmp_path)
    script = f"""
import json, os, socket
facts = {{"environment": dict(os.environ), "cwd": os.getcwd(), "home": os.path.expanduser("~"), "user": os.getuid()}}
facts["interfaces"] = [name for _, name in socket.if_nameindex()]
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
open("left-behind", "w").close()
open({str(tmp_path / "facts")!r}, "w").write(json.dumps(facts))
"""
    result = rehearse(script)
    assert (result.layers[LAYER], result.problems) == ("ran", ())
    facts = json.loads((tmp_path / "facts").read_text())
    assert not {"HF_TOKEN", "MY_SETTING"} & set(facts["environment"])
    assert (facts["home"], facts["user"]) == (str(Path.home()), os.geteuid())
    assert not (tmp_path / "left-behind").exists()
    assert not Path(facts["cwd"]).exists()
    if subprocess.run(["unshare", "--map-root-user", "--net", "true"], check=False).returncode == 0:
        assert facts["interfaces"] == ["lo"]


def test_a_shell_s_tokens_are_not_passed_on() -> None:
    shell = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "x", "PYTHONPATH": "/tmp", "LD_PRELOAD": "/x.so"}
    assert minimal_environment(shell) == {"PATH": "/bin", "LC_ALL": "C"}


@pytest.mark.parametrize("place", ["code", "."])
def test_sitecustomize_of_a_folder_is_not_imported(
    rehearse: Rehearse, write: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Python imports it at its start, before any limit holds."""
    for name in ("sitecustomize", "usercustomize"):
        write(f"{place}/{name}.py", f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path / place)
    assert rehearse("import os\n").layers[LAYER] == "ran"
    assert not (tmp_path / "canary").exists()


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        open({place!r}, "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists({place!r}) or not open({place!r}).read():
    time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "while True: pass"])
def test_a_daemon_does_not_outlive_the_rehearsal(rehearse: Rehearse, tmp_path: Path, end: str) -> None:
    result = rehearse(DAEMON.format(place=str(tmp_path / "daemon"), end=end), Limits(processor_seconds=5))
    assert ("5 s of processor time" in result.layers[LAYER]) == end.startswith("while")
    assert not alive(int((tmp_path / "daemon").read_text()))


def test_a_daemon_does_not_outlive_a_killed_command(write: Callable[[str, str], str], tmp_path: Path) -> None:
    place = tmp_path / "daemon"
    write("code/train.py", DAEMON.format(place=str(place), end="time.sleep(600)"))
    command = [sys.executable, "-m", "fp8launch", "check", write("r.yaml", RECIPE), "--rehearse"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        wait_for(lambda: place.exists() and place.read_text(), 120)
        process.kill()
    daemon = int(place.read_text())
    wait_for(lambda: not alive(daemon))


@pytest.mark.parametrize(
    "hungry",
    [
        "data = bytearray(6 << 30)\nfor at in range(0, len(data), 4096): data[at] = 1\n",
        "data = []\nfor _ in range(600): data.append(b'x' * (10 << 20))\n",
    ],
)
def test_memory_is_limited_while_a_checkout_s_own_megatron_is_imported(
    rehearse: Rehearse, write: Callable[[str, str], str], hungry: str
) -> None:
    write("code/megatron/__init__.py", hungry + "raise SystemExit('it got the memory')\n")
    result = rehearse("import os\n", Limits(memory_gib=1))
    assert "no verdict" in result.layers[LAYER]
    assert "memory" in result.layers[LAYER]
    assert "got the memory" not in result.layers[LAYER]
    assert result.exit_code == MACHINE_LACKS


def test_one_allocation_of_too_much_memory_is_no_refusal(rehearse: Rehearse) -> None:
    result = rehearse("import torch\ntorch.ones(4 << 30)\n", Limits(memory_gib=1))
    assert "no verdict" in result.layers[LAYER]
    assert result.ok


def test_memory_of_children_counts(rehearse: Rehearse) -> None:
    script = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        data = bytearray(500 << 20)
        for at in range(0, len(data), 4096):
            data[at] = 1
        time.sleep(600)
time.sleep(600)
"""
    result = rehearse(script, Limits(memory_gib=1.2))
    assert result.layers[LAYER].endswith("it needs more than 1.2 GiB of memory, the limit of a rehearsal")


def test_a_missing_network_is_no_refusal(rehearse: Rehearse) -> None:
    result = rehearse("import urllib.request\nurllib.request.urlopen('http://203.0.113.1/')\n")
    assert "no verdict" in result.layers[LAYER]
    assert result.ok
