"""Known bugs of the software that neither crash nor warn: see docs/advisories.md."""

from __future__ import annotations

from fp8launch.plugin_registry import Plugin

# In the order of the table.
CODES = (
    "mla-kpos-grad",
    "etp-ne-tp-ep1",
    "router-aux-pertoken-tp",
    "seq-aux-mbs",
    "global-aux-dp",
    "reset-attn-mask-pp",
    "gdn-outnorm-tp",
    "dsa-indexer-microbatches",
    "gtp-expert-scale",
    "dp-instances-pp",
    "pp-isend-dealloc",
    "mfsdp-zero1-fusion",
    "mfsdp-2n",
    "mfsdp-instances-overlap",
    "mfsdp-outer-sharding",
    "mfsdp-pertoken-norms",
    "opfuser-fc2-bias",
    "cuda-graph-buffers",
    "sinks-a2a-grad",
    "moe-tp-ep-norm",
    "muon-expert-bias-norm",
    "sink-norm",
    "cp-local-mean",
    "mtp-cp-norm",
    "mtp-pertoken-local",
    "bridge-mtp-mask",
    "decoupled-lr-resume",
    "override-sched-ignored",
    "rampup-ignored",
    "bridge-rampup-lr",
    "expert-rng-resume",
    "delayed-param-tp-resume",
    "mtp-embedding-tag",
    "bridge-mtp-embedding-group",
    "hdo-stale-step",
    "hdo-weights-only",
    "cyclic-tail-ranks",
    "fully-reshardable-buckets",
    "mfsdp-pp-reshard",
    "mxfp8-paramgather-nooverlap",
    "mxfp8-paramgather-forced",
    "fp8-single-grouped-weight",
    "te-hybrid-grouped-mlp",
    "te-grouped-padding",
    "te-recompute-amax",
    "te-norm-sp-flag",
    "te-tp-overlap-wgrad",
)

PLUGIN = Plugin(
    name="advisories",
    rules=dict.fromkeys(CODES, "fp8launch.plugins.advisories.rules:ADVISORIES"),
    verifications={"advisories": "fp8launch.plugins.advisories.finished_run:known_bugs"},
)
