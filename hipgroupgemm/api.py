"""`ragged_dot` and `ragged_dot_general`: JAX's functions of these names, for everybody's arrays.

The signatures are documentation, so each function has its own; what they do with their arguments goes through one record, `locals()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from hipgroupgemm.backends import backend_names, check_settings, get_backend
from hipgroupgemm.backends.base import Multiprocessors
from hipgroupgemm.backends.reference import compute_call
from hipgroupgemm.caches import CallCache, PlanCache
from hipgroupgemm.config import GroupedGemmConfig, RaggedDotMode
from hipgroupgemm.dispatch import PreparedCall, run, take_output
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import compute_type_of, dtype_of
from hipgroupgemm.plan import GroupedMatmulPlan
from hipgroupgemm.problem.canonicalize import GroupCount, Problem, canonicalize
from hipgroupgemm.problem.dimension_numbers import BASIC
from hipgroupgemm.problem.parse import Call, parse

__all__ = ["clear_plan_cache", "config_for_ragged_dot", "ragged_dot", "ragged_dot_general", "ragged_dot_reference"]

_PLANS = 128
_SETTINGS = ("precision", "preferred_element_type", "deterministic", "batch_invariant", "max_multiprocessors", "backend", "use_store")
_PLAN_SETTINGS = ("backend", "deterministic", "batch_invariant", "max_multiprocessors", "use_store")
_basic_settings: Callable[[Any], tuple[Any, ...]] = operator.itemgetter(*_SETTINGS)
_general_settings: Callable[[Any], tuple[Any, ...]] = operator.itemgetter(*_SETTINGS, "ragged_dot_dimension_numbers", "group_count")


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
    beta: float | None = None,
    tail: str = "zero",
    check: str = "none",
    deterministic: bool = False,
    batch_invariant: bool = False,
    max_multiprocessors: int | None = None,
    backend: str | None = None,
    use_store: bool = True,
    stream: Any = None,
    workspace: Any = None,
) -> Any:
    """Multiplies consecutive groups of lhs's rows by one matrix a group: `jax.lax.ragged_dot`, and what it lacks.

    Row i of out is row i of lhs times rhs[g], for the group g that holds row i: out = alpha * P + beta * c, then bias.

    Args:
        lhs: (m, k), rows in group order.
        rhs: (g, k, n), one matrix per group; or a list of g arrays (k, n) of one type, device and strides, each anywhere in memory.
        group_sizes: (g,) integers: how many rows each group has. On the device they are not read back; on the host they are checked.
        precision: as JAX's; float32 products are IEEE unless TF32 is asked for by name ("tensorfloat32").
        preferred_element_type: out's type; None for JAX's rule (the operands' wider type).
        group_offset: a host int or (1,) integer array: sizes then has more than g entries, and groups [offset, offset + g) are computed.
        offs: end offsets (g,) instead of group_sizes, as in torch.
        out: (m, n), where to write; None makes an array of lhs's framework on lhs's device.
        c: (m, n), out's type, added beta times; may be exactly out.
        bias: (g, n), out's type, added to covered rows.
        alpha, beta: real numbers. With alpha = 0 no product is read, with beta = 0 no c. beta has to be given where c is.
        tail: what becomes of rows that no group covers: "zero" gives them beta * c, "undefined" leaves them as they were.
        check: "sync" waits for the device and raises for wrong sizes there; "none" clamps them, see `GroupedMatmulPlan.check`.
        deterministic: only algorithms that give equal bits for equal inputs.
        batch_invariant: only algorithms with which a row of out has the same bits whatever m, its place and the other rows are, and the
            same one for every m; see `GroupedMatmulPlan`.
        max_multiprocessors: the most CUs or SMs to occupy at a time; None for all. Without effect on a CPU.
        backend: a backend's name, which then runs it or refuses; None lets stored tuning results, then the order of backends, decide.
        use_store: whether stored tuning results decide about backend and algorithm. They are looked at when the plan of such calls is
            made, and again once this process stores something; what other processes store later is not seen by plans that are kept
            (`clear_plan_cache` drops them).
        stream: a stream object or handle; None is the current stream of lhs's framework.
        workspace: memory for the algorithm; None lets the plan keep its own.

    Returns:
        out, (m, n).

    Example:
        >>> import numpy as np
        >>> tokens, weights = np.ones((5, 4), np.float32), np.full((2, 4, 3), [[[1]], [[10]]], np.float32)
        >>> ragged_dot(tokens, weights, np.array([2, 3]))[:, 0].tolist()
        [4.0, 4.0, 40.0, 40.0, 40.0]

    Raises:
        TypeError: shapes, element types or dimension numbers that do not fit; the text names the argument, what it got and wanted.
        ValueError: wrong sizes on the host (or, with check="sync", on the device), devices that differ, overlap of out with an input.
        NotImplementedError: operands that are not floating, or no backend that can run this; the text carries every reason.
        RuntimeError: the device failed, or the call cannot be captured in a graph.
    """
    if max_multiprocessors is not None:
        max_multiprocessors = Multiprocessors.of(max_multiprocessors)
    return run(locals(), _calls, _basic_settings, _prepare_basic, _uncollapsed)


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
    beta: float | None = None,
    tail: str = "zero",
    check: str = "none",
    deterministic: bool = False,
    batch_invariant: bool = False,
    max_multiprocessors: int | None = None,
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
        lhs, rhs, group_sizes, offs: the operands, shaped as above; sizes may have the full prefix that JAX allows. An operand with groups
            (rhs; out and c together, where the ragged dimension is contracted) may be a list of one array per group, for axis 0.
        ragged_dot_dimension_numbers: `RaggedDotDimensionNumbers`, this package's or JAX's.
        group_count: contracted only, with a group_offset: how many slabs out has (default: out's, else all groups).
        precision, preferred_element_type, group_offset, out, c, bias, alpha, beta, tail, check: as in `ragged_dot`. Empty
            groups of a contracted ragged dimension have slabs of beta * c. A bias goes with the first row of the table only.
        deterministic, batch_invariant, max_multiprocessors, backend, use_store, stream, workspace: as in `ragged_dot`; batch_invariant
            where lhs's ragged dimension is neither contracted nor a batch axis.

    Returns:
        out, in the framework of lhs.

    Example:
        >>> import numpy as np
        >>> from hipgroupgemm import RaggedDotDimensionNumbers
        >>> weight_gradient = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())  # the rows are contracted, group by group
        >>> tokens, d_out = np.ones((5, 4), np.float32), np.ones((5, 3), np.float32)
        >>> ragged_dot_general(tokens, d_out, np.array([2, 3]), weight_gradient)[:, 0, 0].tolist()
        [2.0, 3.0]

    Raises:
        TypeError, ValueError, RuntimeError: as `ragged_dot`.
        NotImplementedError: as `ragged_dot`; and operands whose axes do not merge into one batch, m, n and k axis without a copy, which are
            computed on a CPU, on a GPU.
    """
    if ragged_dot_dimension_numbers is None:
        raise TypeError("ragged_dot_dimension_numbers: missing; wanted RaggedDotDimensionNumbers")
    if group_count is not None:
        group_count = GroupCount.of(group_count)
    if max_multiprocessors is not None:
        max_multiprocessors = Multiprocessors.of(max_multiprocessors)
    return run(locals(), _calls, _general_settings, _prepare, _uncollapsed)


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
    beta: float | None = None,
    group_count: int | None = None,
) -> GroupedGemmConfig:
    """The config of a ragged dot: what `ragged_dot_general` with these arguments would plan for. Computes nothing.

    Args:
        lhs, rhs, group_sizes, ...: as in `ragged_dot_general`. An `ArraySpec` stands for an array that does not exist. Without out the
            output is packed row-major. No value is read but alpha, beta and a host group_offset.

    Example:
        >>> from hipgroupgemm import ArraySpec
        >>> tokens, weights = ArraySpec((640, 256), "bfloat16"), ArraySpec((8, 256, 512), "bfloat16")
        >>> config = config_for_ragged_dot(tokens, weights, ArraySpec((8,), "int32"))
        >>> config.m, config.k, config.n, config.group_count, config.flops()
        (640, 256, 512, 8, 167772160)

    Raises:
        TypeError, ValueError: as `ragged_dot_general`.
        NotImplementedError: the operands' axes do not merge into one batch, m, n and k axis without a copy.
    """
    arguments = locals()
    problem = canonicalize(parse(arguments), arguments)
    if problem.config is None:
        raise NotImplementedError(f"these operands have no GroupedGemmConfig: {problem.reason}; make a contiguous copy")
    return problem.config


def ragged_dot_reference(
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
    beta: float | None = None,
    tail: str = "zero",
    check: str = "none",
    group_count: int | None = None,
    accumulate: Any = None,
) -> Any:
    """The ragged dot by NumPy, straight from its definition: the judge of every backend. Host arrays only.

    Unlike `ragged_dot_general` on host arrays it treats wrong sizes as a device does: they are clamped, and refused only where
    check="sync".

    Args:
        lhs, rhs, ...: as in `ragged_dot_general`.
        accumulate: the type that products are accumulated in; None for the operation's own (float32, or float64 for float64
            operands). float64 with preferred_element_type=float64 gives the value that errors are measured against.

    Returns:
        out.

    Example:
        >>> import numpy as np
        >>> lhs, rhs = np.ones((3, 2), np.float32), np.ones((2, 2, 1), np.float32)
        >>> ragged_dot_reference(lhs, rhs, np.array([1, 1])).tolist()  # the last row is in no group
        [[2.0], [2.0], [0.0]]
    """
    arguments = locals()
    call = parse(arguments)
    if call.device.kind != "cpu":
        raise NotImplementedError(f"ragged_dot_reference: lhs is on {call.device}; it computes on the CPU, copy the operands there")
    problem = canonicalize(call, arguments)
    kind = compute_type_of(call.lhs.dtype, call.views["rhs"].dtype, problem.out_dtype) if accumulate is None else accumulate
    accumulator = dtype_of(kind, "accumulate")
    if accumulator not in (np.float32, np.float64):
        raise TypeError(f"accumulate={accumulator!s}: wanted float32 or float64")
    call.require_memory()
    result = take_output(call, out, problem)
    compute_call(call, problem.axes, accumulator)
    return arrays.deliver(result, call.lhs, call.device) if out is None else arrays.written(out)


# ---- plans that the functions keep -----------------------------------------------------------------------------------------


def _prepare_basic(call: Call, arguments: dict[str, Any]) -> PreparedCall:
    if (call.lhs.ndim, call.views["rhs"].ndim, call.sizes.ndim) != (2, 3, 1):
        raise TypeError(
            f"ragged_dot: got lhs {call.lhs.shape}, rhs {call.views['rhs'].shape}, {call.sizes_name} {call.sizes.shape}; wanted "
            "(m, k), (g, k, n) and (g,); ragged_dot_general takes other ranks"
        )
    return _prepare(call, arguments)


def _plan_settings(arguments: dict[str, Any]) -> dict[str, Any]:
    settings = {name: arguments[name] for name in _PLAN_SETTINGS}
    check_settings(**{name: value for name, value in settings.items() if name != "max_multiprocessors"})
    return settings


def _prepare(call: Call, arguments: dict[str, Any]) -> PreparedCall:
    """Finds or makes the plan of a call's problem."""
    problem = canonicalize(call, arguments)
    config = problem.config
    if config is None:
        return PreparedCall(None, problem, call)
    settings = _plan_settings(arguments)
    key = (config.key(), call.device, *settings.values())
    plain = config.with_scalars(1.0, config.beta)  # alpha is no part of the key, so it has no say in choosing the backend
    plan = _plans.get(key, lambda: GroupedMatmulPlan(plain, device=call.device, **settings))
    if config.alpha != 1 and settings["backend"] is None and not plan.has_alpha:  # one more plan, of a backend that has it
        plan = _plans.get((*key, "alpha"), lambda: GroupedMatmulPlan(config, device=call.device, **settings))
    return plan.prepared(problem, call)


def _uncollapsed(call: Call, arguments: dict[str, Any], problem: Problem) -> None:
    """Runs operands that have no config: on the CPU, or not at all."""
    reason = f"the operands do not collapse to a GroupedGemmConfig ({problem.reason})"
    settings = _plan_settings(arguments)
    backend, invariant = settings["backend"], settings["batch_invariant"]
    if call.device.kind != "cpu":
        names = ", ".join(backend_names())
        raise NotImplementedError(f"no backend of {names} runs this ragged dot on {call.device}: {reason}; make a contiguous copy")
    if backend not in (None, "reference"):
        get_backend(backend)
        raise NotImplementedError(f"backend {backend!r} refuses: {reason}; make a contiguous copy, or let the reference backend run it")
    if invariant and problem.axes.mode is not RaggedDotMode.NON_CONTRACTING:
        raise NotImplementedError(f"batch_invariant=True: is said of rows of out that are ragged, this is {problem.axes.mode.name}")
    kind = compute_type_of(call.lhs.dtype, call.views["rhs"].dtype, problem.out_dtype)
    compute_call(call, problem.axes, np.dtype(kind), batch_invariant=invariant)


_plans: PlanCache[GroupedMatmulPlan] = PlanCache(_PLANS)
_calls = CallCache()


def clear_plan_cache() -> int:
    """Closes and forgets the plans that `ragged_dot` keeps; one that a call is using is closed after the call.

    Returns:
        How many plans stay, since a graph capture used them and the graph may be launched again.
    """
    _calls.clear()
    return _plans.clear()
