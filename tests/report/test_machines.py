"""On which nodes, GPUs and drivers a run ran: said by the job, read from its log, listed where runs differ."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from made_runs import Made, write_log, write_study
from support import parse_paths

import fp8launch.injob
from fp8launch.report.comparison import compare
from fp8launch.report.machines import Machines, compressed
from fp8launch.report.named_runs import read_runs
from fp8launch.report.read_run import run_from_logs

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC: x\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (root@host)\n"


@pytest.fixture(scope="module")
def machine():
    """The in-job part stands outside the package, as it does in a run folder."""
    file = Path(fp8launch.injob.__file__).with_name("rank") / "node_info.py"
    spec = importlib.util.spec_from_file_location("machine", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "535.129.03"), (OPEN, "570.124.06"), ("", None)])
def test_the_drivers_own_files(machine, tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    for i in range(8):
        (tmp_path / f"gpus/0000:{i}1:00.0").mkdir(parents=True)
        (tmp_path / f"gpus/0000:{i}1:00.0/information").write_text(
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 3{i}\nGPU UUID: \t GPU-0\n"
        )
    found = machine.describe({"SLURMD_NODENAME": "n7", "RANK": "8"}, tmp_path)
    assert found == {"node": "n7", "rank": 8, "gpus": {"NVIDIA H100 80GB HBM3": 8}, "driver": version}


def test_a_machine_without_gpus_has_a_name(machine, tmp_path: Path) -> None:
    found = machine.describe({}, tmp_path / "none")
    assert found["node"] and found["gpus"] == {} and found["driver"] is None


@pytest.mark.parametrize(
    ("models", "gpu"),
    [
        (("NVIDIA H100 80GB HBM3",), "h100"),
        (("NVIDIA H100 PCIe",), None),
        (("NVIDIA H200",), "h200"),
        (("NVIDIA H200 NVL",), None),
        (("NVIDIA A100-SXM4-80GB",), "a100"),
        (("NVIDIA B200",), "b200"),
        (("NVIDIA GB200",), "gb200"),
        (("NVIDIA B300 SXM6 AC",), "b300"),
        (("NVIDIA H100 80GB HBM3", "NVIDIA H200"), None),
        (("Tesla T4",), None),
    ],
)
def test_the_gpu_by_the_drivers_name(models: tuple[str, ...], gpu: str | None) -> None:
    assert Machines(gpus=models).gpu == gpu


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((), ""),
        (("login",), "login"),
        (("n1", "n2", "n3", "n7"), "n[1-3,7]"),
        (("n10", "n9", "n2"), "n[2,9-10]"),
        (("gpu-008", "gpu-009", "gpu-010"), "gpu-[008-010]"),
        (("a1.site", "a2.site", "b"), "a[1-2].site,b"),
        (("gpu", "gpu1", "gpu2"), "gpu,gpu[1-2]"),
    ],
)
def test_names_as_slurm_writes_them(nodes: tuple[str, ...], text: str) -> None:
    assert compressed(nodes) == text


def test_a_node_whose_number_no_computer_has() -> None:
    nodes = ["node" + "9" * 5000, "node1" + "0" * 5000, "node3"]
    assert "node3" in compressed(nodes)


def said(*nodes: str, gpu: str = "NVIDIA H200", driver: str = "570.124.06") -> str:
    lines = [{"node": n, "rank": 8 * i, "gpus": {gpu: 8}, "driver": driver} for i, n in enumerate(nodes)]
    return "".join(f"{8 * i}: fp8launch-node: {json.dumps(line)}\n" for i, line in enumerate(lines))


def log(path: Path, made: Made, *nodes: str, **machine: str) -> Path:
    write_log(path, made)
    path.write_text(said(*nodes, **machine) + path.read_text())
    return path


def test_the_report_names_them_and_mfu_follows(tmp_path: Path) -> None:
    report = parse_paths([log(tmp_path / "a.log", Made(), "n2", "n1")])
    assert report.machines.nodes == ("n1", "n2")
    assert report.setup.gpu == "h200"
    assert report.speed.mfu_denominator == {"gpu": "h200", "dtype": "bf16", "peak_tflops": 989.0}
    assert report.as_json()["machines"] == {"nodes": ["n1", "n2"], "gpus": ["NVIDIA H200"], "drivers": ["570.124.06"]}


def test_an_unexpected_gpu_is_reported(tmp_path: Path) -> None:
    report = parse_paths([log(tmp_path / "a.log", Made(), "n1")], gpu="h100")
    assert "the GPU is set to h100, but the nodes have NVIDIA H200" in report.notes


def test_other_nodes_and_drivers_are_listed_and_marked(tmp_path: Path) -> None:
    runs = [
        run_from_logs("bf16", [log(tmp_path / "bf16.log", Made(), "n1")]),
        run_from_logs("fp8", [log(tmp_path / "fp8.log", Made(precision="tensorwise"), "n2", driver="580.1")]),
    ]
    found = compare(runs)
    assert found.valid
    assert {d.name: tuple(d.values.values()) for d in found.differences if d.name in ("node set", "driver")} == {
        "node set": ("n1", "n2"),
        "driver": ("570.124.06", "580.1"),
    }
    noted = found.rows[1].speedup.comparability.noted
    assert "node set n2 against n1" in noted and "driver 580.1 against 570.124.06" in noted


def test_another_gpu_model_is_refused(tmp_path: Path) -> None:
    runs = [
        run_from_logs("a", [log(tmp_path / "a.log", Made(), "n1", gpu="NVIDIA H100 PCIe")]),
        run_from_logs("b", [log(tmp_path / "b.log", Made(precision="tensorwise"), "n1", gpu="NVIDIA H100 NVL")]),
    ]
    found = compare(runs)
    assert not found.valid
    assert "GPU model NVIDIA H100 NVL against NVIDIA H100 PCIe" in found.problems[0]


def test_repeats_that_covered_the_same_nodes_carry_no_mark(tmp_path: Path) -> None:
    """Each variant ran once on n1 and once on n2: the node is in the spread, not between the variants."""
    points = [({"precision.recipe": p}, 1, r, Made(precision=p)) for p in ("bf16", "tensorwise") for r in (1, 2)]
    folder = write_study(tmp_path, points)
    for i, node in enumerate(("n1", "n2", "n2", "n1")):
        log(folder / f"run{i:02d}/logs/1-0.log", points[i][3], node, gpu="NVIDIA H100 80GB HBM3")
    found = compare(read_runs([str(folder)]))
    assert found.rows[1].speedup.comparability.noted == ()
    assert any("its runs differ in node set" in note for note in found.rows[0].notes)


def test_more_nodes_are_no_other_nodes_to_scaling(tmp_path: Path) -> None:
    runs = [
        run_from_logs("one", [log(tmp_path / "one.log", Made(), "n1")]),
        run_from_logs("two", [log(tmp_path / "two.log", Made(world=16, batch=128), "n1", "n2")]),
    ]
    found = compare(runs)
    assert found.rows[1].efficiency.ratio.comparability.noted == ()


def test_how_many_processes_the_kernel_has_killed_for_memory(machine, tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 12\noom_kill 7\noom_killer_x 9\n")
    assert machine.memory_kills(counters) == 7
    assert machine.memory_kills(tmp_path / "none") is None
