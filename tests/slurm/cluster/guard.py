"""Takes the cluster in sys.argv[1] down when stdin is closed, that is, when the process that started both is gone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster import Cluster

sys.stdin.read()
root = Path(sys.argv[1])
if (root / "cluster.json").exists():
    Cluster.at(root).down()
