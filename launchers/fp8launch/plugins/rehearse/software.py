"""Find Transformer Engine's Python code in the user's cache, or fetch it once.

The PyPI package `transformer-engine` holds the Python code for every framework and no compiled library (1.2 MB). It is
only read, never installed.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from packaging.version import Version

from fp8launch.injob.ownership import take_write_permission
from fp8launch.megatron.versions import release
from fp8launch.plugins.validators import wheels
from fp8launch.plugins.validators.wheels import NotFetched, Wheel, fetch, safe

# Minor version to its newest release and the SHA-256 of that release's only wheel, from PyPI.
# `pip download --no-deps transformer-engine==2.20.2` and `pip hash` give the line for a release that is not listed yet.
RELEASES: Mapping[str, tuple[str, str]] = {
    "2.1": ("2.1.0", "c3253024f7426d67d9defb14bd395cee6b07ed3d28a5fb959575118dc3b4366e"),
    "2.2": ("2.2.0", "bc2c2c275c630680e9733c225b47e689b9f954a030200202393e7ed1d6444d2e"),
    "2.3": ("2.3.0", "2a02c2ac29b9781d09975d4cc373df66ed5f0326ff079a2908c3c26d35ac9ee9"),
    "2.4": ("2.4.0", "c2a845e433fcf81497cbc53334c99725bd2faa361e7548342e95398acb06e8ce"),
    "2.5": ("2.5.0", "a78a2ad01b1f97bccd740f701287fa43cf6ba37ba5a9b2d8c401d35ecdd0898e"),
    "2.6": ("2.6.0.post1", "deb1ed2a937fbcce7e825e38461e360ca3057147996a8269dc8b868a21672486"),
    "2.7": ("2.7.0", "99f6c61df25fc36db1b62d45a2502662ed6d3560d9657f39827af3911b6bb3b7"),
    "2.8": ("2.8.0", "795b056d31b0f67f5d7432725177782dd5084090c1e3c52532577070947fe9a7"),
    "2.9": ("2.9.0", "953147ed4c490e54c9884bb0d876a1341f05c5c5b7d304bf61f4740f6faee5af"),
    "2.10": ("2.10.0", "a14ccf4e887409be062c0bd8c4a341df55a77baad6aea6aabfe39c24e38252e5"),
    "2.11": ("2.11.0", "7ee1eae8fa6b0cb471c6066aa3555304fda8537174e5019929dc0c8655071df3"),
    "2.12": ("2.12.0", "5d0539c520c39445c62feab9d1fab774ed2e27a576d0feac2086ce86e0bff7c4"),
    "2.13": ("2.13.0", "cb1ad42df836dbe704f9bd140089d6358d7ebea2eeb36f90d533af4504fe2005"),
    "2.14": ("2.14.1", "ad0e5e3c11b90bc98f7dd843c7af06d8a321361ac0df8c6c35326c9b437bdfec"),
    "2.15": ("2.15.0", "4015c5b9a7aa420f4f123e49ea795de31ae6f781fa1180c118d0ee40525eed8d"),
    "2.16": ("2.16.1", "1da67b1b8629bd4439711161957be656dc0cd3e0e4e47cbe7a21a40430b23c67"),
    "2.17": ("2.17.1", "8a4543c0b0ffe4c6117bfbe7a0b6bb9acba0d159782fa4922aaee202ba2cfdc9"),
    "2.18": ("2.18.0", "9d7c4bd74247e57eeed2af46f7b91c133cc405404953f1f3f2e38be8c47cdb7e"),
    "2.19": ("2.19.0", "965d78429d287f7db6978bf299cfcecf68c730247f05cc830ecc6983a123bbc7"),
    "2.20": ("2.20.2", "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094"),
}
_PACKAGE = "transformer_engine"


class NoTransformerEngine(Exception):
    """No Transformer Engine of this version is available for a rehearsal; the message says why."""


def cache_folder() -> Path:
    """Return the folder with the user's copies of Transformer Engine's Python code, one subfolder per release."""
    return wheels.cache_folder(_PACKAGE)


def transformer_engine_for(version: Version, say: Callable[[str], None] = lambda message: None) -> Path:
    """Return a folder with the newest available patch of this minor release's `transformer_engine` package.

    `say` gets a message about a download. Raises NoTransformerEngine.
    """
    minor = f"{version.major}.{version.minor}"
    folder = cache_folder()
    found = _newest(minor)
    if found is None and minor not in RELEASES:
        raise NoTransformerEngine(
            f"transformer-engine {minor} is not in {folder}, and is not fetched because its hash is not known; known "
            f"are {', '.join(RELEASES)}. Unpack its wheel into {folder / version.base_version} to use it"
        )
    try:
        if found is not None:
            return safe(found)
        newest, sha256 = RELEASES[minor]
        return fetch(
            Wheel("transformer-engine", newest, sha256, "1.2 MB"),
            folder,
            find=lambda: _newest(minor),
            keep=lambda wheel: _unpack(wheel, folder / newest),
            say=say,
        )
    except NotFetched as exc:
        raise NoTransformerEngine(str(exc)) from None


def _newest(minor: str) -> Path | None:
    places = [place for place in cache_folder().glob(f"{minor}.*") if (place / _PACKAGE / "pytorch").is_dir()]
    return max(places, key=lambda place: release(place.name), default=None)


def _unpack(wheel: Path, target: Path) -> None:
    unpacked = wheel.with_name("unpacked")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except zipfile.BadZipFile as failure:
        raise NotFetched(f"{wheel.name}: {failure}") from None
    take_write_permission(unpacked)
    if (unpacked / _PACKAGE).is_dir():
        unpacked.rename(target)
