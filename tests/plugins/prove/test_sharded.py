"""The checkpoint entries with which a proof loads and saves a model of Megatron-FSDP."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own, because Megatron needs stand-ins on a CPU. The argument says whether the model is wrapped.
ENTRIES = """
import json, sys
from fp8launch.injob.rank.compat import cpu, python311
python311.install()
cpu.install()
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from fp8launch.plugins.prove.sharded import entries_of

class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 2))
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("tokens", torch.zeros(4), persistent=False)

    def sharded_state_dict(self):
        return {name: ShardedTensor.from_rank_offsets("router." + name, one) for name, one in self.state_dict().items()}

class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def sharded_state_dict(self):
        return self.module.sharded_state_dict()

torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
model = Wrapper(Router()) if json.loads(sys.argv[1]) else Router()
print(json.dumps({name: entry.key for name, entry in entries_of(model).items()}))
"""


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_saved_buffer_has_an_entry_also_in_a_bf16_model(wrapped: bool) -> None:
    """In bf16, Megatron wraps the model once more: on a GPU, a layout would start without its expert biases."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", ENTRIES, json.dumps(wrapped)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    prefix = "module." if wrapped else ""
    assert json.loads(done.stdout.splitlines()[-1]) == {
        f"{prefix}weight": "router.weight",
        f"{prefix}expert_bias": "router.expert_bias",
    }
