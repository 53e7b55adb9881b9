"""Rates measured on a cluster's own GPU: what they change, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import UserError
from fp8launch.hardware.gpus import gpu
from fp8launch.job.prepared import prepare
from fp8launch.plugins.plan.calibration import (
    PROGRAM,
    Correction,
    corrections,
    keep,
    parsed,
    rates_file,
    reference_rates,
)
from fp8launch.plugins.plan.cluster_speeds import cluster_speeds, corrected
from fp8launch.plugins.plan.speeds import speeds
from fp8launch.plugins.plan.step_time import step_time_at

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "fp8launch" / "clusters"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text("network: {gbit_per_gpu: 400}\n")


def result(device: str, **changes: Any) -> bytes:
    """Return a result with the reference's rates of H200; GEMMs in FP8 are a tenth slower."""
    rates = [
        {"kernel": kernel, "shape": shape, "rate": rate * (0.9 if kernel == "gemm fp8" else 1.0)}
        for (name, kernel, shape), rate in reference_rates().items()
        if name == "h200" and kernel != "host"
    ]
    found = {"format": 1, "device": device, "date": "2026-11-26", "rates": rates, "skipped": {"host": "no launches"}}
    return json.dumps(found | changes).encode()


def test_only_what_was_measured_and_has_a_reference_changes() -> None:
    found = {one.group: one for one in corrections(parsed(result(H200), "file"), gpu("h200"))}
    assert found["gemm fp8"].factor == pytest.approx(0.9)
    assert found["gemm bf16"].factor == pytest.approx(1.0)
    assert found["host"].factor is None and "no launches" in found["host"].reason
    assert found["memory"].factor is None and "no reference" in found["memory"].reason
    known = speeds(gpu("h200"))
    assert known is not None
    own = corrected(known, list(found.values()))
    assert own.gemm("delayed") == pytest.approx(0.9 * known.gemm("delayed"))
    assert own.gemm("bf16") == known.gemm("bf16") and own.memory == known.memory
    assert own.device == known.device


def test_what_was_measured_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The time of the host was measured, kept, and not shown anywhere."""
    rows = json.loads(result(H200))["rates"]
    rows.append({"kernel": "host", "shape": "small layers", "rate": 330.0, "unit": "microseconds per layer"})
    rows.append({"kernel": "memory", "shape": "copy", "rate": 4300.0, "unit": "GB/s"})
    file = tmp_path / "rates.json"
    file.write_bytes(result(H200, rates=rows, skipped={}))
    words = ["plan", "llama8b_fp8", "--gpu", "h200", "--cluster", "site", "--top", "1", "--json"]
    assert run([*words, "--rates", str(file)]) == 0
    shown = capsys.readouterr()
    assert "  memory: 4,300 GB/s; changes nothing, no reference for h200 yet" in shown.err.splitlines()
    found = json.loads(shown.out)[0]["basis"]["calibration"]
    assert (found["device"], found["date"]) == (H200, "2026-11-26")
    kernels = {one["kernel"]: one for one in found["kernels"]}
    assert kernels["gemm fp8"]["factor"] == pytest.approx(0.9) and kernels["gemm fp8"]["reason"] is None
    assert kernels["host"] == {
        "kernel": "host",
        "measured": {"small layers": 330.0},
        "unit": "microseconds per layer",
        "factor": pytest.approx(165 / 330),
        "reason": None,
    }
    assert kernels["memory"]["factor"] is None and kernels["memory"]["reason"] == "no reference for h200 yet"
    rates_file(Cluster(name="site")).unlink()
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)[0]["basis"]["calibration"] is None


def test_a_slower_host_changes_a_step_that_waits_for_it_and_no_other() -> None:
    known = speeds(gpu("h100"))
    assert known is not None
    slow = corrected(known, [Correction("host", {"small layers": 500.0}, "microseconds per layer", 1, 0.5)])
    assert slow.device.host.python == pytest.approx(2 * known.device.host.python)
    assert slow.device.host.experts == pytest.approx(2**0.5 * known.device.host.experts)
    ratios = []
    for recipe in ("qwen3_30b_a3b_tensorwise_h100", "llama70b_tensorwise_h100"):
        found = resolve_run(prepare(recipe))
        before, after = (
            step_time_at(found.arguments, found.layout.world, found.layout.global_batch, at) for at in (known, slow)
        )
        assert before is not None and after is not None and not after.depends_on_host
        ratios.append(after.ms / before.ms)
    assert ratios[0] > 1.1 and ratios[1] == 1


def test_check_predicts_with_the_rates_of_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a slow host, FP8 experts are slower than bf16 although they are not on the hosts of the published runs."""
    experts = ["qwen3_30b_a3b_tensorwise_h100", "--set", "parallel.ep=2", "--set", "batch.micro=8", "--cluster", "site"]
    row = {"kernel": "host", "shape": "small layers", "rate": 450.0, "unit": "microseconds per layer"}
    keep(result("NVIDIA H100 80GB HBM3", rates=[row], skipped={}), "file", Cluster(name="site"))
    run(["check", *experts])
    assert "fp8-experts-slower" in capsys.readouterr().out
    rates_file(Cluster(name="site")).write_text("damaged")
    run(["check", *experts])
    assert "fp8-experts-slower" not in capsys.readouterr().out
    rates_file(Cluster(name="site")).unlink()
    run(["check", *experts])
    assert "fp8-experts-slower" not in capsys.readouterr().out


def test_a_profile_whose_name_is_no_file_name_has_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.yaml"
    file.write_text("name: site/h100\n")
    assert run(["estimate", "llama8b_fp8", "--cluster", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted"] is not None


def test_rates_of_another_order_of_magnitude_change_nothing() -> None:
    rows = [{"kernel": "gemm bf16", "shape": "8B layer", "rate": 7.0}]
    found = corrections(parsed(result(H200, rates=rows), "file"), gpu("h200"))
    assert found[0].factor is None and "not plausible" in found[0].reason


def test_plan_shows_the_prediction_before_and_after_and_keeps_the_rates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rates.json"
    file.write_bytes(result(H200))
    words = ["plan", "llama8b_fp8", "--gpu", "h200", "--cluster", "site", "--top", "1"]
    assert run(["estimate", "llama8b_fp8", "--gpu", "h200", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)["predicted"]["tokens_per_s_per_gpu"]
    assert run([*words, "--rates", str(file)]) == 0
    calibrated = capsys.readouterr().err
    assert "gemm fp8: 0.900 times the reference, 1 shape" in calibrated
    assert f"{before:,.0f} tokens/s/GPU before" in calibrated
    assert run([*words, "--json"]) == 0
    shown = capsys.readouterr()
    slower = json.loads(shown.out)[0]["predicted"]["tokens_per_s_per_gpu"]
    rates_file(Cluster(name="site")).unlink()
    assert run([*words, "--json"]) == 0
    assert slower < 0.99 * json.loads(capsys.readouterr().out)[0]["predicted"]["tokens_per_s_per_gpu"]


def test_estimate_predicts_a_planned_layout_at_the_speeds_of_the_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`estimate` knew neither the rates nor the links of a cluster."""
    (tmp_path / "fp8launch" / "clusters" / "site.yaml").write_text("network: {gbit_per_gpu: 200}\n")
    keep(result(H200), "file", Cluster(name="site"))
    layout = str(tmp_path / "layout.yaml")
    words = ["llama8b_fp8", "--gpu", "h200", "--nodes", "2", "--top", "1", "--cluster", "site", "--write", layout]
    assert run(["plan", *words]) == 0
    planned = capsys.readouterr().out
    own = ["estimate", layout, "--json"]
    found = []
    for cluster in (["--cluster", "site"], []):
        assert run([*own, *cluster]) == 0
        found.append(json.loads(capsys.readouterr().out))
    here, elsewhere = found
    assert here["predicted"]["step_time_ms"] > 1.01 * elsewhere["predicted"]["step_time_ms"]
    assert f"  {here['predicted']['tokens_per_s_per_gpu']:,.0f}  " in planned
    assert here["basis"]["calibration"]["cluster"] == "site" and elsewhere["basis"]["calibration"] is None
    assert here["basis"]["links"] == {"gbit_per_gpu": 200, "nvlink_domain": 8}
    assert elsewhere["basis"]["links"] == {"gbit_per_gpu": 400, "nvlink_domain": 8}
    assert run(["estimate", layout, "--cluster", "site"]) == 0
    estimated = capsys.readouterr().out
    for sentence in (
        f"Predicted with the rates of cluster site, measured on {H200} on 2026-11-26.",
        "Links of the cluster profile: 200 Gbit/s per GPU, NVLink domains of 8 GPUs.",
    ):
        assert sentence in planned.splitlines() and sentence in estimated.splitlines()


def test_costs_on_a_calibrated_cluster_rest_on_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """GPU-hours were computed from the published figure, although the cluster's host was known to be half as fast."""
    row = {"kernel": "host", "shape": "small layers", "rate": 280.0}
    keep(result("NVIDIA H100 80GB HBM3", rates=[row]), "file", Cluster(name="site"))
    words = ["estimate", "qwen3_30b_a3b_tensorwise_h100", "--json"]
    found = []
    for cluster in (["--cluster", "site"], []):
        assert run([*words, *cluster]) == 0
        found.append(json.loads(capsys.readouterr().out))
    here, elsewhere = (one["throughput"] for one in found)
    assert not here["known"] and here["basis"].startswith("predicted")
    assert here["tokens_per_s_per_gpu"] == found[0]["predicted"]["tokens_per_s_per_gpu"]
    assert elsewhere["known"] and elsewhere["basis"].startswith("published for")
    assert run([*words, "--cluster", "site", "--tokens-per-second-per-gpu", "5000"]) == 0
    assert json.loads(capsys.readouterr().out)["throughput"]["tokens_per_s_per_gpu"] == 5000


def test_rates_without_a_reference_are_not_said_to_be_used() -> None:
    row = {"kernel": "attention", "shape": "1024 tokens", "rate": 250.0}
    keep(result(H200, rates=[row]), "file", Cluster(name="site"))
    known = cluster_speeds(gpu("h200"), 8, Cluster(name="site"))
    assert known is not None and known.calibration is not None
    assert known.calibration.in_words.startswith("Predicted without the rates of cluster site")
    assert replace(known, calibration=None) == speeds(gpu("h200"))


def test_rates_of_another_gpu_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(result(H200), "file", Cluster(name="site"))
    words = ["plan", "llama8b_fp8", "--gpu", "h100", "--cluster", "site", "--top", "1", "--json"]
    assert run(words) == 0
    with_rates = capsys.readouterr().out
    rates_file(Cluster(name="site")).unlink()
    assert run(words) == 0
    assert capsys.readouterr().out == with_rates


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no measured rates"),
        (b"[1]", "no measured rates"),
        (result(H200, format=2), "no measured rates"),
        (result(H200, rates=[{"kernel": "gemm bf16", "shape": "8B layer", "rate": "fast"}]), "no measured rates"),
        (result("cpu"), "measured without a GPU"),
        (result("NVIDIA H100 PCIe"), "no figures for 'NVIDIA H100 PCIe': it knows A100, H100"),
    ],
    ids=["empty", "list", "format", "text", "CPU", "PCIe card"],
)
def test_other_files_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(UserError) as refused:
        keep(raw, "file", Cluster(name="site"))
    assert message in refused.value.problems[0].message


def test_a_cluster_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama8b_fp8", "--calibrate"])
    assert "need --cluster NAME" in capsys.readouterr().err


def test_the_program_measures_a_cpu_truthfully_and_its_rates_are_not_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run(["plan", "llama8b_fp8", "--cluster", "site", "--calibrate"])
    shown = capfd.readouterr().err
    assert "a CPU only emulates FP8" in shown and "there is no GPU to launch kernels on" in shown
    assert "attention" in shown and "GB/s" in shown
    assert "the rates were measured without a GPU" in shown and "Traceback" not in shown
    assert not rates_file(Cluster(name="site")).exists()


@pytest.mark.parametrize(
    ("torch", "where", "said"),
    [
        ("raise ImportError('no libtorch')", "rates.json", "rates.py needs torch: no libtorch"),
        (None, "missing/rates.json", "missing/rates.json: cannot be written: No such file or directory"),
    ],
)
def test_a_measurement_that_cannot_run_says_why(tmp_path: Path, torch: str | None, where: str, said: str) -> None:
    if torch is None:
        pytest.importorskip("torch")
    else:
        (tmp_path / "torch.py").write_text(torch)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), where],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert said in done.stderr and "Traceback" not in done.stderr
