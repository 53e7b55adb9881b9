"""Write the example scripts in `slurm/`: `python tools/render_slurm.py`.

These are a few recipes worth reading as batch scripts. `fp8launch render NAME --as sbatch --portable` writes any other.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.slurm.batch_script import batch_script

ROOT = Path(__file__).resolve().parents[1]
# Recipes of the pack: a tiny one, an 8B in BF16 and FP8, a 70B, a mixture of experts, and another stack.
EXAMPLES = (
    "tiny_cpu",
    "llama8b_bf16",
    "llama8b_fp8",
    "llama70b_tensorwise_h100",
    "qwen3_30b_a3b_tensorwise_h100",
    "peers/fsdp2_torchao",
)


def portable_script(recipe: Path) -> tuple[str, str]:
    """Return the file name and the text of a recipe's batch script for plain sbatch."""
    prepared = prepare(str(recipe))
    job = plan(prepared, Cluster(), None, runtime="pyxis", check_paths=False)
    return f"{prepared.loaded.recipe.name}.sbatch", batch_script(job)


def main() -> int:
    for example in EXAMPLES:
        name, text = portable_script(ROOT / "recipes" / f"{example}.yaml")
        script = ROOT / "slurm" / name
        script.write_text(text)
        script.chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
