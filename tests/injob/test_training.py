"""The tiny model really trains, and every way to split the work gives the losses of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from train_jobs import MOCK, OLDER, OLDER_RELEASES, OLDEST_QUICKLY, Run, forked, from_weights, srun, torchrun, worker

from fp8launch.injob.rank import ranks

pytestmark = pytest.mark.train

TENSOR = ["--tensor-model-parallel-size", "2"]
PIPELINE = ["--pipeline-model-parallel-size", "2"]
EXPERTS = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall"]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.fixture(scope="module")
def plain(megatron: None) -> Callable[[str], Run]:
    """Ten iterations of one process with a release of Megatron, trained once for the tests that look at them."""
    return functools.cache(lambda version: worker(MOCK, **older(version)))


def same_course(run: Run, alone: Run, tolerance: float = 1e-6) -> None:
    """Every iteration's loss agrees; printed losses have seven digits."""
    run.succeeded()
    assert run.losses.keys() == alone.losses.keys()
    for iteration, loss in alone.losses.items():
        assert run.losses[iteration] == pytest.approx(loss, rel=tolerance), f"iteration {iteration}"


def falls(run: Run, iterations: int = 10) -> None:
    losses = run.succeeded().losses
    assert list(losses) == list(range(1, iterations + 1))
    assert losses[iterations] < losses[1] - 0.3


def test_one_process_learns(alone: Run) -> None:
    falls(alone)
    assert "throughput per GPU (TFLOP/s/GPU)" in alone.output
    assert "[after training is done]" in alone.output


@pytest.mark.parametrize("flags", [["--fp16", "--loss-scale", "1024"], []], ids=["fp16", "fp32"])
def test_other_precisions_learn_as_bf16_does(flags: list[str], alone: Run) -> None:
    """Their losses differ by rounding: bf16 keeps eight bits."""
    arguments = [*(word for word in MOCK if word != "--bf16"), *flags]
    same_course(forked(1, arguments), alone, tolerance=0.02)


def test_tensor_parallel_under_torchrun(weights: Path, alone: Run) -> None:
    """A sum over ranks is rounded to bf16 elsewhere than within one rank, hence the wider tolerance."""
    same_course(torchrun(2, [*MOCK, *TENSOR, *from_weights(weights)]), alone, tolerance=5e-5)


def test_pipeline_parallel_under_srun(weights: Path, alone: Run) -> None:
    same_course(srun(2, [*MOCK, *PIPELINE, *from_weights(weights)]), alone)


def test_data_parallel_with_sharded_optimizer_under_srun(weights: Path, alone: Run) -> None:
    same_course(srun(2, [*MOCK, *SHARDED, *from_weights(weights)]), alone)


LATENT = [word for word in MOCK if word != "--group-query-attention"]
LATENT = [*LATENT[: LATENT.index("--num-query-groups")], *LATENT[LATENT.index("--num-query-groups") + 2 :]]
LATENT += ["--multi-latent-attention", "--kv-lora-rank", "16", "--q-lora-rank", "32", "--qk-head-dim", "16"]
LATENT += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", "--rope-type", "rope", "--qk-layernorm"]


@pytest.mark.parametrize("version", ["installed", *OLDEST_QUICKLY])
def test_latent_attention_learns_in_stages_as_in_one(megatron: None, tmp_path: Path, version: str) -> None:
    """Megatron's own attention takes no widths of keys and values, so such a model did not start on a CPU."""
    keep = ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"]
    forked(1, [*LATENT, *keep], **older(version)).succeeded()
    alone, divided = (
        forked(ranks, [*LATENT, *layout, *from_weights(tmp_path)], **older(version))
        for ranks, layout in ((1, []), (2, PIPELINE))
    )
    falls(alone)
    same_course(divided, alone)


@pytest.mark.slow
def test_tensor_parallel_under_srun(weights: Path, alone: Run) -> None:
    same_course(srun(2, [*MOCK, *TENSOR, *from_weights(weights)]), alone, tolerance=5e-5)


@pytest.mark.slow
def test_pipeline_parallel_under_torchrun(weights: Path, alone: Run) -> None:
    same_course(torchrun(2, [*MOCK, *PIPELINE, *from_weights(weights)]), alone)


@pytest.mark.slow
def test_data_parallel_under_torchrun(weights: Path, alone: Run) -> None:
    same_course(torchrun(2, [*MOCK, *from_weights(weights)]), alone)


def test_two_nodes_under_torchrun(weights: Path, alone: Run) -> None:
    """Two launchers, as two nodes would have, meet by address and node number alone."""
    from train_jobs import finish, start

    nodes = {"SLURM_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    argv = ["--nproc-per-node", "1", "--", *MOCK, *from_weights(weights)]
    run = finish([start("node.py", argv, **nodes, SLURM_NODEID=str(number)) for number in (1, 0)])
    same_course(run, alone)


@pytest.mark.parametrize("version", ["installed", *OLDEST_QUICKLY])
def test_a_config_field_without_a_flag_reaches_the_model(plain: Callable[[str], Run], version: str) -> None:
    sharp = forked(1, MOCK, **older(version), FP8LAUNCH_CONFIG='{"softmax_scale": 2.0}').succeeded()
    assert plain(version).succeeded().losses[10] != sharp.losses[10]


@pytest.mark.slow
def test_virtual_pipeline_stages() -> None:
    layers = ["--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
    falls(forked(2, [*MOCK, *PIPELINE, *layers]))


@pytest.mark.slow
def test_experts_on_two_processes(megatron: None) -> None:
    run = forked(2, [*MOCK, *EXPERTS])
    falls(run)
    assert "load_balancing_loss" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(["--qk-layernorm"], id="qk-layernorm"),
        pytest.param(
            ["--num-experts", "4", "--moe-layer-freq", "[0,1]", "--moe-router-topk", "2"], id="every-second-moe"
        ),
        pytest.param(["--mtp-num-layers", "1"], id="multi-token-prediction"),
    ],
)
@pytest.mark.parametrize("version", ["installed", *OLDER_RELEASES])
def test_model_variants(megatron: None, variant: list[str], version: str) -> None:
    falls(forked(1, [*MOCK, *variant], **older(version)))


def older(version: str) -> dict[str, str]:
    """The environment that puts an older Megatron in front of the installed one."""
    if version == "installed":
        return {}
    if not (OLDER / version / "megatron").is_dir():
        pytest.skip(f"megatron-core {version} is not unpacked in {OLDER}")
    return {"PYTHONPATH": str(OLDER / version)}


@pytest.mark.parametrize("version", OLDEST_QUICKLY)
def test_older_megatron(plain: Callable[[str], Run], version: str) -> None:
    falls(plain(version))


@pytest.mark.slow
@pytest.mark.parametrize("version", OLDER_RELEASES)
@pytest.mark.parametrize(
    "split", [TENSOR, PIPELINE, EXPERTS, SHARDED], ids=["tensor", "pipeline", "experts", "sharded"]
)
def test_older_megatron_in_parallel(megatron: None, version: str, split: list[str]) -> None:
    start = torchrun if split == TENSOR else forked
    falls(start(2, [*MOCK, *split], **older(version)))


@pytest.mark.slow
def test_data_loader_processes(weights: Path, alone: Run) -> None:
    same_course(worker([*MOCK, "--num-workers", "2", *from_weights(weights)]), alone)


def test_a_rank_that_stays_after_its_training_ends_as_a_success(megatron: None, tmp_path: Path) -> None:
    """The entry trains to its end; then an exit handler waits for ever."""
    script = tmp_path / "stays.py"
    script.write_text(
        "import atexit, time\n"
        "from fp8launch.injob.rank import pretrain\n"
        "atexit.register(time.sleep, 3600)\n"
        "if __name__ == '__main__':\n"
        "    pretrain.main(time.time())\n"
    )
    run = worker(MOCK, ("--script", str(script)), FP8LAUNCH_LEAVE_WITHIN="2")
    assert run.codes == [0]
    assert "has not ended 2 s after its training" in run.output
    assert "everything is written" in run.output


def test_garbage_is_collected_in_training_but_not_among_imports(megatron: None, tmp_path: Path) -> None:
    script = tmp_path / "looks.py"
    script.write_text(
        "import gc, sys\n"
        "slow = 'torch' in sys.modules\n"
        "import megatron.core\n"
        "print('collects:', gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "print('prepared:', sys.modules['torch'].cuda.is_available(), megatron.core is sys.modules['megatron.core'])\n"
        "print('imported before it was asked for:', slow)\n"
    )
    run = worker(MOCK, ("--script", str(script))).succeeded()
    assert "collects: True True" in run.output
    assert "prepared: True True" in run.output and "asked for: False" in run.output
