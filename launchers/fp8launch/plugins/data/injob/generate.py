"""A script for worker.py: continue token ids with the GPT model of a checkpoint, on one GPU or CPU.

FP8LAUNCH_GENERATE is JSON with `ids`, `tokens` (how many to add), `temperature` and `seed`; the answer is a line that
begins with that name. Each token is computed from the whole text again, which is enough for a look at a small model.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os

import torch
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model

from fp8launch.injob.rank import gpt_model

REQUEST = "FP8LAUNCH_GENERATE"


def main() -> None:
    """Load the model that sys.argv describes, and print the longer list of ids."""
    parse_and_validate_args()
    initialize_megatron()
    request = json.loads(os.environ[REQUEST])
    model = get_model(gpt_model.build, wrap_with_ddp=False)
    load_checkpoint(model, None, None)
    network = model[0].eval()
    choose = torch.Generator().manual_seed(request["seed"])
    ids: list[int] = request["ids"]
    with torch.no_grad():
        for _ in range(request["tokens"]):
            window = ids[-get_args().seq_length :]
            tokens = torch.tensor([window], device=next(network.parameters()).device)
            positions = torch.arange(len(window), device=tokens.device)[None]
            mask = torch.ones(1, 1, len(window), len(window), dtype=torch.bool, device=tokens.device).triu(1)
            scores = network(tokens, positions, mask)[0, -1].float().cpu()
            if request["temperature"] == 0:
                ids.append(int(scores.argmax()))
            else:
                chances = torch.softmax(scores / request["temperature"], 0)
                ids.append(int(torch.multinomial(chances, 1, generator=choose)))
    print(REQUEST, json.dumps(ids), flush=True)


if __name__ == "__main__":
    main()
