"""What a proof prints."""

from __future__ import annotations

from fp8launch.plugins.prove.judge import Check, Difference
from fp8launch.plugins.prove.report import Proof

DETAIL = "TP 2 x PP 2 (2 virtual stages) x DP 2 to DP 2: the checkpoint does not load: RuntimeError: (TP, PP) mismatch"


def test_lines_fit_a_terminal_and_break_between_words() -> None:
    long = Difference("mtp.layers.0.transformer_layer.mlp.linear_fc1.layer_norm_weight", None, 0.0036)
    proof = Proof((Check("reshard", False, DETAIL, (long,)),), (), "DP 2", "DP 2 with 1 rank", settings=("a (1)",) * 20)
    lines = list(proof.lines())
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("reshard    WRONG  TP 2 x PP 2")
    assert lines[1].startswith("        ")
    assert " ".join(line.strip() for line in lines[:2]).endswith(DETAIL)
    # A number and its percent sign stay together.
    assert "0.36 %" in lines[3]
    assert " ".join(line.strip() for line in lines).count("a (1)") == 20


def test_a_name_that_does_not_fit_stays_indented() -> None:
    name = "optimizer.state.exp_avg_sq.decoder.layers.mlp.experts.experts.linear_fc2.bias"
    proof = Proof((Check("resume", False, "not the same", (Difference(name, None, 0.36),)),), (), "DP 2", "DP 2")
    assert list(proof.lines())[1:] == [f"    {name}:", "        off by 36 %"]
