"""What lines mean that a run failed: text -> code, how deep a cause it is, and what to do. Data only.

Texts are those of Slurm, PyTorch, Transformer Engine, NCCL, gloo, torchrun, pyxis, enroot, Apptainer and Megatron.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Depth. A dead rank makes all others fail too: NCCL and gloo report a lost peer, torchrun a dead child, srun an exit
# code. So the cause is the earliest line of the lowest depth. VAGUE only says that something ended badly.
CAUSE, EXCEPTION, PEER, END, VAGUE = range(5)


@dataclass(frozen=True)
class Pattern:
    expression: re.Pattern[str]
    code: str
    depth: int
    advice: str


def _pattern(depth: int, code: str, advice: str, *alternatives: str) -> Pattern:
    return Pattern(re.compile("|".join(alternatives)), code, depth, advice)


# The first match in this order gives a line its meaning, so the special stands before the general.
PATTERNS: tuple[Pattern, ...] = (
    _pattern(
        CAUSE,
        "time-limit",
        "ask for more time, or resume from the last checkpoint",
        r"DUE TO TIME ?LIMIT",
    ),
    _pattern(
        CAUSE,
        "hang",
        "the stacks above the line say where each rank stood; a rank without one is stopped, or stuck in the driver",
        r"^fp8launch: hang: ",
    ),
    _pattern(CAUSE, "preempted", "resume from the last checkpoint", r"DUE TO PREEMPTION"),
    _pattern(
        CAUSE,
        "node-failure",
        "resume; exclude the node if it fails again",
        r"DUE TO NODE ?FAIL",
        r"\bNODE_FAIL\b",
        r"Node failure on",
    ),
    _pattern(
        CAUSE,
        "unhealthy-node",
        "exclude the nodes that the lines above name (--exclude, or `exclude:` in the profile), and tell the site",
        r"fp8launch: \d+ of \d+ nodes are not healthy",
        r"^\S+: bad: ",
    ),
    _pattern(
        CAUSE,
        "cancelled",
        "someone, or a script, cancelled the job",
        r"\*\*\* (?:JOB|STEP) .*CANCELLED AT",
        r"srun: forcing job termination",
    ),
    _pattern(
        CAUSE,
        "gpu-failure",
        "a GPU or its link is broken: exclude the node, and tell the site",
        # Xids of hardware; others are the program's own faults.
        r"Xid \(PCI[^)]*\): (?:46|48|62|63|64|74|79|92|94|95|110|119|120|122|123|136|140|143|144|145|149|154)\b",
        r"fallen off the bus",
        r"uncorrectable (?:ECC|NVLink)",
        r"system not yet initialized",
    ),
    _pattern(
        CAUSE,
        "shared-memory",
        "/dev/shm is too small for NCCL and data loaders: --shm-size, --ipc=host, or the container runtime's setting",
        r"/dev/shm\b.*(?:No space left|failed)",
        r"NCCL WARN.*(?:shared memory|/dev/shm)",
        r"out of shared memory",
        r"DataLoader worker .*killed by signal: Bus error",
    ),
    _pattern(
        CAUSE,
        "host-out-of-memory",
        "the node's own memory ran out: ask Slurm for more (--mem=0), or use fewer data loader workers",
        r"oom[_-]kill",
        r": task.? \d.*: Out Of Memory",
        r"Out of memory: Killed process",
        r"DataLoader worker .*killed by signal: Killed",
        r"DefaultCPUAllocator: .*allocate memory",
        r"\[Errno 12\] Cannot allocate memory",
        r"std::bad_alloc",
        r"^MemoryError\b",
    ),
    _pattern(
        CAUSE,
        "out-of-memory",
        "lower batch.micro, add recompute, shard more (TP, PP, CP, distributed optimizer) or keep moments in bf16",
        r"\b(?:CUDA|HIP|NPU|XPU|MUSA) out of memory",
        r"OutOfMemoryError",
        r"CUDA error: out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"cudaErrorMemoryAllocation",
        r"Cuda failure.*out of memory",
    ),
    _pattern(
        CAUSE,
        "unsupported-hardware",
        "this GPU, driver or library cannot run the chosen precision: `fp8launch check --gpu` names what each GPU can",
        r"[Cc]ompute capability .*(?:required|or higher|not supported)",
        r"no kernel image is available",
        r"not supported on [\d.]+\+? architectures",
        r"No dot product attention backend is available",
        r"NVIDIA driver on your system is too old",
        r"(?:is|are) not supported (?:on|by) (?:this |the )?(?:device|GPU|hardware|arch|SM|sm_)",
        r"(?:FP8|FP4|[Bb]lock scal\w+)\b.*(?:not (?:supported|available)|requires?|only).*(?:GPU|device|Hopper|SM|sm_)",
        r"CUBLAS_STATUS_(?:NOT_SUPPORTED|ARCH_MISMATCH)",
        r"not compiled for .*sm_\d+",
        r"requires? (?:Hopper|Blackwell|SM ?\d+)",
        r"No CUDA GPUs are available",
        r"Found no NVIDIA driver",
        r"CUDA driver version is insufficient",
    ),
    _pattern(
        CAUSE,
        "nan",
        "lower the learning rate, lengthen the warm-up, keep first and last layers in bf16, or use a finer FP8 recipe",
        r"[Ff]ound NaN",
        r"[Ff]ound Inf",
        r"loss is (?:NaN|Inf)",
        r"Unexpected result (?:nan|inf|tensor\((?:nan|inf))",
        r"NaN (?:loss|detected|in)\b",
        r"grad(?:ient)? norm is (?:nan|inf)",
    ),
    _pattern(
        CAUSE,
        "missing-module",
        "the image lacks a package: see `fp8launch images`",
        r"^(?:ModuleNotFound|Import)Error: ",
        r"version `(?:GLIBC|GLIBCXX|CXXABI)_[^ ]* not found",
    ),
    _pattern(
        CAUSE,
        "bad-arguments",
        "`fp8launch check` finds such arguments before the job is queued",
        r"\w\.py: error: ",
        r": error: (?:unrecognized arguments|argument |the following arguments|ambiguous option)",
        r"ArgumentError",
        r"FP8 execution requires .*divisible",
    ),
    _pattern(
        CAUSE,
        "disk-full",
        "free space, or put checkpoints elsewhere",
        r"No space left on device",
        r"Disk quota exceeded",
        r"PytorchStreamWriter failed writing",
        r"inline_container\.cc.*unexpected pos",
    ),
    _pattern(
        CAUSE,
        "storage",
        "the file system failed under the job: try again; tell the site if it stays",
        r"\[Errno (?:5|107|108|116|121)\]",
        r"Stale file handle",
    ),
    _pattern(
        CAUSE,
        "checkpoint-mismatch",
        "the checkpoint is of another model or layout: `fp8launch diff` with its recipe, or load nothing",
        r"Error\(s\) in loading state_dict",
        r"value from checkpoint \(.*\) is not equal to the input argument",
        r"size mismatch for .*copying a param",
    ),
    _pattern(
        CAUSE,
        "missing-checkpoint",
        "check checkpoint.load",
        r"exit-on-missing-checkpoint' set",
        r"FileNotFoundError.*(?:checkpoint|iter_\d+|\.metadata)",
        r"Checkpoint(?:ing)?Exception",
    ),
    _pattern(
        CAUSE,
        "missing-data",
        "check data.blend and data.tokenizer, and that their folders are mounted in the container",
        r"(?:FileNotFoundError|No such file or directory).*(?:\.bin|\.idx|tokenizer|vocab|merges)\b",
        r"(?:\.bin|\.idx|[Dd]ataset) .*(?:does not exist|not found)",
        r"does not exist.*\.(?:bin|idx)",
        r"Can't load tokenizer for",
        r"couldn't connect to 'https?://",
        r"access a gated repo",
    ),
    _pattern(
        CAUSE,
        "port-in-use",
        "another job holds the rendezvous port on that node",
        r"EADDRINUSE",
        r"[Aa]ddress already in use",
    ),
    _pattern(
        CAUSE,
        "container",
        "the container could not start: check the image name and the mounts",
        r"pyxis: .*(?:error|failed|couldn't)",
        r"enroot-\w+: \[ERROR\]",
        r"FATAL:\s+(?:container|could not open image|while)",
        r"spank.*required plugin",
    ),
    _pattern(
        CAUSE,
        "command-not-found",
        "check the container and the set-up lines",
        r"command not found",
        r"execve\(\).*No such file or directory",
        r"can't open file '.*No such file or directory",
    ),
    _pattern(
        EXCEPTION,
        "slurm",
        "Slurm could not start the processes: submit again, without the node that it names; tell the site if it stays",
        r"srun: error: Unable to (?:create step|confirm allocation|allocate resources)",
        r"Task launch for StepId=\S+ failed on node",
        r"(?:Prolog|Epilog) (?:hung|error|failed)",
        r"Job credential expired",
        r"Unable to contact slurm controller",
    ),
    # A program's own exception, known only by its kind.
    _pattern(EXCEPTION, "missing-file", "check paths and mounts", r"\bFileNotFoundError: "),
    _pattern(
        EXCEPTION,
        "permission",
        "check who owns the files, and the mounts",
        r"\bPermissionError: ",
        r"Permission denied",
    ),
    _pattern(
        EXCEPTION,
        "cuda-error",
        "try again on another node; if it stays, run with CUDA_LAUNCH_BLOCKING=1",
        r"CUDA error: ",
        r"AcceleratorError",
        r"Xid \(PCI",
        r"(?:CUBLAS|CUDNN)_STATUS_",
        r"cuDNN Error",
    ),
    # Peers that noticed that someone is gone.
    _pattern(
        PEER,
        "nccl",
        "a rank stopped or the network failed: find the rank that stopped first; NCCL_DEBUG=INFO shows the transport",
        r"NCCL error",
        r"nccl(?:System|Internal|Remote|UnhandledCuda)Error",
        r"NCCL WARN .*(?:closed by remote|[Tt]imeout|abort)",
        r"Watchdog caught collective operation timeout",
        r"NCCL WARN (?:NET/IB|Call to ibv_)",
        r"ProcessGroupNCCL.*(?:[Tt]imeout|terminate|aborted|watchdog hang)",
        r"DeepEP error: timeout",
        r"DistBackendError",
    ),
    _pattern(
        PEER,
        "network",
        "a rank stopped or could not be reached: check the rendezvous address and port",
        r"\[[^\]]*gloo[^\]]*\]",
        r"[Gg]loo (?:connect|.*fail)",
        r"Connection (?:closed|reset) by peer",
        r"Dist(?:Network|Store)Error",
        r"client socket has (?:timed out|failed)",
        r"Broken pipe",
        r"TCPStore.*(?:fail|timed out)",
        r"Rendezvous(?:Connection|Timeout)Error",
    ),
    # How processes ended: the only trace if nothing was printed before.
    _pattern(
        END,
        "segfault",
        "a native library crashed: try another image",
        r"Segmentation fault",
        r"SIGSEGV",
        r"[Ss]ignal 11\b",
        r"exitcode\s*:? -11",
    ),
    _pattern(
        END,
        "aborted",
        "a native library crashed: try another image",
        r"SIGABRT",
        r"\bAborted\b",
        r"[Ss]ignal 6\b",
        r"exitcode\s*:? -6",
        r"Bus error",
        r"core dumped",
    ),
    _pattern(
        END,
        "killed",
        "killed from outside, often for its memory",
        r"SIGKILL",
        r"[Ss]ignal 9\b",
        r"exitcode\s*:? -9",
        r"(?:^|[: ])Killed\s*(?:$|\w+ )",
    ),
    _pattern(
        END,
        "terminated",
        "stopped from outside",
        r"SIG(?:TERM|INT|HUP)\b",
        r"[Ss]ignal 15\b",
        r"death signal",
        r"got signal: (?:1|2|15)\b",
        r"KeyboardInterrupt",
        r": Terminated\b",
    ),
    _pattern(
        VAGUE,
        "crash",
        "look at the end of the log",
        r"ChildFailedError",
        r"Exited with exit code [1-9]",
        r"exitcode\s*:\s*[1-9]",
        r"(?:srun|slurmstepd): error: ",
    ),
)

# A line that matches a pattern holds one of these. Looking for fixed texts first is what keeps long logs fast; a test
# holds the two together.
NEEDLES: tuple[bytes, ...] = tuple(
    text.encode()
    for text in (
        "Traceback", '  File "', "rror", "Exception", "DUE TO", "CANCELLED", "NODE_FAIL", "Node failure", "forcing job",
        "not healthy", ": bad: ", "fp8launch: hang: ",
        "oom", "Out Of Memory", "out of memory", "DataLoader worker", "DefaultCPUAllocator", "_STATUS_", "apability",
        "no kernel image", "not supported", "not available", "require", "only", "not compiled", "No CUDA GPUs",
        "NVIDIA driver", "driver version", "ound NaN", "ound Inf", "loss is", "Unexpected result", "NaN ", "norm is",
        "No space left", "Disk quota", "fallen off", "system not yet", "/dev/shm", "shared memory",
        "bad_alloc", "[Errno", "GLIBC", "CXXABI", "PytorchStreamWriter", "inline_container", "Stale file", "divisible",
        "from checkpoint", "size mismatch", "Can't load", "couldn't connect", "gated repo", "Task launch", "Prolog",
        "Epilog", "slurm controller", "credential expired", "got signal",
        "missing-checkpoint", "No such file", "not exist", "not found", "EADDRINUSE",
        "ddress already", "pyxis", "enroot", "FATAL", "spank", "Permission denied", "Xid", "uncorrectable",
        "NCCL WARN", "Watchdog", "ProcessGroupNCCL", "gloo", "Gloo", "by peer", "client socket", "Broken pipe",
        "TCPStore", "Segmentation", "SIG", "ignal ", "exitcode", "exit code", "Aborted", "core dumped", "Killed",
        "Terminated", "KeyboardInterrupt", "death signal", "No dot product attention",
    )
)  # fmt: skip
