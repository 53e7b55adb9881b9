"""Memory that Megatron frees and fills again."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import torch


def share_storage(output: torch.Tensor, again: torch.Tensor) -> None:
    """Give the freed storage of `output`, and so all its views, what was computed again."""
    storage, source = output.untyped_storage(), again.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)
