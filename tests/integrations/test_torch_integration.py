"""`hipgroupgemm.integrations.torch` on the CPU: values, derivatives, the compiler, transformations, autocast (`make test-frameworks`)."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from dimension_cases import random_case
from generators import Mode
from torch.utils.checkpoint import checkpoint
from torch_cases import FORMS, NAMES, SIZES, G, K, N, R, by_rows, by_slabs, sizes_on

import hipgroupgemm as hgg
from hipgroupgemm.integrations.torch import grouped_mm, ragged_dot, ragged_dot_general

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]  # torch warns of its own use of TorchScript
every_form = pytest.mark.parametrize("form", FORMS, ids=NAMES)
op = torch.ops.hipgroupgemm.ragged_dot.default


@pytest.fixture
def seed(rng) -> int:
    return int(rng.integers(1 << 30))


@pytest.fixture(autouse=True)
def _poison(rng):
    """Memory that torch hands out is NaN, so that what a product leaves out shows."""
    torch._dynamo.reset()
    torch.manual_seed(int(rng.integers(1 << 30)))
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(got, wanted, dtype=torch.float64):
    scale = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert got.shape == wanted.shape
    assert not got.isnan().any()
    assert (got.double() - wanted.double()).abs().max() <= scale * max(1.0, float(wanted.abs().max())) if wanted.numel() else True


def with_gradients(function, operands, *rest):
    """The result, and the operands' gradients of a sum that weighs every element of it differently."""
    out = function(*operands, *rest)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), operands)]


# ---- values and derivatives --------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loop_of_products_agrees(form, dtype, seed):
    operands, sizes = form.operands(seed, dtype), sizes_on()
    exact = [tensor.detach().double().requires_grad_() for tensor in operands]
    wanted = with_gradients(form.loop, exact, SIZES)
    for got, right in zip(with_gradients(form.call, operands, sizes), wanted, strict=True):
        assert got.dtype == dtype
        close(got, right, dtype)
    plain = form.call(*[tensor.detach() for tensor in operands], sizes)  # no op: at once
    assert not plain.requires_grad
    close(plain, wanted[0], dtype)
    with torch.no_grad():
        close(form.call(*map(torch.nn.Parameter, operands), sizes), wanted[0], dtype)


@every_form
def test_gradcheck(form, seed):
    operands, sizes = form.operands(seed), sizes_on()
    checks = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(lambda *tensors: form.call(*tensors, sizes), operands, fast_mode=True, **checks)


@every_form
def test_gradgradcheck(form, seed):
    operands, sizes = form.operands(seed), sizes_on()
    checks = {"check_fwd_over_rev": True, "check_batched_grad": True}
    assert torch.autograd.gradgradcheck(lambda *tensors: form.call(*tensors, sizes), operands, fast_mode=True, **checks)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.name)
def test_any_dimension_numbers(mode, rng):
    for _ in range(25):
        empty = bool(rng.random() < 0.2)
        case = random_case(rng, mode, empty=empty)
        lhs, rhs = rng.standard_normal(case.lhs_shape), rng.standard_normal(case.rhs_shape)
        wanted = hgg.ragged_dot_general(lhs, rhs, case.sizes, case.numbers)
        a, b = (torch.from_numpy(values).requires_grad_() for values in (lhs, rhs))
        sizes = torch.from_numpy(case.sizes)
        out = ragged_dot_general(a, b, sizes, case.numbers)
        close(out.detach(), torch.from_numpy(wanted))
        if not empty:
            assert torch.autograd.gradcheck(
                lambda a, b, case=case, s=sizes: ragged_dot_general(a, b, s, case.numbers), (a, b), fast_mode=True
            ), case


def test_only_what_is_asked_for_is_computed_and_kept(seed):
    lhs, rhs = FORMS[0].operands(seed)
    out = ragged_dot(lhs, rhs.detach(), sizes_on())
    assert out.grad_fn.saved_tensors[0] is None  # lhs is kept for rhs's gradient alone
    out.sum().backward()
    assert ragged_dot(lhs.detach(), rhs, sizes_on()).grad_fn.saved_tensors[0] is not None


@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_gradient_lies_as_its_weight(transposed, seed):
    """Autograd would copy one that does not."""
    shape = (G, N, K) if transposed else (G, K, N)
    weight = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    view = weight.mT if transposed else weight
    seen = []
    view.register_hook(lambda grad: seen.append(grad.stride()))
    ragged_dot(torch.randn(R, K, dtype=torch.float64), view, sizes_on()).sum().backward()
    assert seen == [view.stride()]
    assert weight.grad.stride() == weight.stride()


def test_types_of_out_and_gradients():
    sizes = sizes_on()
    lhs, rhs = torch.randn(R, K, dtype=torch.bfloat16, requires_grad=True), torch.randn(G, K, N, dtype=torch.float32, requires_grad=True)
    for dtype in (None, torch.float32, torch.float64, torch.bfloat16):
        out = ragged_dot(lhs, rhs, sizes, preferred_element_type=dtype)
        assert out.dtype == (dtype or torch.float32)
        grads = torch.autograd.grad(out.sum(), (lhs, rhs))
        assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
        assert grouped_mm(lhs, rhs, sizes.cumsum(0), out_dtype=dtype).dtype == out.dtype


def test_nan_stays_where_it_is(seed):
    """In rows that no group covers, in the weights of an empty group, and in gradients that flow into such rows."""
    lhs, rhs, bias = FORMS[1].operands(seed)
    sizes = sizes_on()
    clean = with_gradients(FORMS[1].call, (lhs, rhs, bias), sizes)
    with torch.no_grad():
        lhs[sum(SIZES) :] = torch.nan
        rhs[1], bias[1] = torch.nan, torch.inf
    out = ragged_dot(lhs, rhs, sizes, bias=bias)
    close(out.detach(), clean[0])
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    grad[sum(SIZES) :] = torch.nan
    for got, wanted in zip(torch.autograd.grad(out, (lhs, rhs, bias), grad), clean[1:], strict=True):
        close(got, wanted)
    assert not clean[1][sum(SIZES) :].any()
    assert not clean[2][1].any()
    assert not clean[3][1].any()


@pytest.mark.parametrize("extents", [(0, G, K, N), (R, G, 0, N), (R, G, K, 0), (R, 0, K, N), (0, 0, 0, 0)], ids=str)
def test_extents_of_zero(extents):
    rows, groups, k, n = extents
    lhs, rhs, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((rows, k), (groups, k, n), (groups, n)))
    sizes = [rows // max(groups, 1)] * groups
    out = ragged_dot(lhs, rhs, sizes, bias=bias)
    close(out.detach(), by_rows(lhs, rhs, bias, sizes).detach())
    for grad, wanted in zip(
        torch.autograd.grad(out.sum(), (lhs, rhs, bias)),
        torch.autograd.grad(by_rows(lhs, rhs, bias, sizes).sum() + 0 * (lhs.sum() + rhs.sum() + bias.sum()), (lhs, rhs, bias)),
        strict=True,
    ):
        close(grad, wanted)


def test_operands_that_are_not_contiguous(seed):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(2 * R, 3 * K, generator=generator, dtype=torch.float64)
    lhs = wide[::2, 1 : 1 + 2 * K : 2].detach().requires_grad_()
    rhs = torch.randn(K, N, G, generator=generator, dtype=torch.float64).permute(2, 0, 1).detach().requires_grad_()
    for got, wanted in zip(
        with_gradients(ragged_dot, (lhs, rhs), sizes_on()),
        with_gradients(lambda a, b: by_rows(a, b, None, SIZES), (lhs, rhs)),
        strict=True,
    ):
        close(got, wanted)


# ---- weight gradients that accumulate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_weight_grad_into(transposed, backend, seed):
    lhs = torch.randn(R, K, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn((G, N, K) if transposed else (G, K, N), dtype=torch.bfloat16, requires_grad=True)
    main_grad = torch.randn(weight.shape)
    before = main_grad.clone()

    def layer(lhs, weight, main_grad, sizes):
        view, into = (weight.mT, main_grad.mT) if transposed else (weight, main_grad)
        return ragged_dot(lhs, view, sizes, weight_grad_into=into)

    function = layer if backend == "eager" else torch.compile(layer, backend=backend, fullgraph=True)
    if backend == "eager":  # two microbatches in flight
        outs = [function(lhs, weight, main_grad, sizes_on()) for _ in range(2)]
        for out in outs:
            out.float().square().sum().backward()
    else:  # a compiled backward insists on the buffer of its forward
        for _ in range(2):
            out = function(lhs, weight, main_grad, sizes_on())
            out.float().square().sum().backward()
    assert weight.grad is None
    exact = [tensor.detach().double().requires_grad_() for tensor in (lhs, weight)]
    right = by_rows(exact[0], exact[1].mT if transposed else exact[1], None, SIZES)
    right.backward(2 * 2 * out.detach().double())
    close(main_grad, before.double() + exact[1].grad, torch.bfloat16)
    assert (main_grad - before - exact[1].grad).abs().max() <= 1e-4 * exact[1].grad.abs().max()  # float32, and never rounded to bf16
    close(lhs.grad, exact[0].grad, torch.bfloat16)


def test_weight_grad_into_refuses_by_name(seed):
    lhs, rhs = FORMS[0].operands(seed)
    sizes = sizes_on()
    with pytest.raises(TypeError, match="weight_grad_into: got shape"):
        ragged_dot(lhs, rhs, sizes, weight_grad_into=torch.zeros(G, N, K))
    with pytest.raises(NotImplementedError, match="weight_grad_into: a gradient that is added to a buffer"):
        torch.autograd.grad(
            ragged_dot(lhs, rhs, sizes, weight_grad_into=torch.zeros_like(rhs)).sum(), lhs, create_graph=True, allow_unused=True
        )[0].sum()
        torch.autograd.grad(ragged_dot(lhs, rhs, sizes, weight_grad_into=torch.zeros_like(rhs)).sum(), (lhs, rhs), create_graph=True)
    with pytest.raises(NotImplementedError, match=r"weight_grad_into: torch\.func"):
        torch.func.grad(lambda a: ragged_dot(a, rhs, sizes, weight_grad_into=torch.zeros_like(rhs)).sum())(lhs)
    with pytest.raises(NotImplementedError, match="weight_grad_into: only a ragged dot"):
        grouped_mm(lhs.mT, lhs, sizes.cumsum(0), weight_grad_into=torch.zeros(G, K, K))


# ---- the compiler and the transformations ------------------------------------------------------------------------------------


@every_form
def test_opcheck(form, seed, monkeypatch):
    """torch's own checks of the op that the form comes to: schema, shapes without data, autograd, tracing with shapes that vary."""
    calls = []
    for name in ("torch._ragged_dot", "torch_general.ragged_dot"):
        monkeypatch.setattr(f"hipgroupgemm.integrations.{name}", lambda *args: calls.append(args) or op(*args))
    form.call(*form.operands(seed), sizes_on())
    ((args),) = calls
    torch.library.opcheck(op, tuple(arg.detach().requires_grad_(arg.requires_grad) if torch.is_tensor(arg) else arg for arg in args))


def test_opcheck_of_the_op_that_adds():
    into, lhs, rhs = torch.zeros(G, K, N), torch.randn(R, K), torch.randn(R, N)
    torch.library.opcheck(torch.ops.hipgroupgemm.ragged_dot_add_.default, (into, lhs, rhs, sizes_on(), None, "km,kn", False))


@pytest.mark.parametrize(
    ("form", "backend"),
    [*((form, "aot_eager") for form in FORMS), *((FORMS[place], "inductor") for place in (1, 6, 7) if shutil.which("g++"))],
    ids=lambda value: getattr(value, "name", value),
)
def test_compile(form, backend, seed):
    operands, sizes = form.operands(seed), sizes_on()
    compiled = torch.compile(lambda *tensors: form.call(*tensors).sin(), backend=backend, fullgraph=True)
    for tensors in (operands, form.operands(seed + 1)):
        wanted = with_gradients(lambda *tensors: form.loop(*tensors).sin(), tensors, SIZES)
        for got, right in zip(with_gradients(compiled, tensors, sizes), wanted, strict=True):
            close(got, right)


def test_compile_for_any_number_of_rows():
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ragged_dot, backend=counted, fullgraph=True, dynamic=True)
    for rows in (9, 14, 20):
        lhs, rhs = torch.randn(rows, K, requires_grad=True), torch.randn(G, K, N, requires_grad=True)
        sizes = torch.tensor([rows // 2, 0, 1, 2])
        wanted = with_gradients(lambda a, b, s: by_rows(a, b, None, s), (lhs, rhs), sizes)
        for got, right in zip(with_gradients(compiled, (lhs, rhs), sizes), wanted, strict=True):
            close(got, right, torch.float32)
    assert counted.frame_count == 1


@every_form
@pytest.mark.parametrize("strict", [False, True])
def test_export(form, strict, seed):
    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return form.call(*tensors)

    operands = (*form.operands(seed, grad=False), sizes_on())
    exported = torch.export.export(Layer(), operands, strict=strict)
    assert any("hipgroupgemm" in str(node.target) for node in exported.graph.nodes)
    others = (*form.operands(seed + 1, grad=False), sizes_on())
    close(exported.module()(*others), form.loop(*others[:-1], SIZES))


@every_form
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(form, tracing_mode, seed):
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradients(*tensors):
        return torch.func.grad(lambda *tensors: form.call(*tensors, sizes_on()).sin().sum(), tuple(range(len(tensors))))(*tensors)

    traced = make_fx(gradients, tracing_mode=tracing_mode)(*form.operands(seed, grad=False))
    others = form.operands(seed + 1)
    wanted = torch.autograd.grad(form.loop(*others, SIZES).sin().sum(), others)
    for got, right in zip(traced(*[tensor.detach() for tensor in others]), wanted, strict=True):
        close(got, right)


TRANSFORMATIONS = {
    "grad": lambda f, x, t: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "vjp": lambda f, x, t: torch.func.vjp(f, x)[1](f(x))[0],
    "jvp": lambda f, x, t: torch.func.jvp(f, (x,), (t,))[1],
    "linearize": lambda f, x, t: torch.func.linearize(f, x)[1](t),
    "jacrev": lambda f, x, t: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x, t: torch.func.hessian(lambda x: f(x).sin().sum())(x),
    "grad of grad": lambda f, x, t: torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).sin().sum())(x).sin().sum())(x),
    "jvp of jvp": lambda f, x, t: torch.func.jvp(lambda x: torch.func.jvp(lambda x: f(x).sin(), (x,), (t,))[1], (x,), (t,))[1],
    "vmap of grad": lambda f, x, t: torch.func.vmap(torch.func.grad(lambda x: f(x).sin().sum()))(torch.stack([x, t])),
    "grad of vmap": lambda f, x, t: torch.func.grad(lambda x: torch.func.vmap(f)(torch.stack([x, t])).sin().sum())(x),
    "vmap of vmap": lambda f, x, t: torch.func.vmap(torch.func.vmap(f))(torch.stack([torch.stack([x, t]), torch.stack([t, x])])),
    "functional_call": lambda f, x, t: torch.func.functionalize(f)(x),
}


@every_form
@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch.func.linearize warns of itself
def test_transformations(form, name, seed):
    operands, others = form.operands(seed, grad=False), form.operands(seed + 1, grad=False)
    for place, x in enumerate(operands):

        def apply(function, sizes, place=place, x=x):
            def of_one(x):
                return function(*operands[:place], x, *operands[place + 1 :], sizes)

            return TRANSFORMATIONS[name](of_one, x, others[place])

        close(apply(form.call, sizes_on()), apply(form.loop, SIZES))


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transformations_compile(transform, seed):
    lhs, rhs = FORMS[0].operands(seed, grad=False)
    name = {"vmap": "grad of vmap"}.get(transform, transform)

    def function(call, sizes, lhs, rhs):
        return TRANSFORMATIONS[name](lambda x: call(x, rhs, sizes), lhs, lhs + 1)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    close(compiled(ragged_dot, sizes_on(), lhs, rhs), function(FORMS[0].loop, SIZES, lhs, rhs))


@pytest.mark.parametrize("dims", [(0, None, None), (None, 3, None), (1, 0, 0), (None, None, 0), (2, 2, 1), (0, 1, None)], ids=str)
@pytest.mark.parametrize("bias_dim", [None, 0, 2])
def test_vmap(dims, bias_dim, seed):
    generator = torch.Generator().manual_seed(seed)

    def operand(shape, dim):
        made = torch.randn(shape if dim is None else (3, *shape), generator=generator, dtype=torch.float64)
        return made if dim is None else made.movedim(0, dim).contiguous()

    lhs, rhs, bias = operand((R, K), dims[0]), operand((G, K, N), dims[1]), operand((G, N), bias_dim)
    sizes = sizes_on() if dims[2] is None else torch.tensor([SIZES, [0, 17, 0, 0], [1, 2, 3, 4]]).movedim(0, dims[2])
    in_dims = (dims[0], dims[1], dims[2], bias_dim)
    got = torch.func.vmap(lambda a, b, s, c: ragged_dot(a, b, s, bias=c), in_dims)(lhs, rhs, sizes, bias)
    rows = [
        [tensor if dim is None else tensor.select(dim, i) for tensor, dim in zip((lhs, rhs, sizes, bias), in_dims, strict=True)]
        for i in range(3)
    ]
    close(got, torch.stack([by_rows(a, b, c, s) for a, b, s, c in rows]))


def test_forward_mode(seed):
    lhs, rhs = FORMS[0].operands(seed)
    tangent = torch.randn_like(lhs)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(lhs.detach(), tangent)
        got = torch.autograd.forward_ad.unpack_dual(ragged_dot(dual, rhs.detach(), sizes_on())).tangent
    close(got, by_rows(tangent, rhs, None, SIZES).detach())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, seed):
    operands = FORMS[1].operands(seed)

    def layer(*tensors):
        return checkpoint(lambda *inner: FORMS[1].call(*inner, sizes_on()).sin(), *tensors, use_reentrant=use_reentrant)

    wanted = with_gradients(lambda *tensors: FORMS[1].loop(*tensors, SIZES).sin(), operands)
    grads = torch.autograd.grad if not use_reentrant else None
    if grads is not None:
        for got, right in zip(with_gradients(layer, operands), wanted, strict=True):
            close(got, right)
        return
    out = layer(*operands)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    (out * weights).sum().backward()  # all that reentrant checkpointing has
    for tensor, right in zip(operands, wanted[1:], strict=True):
        close(tensor.grad, right)


@every_form
def test_autocast(form, seed):
    operands, sizes = form.operands(seed, torch.float32), sizes_on()
    with torch.autocast("cpu", torch.bfloat16):
        out = form.call(*operands, sizes)
        plain = form.call(*[tensor.detach() for tensor in operands], sizes)
    rounded = [tensor.detach().bfloat16().double() for tensor in operands]
    for got in (out, plain):
        assert got.dtype == torch.bfloat16 or "bias" in form.name or form.name == "2D x 2D"  # a bias that is added to out promotes it
        close(got.detach(), form.loop(*rounded, SIZES), torch.bfloat16)
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), operands))
    with torch.autocast("cpu", torch.bfloat16):
        doubles = form.call(*form.operands(seed), sizes)
        assert doubles.dtype == torch.float64
        if form.name == "ragged_dot":
            assert ragged_dot(*operands, sizes, preferred_element_type=torch.float32).dtype == torch.float32


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch warns of its own: of tracing constants, of nested tensors
def test_refusals_by_name(seed):
    lhs, rhs = FORMS[0].operands(seed, grad=False)
    for call in (lambda a: ragged_dot(a, rhs, sizes_on()), lambda a: grouped_mm(a, rhs, sizes_on().cumsum(0))):
        with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace is not supported"):
            torch.jit.trace(call, (lhs,))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(2, K), torch.randn(3, K)], layout=layout)
        with pytest.raises(NotImplementedError, match="nested tensor"):
            ragged_dot(nested, rhs, sizes_on())
        with pytest.raises(NotImplementedError, match="nested tensor"):
            grouped_mm(nested, rhs, sizes_on().cumsum(0))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_calls_are_errors_of_the_same_kind(grad, compiled, seed):
    lhs, rhs = FORMS[0].operands(seed, grad=grad)
    wrong = [
        (TypeError, "exactly one", lambda: ragged_dot(lhs, rhs)),
        (TypeError, "ragged_dot_general takes other ranks", lambda: ragged_dot(lhs[None], rhs, sizes_on())),
        (TypeError, "contracting dimensions", lambda: ragged_dot(lhs[:, 1:], rhs, sizes_on())),
        (TypeError, "got 3 groups", lambda: ragged_dot(lhs, rhs, sizes_on()[:3])),
        (TypeError, "bias", lambda: ragged_dot(lhs, rhs, sizes_on(), bias=torch.zeros(G, N))),
        (TypeError, "bias", lambda: ragged_dot(lhs, rhs, sizes_on(), bias=torch.zeros(G, N + 1, dtype=torch.float64))),
        (TypeError, "wanted tensors of 2 or 3 axes", lambda: grouped_mm(lhs[0], rhs, sizes_on())),
        (TypeError, "offs: missing", lambda: grouped_mm(lhs, rhs)),
        (TypeError, "offs: given", lambda: grouped_mm(rhs, rhs, sizes_on())),
        (NotImplementedError, "bias: groups of columns", lambda: grouped_mm(rhs.mT, lhs.mT, sizes_on().cumsum(0), torch.zeros(G, N))),
        (NotImplementedError, "int64", lambda: ragged_dot(lhs.detach().long(), rhs.detach().long(), sizes_on())),
    ]
    for kind, words, call in wrong:
        if compiled:  # dynamo wraps what a traced function raises
            with pytest.raises(Exception, match=words):
                torch.compile(call, backend="aot_eager", fullgraph=True)()
        else:
            with pytest.raises(kind, match=words):
                call()


@pytest.mark.parametrize("grad", [False, True])
def test_wrong_sizes_on_the_host_are_refused(grad, seed):
    lhs, rhs = FORMS[0].operands(seed, grad=grad)
    for sizes in ([9, 9, 0, 0], [-1, 2, 0, 0]):
        with pytest.raises(ValueError, match="group"):
            ragged_dot(lhs, rhs, sizes)


def test_sizes_of_every_kind(seed):
    lhs, rhs = FORMS[0].operands(seed)
    wanted = by_rows(lhs, rhs, None, SIZES).detach()
    for sizes in (SIZES, tuple(SIZES), np.array(SIZES, np.uint8), torch.tensor(SIZES, dtype=torch.int16)):
        close(ragged_dot(lhs, rhs, sizes).detach(), wanted)
        close(ragged_dot(lhs, rhs, offs=np.cumsum(SIZES)).detach(), wanted)
    assert ragged_dot(lhs, rhs[:0], []).shape == (R, N)
    close(by_slabs(lhs, lhs, SIZES).detach(), grouped_mm(lhs.mT, lhs, np.cumsum(SIZES)).detach())
