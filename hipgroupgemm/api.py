"""`ragged_dot` and `ragged_dot_general`: JAX's functions of these names, for everybody's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from hipgroupgemm.backends import backend_names, get_backend
from hipgroupgemm.calls import Operands, gather
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import compute_type_of
from hipgroupgemm.plan_cache import PlanCache
from hipgroupgemm.problem.bindings import Binding, Wanted, bind
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers
from hipgroupgemm.reference import compute_uncollapsed
from hipgroupgemm.repeats import Repeats, key_of

__all__ = ["clear_plan_cache", "config_for_ragged_dot", "ragged_dot", "ragged_dot_general"]

_PLANS = 128


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    out: Any = None,
    c: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    tail: str = "zero",
    check: str = "none",
    deterministic: bool = False,
    backend: str | None = None,
    use_store: bool = True,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Multiplies consecutive groups of lhs's rows by one matrix a group: `jax.lax.ragged_dot`, and what it lacks.

    Row i of out is row i of lhs times rhs[g], for the group g that holds row i: out = alpha * P + beta * c, then bias.

    Args:
        lhs: (m, k), rows in group order.
        rhs: (g, k, n), one matrix a group.
        group_sizes: (g,) integers: how many rows each group has. On the device they are not read back; on the host they are checked.
        precision: as JAX's; float32 products are IEEE unless TF32 is asked for by name ("tensorfloat32").
        preferred_element_type: out's type; None for JAX's rule (the operands' wider type).
        group_offset: a host int or (1,) integer array: sizes then has more than g entries, and groups [offset, offset + g) are computed.
        offs: end offsets (g,) instead of group_sizes, as in torch.
        out: (m, n), where to write; None makes an array of lhs's framework on lhs's device.
        c: (m, n), out's type, read only where beta is not 0; may be exactly out.
        bias: (g, n), out's type, added to covered rows.
        alpha, beta: real numbers. With alpha = 0 no product is read, with beta = 0 no c.
        tail: what becomes of rows that no group covers: "zero" gives them beta * c, "undefined" leaves them as they were.
        check: "sync" waits for the device and raises for wrong sizes there; "none" clamps them, see `GroupedMatmulPlan.check`.
        deterministic: only algorithms that give equal bits for equal inputs.
        backend: a backend's name, which then runs it or refuses; None lets stored tuning results, then the order of backends, decide.
        use_store: whether stored tuning results decide about backend and algorithm. They are looked at when the plan of such calls is
            made, and again once this process stores something; what other processes store later is not seen by plans that are kept
            (`clear_plan_cache` drops them).
        stream: a stream object or handle; None is the current stream of lhs's framework.
        workspace: memory for the algorithm; None lets the plan keep its own.

    Returns:
        out, (m, n).

    Raises:
        TypeError: shapes, element types or dimension numbers that do not fit; the text names the argument, what it got and wanted.
        ValueError: wrong sizes on the host (or, with check="sync", on the device), devices that differ, overlap of out with an input.
        NotImplementedError: operands that are not floating, or no backend that can run this; the text carries every reason.
        RuntimeError: the device failed, or the call cannot be captured in a graph.
    """
    return _call(
        "ragged_dot",
        lhs,
        rhs,
        group_sizes,
        BASIC,
        precision,
        preferred_element_type,
        group_offset,
        offs,
        out,
        c,
        bias,
        alpha,
        beta,
        tail,
        check,
        deterministic,
        backend,
        use_store,
        stream,
        workspace,
        None,
    )


def ragged_dot_general(
    lhs: Any,
    rhs: Any,
    group_sizes: Any = None,
    ragged_dot_dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    out: Any = None,
    c: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    tail: str = "zero",
    check: str = "none",
    deterministic: bool = False,
    backend: str | None = None,
    use_store: bool = True,
    stream: Any = None,
    workspace: Any = None,
    group_count: int | None = None,
) -> Any:
    """`jax.lax.ragged_dot_general`: the ragged dot with any contracting, batch, ragged and group dimensions.

    By which dimension of lhs is ragged (b, m, k, n may each be several axes; lhs's axes need not be in this order):

    ================  ===========  ==============  ==============  ==============
    lhs's ragged one  lhs          rhs             group_sizes     out
    ================  ===========  ==============  ==============  ==============
    not contracted    (b, m, k)    (g, b, k, n)    (g,) or (b, g)  (b, m, n)
    contracted        (b, m, k)    (b, k, n)       (g,) or (b, g)  (g, b, m, n)
    a batch axis      (b, m, k)    (b, k, n)       (g,)            (b, m, n)
    ================  ===========  ==============  ==============  ==============

    Args:
        lhs, rhs, group_sizes, offs: the operands, shaped as above; sizes may have the full prefix that JAX allows.
        ragged_dot_dimension_numbers: `RaggedDotDimensionNumbers`, this package's or JAX's.
        group_count: contracted only, with a group_offset: how many slabs out has (default: out's, else all groups).
        precision, preferred_element_type, group_offset, out, c, bias, alpha, beta, tail, check, deterministic, backend, use_store, stream,
            workspace:
            as in `ragged_dot`. Empty groups of a contracted ragged dimension have slabs of beta * c. A bias goes with the first row only.

    Returns:
        out, in the framework of lhs.

    Raises:
        As `ragged_dot`. Operands whose axes do not merge into one batch, m, n and k axis without a copy are computed on a CPU, and a
        NotImplementedError on a GPU.
    """
    if ragged_dot_dimension_numbers is None:
        raise TypeError("ragged_dot_dimension_numbers: missing; wanted RaggedDotDimensionNumbers")
    return _call(
        "ragged_dot_general",
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers,
        precision,
        preferred_element_type,
        group_offset,
        offs,
        out,
        c,
        bias,
        alpha,
        beta,
        tail,
        check,
        deterministic,
        backend,
        use_store,
        stream,
        workspace,
        group_count,
    )


def _call(
    name: str,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    group_offset: Any,
    offs: Any,
    out: Any,
    c: Any,
    bias: Any,
    alpha: float,
    beta: float,
    tail: str,
    check: str,
    deterministic: bool,
    backend: str | None,
    use_store: bool,
    stream: Any,
    workspace: Any,
    group_count: int | None,
) -> Any:
    """A call of the public function of that name. Positional: this is the path whose host time counts."""
    key = None
    if stream is None and workspace is None and check == "none" and (offs is None) != (group_sizes is None):
        sizes = group_sizes if offs is None else offs
        settings = (precision, preferred_element_type, ragged_dot_dimension_numbers)
        if all(type(setting) in _HASHED for setting in settings) and type(group_count) in (int, type(None)):
            rest = (offs is None, tail, *settings, deterministic, backend, use_store, group_count, name)
            key = key_of((lhs, rhs, sizes, out, c, bias), alpha, beta, group_offset, rest)
            repeat = _repeats.get(key) if key is not None else None
            lease = _plans.lease_again(repeat.holder) if repeat is not None else None
            if repeat is not None and lease is not None:
                with lease as plan:
                    return plan._run_again(repeat, out)
    operands = gather(
        lhs,
        rhs,
        group_sizes,
        offs=offs,
        out=out,
        c=c,
        bias=bias,
        alpha=alpha,
        beta=beta,
        group_offset=group_offset,
        tail=tail,
        check=check,
        stream=stream,
        workspace=workspace,
    )
    if name == "ragged_dot" and (operands.lhs.ndim, operands.rhs.ndim, operands.sizes.ndim) != (2, 3, 1):
        raise TypeError(
            f"ragged_dot: got lhs {operands.lhs.shape}, rhs {operands.rhs.shape}, {operands.sizes_name} {operands.sizes.shape}; wanted "
            "(m, k), (g, k, n) and (g,); ragged_dot_general takes other ranks"
        )
    wanted = Wanted(ragged_dot_dimension_numbers, precision, preferred_element_type, group_count)
    binding = bind(operands, wanted)
    operands.validate_host_values(binding.axes)
    operands.take_output(binding.axes.out_shape, binding.out_dtype)
    if binding.config is None:
        _run_uncollapsed(operands, binding, backend)
    else:
        lease = _plans.lease(binding.config, operands.device, backend, deterministic, use_store)
        with lease as plan:
            plan._run(operands, binding.config)
        if key is not None:
            _repeats.remember(key, operands, binding.config, made=out is None, holder=lease.entry)
    return arrays.deliver(operands.out_object, operands.lhs, operands.device) if out is None else arrays.written(out, operands.output)


def config_for_ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any = None,
    ragged_dot_dimension_numbers: Any = BASIC,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    offs: Any = None,
    out: Any = None,
    c: Any = None,
    bias: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    group_count: int | None = None,
) -> GroupedGemmConfig:
    """The config of a ragged dot: what `ragged_dot_general` with these arguments would plan for. Computes nothing.

    Args:
        lhs, rhs, group_sizes, ...: as in `ragged_dot_general`. `arrays.ArraySpec` stands for arrays that do not exist. Without out the
            output is packed row-major. No value is read but alpha, beta and a host group_offset.

    Raises:
        TypeError, ValueError: as `ragged_dot_general`.
        NotImplementedError: the operands' axes do not merge into one batch, m, n and k axis without a copy.
    """
    operands = gather(
        lhs,
        rhs,
        group_sizes,
        offs=offs,
        out=out,
        c=c,
        bias=bias,
        alpha=alpha,
        beta=beta,
        group_offset=group_offset,
        tail="zero",
        check="none",
        stream=None,
        workspace=None,
    )
    binding = bind(operands, Wanted(ragged_dot_dimension_numbers, precision, preferred_element_type, group_count))
    if binding.config is None:
        raise NotImplementedError(f"these operands have no GroupedGemmConfig: {binding.reason}; make a contiguous copy")
    return binding.config


def _run_uncollapsed(operands: Operands, binding: Binding, backend: str | None) -> None:
    reason = f"the operands do not collapse to a GroupedGemmConfig ({binding.reason})"
    if operands.device.kind != "cpu":
        names = ", ".join(backend_names())
        raise NotImplementedError(f"no backend of {names} runs this ragged dot on {operands.device}: {reason}; make a contiguous copy")
    if backend not in (None, "reference"):
        get_backend(backend)
        raise NotImplementedError(f"backend {backend!r} refuses: {reason}; make a contiguous copy, or let the reference backend run it")
    kind = compute_type_of(operands.lhs.dtype, operands.rhs.dtype)
    compute_uncollapsed(operands, binding.axes, np.dtype(kind))


_HASHED = (str, type, type(None), np.dtype, RaggedDotDimensionNumbers)
"""Types of settings that can be part of a key as they are."""
_plans = PlanCache(_PLANS)
_repeats = Repeats()


def clear_plan_cache() -> None:
    """Closes and forgets the plans that `ragged_dot` keeps, once no call uses them."""
    _repeats.clear()
    _plans.clear()
