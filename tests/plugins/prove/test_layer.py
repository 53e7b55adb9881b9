"""`check --prove` and `--require-proof`, with verdicts that are already known."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8launch.cli import run
from fp8launch.job.prepared import prepare
from fp8launch.plugins.prove import proof, proof_cache
from fp8launch.plugins.prove.judge import Check, Difference
from fp8launch.plugins.prove.part import Part, onwards_of, parts_of
from fp8launch.plugins.prove.session import NoVerdict, Session
from fp8launch.plugins.prove.trials import by_relevance, trials_of
from fp8launch.plugins.prove.work import Findings, Work, work_of

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

RIGHT = Findings((Check("loss", True, "5.0"), Check("gradients", True, "9 tensors agree")))
WRONG = Findings(
    (Check("gradients", False, "1 of 9 tensors differs", (Difference("router.weight", 0.5, 0.5),)),),
    {"router.weight": ("moe_aux_loss_coeff", "tensor_model_parallel_size")},
    right="parallel.tp=1",
    tried=2,
)
Trained = Callable[[Findings | NoVerdict], list[Work]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Gives trainings of one step this result. Returns the list of what is trained from now on."""

    def give(findings: Findings | NoVerdict) -> list[Work]:
        works: list[Work] = []

        def carry_out(work: Work, session: Session, done: Callable[[], None]) -> Findings:
            works.append(work)
            if isinstance(findings, NoVerdict):
                raise findings
            return findings if work.step else Findings(())

        monkeypatch.setattr(proof, "carry_out", carry_out)
        return works

    return give


def part(recipe: str, *overrides: str) -> Part:
    return parts_of(prepare(recipe, overrides), print)[0]


def test_a_repeated_proof_trains_nothing(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    works = trained(RIGHT)
    for words in (["prove", "tiny_cpu"], ["check", "tiny_cpu", "--prove"], ["check", "tiny_cpu", "--require-proof"]):
        assert run(words) == 0
    assert [bool(work.step) for work in works] == [True, False]
    assert run(["prove", "tiny_cpu", "--again"]) == 0
    assert len(works) == 4
    # Another name, length or learning rate is no other structure; another layout is.
    assert run(["prove", "tiny_cpu", "--set", "name=other", "--set", "train.iterations=7"]) == 0
    assert len(works) == 4
    assert run(["prove", "tiny_cpu", "--set", "resources.gpus_per_node=2"]) == 0
    assert len(works) == 6
    assert "stored verdict" in capsys.readouterr().err


def test_another_layout_trains_only_what_is_new(trained: Trained) -> None:
    works = trained(RIGHT)
    words = ["prove", "tiny_cpu", "--set", "resources.gpus_per_node=2"]
    assert run(words) == 0
    assert run([*words, "--to", "tp=2"]) == 0
    assert [len(work.reshards) for work in works] == [0, 0, 1]


def test_an_unproven_run_is_refused_on_request(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    works = trained(RIGHT)
    assert run(["check", "tiny_cpu", "--require-proof"]) == 1
    assert "no run of this structure was proven" in capsys.readouterr().out
    assert run(["submit", "tiny_cpu", "--require-proof", "--dry-run"]) == 1
    assert not works


def test_a_site_can_require_proofs(trained: Trained, write: Callable[[str, str], str]) -> None:
    trained(RIGHT)
    site = write("site.yaml", "name: site\nrequire_proof: true\n")
    words = ["submit", "tiny_cpu", "--cluster", site, "--dry-run"]
    assert run(words) == 1
    assert run([*words, "--no-require-proof"]) == 0
    assert run(["prove", "tiny_cpu"]) == 0
    assert run(words) == 0


def test_what_differs_is_a_problem_of_the_check(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    trained(WRONG)
    assert run(["check", "tiny_cpu", "--prove", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (problem,) = [problem for problem in found["problems"] if problem["code"] == "proof"]
    assert "router.weight: 0.5 times" in problem["message"]
    assert problem["fix"] == "try parallel.tp=1"
    assert found["proof"]["ok"] is False
    assert run(["check", "tiny_cpu", "--require-proof"]) == 1
    assert "found differences" in capsys.readouterr().out


def test_a_training_that_fails_is_no_verdict(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    trained(NoVerdict("one rank", "ValueError: no", {}))
    assert run(["prove", "tiny_cpu"]) == 3
    assert "the training of one rank ended with ValueError: no" in capsys.readouterr().err
    assert run(["check", "tiny_cpu", "--prove"]) == 3


def test_a_verdict_survives_the_cache(verdicts: Path) -> None:
    one = part("tiny_cpu")
    entry = proof_cache.entry_of(work_of(one, ()), one.megatron)
    proof_cache.keep(entry, WRONG)
    found = proof_cache.read(entry)
    assert found is not None
    assert (found.checks, found.right, found.tried) == (WRONG.checks, WRONG.right, WRONG.tried)
    assert [file.name for file in verdicts.iterdir()] == [entry.name] if entry else []


def test_an_entry_that_others_can_write_is_ignored(verdicts: Path) -> None:
    one = part("tiny_cpu")
    entry = proof_cache.entry_of(work_of(one, ()), one.megatron)
    assert entry is not None
    proof_cache.keep(entry, RIGHT)
    entry.chmod(0o666)
    assert proof_cache.read(entry) is None


def test_an_incomplete_verdict_is_not_kept(verdicts: Path) -> None:
    one = part("tiny_cpu")
    proof_cache.keep(proof_cache.entry_of(work_of(one, ()), one.megatron), Findings((), unknown=("resume: failed",)))
    assert not verdicts.exists()


def test_settings_of_the_code_around_a_tensor_are_tried_first() -> None:
    trials = list(trials_of(part("llama70b_tensorwise_h100")))
    texts = [trial.text for trial in by_relevance(trials, ["sequence_parallel", "tensor_model_parallel_size"])]
    assert texts[:2] == ["parallel.sequence=null", "parallel.tp=1"]
    (without,) = [trial for trial in trials if trial.text == "parallel.tp=1"]
    assert "sequence_parallel" not in without.run.values
    assert (without.run.layout.tp, without.run.layout.pp) == (1, 2)


def test_phases_go_on_in_the_layout_of_the_next() -> None:
    parts = parts_of(prepare("studies/fp8_phases_llama3_2_1b"), print)
    assert [len(onwards) for onwards in onwards_of(parts, ())] == [0, 0, 0]
    assert [len(onwards) for onwards in onwards_of(parts, parts)] == [1, 1, 1]


def test_a_gpu_is_required_for_what_only_a_gpu_covers(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.import_module("torch").cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    works = trained(RIGHT)
    assert run(["prove", "tiny_cpu", "--device", "cuda"]) == 3
    assert "sees no GPU" in capsys.readouterr().err
    assert not works
