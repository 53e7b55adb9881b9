"""Lets the ranks of a run share one GPU: for run.sh with TOGETHER=1, which puts this folder on their path.

NCCL refuses two ranks on one GPU of a host, so each rank is a host of its own to it, reached through the loopback. What
a run says holds; its speed does not, and what needs peer access (userbuffers, DeepEP, symmetric memory) cannot run.
"""

import os

if "LOCAL_RANK" in os.environ and "RANK" in os.environ:
    os.environ["LOCAL_RANK"] = "0"
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
