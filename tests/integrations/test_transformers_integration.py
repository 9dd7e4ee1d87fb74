"""Mixture-of-experts models of transformers, small and random: logits and all gradients beside those of `eager`, the library's loop."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from transformers_cases import MODELS, model_of

from hipgroupgemm.integrations.transformers import experts_forward, register

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")]


def logits_and_gradients(model, tokens, implementation):
    model.set_experts_implementation(implementation)
    model.zero_grad(set_to_none=True)
    logits = model(tokens).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).reshape(logits.shape)).sum().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(autouse=True)
def _registered(rng):
    register()
    torch.manual_seed(int(rng.integers(1 << 30)))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient(name):
    model = model_of(name).double()
    tokens = torch.randint(0, 61, (2, 9))
    wanted, right = logits_and_gradients(model, tokens, "eager")
    got, gradients = logits_and_gradients(model, tokens, "hipgroupgemm")
    assert model.get_experts_implementation()[""] == "hipgroupgemm"
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    assert any("experts" in parameter and grad.any() for parameter, grad in gradients.items())
    for parameter, grad in right.items():
        if grad is None:
            assert gradients[parameter] is None, parameter
        else:
            torch.testing.assert_close(gradients[parameter], grad, rtol=1e-7, atol=1e-9 * float(grad.abs().max()), msg=parameter)


def test_it_is_called(monkeypatch):
    """`eager` beside `eager` would agree as well."""
    calls = []
    monkeypatch.setitem(
        transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS._global_mapping,
        "hipgroupgemm",
        lambda self, *args: calls.append(type(self).__name__) or experts_forward(self, *args),
    )
    model = model_of("Mixtral", experts_implementation="hipgroupgemm")
    model(torch.randint(0, 61, (1, 4)))
    assert calls == ["MixtralExperts"] * 2


EXPERTS = {  # every layout that use_experts_implementation has
    "packed": ("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeConfig", {"num_experts": 6, "moe_intermediate_size": 24}),
    "transposed": ("aria", "AriaExperts", "AriaTextConfig", {"moe_num_experts": 6, "intermediate_size": 24}),
    "transposed, interleaved, bias": ("gpt_oss", "GptOssExperts", "GptOssConfig", {"num_local_experts": 6, "intermediate_size": 24}),
    "transposed, halves, bias": (
        *("openai_privacy_filter", "OpenAIPrivacyFilterExperts", "OpenAIPrivacyFilterConfig"),
        {"num_local_experts": 6, "intermediate_size": 24},
    ),
    "no gate": ("nemotron_h", "NemotronHExperts", "NemotronHConfig", {"n_routed_experts": 6, "moe_intermediate_size": 24}),
    "norm after": (
        *("muse_spark", "MuseSparkExperts", "MuseSparkTextConfig"),
        {"num_local_experts": 6, "moe_intermediate_size": 24, "moe_hidden_size": 32, "num_attention_heads": 4},
    ),
}


@pytest.mark.parametrize("layout", EXPERTS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_every_layout_of_experts(layout, elsewhere):
    """`elsewhere`: experts of another device are named too, as under expert parallelism; they count as weights of zero here."""
    folder, name, config_name, settings = EXPERTS[layout]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    configs = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    config = getattr(configs, config_name)(hidden_size=32, **settings)
    experts = getattr(module, name)(config).double()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    hidden = torch.randn(11, 32, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(5)[:3] for _ in range(11)])  # expert 5 gets nothing
    away = torch.zeros(11, 3, dtype=torch.bool)
    away[::2, 1] = elsewhere
    weights = torch.rand(11, 3, dtype=torch.float64).masked_fill(away, 0.0).requires_grad_()
    found = {}
    for implementation, ids in (("eager", index), ("hipgroupgemm", index.masked_fill(away, 6))):
        config._experts_implementation = implementation
        experts._is_expert_parallel = elsewhere
        out = experts(hidden, ids, weights)
        scale = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
        found[implementation] = [out.detach(), *torch.autograd.grad((out * scale).sum(), (hidden, weights, *experts.parameters()))]
    found["eager"][2] = found["eager"][2].masked_fill(away, 0.0)
    narrow = layout in ("transposed, halves, bias", "norm after")  # parts of these are float32 whatever comes in
    for got, wanted in zip(found["hipgroupgemm"], found["eager"], strict=True):
        assert (got - wanted).norm() <= (1e-5 if narrow else 1e-12) * wanted.norm()


def test_it_compiles():
    model = model_of("Qwen3Moe")
    tokens = torch.randint(0, 61, (2, 9))
    model.set_experts_implementation("eager")
    wanted = model(tokens).logits
    model.set_experts_implementation("hipgroupgemm")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens).logits, wanted, rtol=1e-3, atol=1e-3)


def test_training_follows_eager():
    losses = {}
    tokens = torch.randint(0, 61, (4, 12))
    start = model_of("Mixtral").state_dict()
    for implementation in ("eager", "hipgroupgemm"):
        model = model_of("Mixtral", experts_implementation=implementation)
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[implementation] = []
        for _ in range(6):
            loss = model(tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[implementation].append(float(loss.detach()))
    assert losses["hipgroupgemm"] == pytest.approx(losses["eager"], rel=1e-3)
    assert losses["eager"][-1] < losses["eager"][0]
