"""Two processes whose CUDA graph holds an all-reduce leave after their training: `python leave_on_gpus.py [kept]`.

Needs torch and two GPUs, and nothing else of fp8launch's own requirements. By default the graph is released before the
process group, as the worker does, and both must end by themselves; with `kept` it stays, and the bound on the time
after the training has to end them. Prints how long each took, and exits with 1 where one did not end with 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
LEAVE_WITHIN = 40


def rank(release: bool) -> None:
    """One process: capture an all-reduce, hand the graph to a class as Megatron does, and leave."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(LAUNCHERS))
    from fp8launch.injob.rank import leaving

    number = int(os.environ["RANK"])
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    values = torch.ones(1 << 20, device=device)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(values)
    graph.replay()
    torch.cuda.synchronize()
    wrapper = type("FullCudaGraphWrapper", (), {"cuda_graph": {"training": graph}, "result": {"training": values}})
    module = types.ModuleType("megatron.core.full_cuda_graph")
    module.FullCudaGraphWrapper = wrapper  # type: ignore[attr-defined]
    sys.modules["megatron.core.full_cuda_graph"] = module
    del graph
    leaving.everything_is_written()
    if not release:
        leaving.release_cuda_graphs = lambda: None
    leaving.end_process_group()
    print(f"rank {number} has ended its process group", flush=True)


def main(words: list[str]) -> int:
    if "RANK" in os.environ:
        rank(release="kept" not in words)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["FP8LAUNCH_LEAVE_WITHIN"] = str(LEAVE_WITHIN)
    began = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    ranks = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(n)}) for n in (0, 1)]
    codes = []
    for number, process in enumerate(ranks):
        try:
            codes.append(process.wait(timeout=max(1, began + 180 - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(-9)
        print(f"rank {number}: exit status {codes[-1]} after {time.monotonic() - began:.0f} s", flush=True)
    return 0 if codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
