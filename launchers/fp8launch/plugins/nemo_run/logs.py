"""Log locations for NeMo-Run's own commands. A separate module, because NeMo-Run stores the class."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from nemo_run.core.execution.slurm import SlurmJobDetails


@dataclass(kw_only=True)
class RunLogs(SlurmJobDetails):  # type: ignore[misc, unused-ignore]
    """`folder` is the `logs` folder of a run."""

    @property
    def ls_term(self) -> str:
        """The pattern that NeMo-Run passes to `ls`; it replaces %j by the job id."""
        return f"{shlex.quote(str(self.folder))}/%j-*.log"
