"""Resolve an image name, URI or file for a container runtime."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from fp8launch.diagnostics import UserError, did_you_mean, error
from fp8launch.recipe.own_paths import is_image_file
from fp8launch.recipe.yaml_source import is_there, read_yaml
from fp8launch.resources import pack_folder
from fp8launch.secrets import secret_in

if TYPE_CHECKING:
    from fp8launch.cluster.profile import Cluster


@functools.cache
def catalogue() -> dict[str, dict[str, str]]:
    """Return the images that come with fp8launch, with `uri` and `source` by name."""
    entries: dict[str, dict[str, str]] = read_yaml(pack_folder("containers") / "images.yaml").plain()
    return entries


def _entry_of(image: str | None) -> dict[str, str]:
    """Return the catalogue's entry for an image, given by name or URI; empty for an unknown image."""
    if image is not None:
        bare = image.removeprefix("docker://").replace("#", "/", 1)
        for name, entry in catalogue().items():
            if bare in (name, entry["uri"]):
                return entry
    return {}


def software_in(image: str | None) -> dict[str, str]:
    """Return the published versions of an image, by package; empty for an unknown image."""
    entry = _entry_of(image)
    packages = ("megatron", "transformer_engine", "cuda", "pytorch")
    return {package: entry[package] for package in packages if package in entry}


def packages_in(image: str) -> frozenset[str]:
    """Return the optional modules that the catalogue has for an image; empty for an unknown image."""
    return frozenset(_entry_of(image).get("packages", "").split())


def image_for(name: str, runtime: str, cluster: Cluster, where: str, must_exist: bool = True) -> str:
    """Return what `runtime` needs to start the image that a recipe calls `name`. Raises UserError if it is missing."""
    known = catalogue()
    place = name
    if cluster.images.get(name):
        place = cluster.images[name]
    elif name in known:
        # A tag can be moved to another image, so the digest counts if the catalogue has one.
        place = pinned(known[name]["uri"], known[name].get("digest"))
    if is_image_file(place):
        # pyxis reads a relative x.sqsh as an image name in a registry.
        path = local_path(place, where)
        if must_exist and not is_there(path):
            raise error("image-missing", f"container image {path} does not exist", where, "import it first", 3)
        return str(path)
    if runtime == "apptainer" and "://" in place and not place.startswith("docker://"):
        return place
    bare = place.removeprefix("docker://")
    _refuse_password(bare, where)
    if "/" not in bare and ":" not in bare and "#" not in bare:
        names = [*known, *cluster.images]
        fix = did_you_mean(name, names, f"known names: {', '.join(names)}")
        raise error("unknown-image", f"container image '{name}' is not a known name, a URI or a file", where, fix)
    if runtime == "pyxis":
        return _for_enroot(bare)
    if runtime == "apptainer":
        return f"docker://{bare.replace('#', '/', 1)}"
    raise error(
        "image-not-local",
        f"Charliecloud runs only folders and .sqsh files, not '{name}'",
        where,
        "run `ch-image pull` and `ch-convert`, then add its name to `images:` in the cluster profile",
    )


def _refuse_password(bare: str, where: str) -> None:
    if secret_in(f"docker://{bare}"):
        raise error(
            "password-in-uri",
            "the image's URI contains a password, which would be recorded",
            where,
            "remove it; enroot reads ~/.config/enroot/.credentials, Apptainer the credentials of `apptainer registry "
            "login`",
        )


def _for_enroot(uri: str) -> str:
    """Return a URI for enroot, with a '#' after the registry. A first part with a dot or a port is a registry."""
    if "#" in uri or "/" not in uri:
        return uri
    registry, _, rest = uri.partition("/")
    is_registry = registry == "localhost" or (bool(set(".:") & set(registry)) and "://" not in uri)
    if not is_registry:
        return uri
    return f"{registry}#{rest}"


def pinned(uri: str, digest: str | None) -> str:
    """Return the URI with the digest in place of the tag."""
    if digest is None or "@sha256:" in uri:
        return uri
    head, separator, last = re.match(r"(.*)([/#])(.*)", uri, re.S).groups()  # type: ignore[union-attr]
    return f"{head}{separator}{last.partition(':')[0]}@{digest}"


def image_folder(name: str, cluster: Cluster) -> Path | None:
    """Return the folder that is the image, which only Charliecloud can run; None for a file or a URI."""
    place = cluster.images.get(name, name)
    if not place.startswith(("/", "~")):
        return None
    try:
        folder = local_path(place)
        return folder if folder.is_dir() else None
    except (OSError, ValueError, UserError):
        return None


def local_path(text: str, where: str | None = None) -> Path:
    """Return the absolute form of a path that the user wrote, with `~` expanded."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise error(
            "no-such-home", f"{Path(text).parts[0]} is not the home of a user of this machine", where or text
        ) from None
