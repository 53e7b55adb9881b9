"""Lines that follow from a failure whose cause may be another line: text -> depth, code and what to do. Data only.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from fp8launch.injob.supervisor.failure_pattern import (
    CONTAINER_ADVICE,
    END,
    EXCEPTION,
    KILLED_ADVICE,
    PEER,
    VAGUE,
    VERSION_ADVICE,
    Pattern,
)

# The first match in this order gives a line its meaning, so the special stands before the general.
SYMPTOMS: tuple[Pattern, ...] = (
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
    # PMIx also reports peers that a failure ended, so a cause that a process printed comes before it.
    Pattern(
        EXCEPTION,
        "pmix",
        "Slurm's PMIx could not connect the processes, which training does not need: set `mpi: none` in the cluster "
        "profile; if you need it, submit again without the node that it names, and report it to the site",
        r"mpi/pmix\w{0,20}: .*PMIX ERROR",
        r"mpi/pmix\w{0,20}: .*(?:pmixp_coll|pmixp_dconn)\w{0,60}: .*(?:timeout|[Cc]annot|failed)",
        r"Couldn't (?:find|load) the specified plugin name for mpi/pmix",
        r"Invalid MPI type 'pmix",
    ),
    Pattern(
        EXCEPTION,
        "nvls",
        "NCCL could not use NVLink SHARP (NVLS), for which the node's Fabric Manager and driver must be set up: set "
        "NCCL_NVLS_ENABLE: 0 under `env:`, and report it to the site",
        r"Cuda failure 801\b",
        r"transport/nvls\.cc.*NCCL WARN Cuda failure",
        r"NVLink SHARP \(NVLS\) [Mm]ulticast memory",
    ),
    Pattern(
        EXCEPTION,
        "version-mismatch",
        VERSION_ADVICE,
        r"^AttributeError: module '\S{1,200}' has no attribute",
        r"^TypeError: .*got an unexpected keyword argument",
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
    # torchrun's line about the rank of its node that ended first. Nobody but the kernel or a user ends one by SIGKILL
    # while torchrun lives, so the exceptions of its peers follow from it.
    Pattern(EXCEPTION, "killed", KILLED_ADVICE, r"failed \(exitcode: -9\) local_rank"),
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
        KILLED_ADVICE,
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
