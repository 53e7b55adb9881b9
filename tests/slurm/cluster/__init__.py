"""A real multi-node Slurm on one machine, for the tests: ``with Cluster.up() as cluster: cluster.run("srun", ...)``.

Everything lives below one root folder and is selected by SLURM_CONF; nothing of the machine's own Slurm, munge or
MariaDB is read or written. By hand: ``python -m tests.slurm.cluster up`` from the top of the repository.
"""

from . import pyxis
from .cluster import Cluster, why_not
from .config import Settings
from .image import Image
from .packages import ClusterError, InstallError

__all__ = ["Cluster", "ClusterError", "Image", "InstallError", "Settings", "pyxis", "why_not"]
