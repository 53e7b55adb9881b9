"""The GPT model for Megatron 0.17 and 0.18, which train a model that the caller builds (0.19 builds its own)."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.training import get_args

from fp8launch.injob.rank import config_fields


def build(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Return one pipeline stage (of virtual stage `vp_stage`) of the model that Megatron's arguments describe.

    The block spec lists the layers of this stage one by one, so the same call makes dense, MoE and mixed
    (`--moe-layer-freq`) models, with or without MLA and QK norms, of Transformer Engine's modules or local ones.
    """
    args = get_args()
    config_fields.set_config_fields(args)
    config = config or config_fields.transformer_config(args)
    spec_options = {
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
        "vp_stage": vp_stage,
    }
    if config.experimental_attention_variant is None:
        block_spec = get_gpt_decoder_block_spec(config, **spec_options)
    else:
        # The function above ignores the variant and silently builds ordinary attention.
        block_spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    mtp_spec = None
    if args.mtp_num_layers:
        # A multi-token-prediction layer has the spec of the model's last layer, whatever stage that layer is on.
        last_layer = get_gpt_decoder_layer_specs(config, **spec_options)[-1]
        mtp_spec = get_gpt_mtp_block_spec(config, last_layer, spec_options["use_transformer_engine"], vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec,
        mtp_block_spec=mtp_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
