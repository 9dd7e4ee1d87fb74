"""Small mixture-of-experts models of transformers, built from configs: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "Mixtral": {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
    "DeepseekV3": {
        **{"moe_intermediate_size": 24, "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1},
        **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    },
    "GptOss": {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}


def model_of(name: str, **settings: Any) -> Any:
    """A small model with weights that torch.manual_seed decides, biases and all."""
    made = {**TINY, **MODELS[name], **settings}
    if "qk_rope_head_dim" in made:  # the part of a head that is rotated has to be what the rotation is made for
        made["qk_rope_head_dim"] = made["head_dim"]
    config = getattr(transformers, f"{name}Config")(**made)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model.eval()
