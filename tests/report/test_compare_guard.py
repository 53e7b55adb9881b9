"""Which runs are repeats of each other, which may be compared, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import FP8, Made, of, write_run

from fp8launch.report.export import to_markdown


class TestGuard:
    @pytest.mark.parametrize(
        ("other", "reason"),
        [
            (Made(precision=FP8, sequence=8192), "sequence length 8192 against 4096"),
            (Made(precision=FP8, batch=128), "global batch 128 against 64"),
            (Made(precision=FP8, world=16, batch=128), "number of GPUs 16 against 8"),
            (Made(precision=FP8, arguments={"num_layers": 8}), "model (num_layers) 8 against 4"),
            (Made(precision=FP8, arguments={"num_experts": 8}), "model (num_experts) 8 against off"),
            (Made(precision=FP8, arguments={"padded_vocab_size": 32000}), "model (padded_vocab_size)"),
        ],
    )
    def test_unlike_runs_have_no_ratio(self, logs, other: Made, reason: str) -> None:
        base = Made(arguments={"num_experts": None}) if "num_experts" in other.arguments else Made()
        found = of(*logs(base=base, other=other))
        speedup = found.entries[1].speedup
        assert speedup.value is None
        assert not speedup.verdict.comparable
        assert any(reason in text for text in speedup.verdict.unlike), speedup.verdict.unlike
        assert not found.valid
        assert found.entries[1].tokens is not None, "the run's own numbers stay"

    def test_force_gives_the_ratio_with_a_mark(self, logs) -> None:
        found = of(*logs(base=Made(), other=Made(precision=FP8, batch=128)), force=True)
        assert found.entries[1].speedup.value == pytest.approx(2)
        assert not found.valid
        assert "2.00×!" in to_markdown(found)

    @pytest.mark.parametrize(
        ("name", "value"), [("tensor_model_parallel_size", 2), ("micro_batch_size", 2), ("overlap_grad_reduce", True)]
    )
    def test_what_may_change_the_speed_is_noted(self, logs, name: str, value: object) -> None:
        base = Made(arguments={name: 1 if value == 2 else False})
        found = of(*logs(base=base, other=Made(precision=FP8, arguments={name: value})))
        speedup = found.entries[1].speedup
        assert found.valid
        assert speedup.value == 1
        assert any(name in noted for noted in speedup.verdict.noted)
        assert name in {d.name for d in found.differences}
        assert "1.00×\\*" in to_markdown(found)

    @pytest.mark.parametrize(("name", "value"), [("seed", 7), ("lr", 1e-5), ("save", "/elsewhere"), ("train_iters", 9)])
    def test_what_changes_no_speed_is_no_difference(self, logs, name: str, value: object) -> None:
        found = of(*logs(base=Made(arguments={name: 1}), other=Made(precision=FP8, arguments={name: value})))
        assert found.entries[1].speedup.verdict.noted == ()
        assert [d.name for d in found.differences] == ["precision"]

    def test_runs_alike_in_all_but_the_seed_are_repeats(self, logs) -> None:
        found = of(*logs(a=Made(), b=Made(arguments={"seed": 5}), c=Made(precision=FP8)))
        assert [(e.row.label, len(e.row.runs)) for e in found.entries] == [("bf16", 2), ("tensorwise", 1)]

    def test_another_gpu(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made())
        b = write_run(tmp_path / "b", Made(precision=FP8), gpu="b200")
        found = of(a, b, gpu=None)
        assert found.entries[1].speedup.verdict.unlike == ("GPU model b200 against h100",)

    def test_image_environment_and_software_are_noted(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made(), image={"image": "x.sqsh", "digest": "sha256:1"}, environment={"N": "1"})
        b = write_run(
            tmp_path / "b", Made(precision=FP8), image={"image": "x.sqsh", "digest": "sha256:2"},
            environment={"N": "2"}, git={"commit": "c" * 40, "dirty": False},
        )  # fmt: skip
        noted = of(a, b, gpu=None).entries[1].speedup.verdict.noted
        assert [text.split(" ")[0] for text in noted] == ["env", "image"]

    def test_what_only_one_run_sets_makes_it_no_repeat_of_the_other(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made(), environment={"N": "1"})
        b = write_run(tmp_path / "b", Made(), environment={"N": "1", "NCCL_ALGO": "Tree"})
        c = write_run(tmp_path / "c", Made(), environment={"N": "1", "FP8LAUNCH_CONFIG": '{"fused_rope": true}'})
        d = write_run(tmp_path / "d", Made(), environment={"N": "1"}, recipe={"launch": {"script": "/x/peer.py"}})
        again = write_run(tmp_path / "again", Made(), environment={"N": "1"})
        found = of(a, b, c, d, again, gpu=None)
        labels = [entry.row.label for entry in found.entries]
        assert labels == ["bf16", "bf16, NCCL_ALGO=Tree", "bf16, fused_rope=True", "peer"]
        assert [len(entry.row.runs) for entry in found.entries] == [2, 1, 1, 1]
        noted = [entry.speedup.verdict.noted for entry in found.entries[1:]]
        assert noted[0] == ("env NCCL_ALGO Tree against unset",)
        assert noted[1] == ("config fused_rope on against unset",)
        assert noted[2] == ("script peer.py against fp8launch's entry",)

    def test_logs_that_do_not_say_what_they_were_started_with(self, tmp_path: Path) -> None:
        text = (
            " iteration {}/9 | elapsed time per iteration (ms): {} | tokens/sec/gpu: {} | global batch size: 8 |"
            " lm loss: 2.0 |"
        )
        for name, ms in (("a", 100.0), ("b", 50.0)):
            lines = [text.format(i, ms, 5e5 / ms) for i in range(1, 10)]
            (tmp_path / f"{name}.log").write_text("\n".join(lines))
        found = of(tmp_path / "a.log", tmp_path / "b.log", gpu=None)
        a, b = found.entries
        assert (a.row.label, b.row.label) == ("a", "b"), "nobody knows that they are repeats"
        assert b.speedup.value == pytest.approx(2)
        assert any("not known of both: seq_length" in noted for noted in b.speedup.verdict.noted)
