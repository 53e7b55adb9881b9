"""The versions of cuDNN and cuBLAS in the job, as far as they are known.

With Transformer Engine 2.20 and CUDA 13.0 the cuDNN of torch 2.11 is assumed, 9.19, with which a run on H200 ended for
lack of a kernel; others come in images whose cuDNN is not published.
"""

from __future__ import annotations

CUDNN_OF_TORCH_2_11 = 91900
CUDNN_WITH_LARGEST_LOGITS = 92100
# cuBLAS in CUDA, by the requirements of the package cuda-toolkit; releases between are like the one before.
CUBLAS = {
    (12, 8): 120804, (12, 9): 120901, (13, 0): 130100, (13, 1): 130200, (13, 2): 130300, (13, 2, 1): 130400,
    (13, 3): 130501, (13, 4): 130700, (13, 5): 131000,
}  # fmt: skip


class Assumed:
    """What is assumed of the job's libraries."""

    cudnn = CUDNN_OF_TORCH_2_11
    cublas = CUBLAS[13, 0]


def assume(transformer_engine: str, cuda: str) -> None:
    """Assume the cuDNN beside this release of Transformer Engine, such as "2.20.2", and the cuBLAS of this CUDA."""
    of_torch = _release(transformer_engine)[:2] >= (2, 20) and _release(cuda)[:2] == (13, 0)
    Assumed.cudnn = CUDNN_OF_TORCH_2_11 if of_torch else CUDNN_WITH_LARGEST_LOGITS
    Assumed.cublas = cublas_of(cuda)


def cublas_of(cuda: str) -> int:
    """The version of cuBLAS in a release of CUDA, as the library numbers itself."""
    known = [number for release, number in CUBLAS.items() if release <= _release(cuda)]
    return max(known, default=min(CUBLAS.values()))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
