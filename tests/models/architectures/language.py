"""Language models: encoders, decoders, both, mixtures of experts and state-space models; two layers each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.models.architectures.architecture import VOCABULARY, Architecture, Inputs, ids, ids_of, two_sequences

_ENCODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 80, "max_position_embeddings": 64,
}  # fmt: skip
_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.1,
}  # fmt: skip
_ENCODER_DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "max_position_embeddings": 64,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _long_ids() -> Inputs:
    return ids(length=64)


ENCODERS = {
    "bert": Architecture("BertForMaskedLM", "BertConfig", _ENCODER, ids),
    "roberta": Architecture("RobertaModel", "RobertaConfig", _ENCODER, ids),
    "albert": Architecture("AlbertModel", "AlbertConfig", {**_ENCODER, "embedding_size": 32}, ids),
    "electra": Architecture("ElectraForPreTraining", "ElectraConfig", {**_ENCODER, "embedding_size": 32}, ids),
    "deberta": Architecture(
        "DebertaModel",
        "DebertaConfig",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        ids,
    ),
    "deberta_v2": Architecture(
        "DebertaV2Model",
        "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 3},
        ids,
    ),
    "distilbert": Architecture(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80},
        ids,
    ),
    "mpnet": Architecture("MPNetModel", "MPNetConfig", _ENCODER, ids),
    "modernbert": Architecture(
        "ModernBertModel",
        "ModernBertConfig",
        {**_ENCODER, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
         "local_attention": 8, "attention_dropout": 0.1, "mlp_dropout": 0.1},
        ids,
    ),
    "xlnet": Architecture(
        "XLNetModel",
        "XLNetConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "n_layer": 2, "n_head": 4, "d_inner": 80},
        ids,
    ),
    "funnel": Architecture(
        "FunnelModel",
        "FunnelConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "block_sizes": [1, 1], "num_decoder_layers": 1, "n_head": 4,
         "d_head": 12, "d_inner": 80},
        ids_of(length=20),
    ),
    "longformer": Architecture(
        "LongformerModel",
        "LongformerConfig",
        {**_ENCODER, "attention_window": 8, "max_position_embeddings": 90},
        ids_of(length=24),
    ),
    "big_bird": Architecture(
        "BigBirdModel",
        "BigBirdConfig",
        {**_ENCODER, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1,
         "max_position_embeddings": 128},
        _long_ids,
    ),
    "reformer": Architecture(
        "ReformerModel",
        "ReformerConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "attention_head_size": 12, "num_attention_heads": 4,
         "feed_forward_size": 80, "attn_layers": ["local", "lsh"], "local_attn_chunk_length": 8,
         "lsh_attn_chunk_length": 8, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 32],
         "max_position_embeddings": 64, "num_buckets": 4, "hash_seed": 0, "use_cache": False, "is_decoder": False,
         # It seeds its dropout from the clock.
         "hidden_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0,
         "local_attention_probs_dropout_prob": 0.0},
        _long_ids,
    ),
    "nystromformer": Architecture(
        "NystromformerModel",
        "NystromformerConfig",
        {**_ENCODER, "num_landmarks": 4, "segment_means_seq_len": 20, "conv_kernel_size": 5},
        ids_of(length=20, padded=False),
        eager_dtypes=("float32",),
    ),
    "fnet": Architecture(
        "FNetModel",
        "FNetConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80},
        lambda: {"input_ids": torch.randint(VOCABULARY, (2, 19))},
        eager_dtypes=("float32",),
    ),
    "squeezebert": Architecture("SqueezeBertModel", "SqueezeBertConfig", {**_ENCODER, "embedding_size": 48}, ids),
    "convbert": Architecture("ConvBertModel", "ConvBertConfig", {**_ENCODER, "embedding_size": 48}, ids),
    "esm": Architecture(
        "EsmModel", "EsmConfig", {**_ENCODER, "pad_token_id": 1, "position_embedding_type": "rotary"}, ids
    ),
}  # fmt: skip

DECODERS = {
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False},
        ids,
    ),
    "gpt_neo": Architecture(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "window_size": 8,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "use_cache": False,
         "resid_dropout": 0.1, "embed_dropout": 0.1, "attention_dropout": 0.1},
        ids,
    ),
    "gptj": Architecture(
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8,
         "use_cache": False, "resid_pdrop": 0.1},
        ids,
    ),
    "gpt_neox": Architecture(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_without(_DECODER, "num_key_value_heads"), "hidden_dropout": 0.1},
        ids,
    ),
    "opt": Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        {**_without(_DECODER, "intermediate_size", "num_key_value_heads"), "ffn_dim": 80, "word_embed_proj_dim": 48},
        ids,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 4, "use_cache": False,
         "hidden_dropout": 0.1, "attention_dropout": 0.1, "pad_token_id": 0},
        ids,
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "use_cache": False},
        ids,
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", _DECODER, ids),
    "mistral": Architecture("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 8}, ids),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _DECODER, ids),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 12}, ids),
    "gemma": Architecture("GemmaForCausalLM", "GemmaConfig", {**_DECODER, "head_dim": 12}, ids),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config", {**_DECODER, "head_dim": 12, "sliding_window": 8}, ids_of(padded=False)
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "head_dim": 12, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        ids,
    ),
    "phi": Architecture("PhiForCausalLM", "PhiConfig", {**_DECODER, "resid_pdrop": 0.1}, ids),
    "phi3": Architecture("Phi3ForCausalLM", "Phi3Config", {**_DECODER, "resid_pdrop": 0.1}, ids),
    "falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {**_without(_DECODER, "intermediate_size", "num_key_value_heads"), "hidden_dropout": 0.1},
        ids,
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM", "StableLmConfig", {**_DECODER, "hidden_size": 64, "hidden_dropout": 0.1}, ids
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "Olmo2Config", _DECODER, ids),
    "granite": Architecture("GraniteForCausalLM", "GraniteConfig", _DECODER, ids),
    "cohere": Architecture("CohereForCausalLM", "CohereConfig", _DECODER, ids),
    "starcoder2": Architecture("Starcoder2ForCausalLM", "Starcoder2Config", {**_DECODER, "residual_dropout": 0.1}, ids),
    "glm": Architecture("GlmForCausalLM", "GlmConfig", {**_DECODER, "head_dim": 12}, ids),
}  # fmt: skip

ENCODER_DECODERS = {
    "t5": Architecture(
        "T5Model",
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 4, "use_cache": False},
        two_sequences,
    ),
    "bart": Architecture("BartModel", "BartConfig", _ENCODER_DECODER, two_sequences),
    "pegasus": Architecture("PegasusModel", "PegasusConfig", _ENCODER_DECODER, two_sequences),
    "marian": Architecture(
        "MarianModel", "MarianConfig", {**_ENCODER_DECODER, "decoder_start_token_id": 0}, two_sequences
    ),
    "mbart": Architecture("MBartModel", "MBartConfig", _ENCODER_DECODER, two_sequences),
    "blenderbot": Architecture("BlenderbotModel", "BlenderbotConfig", _ENCODER_DECODER, two_sequences),
}  # fmt: skip

MIXTURES = {
    "mixtral": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, ids
    ),
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "shared_expert_intermediate_size": 40},
        ids,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_DECODER, "head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ids,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**_DECODER, "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
         "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "kv_lora_rank": 16, "q_lora_rank": 24,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12, "first_k_dense_replace": 1},
        ids,
    ),
    "gpt_oss": Architecture(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_DECODER, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
        ids,
    ),
    "jamba": Architecture(
        "JambaForCausalLM",
        "JambaConfig",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
         "use_mamba_kernels": False},
        ids,
    ),
    "olmoe": Architecture(
        "OlmoeForCausalLM", "OlmoeConfig", {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2}, ids
    ),
    "switch_transformers": Architecture(
        "SwitchTransformersModel",
        "SwitchTransformersConfig",
        {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_decoder_layers": 2,
         "num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "router_jitter_noise": 0.0, "use_cache": False},
        two_sequences,
    ),
}  # fmt: skip

STATE_SPACES = {
    "mamba": Architecture(
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8, "use_cache": False},
        ids_of(padded=False),
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8, "num_heads": 8,
         "head_dim": 12, "n_groups": 2, "chunk_size": 8, "use_cache": False},
        ids_of(padded=False),
    ),
    "falcon_mamba": Architecture(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8, "use_cache": False},
        ids_of(padded=False),
    ),
    "recurrent_gemma": Architecture(
        "RecurrentGemmaForCausalLM",
        "RecurrentGemmaConfig",
        {**_without(_DECODER, "max_position_embeddings"), "num_hidden_layers": 3, "attention_window_size": 8,
         "lru_width": 48},
        ids_of(padded=False),
    ),
    "rwkv": Architecture(
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80,
         "attention_hidden_size": 48, "use_cache": False},
        ids_of(padded=False, length=9),
    ),
}  # fmt: skip
