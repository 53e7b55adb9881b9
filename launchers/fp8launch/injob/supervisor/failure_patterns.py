"""What lines mean that a run failed: text -> code, how deep a cause it is, and what to do. Data only.

Texts are those of Slurm, PyTorch, Transformer Engine, NCCL, gloo, torchrun, pyxis, enroot, Apptainer, Megatron, and of
the worker (`injob/rank/worker.py`).

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from fp8launch.injob.supervisor.line_pattern import LinePattern

# Depth. A dead rank makes all others fail too: NCCL and gloo report a lost peer, torchrun a dead child, srun an exit
# code. So the cause is the earliest line of the lowest depth. VAGUE only says that something ended badly.
CAUSE, EXCEPTION, PEER, END, VAGUE = range(5)

CONTAINER_ADVICE = "the container could not start: check the image name and the mounts"


class Pattern:
    """Lines of one meaning: any of the alternatives."""

    def __init__(self, depth: int, code: str, advice: str, *alternatives: str) -> None:
        self.depth, self.code, self.advice = depth, code, advice
        self.alternatives = [LinePattern(text) for text in alternatives]

    def matches(self, line: str) -> bool:
        return any(alternative.matches(line) for alternative in self.alternatives)


# The first match in this order gives a line its meaning, so the special stands before the general.
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        CAUSE,
        "time-limit",
        "increase resources.time, or resume from the last checkpoint",
        r"DUE TO TIME ?LIMIT",
    ),
    Pattern(
        CAUSE,
        "hang",
        "the stacks above this line show where each rank was; a rank without a stack is stopped, or stuck in the "
        "driver",
        r"^fp8launch: hang: ",
    ),
    Pattern(CAUSE, "preempted", "resume from the last checkpoint", r"DUE TO PREEMPTION"),
    Pattern(
        CAUSE,
        "node-failure",
        "resume; exclude the node if it fails again",
        r"DUE TO NODE ?FAIL",
        r"\bNODE_FAIL\b",
        r"Node failure on",
    ),
    Pattern(
        CAUSE,
        "unhealthy-node",
        "exclude the nodes named above (--exclude, or `exclude:` in the cluster profile), and report them to the site",
        r"fp8launch: \d{1,9} of \d{1,9} nodes are not healthy",
        r"^\S{1,255}: bad: ",
    ),
    Pattern(
        CAUSE,
        "cancelled",
        "someone, or a script, cancelled the job",
        r"\*\*\* (?:JOB|STEP) .*CANCELLED AT",
        r"srun: forcing job termination",
    ),
    Pattern(
        CAUSE,
        "gpu-failure",
        "a GPU or its link is broken: exclude the node, and report it to the site",
        # Xids of hardware; others are the program's own faults.
        r"Xid \(PCI[^)]{0,40}\): (?:46|48|62|63|64|74|79|92|94|95|110|119|120|122|123|136|140|143|144|145|149|154)\b",
        r"fallen off the bus",
        r"uncorrectable (?:ECC|NVLink)",
        r"system not yet initialized",
    ),
    Pattern(
        CAUSE,
        "shared-memory",
        "/dev/shm is too small for NCCL and data loaders: --shm-size, --ipc=host, or the container runtime's setting",
        r"/dev/shm\b.*(?:No space left|failed)",
        r"NCCL WARN.*(?:shared memory|/dev/shm)",
        r"out of shared memory",
        r"DataLoader worker .*killed by signal: Bus error",
    ),
    Pattern(
        CAUSE,
        "host-out-of-memory",
        "the memory of the node, or the part of it that Slurm gives the job, ran out: ask for more (`memory:` in the "
        "cluster profile; 0 is all of a node), or use fewer data loader workers",
        # Slurm's own watch over --mem, and that of its control groups.
        r"xceeded (?:job|step) memory limit",
        r"exceeded memory limit \(\d",
        r"oom_kill",
        r"oom-kill",
        r": task.? \d.*: Out Of Memory",
        r"Out of memory: Killed process",
        r"DataLoader worker .*killed by signal: Killed",
        r"DefaultCPUAllocator: .*allocate memory",
        r"\[Errno 12\] Cannot allocate memory",
        r"std::bad_alloc",
        r"^MemoryError\b",
        r"^fp8launch: host-out-of-memory: ",
    ),
    Pattern(
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
    Pattern(
        CAUSE,
        "unsupported-hardware",
        "this GPU, driver or library cannot run the chosen precision: docs/gpus.md lists the precisions of each GPU",
        r"ompute capability .*(?:required|or higher|not supported)",
        r"no kernel image is available",
        r"not supported on [\d.]{1,20}\+? architectures",
        r"No dot product attention backend is available",
        r"NVIDIA driver on your system is too old",
        r" not supported (?:on|by) (?:this |the )?(?:device|GPU|hardware|arch|SM|sm_)",
        r"FP8\b.*(?:not (?:supported|available)|require|only).*(?:GPU|device|Hopper|SM|sm_)",
        r"FP4\b.*(?:not (?:supported|available)|require|only).*(?:GPU|device|Hopper|SM|sm_)",
        r"lock scal(?:e|es|ed|ing)\b.*(?:not (?:supported|available)|require|only).*(?:GPU|device|Hopper|SM|sm_)",
        r"CUBLAS_STATUS_NOT_SUPPORTED",
        r"CUBLAS_STATUS_ARCH_MISMATCH",
        r"not compiled for .*sm_\d",
        r"requires? (?:Hopper|Blackwell|SM ?\d)",
        r"^fp8launch: no GPU is visible",
        r"No CUDA GPUs are available",
        r"Found no NVIDIA driver",
        r"CUDA driver version is insufficient",
    ),
    Pattern(
        CAUSE,
        "nan",
        "lower the learning rate, lengthen the warm-up, keep first and last layers in bf16, or use a finer FP8 recipe",
        r"ound NaN",
        r"ound Inf",
        r"loss is (?:NaN|Inf)",
        r"Unexpected result (?:nan|inf|tensor\((?:nan|inf))",
        r"NaN (?:loss|detected|in)\b",
        r" norm is (?:nan|inf)",
    ),
    Pattern(
        CAUSE,
        "missing-module",
        "the image does not contain a package: see `fp8launch images`",
        r"^ModuleNotFoundError: ",
        r"^ImportError: ",
        r"version `(?:GLIBC|GLIBCXX|CXXABI)_.* not found",
        r"^fp8launch: torch is not installed",
        r"^fp8launch: Megatron-Core .* is not installed",
        r"^fp8launch: megatron-core .* has no megatron\.training",
        r"^fp8launch: .* needs Transformer Engine",
    ),
    Pattern(
        CAUSE,
        "bad-arguments",
        "`fp8launch check` finds such arguments before the job is queued",
        r"\w\.py: error: ",
        r": error: (?:unrecognized arguments|argument |the following arguments|ambiguous option)",
        r"ArgumentError",
        r"FP8 execution requires .*divisible",
        r"^fp8launch: .* on a CPU: there is no FP8",
        r"^fp8launch: .* would train in bf16",
        r"^fp8launch: training on a CPU also needs",
        r"^fp8launch: local rank .* needs its own GPU",
        r"^fp8launch: .* is not supported by fp8launch's own entry",
    ),
    # "No space left on device" is the kernel's word for a limit of 0, which is no matter of disks.
    Pattern(
        CAUSE,
        "user-namespaces",
        "the node lets users create no user namespaces, which containers need: the site sets user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone, and on Ubuntu kernel.apparmor_restrict_unprivileged_userns or a profile",
        r"enroot-nsenter: failed to (?:create|enter) user namespace",
        r"ch-run\[\d{1,10}\]: error: can't init user\+mount namespaces",
        r"Failed to create user namespace: ",
        r"Failed to create mount namespace: mount namespace requires privileges",
        r"User namespace not supported, and program not running privileged",
    ),
    Pattern(
        CAUSE,
        "container-disk-full",
        "the node's disk for containers (ENROOT_DATA_PATH) is full: exclude the node, and report it to the site",
        r"pyxis: .*No space left on device",
        r"pyxis: .*Disk quota exceeded",
        r"enroot.*No space left on device",
        r"unsquashfs.*No space left on device",
    ),
    Pattern(
        CAUSE,
        "container-left",
        "an earlier attempt on this node left its container: remove it with `enroot remove`, or submit a new job",
        r"File already exists: .*/pyxis_",
    ),
    Pattern(
        CAUSE,
        "disk-full",
        "free disk space, or choose another checkpoint.dir",
        r"No space left on device",
        r"Disk quota exceeded",
        r"PytorchStreamWriter failed writing",
        r"inline_container\.cc.*unexpected pos",
    ),
    Pattern(
        CAUSE,
        "storage",
        "the file system failed during the job: retry; if it fails again, report it to the site",
        r"\[Errno (?:5|107|108|116|121)\]",
        r"Stale file handle",
    ),
    Pattern(
        CAUSE,
        "checkpoint-mismatch",
        "the checkpoint belongs to another model or layout: compare the recipes with `fp8launch diff`, or remove "
        "checkpoint.load",
        r"Error\(s\) in loading state_dict",
        r"value from checkpoint \(.*\) is not equal to the input argument",
        r"size mismatch for .*copying a param",
    ),
    Pattern(
        CAUSE,
        "missing-checkpoint",
        "check checkpoint.load",
        r"exit-on-missing-checkpoint' set",
        r"FileNotFoundError.*(?:checkpoint|iter_\d|\.metadata)",
        r"CheckpointException",
        r"CheckpointingException",
    ),
    Pattern(
        CAUSE,
        "missing-data",
        "check data.blend and data.tokenizer, and that their folders are mounted in the container",
        r"FileNotFoundError.*(?:\.bin|\.idx|tokenizer|vocab|merges)\b",
        r"No such file or directory.*(?:\.bin|\.idx|tokenizer|vocab|merges)\b",
        r"\.bin .*(?:does not exist|not found)",
        r"\.idx .*(?:does not exist|not found)",
        r"ataset .*(?:does not exist|not found)",
        r"does not exist.*\.(?:bin|idx)",
        r"Can't load tokenizer for",
        r"couldn't connect to 'https?://",
        r"access a gated repo",
    ),
    Pattern(
        CAUSE,
        "port-in-use",
        "another job uses the rendezvous port on that node",
        r"EADDRINUSE",
        r"ddress already in use",
    ),
    Pattern(
        CAUSE,
        "container",
        CONTAINER_ADVICE,
        r"pyxis: .*\[ERROR\]",
        r"enroot-\w{1,40}: \[ERROR\]",
        r"FATAL:\s{1,20}(?:container|could not open image|while)",
        r"^fp8launch: \S{1,255} cannot find the address of ",
    ),
    Pattern(
        CAUSE,
        "missing-file",
        "check paths and mounts",
        r"^fp8launch: no such script: ",
    ),
    Pattern(
        CAUSE,
        "command-not-found",
        "check the container and the set-up lines",
        r"command not found",
        r"execve\((?:2)?\).*No such file or directory",
        r"can't open file '.*No such file or directory",
    ),
    Pattern(
        EXCEPTION,
        "slurm",
        "Slurm could not start the processes: submit again without the node that it names; if it fails again, report "
        "it to the site",
        r"srun: error: Unable to (?:create step|confirm allocation|allocate resources)",
        r"Task launch for StepId=\S+ failed on node",
        r"Prolog (?:hung|error|failed)",
        r"Epilog (?:hung|error|failed)",
        r"Job credential expired",
        r"Unable to contact slurm controller",
    ),
    # Only that the container failed: the line that says why is one of its own.
    Pattern(
        EXCEPTION,
        "container",
        CONTAINER_ADVICE,
        r"pyxis: .*(?:error|failed|couldn't)",
        r"spank.*required plugin",
    ),
    # A program's own exception, known only by its kind.
    Pattern(EXCEPTION, "missing-file", "check paths and mounts", r"\bFileNotFoundError: "),
    Pattern(
        EXCEPTION,
        "permission",
        "check who owns the files, and the mounts",
        r"\bPermissionError: ",
        r"Permission denied",
    ),
    Pattern(
        EXCEPTION,
        "cuda-error",
        "retry on another node; if it fails again, run with CUDA_LAUNCH_BLOCKING=1",
        r"CUDA error: ",
        r"AcceleratorError",
        r"Xid \(PCI",
        r"CUBLAS_STATUS_",
        r"CUDNN_STATUS_",
        r"cuDNN Error",
    ),
    # Peers that noticed that someone is gone.
    Pattern(
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
    Pattern(
        PEER,
        "network",
        "a rank stopped or could not be reached: check the rendezvous address and port",
        r"\[[^\][]{0,200}gloo[^\][]{0,200}\]",
        r"loo connect",
        r"Gloo .*fail",
        r"gloo .*fail",
        r"Connection (?:closed|reset) by peer",
        r"Dist(?:Network|Store)Error",
        r"client socket has (?:timed out|failed)",
        r"Broken pipe",
        r"TCPStore.*(?:fail|timed out)",
        r"Rendezvous(?:Connection|Timeout)Error",
    ),
    # How processes ended: the only trace if nothing was printed before.
    Pattern(
        END,
        "segfault",
        "a native library crashed: try another image",
        r"Segmentation fault",
        r"SIGSEGV",
        r"ignal 11\b",
        r"exitcode\s{0,20}:? -11",
    ),
    Pattern(
        END,
        "aborted",
        "a native library crashed: try another image",
        r"SIGABRT",
        r"\bAborted\b",
        r"ignal 6\b",
        r"exitcode\s{0,20}:? -6",
        r"Bus error",
        r"core dumped",
    ),
    Pattern(
        END,
        "killed",
        "killed from outside, most often by the kernel because the node's memory ran out",
        r"SIGKILL",
        r"ignal 9\b",
        r"exitcode\s{0,20}:? -9",
        r"(?:^|[: ])Killed\s{0,20}(?:$|\w{1,40} )",
    ),
    Pattern(
        END,
        "terminated",
        "stopped from outside",
        r"SIG(?:TERM|INT|HUP)\b",
        r"ignal 15\b",
        r"death signal",
        r"got signal: (?:1|2|15)\b",
        r"KeyboardInterrupt",
        r": Terminated\b",
    ),
    Pattern(
        VAGUE,
        "crash",
        "look at the end of the log",
        r"ChildFailedError",
        r"Exited with exit code [1-9]",
        r"exitcode\s{0,20}:\s{0,20}[1-9]",
        r"srun: error: ",
        r"slurmstepd: error: ",
    ),
)
