"""The text of Slurm's commands, as several versions and sites print it, to partitions and nodes."""

from __future__ import annotations

import pytest

from fp8launch.schedulers.slurm.inventory import minutes, parse_gpus, parse_nodes, parse_partitions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 30),
        ("30:00", 30),
        ("30:01", 31),
        ("01:00:00", 60),
        ("1-0", 1440),
        ("1-02:03", 1563),
        ("7-00:00:00", 10080),
        ("UNLIMITED", None),
        ("infinite", None),
        ("", None),
    ],
)
def test_slurm_times(text: str, expected: int | None) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:8", {"": 8}),
        ("gpu", {"": 1}),
        ("gpu:h100", {"h100": 1}),
        ("gpu:h200:8", {"h200": 8}),
        ("gpu:h100:8(S:0-1)", {"h100": 8}),
        ("gpu:h100:4(S:0,2),gpu:a100:2(S:1),shard:16", {"h100": 4, "a100": 2}),
        ("nic:2,gpu:nvidia_h100_80gb_hbm3:8(S:0-1),tmpdisk:1K", {"nvidia_h100_80gb_hbm3": 8}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpux:3", {}),
    ],
)
def test_generic_resources(gres: str, expected: dict[str, int]) -> None:
    assert parse_gpus(gres) == expected


def test_nodes_and_partitions() -> None:
    nodes = parse_nodes(
        "batch|n1|idle|gpu:h100:8(S:0-1)|224|ib,rack1\n"
        "batch|n2|drained*|gpu:h100:8(S:0-1)|224|(null)\n"
        "debug|n1|mixed|gpu:h100:8|224|ib\n"
        "a line that is none\n"
    )
    line = "PartitionName=batch AllowAccounts=a,b Default=YES MaxNodes=16 MaxTime=2-00:00:00 MinNodes=0 State=UP"
    other = "PartitionName=debug Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=1 State=DRAIN X=a=b"
    batch, debug = parse_partitions(f"{line} TotalNodes=2\n\n{other} TotalNodes=1\n", nodes)
    assert (batch.default, batch.max_minutes, batch.max_nodes, batch.min_nodes) == (True, 2880, 16, 0)
    assert [node.name for node in batch.in_service] == ["n1"]
    assert batch.nodes[0].features == {"ib", "rack1"} and batch.nodes[1].features == frozenset()
    assert (debug.state, debug.max_nodes, debug.max_minutes) == ("DRAIN", None, None)
    assert [batch.nodes[0].gpus_of(kind) for kind in (None, "h100", "a100")] == [8, 8, 0]


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "completing", "idle~", "reserved", "planned", "mix$"])
def test_nodes_in_service(state: str) -> None:
    assert parse_nodes(f"p|n|{state}|(null)|1|x")["p"][0].in_service


@pytest.mark.parametrize("state", ["down", "down*", "drained", "draining", "drained*", "fail", "unknown*", "error"])
def test_nodes_out_of_service(state: str) -> None:
    assert not parse_nodes(f"p|n|{state}|(null)|1|x")["p"][0].in_service
