"""fp8launch's own pre-training entry with losses that are broken in some iterations: $BREAKS is KIND,FIRST,LAST.

A batch that is skipped breaks nothing, as with real data.
"""

from __future__ import annotations

import os
import time

FACTORS = {"nan": float("nan"), "zero": 0.0, "jump": 20.0}

if __name__ == "__main__":
    from megatron.training import get_args

    from fp8launch.injob.rank import pretrain

    kind, first, last = os.environ["BREAKS"].split(",")
    own = pretrain.loss

    def loss(mask, per_token):
        if int(first) <= get_args().curr_iteration + 1 <= int(last):
            per_token = per_token * FACTORS[kind]
        return own(mask, per_token)

    pretrain.loss = loss
    pretrain.main(time.time())
