"""Bandwidth of all-reduces: over all ranks by size, within each node, and between each node and the next.

One process a GPU, started by srun (MASTER_ADDR and MASTER_PORT set) or torchrun. Bus bandwidth is bytes / seconds x
2 (n - 1) / n for n ranks, which compares with a link's own bandwidth whatever n is; the median of the repetitions
counts. Exit status 1 when sums are wrong, or when a node's figure is below `--least` of the median of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

MIB = 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Which ranks are on which node: `nodes` holds (name, ranks) in the order of the ranks."""

    nodes: tuple[tuple[str, tuple[int, ...]], ...]
    device: torch.device
    repeat: int


def bus_bandwidth(size: int, ranks: int, seconds: float) -> float:
    """GB/s of an all-reduce of `size` bytes: what each rank must send and receive in a ring, per second."""
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def measure(layout: Layout, ranks: int, size: int, group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth in GB/s of the median all-reduce among `ranks` ranks, this one included."""
    tensor = torch.ones(size // 4, dtype=torch.float32, device=layout.device)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == ranks).all()):
        sys.exit(f"nccl_check: rank {dist.get_rank()}: wrong sums over {ranks} ranks at {size} bytes")
    seconds = []
    for _ in range(layout.repeat):
        tensor.fill_(1.0)
        _settle(layout)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _settle(layout)
        seconds.append(time.perf_counter() - began)
    return bus_bandwidth(size, ranks, statistics.median(seconds))


def _settle(layout: Layout) -> None:
    if layout.device.type == "cuda":
        torch.cuda.synchronize(layout.device)


def groups_at_once(layout: Layout, groups: Sequence[tuple[int, ...]], size: int) -> dict[tuple[int, ...], float]:
    """Each group's bandwidth while all of them, which share no rank, work at the same time; known on every rank."""
    me = dist.get_rank()
    # Every rank must make every group, in the same order.
    made = [dist.new_group(list(ranks)) for ranks in groups]
    found: tuple[tuple[int, ...], float] | None = None
    dist.barrier()
    for ranks, group in zip(groups, made, strict=True):
        if me in ranks:
            found = ranks, measure(layout, len(ranks), size, group)
    answers: list[tuple[tuple[int, ...], float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, found)
    return dict(answer for answer in answers if answer is not None)


def find_layout(repeat: int) -> Layout:
    name = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    nodes: dict[str, tuple[int, ...]] = {}
    for rank, node in enumerate(names):
        nodes[str(node)] = (*nodes.get(str(node), ()), rank)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return Layout(tuple(nodes.items()), device, repeat)


def pairs(layout: Layout) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Rounds of node pairs that share no node: each node with the next, the last with the first."""
    nodes = layout.nodes
    count = len(nodes)
    if count < 3:  # one pair is what "all ranks" has measured already
        return []
    ring = [(i, (i + 1) % count) for i in range(count)]
    rounds = [ring[0 : count - count % 2 : 2], ring[1::2], ring[count - 1 :] if count % 2 else []]
    name = [[(f"{nodes[a][0]} - {nodes[b][0]}", (*nodes[a][1], *nodes[b][1])) for a, b in part] for part in rounds]
    return [part for part in name if part]


def slow(figures: dict[str, float], least: float) -> list[str]:
    """The names whose figure is below `least` of the median of all."""
    if len(figures) < 2:
        return []
    middle = statistics.median(figures.values())
    return [name for name, figure in figures.items() if figure < least * middle]


def start() -> None:
    """Join the process group, by torchrun's variables or Slurm's."""
    for ours, slurm in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        if ours not in os.environ and slurm in os.environ:
            os.environ[ours] = os.environ[slurm]
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        sys.exit(f"nccl_check: {', '.join(missing)} not set: start it by slurm/nccl_check.sbatch or torchrun")
    if torch.cuda.is_available():
        # A task may see all GPUs of its node, or its own only.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MIB", help="default: 1 to 1024 on GPUs, 1 4 on CPUs")
    parser.add_argument("--repeat", type=int, default=20, help="measured all-reduces of a size (%(default)s)")
    parser.add_argument("--least", type=float, default=0.8, help="share of the median that is enough (%(default)s)")
    options = parser.parse_args()
    start()
    layout = find_layout(options.repeat)
    world, first = dist.get_world_size(), dist.get_rank() == 0
    sizes = options.sizes or ([1, 4] if layout.device.type == "cpu" else [1, 8, 64, 256, 1024])

    def tell(text: str) -> None:
        if first:
            print(text, flush=True)

    tell(f"{world} ranks on {len(layout.nodes)} nodes, {dist.get_backend()}, torch {torch.__version__}")
    if world < 2:
        tell("one rank has nobody to talk to")
        return 0
    tell("all ranks, MiB: GB/s (bus bandwidth)")
    for size in sizes:
        tell(f"{size:8d}: {measure(layout, world, size * MIB, None):8.2f}")

    failing: list[str] = []
    within = {name: ranks for name, ranks in layout.nodes if len(ranks) > 1}
    rounds = [list(within.items())] if within else []
    for title, parts in (("within each node", rounds), ("between each node and the next", pairs(layout))):
        figures: dict[str, float] = {}
        for part in parts:
            answers = groups_at_once(layout, [ranks for _, ranks in part], sizes[-1] * MIB)
            figures |= {name: answers[ranks] for name, ranks in part}
        weak = slow(figures, options.least)
        if figures:
            tell(f"{title}, {sizes[-1]} MiB:")
        for name, figure in figures.items():
            tell(f"  {name}: {figure:.2f} GB/s" + (" SLOW" if name in weak else ""))
        failing += weak
    dist.destroy_process_group()
    if failing:
        tell(f"nccl_check: below {options.least:.0%} of the median: {', '.join(failing)}")
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
