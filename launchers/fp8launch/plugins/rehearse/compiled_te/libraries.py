"""The versions of cuDNN and cuBLAS that rehearsals assume.

For Transformer Engine 2.20 with CUDA 13.0, this is cuDNN 9.19 from torch 2.11. It lacks a kernel: a run on H200 failed
for that reason. Other combinations come from images whose cuDNN version is not published; a newer one is assumed.
"""

from __future__ import annotations

CUDNN_OF_TORCH_2_11 = 91900
CUDNN_WITH_LARGEST_LOGITS = 92100
# The cuBLAS version in each CUDA release, from the requirements of the package cuda-toolkit. Releases that are not
# listed have the same cuBLAS as the preceding one.
CUBLAS = {
    (12, 8): 120804, (12, 9): 120901, (13, 0): 130100, (13, 1): 130200, (13, 2): 130300, (13, 2, 1): 130400,
    (13, 3): 130501, (13, 4): 130700, (13, 5): 131000,
}  # fmt: skip


class Assumed:
    """The assumed versions of the job's libraries."""

    cudnn = CUDNN_OF_TORCH_2_11
    cublas = CUBLAS[13, 0]


def assume(transformer_engine: str, cuda: str) -> None:
    """Assume the cuDNN that ships with this Transformer Engine, such as "2.20.2", and the cuBLAS of this CUDA."""
    of_torch = _release(transformer_engine)[:2] >= (2, 20) and _release(cuda)[:2] == (13, 0)
    Assumed.cudnn = CUDNN_OF_TORCH_2_11 if of_torch else CUDNN_WITH_LARGEST_LOGITS
    Assumed.cublas = cublas_of(cuda)


def cublas_of(cuda: str) -> int:
    """Return the cuBLAS version in a CUDA release, in the library's own number format."""
    known = [number for release, number in CUBLAS.items() if release <= _release(cuda)]
    return max(known, default=min(CUBLAS.values()))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
