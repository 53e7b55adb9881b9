"""Provide Megatron's compiled dataset helper, which its wheels cannot compile.

Megatron runs `make` next to `megatron/core/datasets/helpers.cpp` at every start and exits with 1 if that fails. The
wheels contain the compiled helper but no Makefile, so this step ends every run from a wheel although there is nothing
to compile. Here the step is skipped if the helper can be imported. Otherwise the helper is compiled into a cache
folder, because site-packages may be read-only.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fp8launch.injob.rank.compat import cache_folders

HELPER = "megatron.core.datasets.helpers_cpp"


class HelperProblem(Exception):
    """The helper is missing and cannot be compiled; the message says why."""


def install() -> None:
    """Make the helper importable in this process, and skip Megatron's own step. Raises HelperProblem.

    Every process calls this. On each node the first one compiles, and the others wait for it.
    """
    utils = importlib.import_module("megatron.core.datasets.utils")
    datasets = importlib.import_module("megatron.core.datasets")
    folder = Path(str(utils.__file__)).parent
    try:
        importlib.import_module(HELPER)
    except ImportError:
        built = _build(folder / "helpers.cpp")
        datasets.__path__.append(str(built.parent))
        importlib.invalidate_caches()
        importlib.import_module(HELPER)
    # Megatron looks the function up when it calls it, in rank 0 only.
    setattr(utils, "compile_helpers", lambda: None)  # noqa: B010 (mypy knows no such name in a module found by name)


def _build(source: Path) -> Path:
    """Compile `source` once per content, Python and machine. Return the file of the extension module."""
    if not source.is_file():
        raise HelperProblem(f"Megatron's dataset helper is not compiled and its source is missing: {source}")
    cache = cache_folders.private_folder()
    if cache is None:
        raise HelperProblem(
            "Megatron's dataset helper must be compiled, but no cache folder can be written; set XDG_CACHE_HOME"
        )
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    key = hashlib.sha256(source.read_bytes() + suffix.encode()).hexdigest()[:16]
    target = cache / key / f"helpers_cpp{suffix}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / "lock"):
        if not target.is_file():
            _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        raise HelperProblem(
            "Megatron's dataset helper is not compiled for this Python and there is no C++ compiler (c++)"
        )
    python_headers = Path(sysconfig.get_paths()["include"])
    if not (python_headers / "Python.h").is_file():
        raise HelperProblem(f"Megatron's dataset helper must be compiled, but Python.h is not in {python_headers}")
    # Written under another name first, so that no process, such as one on another node, sees a partial file.
    partial = target.with_name(f".{os.uname().nodename}.{os.getpid()}.so")
    command = [compiler, "-O3", "-Wall", "-shared", "-std=c++17", "-fPIC", "-fdiagnostics-color=never"]
    command += [f"-I{path}" for path in (python_headers, _pybind11_headers())]
    done = subprocess.run(
        [*command, str(source), "-o", str(partial)], capture_output=True, errors="replace", check=False
    )
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if "error" in line] or lines or [str(done.returncode)]
        raise HelperProblem(f"compiling Megatron's dataset helper failed: {errors[0]}")
    partial.replace(target)


def _pybind11_headers() -> Path:
    """Return the headers of the package pybind11, else torch's copy."""
    try:
        return Path(importlib.import_module("pybind11").get_include())
    except ImportError:
        import torch

        headers = Path(str(torch.__file__)).parent / "include"
        if not (headers / "pybind11" / "pybind11.h").is_file():
            raise HelperProblem(
                "Megatron's dataset helper must be compiled, but there are no pybind11 headers; pip install pybind11"
            ) from None
        return headers


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        # On a file system without locks every process compiles, which the rename makes harmless.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
