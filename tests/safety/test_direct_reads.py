"""A lint rule: files that somebody else may have written are opened by `fp8launch.injob.regular_files` only.

Everything else that opens or reads a file is listed here with the reason why nobody else's file can be there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fp8launch

PACKAGE = Path(fp8launch.__file__).parent
# Calls that read a whole file, or that open it by its name.
READS = {"read_text", "read_bytes", "safe_load", "memory_map", "OSFile", "ParquetFile", "from_file", "fromfile"}
READS |= {"memmap", "is_zipfile", "copyfile", "copytree", "copy2", "loadtxt", "genfromtxt"}
OPENS = {"open", "fdopen"}

OWN_DATA = "comes with the package"
KERNEL = "a file of the kernel"
OWN_STATE = "below the user's own state or cache folder"
OWN_RUN = "the supervisor acts only in a run folder of its own user"
OWN_BUILD = "below the folder of a build, which must be the user's own"
CHECKED_CACHE = "in a cache folder whose owner and mode were checked"
OWN_TEMPORARY = "in a temporary folder of this process"
JOB = "runs in the job, on paths of the recipe that the user submitted"
EXCEPTIONS = {
    "check/job_paths.py:_apptainer_binds": "in /etc, which belongs to root",
    "check/rules/table.py:table": OWN_DATA,
    "check/run_root.py:_file_system": KERNEL,
    "plugins/validators/verdict_cache.py:_basis": OWN_DATA,
    "plugins/validators/verdict_cache.py:_read": CHECKED_CACHE,
    "plugins/importer/cli.py:_read": "a launch script may come through a pipe; reads 1 MiB at most",
    "plugins/init/layout.py:with_layout": "no file: values that the planner itself made",
    "plugins/plan/files.py:recipe_text": "no file: a value that `plan` itself made",
    "plugins/notify/injob/webhook.py:post": "opens a connection, and no file",
    "plugins/images/image_store.py:without_secrets": "enroot's credentials of the user",
    "plugins/data/chat/dataset.py:_write_splits": OWN_BUILD,
    "plugins/data/documents.py:_batches": "pyarrow maps the file; `find_files` takes regular files only",
    "plugins/data/files.py:sync": "opens what it has written, and reads nothing",
    "plugins/data/merge.py:write_index": OWN_BUILD,
    "plugins/data/sources.py:row_groups": "pyarrow reads the end of the file; `find_files` takes regular files only",
    "plugins/data/tokenizer.py:HuggingFaceEncoder.__init__": "the file's size was limited for its checksum",
    "plugins/data/workers.py:resident_bytes": KERNEL,
    "plugins/forks/store.py:fork_of": "in the user's own configuration folder",
    "plugins/bridge/fields.py:fields_of": OWN_DATA,
    "plugins/bridge/index.py:_read": OWN_DATA,
    "plugins/bridge/own_program.py:hub_models": OWN_DATA,
    "plugins/bridge/published.py:rows": OWN_DATA,
    "plugins/convert/engine.py:architectures": OWN_DATA,
    "injob/rank/": JOB,
    "injob/regular_files.py:open_regular": "this is the function to use",
    "injob/supervisor/failure_patterns.py:_read_table": OWN_DATA,
    "injob/supervisor/health_watch.py:HealthWatch.look": OWN_RUN,
    "injob/supervisor/run_records.py:recorded_roots": OWN_STATE,
    "injob/supervisor/run_records.py:process_stat": KERNEL,
    "injob/local_job.py:_words": KERNEL,
    "logs/open_log.py:_blocks": "opens the stream that open_regular returned",
    "megatron/schema.py:_with_script": OWN_DATA,
    "megatron/schema.py:schema_text": OWN_DATA,
    "plugins/validators/megatron_core.py:_unpacked": "a wheel whose checksum is known",
    "plugins/validators/megatron_core.py:megatron_version": "installed, or in a checked cache",
    "plugin_registry.py:_any_entry_point": "an installed package's list of entry points",
    "plugins/convert/injob/": JOB,
    "recipe/catalog.py:_first_comment": OWN_DATA,
    "recipe/yaml_source.py:read_start": "a recipe may come through /dev/fd; refuses pipes by name, reads 1 MiB at most",
    "plugins/plan/calibration.py:reference_rates": OWN_DATA,
    "plugins/measure/injob/nsight.py:pending": KERNEL,
    "plugins/plan/injob/rates.py:_cpu": "the kernel's file",
    "plugins/plan/known_runs.py:known_runs": OWN_DATA,
    "plugins/prove/proof_cache.py:_own_files": OWN_DATA,
    "plugins/prove/proof_cache.py:read": CHECKED_CACHE,
    "plugins/prove/world.py:_failure": OWN_TEMPORARY,
    "plugins/prove/world.py:train": OWN_TEMPORARY,
    "plugins/rehearse/": "runs releases of known checksums in a process of its own, on files of that process",
    "rundir/atomic_io.py:held": "opens a lock, and reads nothing",
    "rundir/atomic_io.py:sync_folder": "opens a folder, and reads nothing",
    "rundir/run_dir.py:_copy_package": OWN_DATA,
    "rundir/run_dir.py:create_run_folder": OWN_DATA,
    "plugins/submitit/scheduler.py:RunTask.__call__": JOB,
    "plugins/validators/wheels.py:_download_once": CHECKED_CACHE,
}


def test_only_listed_code_opens_files_itself() -> None:
    found = set(direct_reads())
    listed = {name for name in found for exception in EXCEPTIONS if covers(exception, name)}
    assert sorted(found - listed) == [], "use fp8launch.injob.regular_files, or add the reason to EXCEPTIONS"


def test_no_exception_is_out_of_date() -> None:
    found = list(direct_reads())
    assert [name for name in EXCEPTIONS if not any(covers(name, other) for other in found)] == []


def covers(exception: str, name: str) -> bool:
    return name == exception or (exception.endswith("/") and name.startswith(exception))


def direct_reads() -> Iterator[str]:
    """FILE:FUNCTION of each call that reads a file directly."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for function in reading_functions(ast.parse(file.read_text()), ""):
            yield f"{file.relative_to(PACKAGE).as_posix()}:{function}"


def reading_functions(node: ast.AST, inside: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call) and reads(child):
            yield name
        yield from reading_functions(child, name)


def reads(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in READS:
        return True
    if name not in OPENS:
        return False
    words = {child.value for child in ast.walk(call) if isinstance(child, ast.Constant)}
    flags = {child.attr for child in ast.walk(call) if isinstance(child, ast.Attribute)}
    keywords = {keyword.arg for keyword in call.keywords}
    modes = {word for word in words if isinstance(word, str) and set(word) <= set("rwxabt+:gz") and word}
    writes = any(set(mode) & set("wxa+") for mode in modes) or flags & {"O_WRONLY", "O_RDWR", "O_CREAT"}
    return not writes and "fileobj" not in keywords and not is_descriptor(call, name)


def is_descriptor(call: ast.Call, name: str) -> bool:
    """`os.fdopen(handle, ...)`: what was opened is looked at, not what is made of it."""
    return name == "fdopen" or "devnull" in ast.unparse(call)


def test_the_rule_sees_every_kind_of_read() -> None:
    for line in (
        "p.read_text()", "p.read_bytes()", "p.open()", "p.open('rb')", "open(p)", "open(p, 'r')",
        "os.open(p, os.O_RDONLY)", "gzip.open(p)", "yaml.safe_load(p)", "numpy.memmap(p)", "shutil.copyfile(p, q)",
        "tarfile.open(p)",
    ):  # fmt: skip
        assert list(reading_functions(ast.parse(line), "")), line
    for line in ("p.open('wb')", "open(p, 'a')", "os.open(p, os.O_WRONLY | os.O_CREAT)", "open_regular(p)"):
        assert not list(reading_functions(ast.parse(line), "")), line
