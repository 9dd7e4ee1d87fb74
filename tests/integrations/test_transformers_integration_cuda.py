"""bf16 training of small mixture-of-experts models of transformers on a CUDA device, beside `eager`."""

from __future__ import annotations

import pytest
import torch
from transformers_cases import MODELS, model_of

from hipgroupgemm.integrations.transformers import register

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]
LARGER = {"hidden_size": 128, "head_dim": 32}


@pytest.mark.parametrize("name", MODELS)
def test_training_in_bf16_follows_eager(name, rng):
    register()
    torch.manual_seed(int(rng.integers(1 << 30)))
    tokens = torch.randint(0, 61, (8, 64), device="cuda")
    start = {key: value * 0.5 for key, value in model_of(name, **LARGER).state_dict().items()}
    losses = {}
    for implementation in ("eager", "hipgroupgemm"):
        model = model_of(name, **LARGER, experts_implementation=implementation)
        model.load_state_dict(start)
        model.to("cuda", torch.bfloat16).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses[implementation] = []
        for _ in range(10):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
            optimizer.step()
            losses[implementation].append(float(loss.detach()))
    assert losses["hipgroupgemm"] == pytest.approx(losses["eager"], rel=0.02)
    assert losses["eager"][-1] < losses["eager"][0]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_in_float32(name, rng):
    """Where routing cannot flip between two experts by a rounding, every gradient is eager's."""
    register()
    torch.manual_seed(int(rng.integers(1 << 30)))
    tokens = torch.randint(0, 61, (2, 33), device="cuda")
    model = model_of(name, **LARGER).cuda()
    found = {}
    for implementation in ("eager", "hipgroupgemm"):
        model.set_experts_implementation(implementation)
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()
        found[implementation] = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert found["eager"].keys() == found["hipgroupgemm"].keys()
    for key, wanted in found["eager"].items():
        got = found["hipgroupgemm"][key]
        assert (got - wanted).norm() <= 1e-3 * wanted.norm() + 1e-6, key


def test_experts_do_not_wait_for_the_device():
    register()
    model = model_of("Qwen3Moe", **LARGER, experts_implementation="hipgroupgemm").cuda()
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(50, 128, device="cuda", requires_grad=True)
    index = torch.stack([torch.randperm(6)[:2] for _ in range(50)]).cuda()
    weights = torch.rand(50, 2, device="cuda", requires_grad=True)
    experts(hidden, index, weights).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(hidden, index, weights).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
