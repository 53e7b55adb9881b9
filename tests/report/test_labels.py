"""Labels of variants: short, and with what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import Made, of, write_log, write_run, write_study


def labels(*folders: Path) -> list[str]:
    return [row.label for row in of(*folders, gpu=None).rows]


@pytest.mark.parametrize(
    ("axis", "values", "expected"),
    [
        ("train.warmup", (1, 5), ["warm-up 1", "warm-up 5"]),
        ("batch.micro", (1, 2), ["MBS 1", "MBS 2"]),
        ("parallel.tp", (1, 2), ["bf16", "bf16, TP 2"]),
    ],
)
def test_only_a_parallel_size_of_one_goes_without_saying(
    axis: str, values: tuple[int, ...], expected: list[str], tmp_path: Path
) -> None:
    """A warm-up of one iteration was called `bf16`."""
    study = write_study(tmp_path, [({axis: value}, 1, 1, Made(iterations=40)) for value in values])
    assert labels(study) == expected


def test_what_is_off_is_left_out(tmp_path: Path) -> None:
    arguments = [{"cuda_graph_impl": "none"}, {"cuda_graph_impl": "te"}]
    logs = [write_log(tmp_path / f"{i}.log", Made(arguments=one)) for i, one in enumerate(arguments)]
    assert labels(*logs) == ["bf16", "bf16, cuda graph impl te"]


def test_long_labels_keep_model_and_sequence(tmp_path: Path) -> None:
    """Logs of two models were called by learning rate, iterations and log interval."""
    logs = []
    for layers, sequence, iterations in ((4, 8192, 10), (4, 8192, 12), (2, 64, 14), (2, 64, 22)):
        more = {"num_layers": layers, "train_iters": iterations, "log_interval": iterations - 9, "lr": 1e-3 / layers}
        made = Made(iterations=iterations, sequence=sequence, arguments=more)
        logs.append(write_log(tmp_path / f"{layers}-{iterations}.log", made))
    found = labels(*logs)
    assert all(label.startswith(("seq 8192, layers 4, ", "seq 64, layers 2, ")) for label in found), found
    assert max(map(len, found)) < 40


def test_a_part_that_others_lack_stays(tmp_path: Path) -> None:
    """`tensorwise, layers 32` was said of the only run with FSDP."""
    logs = []
    for name, more in {
        "cp": {"context_parallel_size": 2}, "pp": {"pipeline_model_parallel_size": 2}, "plain": {},
        "fsdp": {"use_megatron_fsdp": True}, "other": {"num_layers": 8, "num_experts": 8},
    }.items():  # fmt: skip
        sizes = {"context_parallel_size": 1, "pipeline_model_parallel_size": 1, "use_megatron_fsdp": False}
        precision = "tensorwise" if name == "fsdp" else "blockwise"
        arguments = {**sizes, "num_experts": None, "fp8_param_gather": True, **more}
        logs.append(write_log(tmp_path / f"{name}.log", Made(precision=precision, arguments=arguments)))
    assert "FSDP" in labels(*logs)[3]


def test_a_learning_rate_is_named_where_rows_of_the_same_model_differ_in_it(tmp_path: Path) -> None:
    runs = []
    for layers, lr, experts in ((4, 0.00025, 8), (4, 0.000125, 8), (2, 0.0003, 16), (2, 0.0003, 32)):
        arguments = {"lr": lr, "num_layers": layers, "num_experts": experts}
        runs.append(write_run(tmp_path / f"{lr}-{layers}-{experts}", Made(sequence=2048 * layers, arguments=arguments)))
    assert labels(*runs) == [
        "seq 8192, layers 4, experts 8, lr 0.00025",
        "seq 8192, layers 4, experts 8, lr 0.000125",
        "seq 4096, layers 2, experts 16",
        "seq 4096, layers 2, experts 32",
    ]


def test_names_have_the_size_only_if_sizes_differ(tmp_path: Path) -> None:
    same = [write_run(tmp_path / f"{lr}", Made(arguments={"lr": lr})) for lr in (1e-4, 3e-4)]
    assert [row.name for row in of(*same, gpu=None).rows] == ["lr 0.0001", "lr 0.0003"]
    log = write_log(tmp_path / "a.log", Made(arguments={"lr": 1e-3}))
    assert [row.name for row in of(*same, log, gpu=None).rows] == ["lr 0.0001", "lr 0.0003", "lr 0.001"]
    other = write_run(tmp_path / "other", Made(world=16, batch=128, arguments={"lr": 1e-4}), nodes=2)
    assert [row.name for row in of(same[0], other, gpu=None).rows] == ["bf16, 1 node", "bf16, 2 nodes"]
