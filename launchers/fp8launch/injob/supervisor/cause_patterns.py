"""Lines that name the cause of a failure: text -> code and what to do. Data only.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from fp8launch.injob.supervisor.failure_pattern import CAUSE, CONTAINER_ADVICE, STEP_CANCELLED, VERSION_ADVICE, Pattern

# The first match in this order gives a line its meaning, so the special stands before the general.
CAUSES: tuple[Pattern, ...] = (
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
    Pattern(
        CAUSE,
        "unhealthy-training",
        "lower the learning rate, look at the data of these iterations, or let `health.actions` rewind the run",
        r"^fp8launch: unhealthy: ",
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
        r"\*\*\* JOB .*CANCELLED AT",
        r"srun: forcing job termination",
    ),
    Pattern(
        CAUSE,
        STEP_CANCELLED,
        "Slurm ended the processes: somebody cancelled the job or its step, or srun ended the step because a process "
        "failed; the output of srun and of the batch script (slurm-JOB.out) shows which",
        r"\*\*\* STEP .*CANCELLED AT",
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
        "stream-capture",
        "an operation that CUDA graphs do not allow ran while one was captured; another node does not help: remove "
        "megatron.cuda_graph_impl, or leave that module out of megatron.cuda_graph_modules",
        r"operation not permitted when stream is capturing",
        r"operation would make the legacy stream depend on a capturing blocking stream",
        r"operation failed due to a previous error during capture",
        r"CUDA error: .*cudaErrorStreamCapture",
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
        "triton-kernel",
        "the driver cannot load a kernel that Triton compiled: set TRITON_CACHE_DIR to an empty folder, because the "
        "cache may be of another GPU; if it fails again, the image's Triton needs a newer driver",
        r"Triton Error \[CUDA\]: device kernel image is invalid",
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
    # These also begin with ImportError, so they stand before `missing-module`.
    Pattern(
        CAUSE,
        "library-mismatch",
        "a compiled library was built against another version of a library that it needs: use one image for "
        "PyTorch, CUDA and Transformer Engine, mount no packages over it, and check LD_LIBRARY_PATH; else rebuild it",
        r"^(?:OSError|ImportError): .*undefined symbol: ",
        r"symbol lookup error: .*undefined symbol: ",
    ),
    Pattern(
        CAUSE,
        "version-mismatch",
        VERSION_ADVICE,
        r"^ImportError: cannot import name '",
    ),
    Pattern(
        CAUSE,
        "missing-module",
        "a package is missing: use an image with it (`fp8launch images`), or install it for the job's Python",
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
        "max-connections",
        "set CUDA_DEVICE_MAX_CONNECTIONS: auto under `env:` in the recipe, which becomes what the layout needs on this "
        "GPU, and remove other settings of it (cluster profile, image)",
        r"^AssertionError: .*CUDA_DEVICE_MAX_CONNECTIONS",
        r"^(?:RuntimeError|ValueError|Exception): .*CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    Pattern(
        CAUSE,
        "fp8-shape",
        "MXFP8 needs dimensions that are multiples of 32 on every GPU: choose such a batch.sequence (after CP and TP) "
        "and sizes of layers, set megatron.moe_router_padding_for_quantization: true for experts, or use another "
        "precision.recipe",
        r"MXFP8 requires tensor dims that are divisible by",
        r"Assertion failed: .*% MXFP8_BLOCK_SIZE == 0",
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
    Pattern(
        CAUSE,
        "no-pyxis",
        "this Slurm lacks the plugin pyxis: choose another `runtime:` in the cluster profile (apptainer, or none), or "
        "ask the site to install it; `fp8launch doctor` shows what is there",
        r"unrecognized option '--container-",
    ),
    # "No space left on device" is also how the kernel reports a limit of 0, which has nothing to do with disks.
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
        "container-unwritable",
        "enroot cannot write to its folders on the node: correct ENROOT_RUNTIME_PATH, ENROOT_DATA_PATH and the like if "
        "you set them, else exclude the node, and report it to the site",
        r"pyxis: .*cannot create directory .*Permission denied",
        r"pyxis: .*cannot create directory .*Read-only file system",
        r"failed to make directory .*Permission denied",
        r"failed to make directory .*Read-only file system",
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
        "pickled-state",
        "Transformer Engine loads the state of delayed scaling only from a trusted checkpoint: if you trust everyone "
        "who could write it, set checkpoint.allow_pickle: true. To resume a run that was submitted without it, "
        "`export NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1` before `fp8launch resume`",
        r"Refusing to load pickled Transformer Engine extra state",
    ),
    Pattern(
        CAUSE,
        "fp8-state-missing",
        "the checkpoint was written with another precision and lacks its FP8 state: resume with the precision that "
        "wrote it, or set megatron.dist_ckpt_strictness: log_all, which starts without that state",
        r"Object shard .*_extra_state.*not found in checkpoint",
        r"Missing key in checkpoint state_dict: .*_extra_state",
    ),
    Pattern(
        CAUSE,
        "scheduler-mismatch",
        "the schedule differs from the checkpoint's: to use the recipe's set "
        "megatron.override_opt_param_scheduler: true, to keep the checkpoint's "
        "megatron.use_checkpoint_opt_param_scheduler: true",
        r"OptimizerParamScheduler: class input value .* and checkpoint ?value ",
    ),
    Pattern(
        CAUSE,
        "parameter-groups",
        "Megatron finds optimizer states by learning rate, weight decay and whether experts are spread over GPUs: keep "
        "train.lr, train.min_lr and the choice of EP 1 or more as in the run that wrote the checkpoint, or set "
        "megatron.finetune: true to load only the weights",
        r"Could not find parameter group with key ",
        r"not found in param_group ",
    ),
    Pattern(
        CAUSE,
        "optimizer-mismatch",
        "the checkpoint holds other optimizers, or other parameter groups: keep optimizer, experts and EP as in the "
        "run that wrote it, or set megatron.no_load_optim: true to start with new states",
        r"Expected .* entries in state dict, but got \d",
        r"loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        r"loaded state dict has a different number of parameter groups",
    ),
    Pattern(
        CAUSE,
        "missing-optimizer",
        "the checkpoint holds no optimizer state (it was converted, or saved with no_save_optim): set "
        "megatron.finetune: true, which loads only the weights, or load another checkpoint",
        r"^KeyError: 'optimizer'",
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
        "gated-repository",
        "Hugging Face does not give you this repository: accept its license on its page, and set HF_TOKEN for the job; "
        "or download it, and set data.tokenizer to the folder",
        r"access a gated repo",
        r"GatedRepoError: ",
        r"Access to model .* is restricted",
        r"40[13] Client Error.*huggingface\.co/",
    ),
    Pattern(
        CAUSE,
        "hub-rate-limit",
        "Hugging Face limits requests, and each process sent some: download the tokenizer or model once, set "
        "HF_HUB_OFFLINE: 1 and HF_HOME to that shared folder under `env:`, or set data.tokenizer to the folder",
        r"429 Client Error.*huggingface\.co",
        r"HfHubHTTPError: 429 ",
    ),
    Pattern(
        CAUSE,
        "hub-unreachable",
        "the job cannot reach Hugging Face: download the tokenizer or model where it can be reached, set "
        "HF_HUB_OFFLINE: 1 and HF_HOME to that shared folder under `env:`, or set data.tokenizer to the folder",
        r"couldn't connect to 'https?://",
        r"LocalEntryNotFoundError: ",
        r"outgoing traffic has been disabled",
        r"OfflineModeIsEnabled: ",
    ),
    Pattern(
        CAUSE,
        "damaged-data",
        "the .idx file is damaged, cut off, or not Megatron's: `fp8launch data inspect PREFIX` shows it; build or copy "
        "the dataset again",
        r"bad header, cannot read: ",
        r"bad version, cannot read: ",
        r"cannot mmap an empty file",
        r"buffer is smaller than requested size",
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
)
