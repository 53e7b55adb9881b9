"""An image name, URI or file to the words of a container runtime."""

from __future__ import annotations

import functools
from pathlib import Path

from fp8launch.job.cluster import Cluster
from fp8launch.pack import pack_folder
from fp8launch.problems import error, nearest
from fp8launch.recipe.source import is_there, read_yaml


@functools.cache
def catalogue() -> dict[str, dict[str, str]]:
    """The images that come with fp8launch: name to `uri` and `source`."""
    entries: dict[str, dict[str, str]] = read_yaml(pack_folder("containers") / "images.yaml").plain()
    return entries


def software_in(image: str | None) -> dict[str, str]:
    """What is published to be in an image, by package; empty for an image that the catalogue does not know."""
    packages = ("megatron", "transformer_engine", "cuda", "pytorch")
    for name, entry in catalogue().items():
        if image is not None and image.removeprefix("docker://").replace("#", "/", 1) in (name, entry["uri"]):
            return {package: entry[package] for package in packages if package in entry}
    return {}


def image_for(name: str, runtime: str, cluster: Cluster, where: str, must_exist: bool = True) -> str:
    """What `runtime` must be given for the image that a recipe calls `name`. Raises UserError when it is not there."""
    known = catalogue()
    place = cluster.images.get(name) or (known[name]["uri"] if name in known else name)
    if _is_file(place):
        # pyxis reads a relative x.sqsh as the name of an image in a registry.
        path = local_path(place, where)
        if must_exist and not is_there(path):
            raise error("image-missing", f"container image {path} does not exist", where, "import it first", 3)
        return str(path)
    if runtime == "apptainer" and "://" in place and not place.startswith("docker://"):
        return place
    bare = place.removeprefix("docker://")
    if "/" not in bare and ":" not in bare and "#" not in bare:
        near = nearest(name, [*known, *cluster.images])
        raise error(
            "unknown-image",
            f"container image '{name}' is neither a known name nor a URI nor a file",
            where,
            f"did you mean '{near}'?" if near else f"known names: {', '.join([*known, *cluster.images])}",
        )
    if runtime == "pyxis":
        registry, slash, rest = bare.partition("/")
        # enroot separates the registry with '#'; a first part with a dot or a port is a registry.
        named = registry == "localhost" or (bool(set(".:") & set(registry)) and "://" not in bare)
        return f"{registry}#{rest}" if slash and named and "#" not in bare else bare
    if runtime == "apptainer":
        return f"docker://{bare.replace('#', '/', 1)}"
    raise error(
        "image-not-local",
        f"Charliecloud runs folders and .sqsh files, not '{name}'",
        where,
        "`ch-image pull` it, `ch-convert` it, and map its name in the cluster profile's `images:`",
    )


def local_path(text: str, where: str | None = None) -> Path:
    """A path of this machine as a user writes it, absolute; `~` is the user's home."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise error("no-such-home", f"{Path(text).parts[0]} is no user's home on this machine", where or text) from None


def _is_file(place: str) -> bool:
    return place.endswith((".sqsh", ".sqfs", ".sif")) or place.startswith(("/", "./", "../", "~"))
