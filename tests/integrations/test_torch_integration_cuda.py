"""`hipgroupgemm.integrations.torch` on a CUDA device: bf16 beside a loop of products, graphs, the compiler, streams; nothing waits."""

from __future__ import annotations

import pytest
import torch
from torch_cases import FORMS, NAMES, by_rows

import hipgroupgemm as hgg
from hipgroupgemm.integrations.torch import grouped_mm, ragged_dot

# torch's own words: of the engine's thread before its first product, of the mode that finds waiting, of the compiler's empty first graph
_SAID = ("Attempting to run cuBLAS", "Synchronization debug mode", "The CUDA Graph is empty", ":DeprecationWarning:torch")
pytestmark = [pytest.mark.cuda, *(pytest.mark.filterwarnings(f"ignore:{text}") for text in _SAID)]
every_form = pytest.mark.parametrize("form", FORMS, ids=NAMES)
M, G, K, N = 1000, 8, 256, 320
SIZES = [100, 0, 333, 1, 64, 0, 300, 128]  # 74 rows are left over


@pytest.fixture(autouse=True)
def _seeded(rng):
    torch._dynamo.reset()
    torch.manual_seed(int(rng.integers(1 << 30)))
    yield
    hgg.clear_plan_cache()


def layer(dtype=torch.bfloat16):
    """lhs, rhs and bias that require gradients, and sizes on the device."""
    made = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in ((M, K), (G, K, N), (G, N))]
    return (*made, torch.tensor(SIZES, device="cuda"))


def loop(lhs, rhs, bias):
    return by_rows(lhs, rhs, bias, SIZES)


def gradients(function, operands):
    out = function(*operands)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, operands, weights)]


def exact(function, operands):
    return gradients(function, [operand.detach().double().requires_grad_() for operand in operands])


def close(got, wanted, dtype=torch.bfloat16):
    scale = {torch.bfloat16: 0.01, torch.float16: 0.002, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert got.shape == wanted.shape
    assert got.isfinite().all()
    assert (got.double() - wanted).norm() <= scale * wanted.norm()


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_form(form, dtype, rng):
    operands = form.operands(int(rng.integers(1 << 30)), dtype, "cuda")
    sizes = [5, 0, 3, 7]
    wanted = exact(lambda *tensors: form.loop(*tensors, sizes), operands)
    for got, right in zip(
        gradients(lambda *tensors: form.call(*tensors, torch.tensor(sizes, device="cuda")), operands), wanted, strict=True
    ):
        assert got.dtype == dtype
        close(got, right, dtype)


def test_large_enough_for_the_fast_kernels():
    *operands, sizes = layer()
    for plain in (False, True):
        if plain:  # without a bias the sm_90 kernels take it
            function, right = (lambda a, b: ragged_dot(a, b, sizes)), (lambda a, b: loop(a, b, None))
            operands = operands[:2]
        else:
            function, right = (lambda a, b, c: ragged_dot(a, b, sizes, bias=c)), loop
        for got, wanted in zip(gradients(function, operands), exact(right, operands), strict=True):
            close(got, wanted)


def test_float64_is_refused():
    operands = FORMS[1].operands(3, torch.float64, "cuda")
    with pytest.raises(NotImplementedError, match="float64"):
        FORMS[1].call(*operands, torch.tensor([5, 0, 3, 7], device="cuda"))


def test_nothing_waits_for_the_device():
    *operands, sizes = layer()
    ends = sizes.cumsum(0, dtype=torch.int32)
    into = torch.zeros(G, K, N, device="cuda")

    def step():
        gradients(lambda a, b, c: ragged_dot(a, b, sizes, bias=c), operands)
        gradients(lambda a, b, c: grouped_mm(a, b, ends, c), operands)
        ragged_dot(*operands[:2], sizes, weight_grad_into=into).sum().backward()
        with torch.no_grad():
            grouped_mm(operands[0], operands[1], ends)

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_weight_gradients_accumulate_in_float32():
    lhs, rhs, _, sizes = layer()
    into = torch.randn(G, K, N, device="cuda")
    before, total = into.double(), 0
    for _ in range(3):
        out = ragged_dot(lhs, rhs, sizes, weight_grad_into=into)
        grad = torch.randn_like(out)
        out.backward(grad)
        total = (
            total + torch.autograd.grad(loop(lhs.double(), right := rhs.detach().double().requires_grad_(), None), right, grad.double())[0]
        )
    assert rhs.grad is None
    close(into, before + total, torch.float32)


def test_a_graph_of_a_training_step():
    """The usual warm-up and capture; replays read new tokens and new sizes."""
    *operands, sizes = layer()

    def step():
        for operand in operands:
            operand.grad = None
        ragged_dot(*operands[:2], sizes, bias=operands[2]).float().square().sum().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    for operand in operands:
        operand.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for counts in (SIZES, SIZES[::-1]):
        with torch.no_grad():
            operands[0].normal_()
            sizes.copy_(torch.tensor(counts))
        for operand in operands:
            operand.grad.fill_(torch.nan)
        graph.replay()
        doubles = [operand.detach().double().requires_grad_() for operand in operands]
        by_rows(*doubles, counts).square().sum().backward()
        for operand, double in zip(operands, doubles, strict=True):
            close(operand.grad, double.grad)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    *operands, sizes = layer()
    compiled = torch.compile(lambda a, b, c, s: (ragged_dot(a, b, s, bias=c) / 16).sin(), fullgraph=True, mode=mode)
    for turn in range(4):
        with torch.no_grad():
            operands[0].normal_()
        torch.compiler.cudagraph_mark_step_begin()
        found = [tensor.clone() for tensor in gradients(lambda *tensors: compiled(*tensors, sizes), operands)]
        for got, wanted in zip(found, exact(lambda *tensors: (loop(*tensors) / 16).sin(), operands), strict=True):
            close(got, wanted), turn


def test_autocast():
    *operands, sizes = layer(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = gradients(lambda a, b, c: ragged_dot(a, b, sizes, bias=c), operands)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, *[torch.float32] * 3]
    rounded = [operand.detach().bfloat16().double().requires_grad_() for operand in operands]
    for got, wanted in zip(found, gradients(loop, rounded), strict=True):
        close(got, wanted)


def test_every_stream_is_taken():
    """A product on a side stream reads what that stream still computes, and the backward runs there too."""
    *operands, sizes = layer()
    wanted = exact(loop, [operand * 2 for operand in operands])
    gradients(lambda a, b, c: ragged_dot(a, b, sizes, bias=c), operands)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [(operand * 2).detach().requires_grad_() for operand in operands]
        found = gradients(lambda a, b, c: ragged_dot(a, b, sizes, bias=c), late)
    stream.synchronize()
    for got, right in zip(found, wanted, strict=True):
        close(got, right)


def test_wrong_sizes_on_the_device_stay_inside():
    lhs, rhs, _, _ = layer()
    for sizes in ([900, 900, 0, 0, 0, 0, 0, 0], [-5, 2000, 1, 1, 1, 1, 1, 1]):
        for tensor in gradients(lambda a, b, s=sizes: ragged_dot(a, b, torch.tensor(s, device="cuda")), (lhs, rhs)):
            assert tensor.isfinite().all()
    torch.cuda.synchronize()


def test_sizes_on_the_host_are_checked():
    lhs, rhs, _, _ = layer()
    close(ragged_dot(lhs, rhs, SIZES).detach(), loop(lhs.double(), rhs.double(), None).detach())
    with pytest.raises(ValueError, match="group"):
        ragged_dot(lhs, rhs, [M, 1, 0, 0, 0, 0, 0, 0])
