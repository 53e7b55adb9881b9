"""Secrets in an imported script stay out of the recipe."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[..., tuple[int, str, str]]
Write = Callable[[str, str], str]


def test_import_copies_no_secret(say: Say, write: Write) -> None:
    script = write(
        "run.sh",
        "export NCCL_X=hf_AbCdEfGhIjKlMnOpQrStUvWx\nexport NCCL_KEY=c4n4ry\n"
        "srun --container-image=docker://user:c4n4ry@reg/x python pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 2 --wandb-project nvapi-aB1aB1aB1aB1aB1aB1aB1 --my-api-key=c4n4ry --seq-length 64\n",
    )
    code, out, err = say("import", script)
    assert (code, "import-secret" in err) == (0, True)
    assert not [text for text in ("c4n4ry", "hf_AbCd", "nvapi-") if text in out]
    assert "NCCL_X" in out and "NCCL_KEY" in out  # under `secrets:`
