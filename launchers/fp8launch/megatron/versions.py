"""The Megatron-Core versions that fp8launch supports, named here and nowhere else.

`python tools/intake.py megatron-core==VERSION` adds a release to SUPPORTED and WHEELS, and writes its flag schema. A
test compares pyproject.toml, the schemas and the in-job worker's list with this one. Recipes that name no version use
DEFAULT, which is changed separately.

Standard library only: tools/setup.sh reads it before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Minor version to the release from which its schema was made and with which the tests run.
SUPPORTED: Mapping[str, str] = {
    "0.17": "0.17.1",
    "0.18": "0.18.2",
    "0.19": "0.19.2",
}
# SHA-256 of the wheel that `check` downloads for its validators (Python 3.12, x86_64; all have the same code).
WHEELS: Mapping[str, str] = {
    "0.17.1": "6dd0826489ee70a791e38612b25e914c4a18b0b074f2282353f235ee96273cf2",
    "0.18.2": "c2717b84079bf0bad1151525533a251870d1a86201f8c0702e0b5a6d6b5594f1",
    "0.19.2": "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5",
}
# For a recipe whose software.megatron and image do not state a version.
DEFAULT = "0.19"

Release = tuple[int, ...]


def release(version: object) -> Release:
    """Return the numbers of a version, for comparisons: "2.20.0.dev0" and "2.20.0a0+1234" are (2, 20, 0).

    A development build counts as its release, because NVIDIA builds its images from release branches under such names.
    """
    from packaging.version import Version

    numbers = re.match(r"[vV]?\d{1,9}(\.\d{1,9}){0,3}", str(version).strip())
    if numbers is None:
        return ()
    return Version(numbers[0]).release


def minor_of(version: object) -> str:
    """Return the minor version, such as "0.19" of "0.19.2"."""
    return ".".join(map(str, release(version)[:2]))
