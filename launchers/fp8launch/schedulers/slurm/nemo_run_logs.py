"""Where NeMo-Run's own commands find the logs of our runs. A module of its own, because NeMo-Run stores the class."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from nemo_run.core.execution.slurm import SlurmJobDetails


@dataclass(kw_only=True)
class RunLogs(SlurmJobDetails):  # type: ignore[misc, unused-ignore]
    """`folder` is the `logs` folder of a run."""

    @property
    def ls_term(self) -> str:
        """What NeMo-Run gives to `ls`; it puts the job id for %j."""
        return f"{shlex.quote(str(self.folder))}/%j-*.log"
