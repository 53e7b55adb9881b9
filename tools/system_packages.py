"""Install the distribution's packages that the tests use: Slurm, MariaDB, Charliecloud, ssh, shellcheck, Chromium.

    python tools/system_packages.py            # installs what is missing (Debian and Ubuntu, as root)
    python tools/system_packages.py --missing  # only prints the names, one per line

Never fails: a test that lacks a package is skipped and says which.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "slurm"))

from cluster.packages import InstallError, Need, install, missing, say, why_not_installable

# Needed in addition to the packages of the test cluster.
MORE = (
    Need("shellcheck", ("shellcheck",), optional=True),  # batch scripts
    Need("ssh", ("openssh-client",), optional=True),  # `fp8launch --remote`
    Need("sshd", ("openssh-server",), optional=True),
    Need("chromium", ("chromium",), optional=True),  # the HTML page of `compare`
    Need("g++", ("g++",), optional=True),  # Megatron's dataset index builder
    Need("tcsh", ("tcsh",), optional=True),  # login shells
    Need("fish", ("fish",), optional=True),
    Need("zsh", ("zsh",), optional=True),
    Need("skopeo", ("skopeo",), optional=True),  # images from a registry, by digest
    Need("docker-registry", ("docker-registry",), optional=True),
)


def main() -> int:
    needs = {need.probe: need for need in (*missing(), *(need for need in MORE if not need.met))}
    names = sorted({need.packages[0] for need in needs.values()})
    if "--missing" in sys.argv[1:]:
        print(*names, sep="\n", end="\n" if names else "")
        return 0
    if not names:
        return 0
    required = [Need(need.probe, need.packages) for need in needs.values()]
    if reason := why_not_installable(required):
        say(f"{reason}; without them some tests are skipped")
        return 0
    try:
        install(list(needs.values()))
    except InstallError as error:
        say(f"{error}\nwithout them some tests are skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
