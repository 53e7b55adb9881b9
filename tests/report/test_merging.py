"""Which runs share a row of a comparison: repeats and seeds of one recipe, never runs that differ in anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_runs import Made, of, write_log, write_run, write_study

from fp8launch.cli import run
from fp8launch.report.comparison import Comparison

MERGED = {"seed": (1, 2), "save": ("/a", "/b"), "load": ("/a", "/b"), "tensorboard_dir": ("/a", "/b")}
APART = {
    "lr": (0.005, 0.05), "weight_decay": (0.1, 0.01), "lr_warmup_iters": (10, 20), "init_method_std": (0.02, 0.01),
    "train_iters": (40, 50), "min_lr": (0.0, 1e-5), "lr_decay_style": ("cosine", "linear"), "adam_beta2": (0.95, 0.999),
    "clip_grad": (1.0, 0.5), "data_path": ("/a", "/b"), "micro_batch_size": (1, 2), "rotary_base": (10000, 500000),
    "eval_interval": (10, 100),
}  # fmt: skip


def made(**arguments: object) -> Made:
    return Made(iterations=40, arguments={"seed": 1234, **arguments})


def rows(found: Comparison) -> dict[str, list[str]]:
    return {row.label: [one.name for one in row.runs] for row in found.rows}


@pytest.mark.parametrize("logs_only", [False, True], ids=["runs", "logs"])
@pytest.mark.parametrize("name", [*MERGED, *APART])
def test_runs_are_merged_only_if_nothing_but_seed_and_paths_differ(name: str, logs_only: bool, tmp_path: Path) -> None:
    write = write_log if logs_only else write_run
    values = {**MERGED, **APART}[name]
    paths = [write(tmp_path / f"{side}.log", made(**{name: value})) for side, value in zip("ab", values, strict=True)]
    found = rows(of(*paths, gpu=None))
    assert len(found) == (1 if name in MERGED else 2), found
    if name in APART:
        shown = [str(value) for value in values]
        assert all(any(value in label for label in found) for value in shown) or name == "micro_batch_size"


def test_two_logs_whose_arguments_are_unknown_are_never_merged(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        lines = made().text().splitlines(keepends=True)
        (tmp_path / name).write_text("".join(line for line in lines if "iteration" in line and "|" in line))
    found = of(tmp_path / "a.log", tmp_path / "b.log", gpu=None)
    assert len(found.rows) == 2


def learning_rates(root: Path, seeds: tuple[int, ...] = (1, 2)) -> Path:
    points = [
        ({"train.lr": lr, "megatron.seed": seed}, 1, 1, made(lr=lr, seed=seed))
        for lr in (1e-4, 3e-4, 1e-3, 3e-3)
        for seed in seeds
    ]
    return write_study(root, points)


def test_seeds_of_a_study_share_a_row_that_names_them(tmp_path: Path) -> None:
    found = of(learning_rates(tmp_path), gpu=None)
    assert [row.label for row in found.rows] == ["lr 0.0001", "lr 0.0003", "lr 0.001", "lr 0.003"]
    assert all(len(row.runs) == 2 for row in found.rows)
    [note] = [note for note in found.notes if note.startswith("lr 0.0001: ")]
    assert note.startswith("lr 0.0001: 2 seeds (1, 2), mean loss ") and note.endswith(": run00, run01")


def test_a_study_beside_another_run_keeps_its_rows(tmp_path: Path) -> None:
    study = learning_rates(tmp_path)
    other = write_run(tmp_path / "other", made(lr=0.01))
    found = rows(of(study, other, gpu=None))
    assert sorted(map(len, found.values())) == [1, 2, 2, 2, 2]


def test_runs_of_different_studies_that_differ_in_the_seed_share_a_row(tmp_path: Path) -> None:
    """One study swept the micro batch, the other the learning rate: the point in common was two rows."""
    of_batch = [({"batch.micro": n}, 1, 1, made(lr=1e-3, micro_batch_size=n)) for n in (1, 2)]
    of_rate = [({"train.lr": lr}, 1, 1, made(lr=lr, micro_batch_size=1, seed=7)) for lr in (1e-3, 1e-2)]
    studies = [write_study(tmp_path / name, points) for name, points in (("batch", of_batch), ("rate", of_rate))]
    found = rows(of(*studies, gpu=None))
    assert {label: len(runs) for label, runs in found.items()} == {
        "MBS 1, lr 0.001": 2,
        "MBS 2, lr 0.001": 1,
        "MBS 1, lr 0.01": 1,
    }


def test_a_study_beside_logs_of_another_model_keeps_short_names(tmp_path: Path) -> None:
    """Labels listed some seventeen arguments, in lines of more than a thousand characters."""
    study = write_study(tmp_path, [({"batch.micro": n}, 1, 1, made(micro_batch_size=n)) for n in (1, 2)])
    other = {"num_layers": 80, "hidden_size": 64, "ffn_hidden_size": 128, "lr": 1e-5, "num_workers": 0, "min_lr": 1e-6}
    log = write_log(tmp_path / "other.log", made(**other, attention_backend="auto", ddp_bucket_size=1, log_interval=1))
    found = rows(of(study, log, gpu=None))
    assert len(found) == 3 and max(map(len, found)) < 40


def losses(offset: float, seed: int) -> Made:
    return Made(iterations=60, loss=lambda i: 3 + offset - 0.01 * i, arguments={"lr": 1e-4, "seed": seed})


def test_only_seeds_give_the_loss_a_spread(tmp_path: Path) -> None:
    same = [write_run(tmp_path / f"same{i}", losses(0, 1)) for i in range(3)]
    [entry] = of(*same, gpu=None).rows
    assert entry.loss is not None and "±" not in entry.loss.text
    assert (entry.loss.runs, entry.loss.seeds, entry.loss.interval) == (3, 1, None)
    assert entry.loss.as_json()["spread"] is None, "a spread of 0.0 was said of repeats of one seed"
    seeds = [write_run(tmp_path / f"seed{i}", losses(0.02 * i, i)) for i in (1, 2, 3)]
    [entry] = of(*seeds, gpu=None).rows
    assert entry.loss is not None and "± 0.0200 (" in entry.loss.text
    assert (entry.loss.runs, entry.loss.seeds) == (3, 3)
    assert entry.loss.mean == pytest.approx(entry.loss.smoothed) and entry.loss.interval is not None
    # By hand: mean ± t(2) * s / sqrt(3), with s = 0.02.
    half = 4.3027 * 0.02 / 3**0.5
    assert entry.loss.interval.high - entry.loss.mean == pytest.approx(half, rel=1e-3)
    # A repeat of a seed adds no seed.
    again = write_run(tmp_path / "again", losses(0.02, 1))
    [entry] = of(*seeds, again, gpu=None).rows
    assert entry.loss is not None and (entry.loss.runs, entry.loss.seeds) == (4, 3)


def points(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert run(["submit", "tiny_cpu", "--backend", "local", "--dry-run", "--json", *words]) == 0
    return [point["point"] for point in json.loads(capsys.readouterr().out)["points"]]


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (("--seeds", "1,2,3"), [1, 2, 3]),
        (("--repeat", "3", "--vary-seed"), [1234, 1235, 1236]),
        (("--repeat", "2", "--vary-seed", "--set", "megatron.seed=7"), [7, 8]),
    ],
)
def test_each_point_runs_once_per_seed(
    words: tuple[str, ...], seeds: list[int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = points(capsys, "--run-root", str(tmp_path), "--sweep", "train.lr=0.001,0.01", *words)
    expected = [f"lr={lr}, seed={seed}, repeat 1" for seed in seeds for lr in ("0.001", "0.01")]
    assert found == expected


def test_each_recipe_varies_its_own_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All recipes took the seeds of the first one."""
    other = tmp_path / "other.yaml"
    other.write_text("extends: tiny_cpu\nname: other\nmegatron: {seed: 7}\n")
    words = ("--run-root", str(tmp_path), "--repeat", "2", "--vary-seed")
    assert points(capsys, *words, str(other)) == [f"seed={seed}, repeat 1" for seed in (1234, 7, 1235, 8)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seeds", "1,x"), "must be different whole numbers"),
        (("--seeds", "1,1"), "must be different whole numbers"),
        (("--seeds", ""), "must be different whole numbers"),
        (("--seeds", "1,2", "--sweep", "megatron.seed=3,4"), "both choose the seeds"),
        (("--seeds", "1,2", "--repeat", "2", "--vary-seed"), "pass only one of them"),
        (("--vary-seed",), "add --repeat"),
    ],
)
def test_seeds_that_make_no_sense_are_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", "tiny_cpu", "--backend", "local", "--dry-run", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
