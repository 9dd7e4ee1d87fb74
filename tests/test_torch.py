"""torch's CPU tensors, for real: every type, layout, grad state and way of giving sizes (`make test-frameworks`)."""

from __future__ import annotations

import numpy as np
import pytest
from comparison import assert_close
from generators import (
    FLOAT8S,
    FLOATS,
    WEIGHT_GRADIENT,
    Library,
    Mode,
    dtype_of,
    make_problem,
    random_layout,
    random_sizes,
    random_values,
)

import hipgroupgemm as hgg
from hipgroupgemm import dispatch
from hipgroupgemm.operands.exchange import exchange_reader

pytestmark = pytest.mark.torch
torch = None


@pytest.fixture(autouse=True)
def _torch():
    """Imported by the tests only, so that collecting this file needs no torch."""
    global torch
    import torch as module

    torch = module


SIZES = [5, 0, 7]
WIDTHS = {1: np.uint8, 2: np.int16}


def to_torch(values, dtype=None):
    """A NumPy array, bf16 and fp8 included, as a tensor of the same bits."""
    name = dtype or values.dtype.name
    if name in ("bfloat16", *FLOAT8S):
        bits = torch.from_numpy(values.view(WIDTHS[values.dtype.itemsize]).copy())
        return bits.view(getattr(torch, name))
    return torch.from_numpy(values.copy())


def to_numpy(tensor):
    """A tensor as a NumPy array of the same bits."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16", *FLOAT8S):
        kind = dtype_of(name)
        same = torch.int16 if kind.itemsize == 2 else torch.uint8
        return tensor.detach().contiguous().view(same).numpy().view(kind)
    return tensor.detach().numpy()


def operands(rng, dtype="float32"):
    return random_values(rng, (12, 7), dtype), random_values(rng, (3, 7, 5), dtype)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
def test_every_type(dtype, rng):
    lhs, rhs = operands(rng, dtype)
    got = hgg.ragged_dot(to_torch(lhs), to_torch(rhs), torch.tensor(SIZES))
    assert isinstance(got, torch.Tensor)
    assert got.dtype == getattr(torch, dtype)
    assert got.device.type == "cpu"
    assert not got.requires_grad
    np.testing.assert_array_equal(bits(to_numpy(got)), bits(hgg.ragged_dot(lhs, rhs, SIZES)))


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
def test_out_of_every_type(dtype, rng):
    lhs, rhs = operands(rng, dtype)
    out = to_torch(np.full((12, 5), np.nan, dtype_of(dtype)))
    assert hgg.ragged_dot(to_torch(lhs), to_torch(rhs), torch.tensor(SIZES), out=out) is out
    np.testing.assert_array_equal(bits(to_numpy(out)), bits(hgg.ragged_dot(lhs, rhs, SIZES)))


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_sizes_of_every_integer_type(kind, rng):
    lhs, rhs = operands(rng)
    a, b, wanted = to_torch(lhs), to_torch(rhs), hgg.ragged_dot(lhs, rhs, SIZES)
    sizes = torch.tensor(SIZES).to(getattr(torch, kind))
    np.testing.assert_array_equal(to_numpy(hgg.ragged_dot(a, b, sizes)), wanted)
    ends = torch.tensor([5, 5, 12]).to(getattr(torch, kind))
    np.testing.assert_array_equal(to_numpy(hgg.ragged_dot(a, b, offs=ends)), wanted)
    offset = torch.tensor([1]).to(getattr(torch, kind))
    np.testing.assert_array_equal(
        to_numpy(hgg.ragged_dot(a, b[:1], sizes, group_offset=offset)), hgg.ragged_dot(lhs, rhs[:1], SIZES, group_offset=1)
    )


def test_torch_s_own_product_agrees(rng):
    lhs, rhs = operands(rng, "float64")
    got = hgg.ragged_dot(to_torch(lhs), to_torch(rhs), SIZES)
    wanted = torch.cat([to_torch(lhs)[:5] @ to_torch(rhs)[0], to_torch(lhs)[5:] @ to_torch(rhs)[2]])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_that_are_not_contiguous(dtype, rng):
    lhs, rhs = operands(rng, dtype)
    exact = hgg.ragged_dot_reference(lhs, rhs, SIZES, accumulate=np.float64, preferred_element_type=np.float64)
    magnitude = hgg.ragged_dot_reference(abs(lhs), abs(rhs), SIZES, accumulate=np.float64, preferred_element_type=np.float64)
    wide = to_torch(np.full((20, 20), np.nan, lhs.dtype))
    wide[1:13, 2:9] = to_torch(lhs)
    steps = to_torch(np.full((12, 14), np.nan, lhs.dtype))
    steps[:, ::2] = to_torch(lhs)
    for a in (wide[1:13, 2:9], steps[:, ::2], to_torch(np.ascontiguousarray(lhs.T)).t()):
        assert not a.is_contiguous()
        for b in (to_torch(rhs), to_torch(np.ascontiguousarray(rhs.transpose(0, 2, 1))).transpose(1, 2)):
            for out in (None, to_torch(np.full((5, 12), np.nan, lhs.dtype)).t(), to_torch(np.full((12, 9), np.nan, lhs.dtype))[:, 1:6]):
                got = hgg.ragged_dot(a, b, SIZES, out=out)
                assert out is None or got is out
                assert_close(to_numpy(got), exact, magnitude, 7, (lhs.dtype,))
    one_for_all = to_torch(rhs[:1]).expand(3, 7, 5)
    np.testing.assert_array_equal(
        to_numpy(hgg.ragged_dot(to_torch(lhs), one_for_all, SIZES)), hgg.ragged_dot(lhs, np.broadcast_to(rhs[:1], rhs.shape), SIZES)
    )


def test_tensors_of_no_elements(rng):
    _, rhs = operands(rng)
    got = hgg.ragged_dot(torch.zeros(0, 7), to_torch(rhs), torch.zeros(3, dtype=torch.int32))
    assert got.shape == (0, 5)
    got = hgg.ragged_dot_general(torch.zeros(0, 7), torch.zeros(0, 5), torch.zeros(3, dtype=torch.int32), WEIGHT_GRADIENT)
    assert got.shape == (3, 7, 5)
    assert not got.any()
    assert hgg.ragged_dot(torch.zeros(4, 0), torch.zeros(2, 0, 5), [2, 2]).tolist() == [[0.0] * 5] * 4
    assert hgg.ragged_dot(torch.zeros(4, 3), torch.zeros(0, 3, 5), torch.zeros(0, dtype=torch.int64)).tolist() == [[0.0] * 5] * 4


def test_gradients_are_refused_unless_they_are_off(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    for name, arguments in [("lhs", (lhs.clone().requires_grad_(), rhs)), ("rhs", (lhs, torch.nn.Parameter(rhs.clone())))]:
        with pytest.raises(NotImplementedError, match=rf"{name}: requires grad.*{name}\.detach\(\).*no_grad"):
            hgg.ragged_dot(*arguments, SIZES)
        with torch.no_grad():
            got = hgg.ragged_dot(*arguments, SIZES)
        assert not got.requires_grad
        assert torch.equal(got, wanted)
        assert torch.equal(hgg.ragged_dot(*(tensor.detach() for tensor in arguments), SIZES), wanted)
        with torch.inference_mode():
            assert torch.equal(hgg.ragged_dot(*arguments, SIZES), wanted)
    out = torch.zeros(12, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="out: requires grad"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=out)


def test_parameters_and_subclasses(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))

    class Tagged(torch.Tensor):
        pass

    frozen = torch.nn.Parameter(rhs.clone(), requires_grad=False)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    assert torch.equal(hgg.ragged_dot(lhs, frozen, SIZES), wanted)
    got = hgg.ragged_dot(lhs.as_subclass(Tagged), frozen, SIZES)
    assert type(got) is torch.Tensor
    assert torch.equal(got, wanted)


def test_pending_negation_and_conjugation_are_refused(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    negated = torch.complex(torch.zeros_like(lhs), lhs).conj().imag
    assert negated.is_neg()
    with pytest.raises(TypeError, match=r"lhs: .*negation.*resolve_neg"):
        hgg.ragged_dot(negated, rhs, SIZES)
    assert torch.allclose(hgg.ragged_dot(negated.resolve_neg().contiguous(), rhs, SIZES), -hgg.ragged_dot(lhs, rhs, SIZES))
    with pytest.raises(TypeError, match=r"lhs: .*conjugation"):
        hgg.ragged_dot(torch.complex(lhs, lhs).conj(), rhs, SIZES)


def test_layouts_and_devices_that_are_refused(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    for other in (lhs.to_sparse(), lhs.to_mkldnn()):
        with pytest.raises(TypeError, match=r"lhs: got a tensor of layout torch\._?(sparse|mkldnn).*to_dense"):
            hgg.ragged_dot(other, rhs, SIZES)
    with pytest.raises(NotImplementedError, match="lhs: lies on torch device meta; wanted cpu or cuda"):
        hgg.ragged_dot(lhs.to("meta"), rhs, SIZES)
    with pytest.raises(NotImplementedError, match="group_sizes: lies on torch device meta"):
        hgg.ragged_dot(lhs, rhs, torch.tensor(SIZES, device="meta"))


@pytest.mark.parametrize("kind", ["int32", "bool", "complex64", "uint16"])
def test_types_that_are_refused(kind, rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    with pytest.raises(NotImplementedError, match=rf"lhs: got (torch\.)?{kind}, wanted a floating type"):
        hgg.ragged_dot(lhs.to(getattr(torch, kind)), rhs, SIZES)
    if kind in ("bool", "complex64"):
        with pytest.raises(TypeError, match=f"group_sizes: got {kind}, wanted an integer type"):
            hgg.ragged_dot(lhs, rhs, torch.tensor(SIZES).to(getattr(torch, kind)))


def test_float_sizes_are_a_type_error(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    for kind in (torch.float32, torch.bfloat16):
        with pytest.raises(TypeError, match=r"group_sizes: got .*float.*, wanted an integer type"):
            hgg.ragged_dot(lhs, rhs, torch.tensor(SIZES, dtype=kind))


def test_torch_s_dtypes_are_taken_where_a_type_is_named(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng, "bfloat16"))
    assert hgg.ragged_dot(lhs, rhs, SIZES, preferred_element_type=torch.float32).dtype == torch.float32
    assert hgg.ragged_dot(lhs, rhs, SIZES, preferred_element_type=torch.float8_e5m2).dtype == torch.float8_e5m2
    assert hgg.ArraySpec((3, 4), torch.bfloat16).dtype == dtype_of("bfloat16")
    named = hgg.as_array(lhs.view(torch.int16), torch.bfloat16)
    assert torch.equal(hgg.ragged_dot(named, rhs, SIZES), hgg.ragged_dot(lhs, rhs, SIZES))
    with pytest.raises(NotImplementedError, match="preferred_element_type: got int64"):
        hgg.ragged_dot(lhs, rhs, SIZES, preferred_element_type=torch.int64)


def test_mixed_with_numpy(rng):
    lhs, rhs = operands(rng)
    wanted = hgg.ragged_dot(lhs, rhs, SIZES)
    got = hgg.ragged_dot(to_torch(lhs), rhs, np.array(SIZES))
    assert isinstance(got, torch.Tensor)
    np.testing.assert_array_equal(to_numpy(got), wanted)
    other = hgg.ragged_dot(lhs, to_torch(rhs), torch.tensor(SIZES))
    assert type(other) is np.ndarray
    np.testing.assert_array_equal(other, wanted)
    out = np.zeros((12, 5), np.float32)
    assert hgg.ragged_dot(to_torch(lhs), to_torch(rhs), SIZES, out=out) is out
    np.testing.assert_array_equal(out, wanted)


def test_alpha_beta_c_bias_and_a_plan(rng):
    problem = make_problem(rng, Mode.NON_CONTRACTING, 33, 5, 7, random_sizes(rng, 33, 4), "bfloat16", c="array", bias=True)
    arguments = {"c": to_torch(problem.c.values), "bias": to_torch(problem.bias.values), "alpha": 2.0, "beta": 0.5}
    a, b, sizes = to_torch(problem.lhs.values), to_torch(problem.rhs.values), to_torch(problem.sizes.values)
    problem.settings.update(alpha=2.0, beta=0.5)
    wanted = problem.check()
    np.testing.assert_array_equal(bits(to_numpy(hgg.ragged_dot(a, b, sizes, **arguments))), bits(wanted))
    config = hgg.config_for_ragged_dot(a, b, sizes, **arguments)
    with hgg.GroupedMatmulPlan(config, device="cpu") as plan:
        first = plan.execute(a, b, sizes, **arguments)
        again = plan.execute(a, b, sizes, **arguments, out=torch.empty_like(first))
        assert isinstance(first, torch.Tensor)
        np.testing.assert_array_equal(bits(to_numpy(first)), bits(wanted))
        np.testing.assert_array_equal(bits(to_numpy(again)), bits(wanted))
    out = to_torch(problem.c.values)
    hgg.ragged_dot(a, b, sizes, **{**arguments, "c": out}, out=out)
    np.testing.assert_array_equal(bits(to_numpy(out)), bits(wanted))


def test_torch_s_memory_is_used_as_it_is(rng):
    lhs, rhs = (to_torch(values) for values in operands(rng))
    view = hgg.as_array(lhs[2:, 1:])
    assert view.pointer == lhs.data_ptr() + (2 * 7 + 1) * 4
    assert view.strides == (28, 4)
    with pytest.raises(ValueError, match="out: shares memory with lhs"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=lhs[:, :5])
    with pytest.raises(ValueError, match="out: its elements overlap"):
        hgg.ragged_dot(lhs, rhs, SIZES, out=torch.zeros(5).expand(12, 5))


class OnlyDLPack:
    """A tensor of which nothing but its DLPack export is known."""

    def __init__(self, tensor):
        self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8S])
def test_torch_s_own_capsules_are_read_right(dtype, rng):
    """Another implementation's codes for every element type, bf16 and fp8 included."""
    lhs, rhs = operands(rng, dtype)
    view = hgg.as_array(OnlyDLPack(to_torch(lhs)))
    assert view.dtype == lhs.dtype
    got = hgg.ragged_dot(OnlyDLPack(to_torch(lhs)), OnlyDLPack(to_torch(rhs)), OnlyDLPack(torch.tensor(SIZES)))
    np.testing.assert_array_equal(bits(got), bits(hgg.ragged_dot(lhs, rhs, SIZES)))


class TorchLibrary(Library):
    """The generators' problems as tensors, with their layouts, their poison and the bytes round them."""

    name = "torch"

    def to_device(self, storage):
        return torch.from_numpy(storage.copy())

    def to_host(self, storage):
        return storage.numpy().copy()

    def view(self, storage, offset, shape, strides, dtype):
        steps = [stride // dtype.itemsize for stride in strides]
        return storage.view(getattr(torch, dtype.name)).as_strided(shape, steps, offset // dtype.itemsize)

    def result(self, array):
        assert isinstance(array, torch.Tensor)
        return to_numpy(array)


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_the_generators_problems_as_tensors(mode, dtype, rng):
    for _ in range(15):
        batch = 2 if mode is Mode.BATCH or rng.random() < 0.5 else None
        ndim = 2 if batch is None else 3
        ranks = {"lhs": ndim, "rhs": ndim + (mode is Mode.NON_CONTRACTING), "out": ndim + (mode is Mode.CONTRACTING)}
        layouts = {name: random_layout(rng, rank, may_broadcast=name != "out") for name, rank in ranks.items()}
        extents = (5, 6, 20) if mode is Mode.CONTRACTING else (20, 5, 6)
        settings = {"layouts": layouts, "batch": batch, "out_dtype": "float32", "give_out": bool(rng.random() < 0.7)}
        settings["c"] = "array" if rng.random() < 0.5 else None
        settings["beta"] = 0.3 if settings["c"] else 0.0
        make_problem(rng, mode, *extents, random_sizes(rng, 20, 4), dtype, library=TorchLibrary(), **settings).check()


@pytest.mark.parametrize("call", ["function", "plan", "reference"])
def test_autograd_learns_that_out_was_written(call):
    """exp keeps its result for the backward; once that is overwritten, a backward must fail and not give another gradient."""
    lhs, rhs, sizes = torch.ones(8, 4), torch.ones(2, 4, 4), torch.tensor([3, 5])
    x = torch.ones(8, 4, requires_grad=True)
    y = torch.exp(x)
    out = y.detach()
    if call == "plan":
        with hgg.GroupedMatmulPlan(hgg.config_for_ragged_dot(lhs, rhs, sizes, out=out), device="cpu") as plan:
            assert plan.execute(lhs, rhs, sizes, out=out) is out
    else:
        function = hgg.ragged_dot if call == "function" else hgg.ragged_dot_reference
        assert function(lhs, rhs, sizes, out=out) is out
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_out_may_be_an_inference_tensor():
    with torch.inference_mode():
        out = torch.empty(8, 4)
        hgg.ragged_dot(torch.ones(8, 4), torch.ones(2, 4, 4), torch.tensor([3, 5]), out=out)
    assert (out == 4).all()


# ---- transformations, which would not see the call -------------------------------------------------------------------------------


def layer(lhs, rhs=None):
    rhs = torch.ones(2, 4, 6) if rhs is None else rhs
    return hgg.ragged_dot(lhs, rhs, torch.tensor([2, 3]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of its own use of TorchScript
@pytest.mark.parametrize("warm", [False, True])
def test_transformations_are_refused_by_name(warm):
    lhs, rhs = torch.randn(5, 4), torch.randn(2, 4, 6)
    if warm:
        layer(lhs, rhs)  # what is remembered must not be taken
    tangent = torch.randn(5, 4)
    for transformed in (
        lambda: torch.func.linearize(layer, lhs),
        lambda: torch.func.jvp(layer, (lhs,), (tangent,)),
        lambda: torch.func.vjp(layer, lhs),
        lambda: torch.func.grad(lambda x: layer(x).sum())(lhs),
        lambda: torch.func.vmap(layer)(torch.randn(3, 5, 4)),
    ):
        with pytest.raises(NotImplementedError, match=r"lhs: is (inside a torch\.func|being traced)"):  # linearize traces
            transformed()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(lhs, tangent)
        with pytest.raises(NotImplementedError, match="lhs: carries a forward-mode tangent"):
            layer(dual, rhs)
        assert torch.equal(layer(lhs, rhs), layer(lhs, rhs))  # no tangent, nothing lost
    with pytest.raises(NotImplementedError, match=r"(lhs|rhs): is inside a torch\.func"):
        torch.func.vmap(lambda w: layer(lhs, w))(torch.randn(3, 2, 4, 6))


@pytest.mark.filterwarnings("ignore")  # torch warns of its own: of tracing constants, of nested tensors
def test_tracing_is_refused_by_name():
    from torch.fx.experimental.proxy_tensor import make_fx

    lhs, rhs = torch.randn(5, 4), torch.randn(2, 4, 6)
    layer(lhs, rhs)
    for mode in ("real", "fake", "symbolic"):
        with pytest.raises(NotImplementedError, match=r"(lhs|rhs|group_sizes): is (being traced|a FakeTensor)"):
            make_fx(layer, tracing_mode=mode)(lhs, rhs)
    with pytest.raises(NotImplementedError, match=r"being traced by torch\.jit\.trace"):
        torch.jit.trace(layer, (lhs, rhs))
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    with pytest.raises(NotImplementedError, match="lhs: is a nested tensor"):
        layer(nested, rhs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warm", [False, True])
def test_what_a_transformation_left_behind_is_refused_by_name(warm):
    lhs, rhs, sizes = torch.ones(4, 5), torch.ones(2, 5, 3), torch.tensor([2, 2])
    if warm:
        hgg.ragged_dot(lhs, rhs, sizes)
    left = []

    def leak(x):
        left.append(x)
        return (x * 2).sum()

    torch.vmap(leak)(torch.ones(3, 4, 5))
    torch.func.grad(leak)(lhs)
    torch.func.jvp(leak, (lhs,), (lhs,))
    torch.func.functionalize(leak)(lhs)
    for tensor in left:
        with pytest.raises(NotImplementedError, match=r"lhs: (is left over|requires grad)"):
            hgg.ragged_dot(tensor, rhs, sizes)
        with pytest.raises(NotImplementedError, match=r"out: (is left over|requires grad)"):
            hgg.ragged_dot(lhs, rhs, sizes, out=tensor)


@pytest.mark.parametrize("warm", [False, True])
def test_a_storage_that_was_freed_is_refused(warm):
    """As sharded training frees parameters between uses."""
    lhs, rhs, sizes = torch.randn(5, 4), torch.randn(2, 4, 6), torch.tensor([2, 3])
    for _ in range(2 * warm):
        hgg.ragged_dot(lhs, rhs, sizes)
    rhs.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"rhs: has shape .* but no memory"):
        hgg.ragged_dot(lhs, rhs, sizes)


def test_results_are_tensors_whoever_called_before():
    lhs, rhs, sizes = torch.randn(5, 4), torch.randn(2, 4, 6), torch.tensor([2, 3], dtype=torch.int32)
    arrays = [tensor.numpy().copy() for tensor in (lhs, rhs, sizes)]
    for _ in range(3):
        assert isinstance(hgg.ragged_dot(*arrays), np.ndarray)
        assert isinstance(hgg.ragged_dot(lhs, rhs, sizes), torch.Tensor)


def exchange():
    reader = exchange_reader((torch.Tensor, torch.nn.Parameter), ("lhs", "rhs"))
    assert reader is not None  # torch here has the API, and there is a compiler
    return reader


def test_the_exchange_reader_tells_layouts_apart_and_finds_addresses():
    read = exchange()
    base = torch.arange(4096, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.ones(3, 5))
    layouts = [
        base[:12].view(3, 4), base[:12].view(4, 3), base[:12].view(3, 4).t(), base[:12], base[1:13].view(3, 4), base[4:16].view(3, 4),
        base[:12].view(torch.int32).view(3, 4), base[:6].view(torch.float16).view(3, 4), base[:6].view(torch.bfloat16).view(3, 4),
        base[:24:2].view(3, 4), base[:12].view(1, 3, 4), base[0], weight.detach(),
    ]  # fmt: skip
    keys = {}
    for number, tensor in enumerate(layouts):
        key, addresses, stream = read((tensor, None), True)
        assert addresses == {"lhs": tensor.data_ptr()} and stream == 0
        again, _, _ = read((tensor.clone(memory_format=torch.preserve_format), None), True)
        if tensor.data_ptr() % 16 == 0 and tensor.is_contiguous():
            assert again == key
        keys[key] = number
    assert len(keys) == len(layouts) - 1  # base[4:16] lies as base[:12] does
    first, second = read((base, weight), False), read((weight, base), False)
    assert first[1] == {"lhs": base.data_ptr(), "rhs": weight.data_ptr()}
    assert second[0] != first[0] and read((None, base), False)[0] != read((base, None), False)[0]


def test_the_exchange_reader_leaves_what_it_must_not_read():
    read = exchange()
    plain, weight = torch.ones(3, 4), torch.nn.Parameter(torch.ones(3, 4))
    assert read((plain, weight), True) is None and read((plain, weight), False) is not None
    negative = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    assert negative.is_neg()
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    nine = torch.ones((1,) * 9)
    for tensor in (negative, freed, plain.to_sparse(), plain.to("meta"), torch.ones(0, 4), np.ones(3), nine, "text"):
        assert read((plain, tensor), False) is None and read((tensor, plain), False) is None
    assert read((plain, plain), True) is not None  # no error is left behind


def test_parameters_are_warm_where_no_gradient_is_recorded(monkeypatch):
    lhs, weight, sizes = torch.ones(6, 4), torch.nn.Parameter(torch.ones(2, 4, 3)), torch.tensor([4, 2])
    with torch.no_grad():
        wanted = hgg.ragged_dot(lhs, weight, sizes)
        monkeypatch.setattr("hipgroupgemm.dispatch.parse", None)  # a warm call is not parsed
        assert torch.equal(hgg.ragged_dot(lhs.clone(), weight, sizes.clone()), wanted)
    monkeypatch.undo()
    with pytest.raises(NotImplementedError, match="requires grad"):
        hgg.ragged_dot(lhs, weight, sizes)


def test_without_the_exchange_calls_are_read_from_python(monkeypatch):
    monkeypatch.setattr(dispatch, "exchange_reader", lambda *_: None)
    monkeypatch.setattr(dispatch, "_readers", {})
    lhs, weight, sizes = torch.ones(6, 4), torch.ones(2, 4, 3), torch.tensor([4, 2])
    wanted = hgg.ragged_dot(lhs, weight, sizes)
    monkeypatch.setattr(dispatch, "parse", None)
    assert torch.equal(hgg.ragged_dot(lhs.clone(), weight, sizes.clone()), wanted)


# ---- lists ---------------------------------------------------------------------------------------------------------------------

WGRAD = hgg.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


@pytest.fixture(params=["exchange", "Python"])
def reader(request, monkeypatch):
    """Both ways of reading a warm call's tensors."""
    if request.param == "Python":
        monkeypatch.setattr(dispatch, "exchange_reader", lambda *_: None)
    elif exchange_reader((torch.Tensor, torch.nn.Parameter), ("lhs",)) is None:
        pytest.skip("NOT RUN: this torch has no C exchange API, or there is no C compiler")
    monkeypatch.setattr(dispatch, "_readers", {})


def test_lists_of_tensors_and_parameters(reader, monkeypatch):
    lhs, sizes = torch.randn(9, 4), torch.tensor([4, 0, 5])
    weights = [torch.randn(4, 6), torch.nn.Parameter(torch.randn(4, 6)), torch.randn(8, 6)[::2]]
    weights[2] = weights[2].contiguous()
    with torch.no_grad():
        wanted = hgg.ragged_dot(lhs, torch.stack(list(weights)), sizes)
        assert torch.equal(hgg.ragged_dot(lhs, weights, sizes), wanted)
        monkeypatch.setattr(dispatch, "parse", None)  # a warm call is not parsed
        assert torch.equal(hgg.ragged_dot(lhs.clone(), weights, sizes), wanted)
        weights[0] = weights[0] * 2  # the caller's list, another tensor in it
        assert torch.equal(hgg.ragged_dot(lhs, tuple(weights), sizes)[:4], 2 * wanted[:4])
        monkeypatch.undo()
        for bad, error, text in (
            ([weights[0], weights[1], weights[2][:, :5]], TypeError, r"rhs\[2\]: has shape"),
            ([weights[0], weights[1], weights[2].double()], TypeError, r"rhs\[2\]: has type float64"),
            ([weights[0], weights[1], weights[2].t().contiguous().t()], ValueError, r"rhs\[2\]: has strides"),
            ([weights[0], weights[1], torch.empty(4, 6, device="meta")], NotImplementedError, r"rhs\[2\]"),
            ([weights[0], weights[1], None], TypeError, r"rhs\[2\]: got NoneType"),
        ):
            for _ in range(2):
                with pytest.raises(error, match=text):
                    hgg.ragged_dot(lhs, bad, sizes)
    with pytest.raises(NotImplementedError, match=r"rhs\[1\]: requires grad"):
        hgg.ragged_dot(lhs, weights, sizes)


def test_lists_of_outputs_are_read_anew_and_told_of(reader, monkeypatch):
    lhs, rhs, sizes = torch.randn(9, 4), torch.randn(9, 6), torch.tensor([4, 0, 5])
    wanted = hgg.ragged_dot_general(lhs, rhs, sizes, WGRAD)
    for round_ in range(3):
        out = [torch.full((4, 6), float("nan")) for _ in range(3)]
        versions = [tensor._version for tensor in out]
        if round_ == 2:
            monkeypatch.setattr(dispatch, "parse", None)  # a warm call is not parsed
        assert hgg.ragged_dot_general(lhs, rhs, sizes, WGRAD, out=out) is out
        assert torch.equal(torch.stack(out), wanted)
        assert [tensor._version for tensor in out] == [version + 1 for version in versions]
    monkeypatch.undo()
    for _ in range(3):
        hgg.ragged_dot_general(lhs, rhs, sizes, WGRAD, out=out, c=out, beta=1.0)
    torch.testing.assert_close(torch.stack(out), 4 * wanted)
    with pytest.raises(ValueError, match=r"out\[0\]: shares memory with out\[1\]"):
        hgg.ragged_dot_general(lhs, rhs, sizes, WGRAD, out=[out[0], out[0], out[2]])


def test_sizes_and_bias_are_no_lists_of_tensors(reader):
    lhs, rhs = torch.randn(9, 4), torch.randn(3, 4, 6)
    sizes = [torch.tensor(4), torch.tensor(0), torch.tensor(5)]
    wanted = hgg.ragged_dot(lhs, rhs, torch.tensor([4, 0, 5]))
    for _ in range(3):
        assert torch.equal(hgg.ragged_dot(lhs, rhs, sizes), wanted)
        with pytest.raises(TypeError, match="bias: got list"):
            hgg.ragged_dot(lhs, rhs, sizes, bias=[torch.zeros(6)] * 3)
