"""Experts of Hugging Face's transformers by ragged dots: `register()`, then `experts_implementation="hipgroupgemm"`.

from hipgroupgemm.integrations import transformers

transformers.register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="hipgroupgemm")
model.set_experts_implementation("hipgroupgemm")  # or later
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hipgroupgemm.integrations.torch import ragged_dot

__all__ = ["experts_forward", "register"]

Tensor = Any


def register(name: str = "hipgroupgemm") -> None:
    """Puts `experts_forward` into the library's table of experts implementations, under `name`. Twice is fine."""
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module: two ragged dots over the tokens in expert order. Nothing is read back from the device.

    It takes every layout that `transformers.integrations.moe.use_experts_implementation` knows: gated (gate and up packed, in halves or
    interleaved) or not, weights as (E, out, in) or (E, in, out), with or without biases, with or without a norm after each expert.

    Args:
        self: the experts module.
        hidden_states: (tokens, hidden).
        top_k_index: (tokens, k), each token's experts. An expert from num_experts on is on another device: it adds nothing.
        top_k_weights: (tokens, k).

    Returns:
        (tokens, hidden), hidden_states' type.
    """
    tokens, top_k = top_k_index.shape
    experts, order = torch.sort(top_k_index.reshape(-1))
    ends = torch.searchsorted(
        experts, torch.arange(self.num_experts, device=experts.device, dtype=experts.dtype), right=True, out_int32=True
    )
    rows = _project(self, "gate_up_proj" if self.has_gate else "up_proj", hidden_states[order // top_k], ends)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _project(self, "down_proj", rows, ends)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(tokens * top_k, device=order.device)
    return rows[place].view(tokens, top_k, -1).sum(1).to(hidden_states.dtype)


def _project(module: Any, name: str, rows: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its weight, plus its bias; rows of no expert here are zero."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return ragged_dot(rows.to(weight.dtype), weight if module.is_transposed else weight.mT, offs=ends, bias=bias)
