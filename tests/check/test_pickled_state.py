"""Checkpoints with FP8 state that Transformer Engine would have to unpickle: real ones, as torch writes them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support import only
from support_site import data_problems, recipe

from fp8launch.check.pickled_state import holds_pickled_state, refuses_pickles
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.checkpoint_owner import UNPICKLE
from fp8launch.job.prepared import prepare

torch = pytest.importorskip("torch")

LOADS = "checkpoint: {{load: {folder}{more}}}\nmegatron: {{finetune: true}}\n"


def write_checkpoint(folder: Path, stateful: bool, iteration: int = 4) -> None:
    """Write a torch_dist checkpoint with the extra state of two modules, as TE's get_extra_state makes it."""
    from torch.distributed import checkpoint

    def extra_state(state: object) -> object:
        if state is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    state = {
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.zeros(1024, 3),
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.zeros(1024, 2),
    }
    tensors = {
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(8, 8),
        # The first layer is in bf16, so only the second one has state.
        "decoder.layers.0.mlp.linear_fc1._extra_state": [extra_state(None)],
        "decoder.layers.1.mlp.linear_fc1._extra_state": [extra_state(state if stateful else None)],
    }
    checkpoint.save(tensors, checkpoint_id=str(checkpoints.place(folder, iteration)), no_dist=True)
    checkpoints.point_at(folder, iteration)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delayed")
    write_checkpoint(folder, stateful=True)
    return folder


@pytest.fixture(scope="module")
def tensorwise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensorwise")
    write_checkpoint(folder, stateful=False)
    return folder


def found(folder: Path, text: str, release: str = "2.20.2", precision: str = "delayed") -> list[Problem]:
    software = f"software: {{megatron: '0.19', transformer_engine: '{release}'}}\n"
    parts = f"models/llama3_8b, parts/pretrain, hardware/h100, precision/{precision}"
    batch = "name: loads\nbatch: {micro: 1, global: 8, sequence: 8192}\ntrain: {iterations: 10, lr: 1.0e-4}\n"
    problems = data_problems(prepare(recipe(folder, text + batch + software, parts)), Cluster())
    return [problem for problem in problems if problem.code == "pickled-state"]


def test_state_is_found_without_unpickling_it(delayed: Path, tensorwise: Path, tmp_path: Path) -> None:
    assert holds_pickled_state(delayed) is True
    assert holds_pickled_state(checkpoints.place(delayed, 4)) is True
    assert holds_pickled_state(tensorwise) is False
    assert holds_pickled_state(tmp_path) is None


def test_a_damaged_checkpoint_is_no_answer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, stateful=True)
    (checkpoints.place(tmp_path, 4) / ".metadata").write_bytes(b"\x80\x04garbage")
    assert holds_pickled_state(tmp_path) is None


@pytest.mark.parametrize(
    ("release", "refuses"),
    [
        ((2, 14), False), ((2, 15, 9), False), ((2, 16), None), ((2, 16, 0), False), ((2, 16, 1), True),
        ((2, 17), None), ((2, 17, 0), False), ((2, 17, 1), True), ((2, 18), True), ((2, 20, 2), True),
        ((3, 0), True), (None, None),
    ],
)  # fmt: skip
def test_the_release_decides_by_patch(release: tuple[int, ...] | None, refuses: bool | None) -> None:
    assert refuses_pickles(release) is refuses


def test_state_from_elsewhere_needs_the_users_word(delayed: Path, tmp_path: Path) -> None:
    problem = only(found(tmp_path, LOADS.format(folder=delayed, more="")))
    assert (problem.severity, problem.where) == ("error", f"{tmp_path}/recipe.yaml:2")
    assert "Transformer Engine 2.20.2 refuses to load" in problem.message
    assert "runs any code" in str(problem.fix) and "checkpoint.allow_pickle: true" in str(problem.fix)
    assert found(tmp_path, LOADS.format(folder=delayed, more=", allow_pickle: true")) == []
    assert found(tmp_path, LOADS.format(folder=delayed, more="") + f"env: {{{UNPICKLE}: 1}}\n") == []


def test_another_precision_has_to_load_it_as_well(delayed: Path, tmp_path: Path) -> None:
    text = LOADS.format(folder=delayed, more="")
    assert only(found(tmp_path, text, precision="bf16")).severity == "error"
    loads = f"megatron: {{pretrained_checkpoint: {delayed}}}\n"
    assert "pretrained_checkpoint" in only(found(tmp_path, loads, precision="bf16")).message


def test_an_unknown_patch_release_is_a_warning(delayed: Path, tmp_path: Path) -> None:
    text = LOADS.format(folder=delayed, more="")
    assert only(found(tmp_path, text, "2.16")).severity == "warning"
    assert found(tmp_path, text, "2.16.0") == []
    assert only(found(tmp_path, text, "2.16.1")).severity == "error"


def test_a_checkpoint_without_state_is_no_problem(tensorwise: Path, tmp_path: Path) -> None:
    assert found(tmp_path, LOADS.format(folder=tensorwise, more="")) == []


def test_a_run_that_only_resumes_needs_nothing(tmp_path: Path) -> None:
    saves = "checkpoint: {dir: checkpoints, interval: 10}\n"
    assert found(tmp_path, saves) == []
    problem = only(found(tmp_path, saves + f"env: {{{UNPICKLE}: 0}}\n"))
    assert "cannot resume" in problem.message and problem.fix == f"remove env.{UNPICKLE}"


def test_a_checkpoint_folder_that_others_can_write_to_keeps_a_run_from_resuming(tmp_path: Path) -> None:
    saves = f"checkpoint: {{dir: {tmp_path}/team/run, interval: 10}}\n"
    (tmp_path / "team").mkdir()
    assert found(tmp_path, saves) == []
    (tmp_path / "team").chmod(0o777)
    problem = only(found(tmp_path, saves))
    assert problem.severity == "warning" and "can be written by everybody" in problem.message
    assert found(tmp_path, saves.replace("interval", "allow_pickle: true, interval")) == []
    assert found(tmp_path, saves, precision="tensorwise") == []


def test_a_folder_that_is_not_on_this_machine_is_a_warning_for_delayed_scaling(tmp_path: Path) -> None:
    image = "container: {image: /image.sqsh, contains: [/inside]}\n"
    loads = LOADS.format(folder="/inside/checkpoints", more="")
    assert [one.severity for one in found(tmp_path, image + loads)] == ["warning"]
    assert found(tmp_path, image + loads, precision="tensorwise") == []
