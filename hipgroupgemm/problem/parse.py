"""One call's arguments as views by role, checked one by one: types, devices, settings. Shapes are `canonicalize`'s.

`ROLES` is the one list of operands. Whatever has to be done with each of them (a view, memory, overlap, stream order, an address, keeping
it alive) goes through the list, so that a new operand is a line there, and its shape in `canonicalize`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from hipgroupgemm.config import FLOAT32_MAX
from hipgroupgemm.operands import arrays
from hipgroupgemm.operands.dtypes import compute_type_of, dtype_of, float_dtype
from hipgroupgemm.operands.views import ArrayView, Device, host_array, near_pairs
from hipgroupgemm.runtime.streams import normalize_stream, stream_handle

__all__ = ["ARRAYS", "ROLES", "Call", "Role", "parse", "parse_beta"]


class Role(NamedTuple):
    """What an operand is: "floating" data or "integer" indices, or "bytes"; whether the call writes it, and whether it may be a list."""

    elements: str
    written: bool = False
    listed: bool = False


ROLES: dict[str, Role] = {
    "lhs": Role("floating"),
    "rhs": Role("floating", listed=True),
    "group_sizes": Role("integer"),
    "group_offset": Role("integer"),
    "c": Role("any", listed=True),
    "bias": Role("any"),
    "out": Role("any", written=True, listed=True),
    "workspace": Role("bytes", written=True),
}
ARRAYS = ("lhs", "rhs", "group_sizes", "offs", "c", "bias", "out")
"""The arguments that are arrays in every call that has them; `group_offset` may be an int, `workspace` is rare."""


@dataclasses.dataclass(slots=True)
class Call:
    """One call, parsed.

    Attributes:
        views: the operands that are there, by role; a role that is not there is absent.
        ends: whether the sizes are end offsets.
        group_offset: the first group computed where it is a host int; None without one, or where it lies on the device.
        alpha, beta, tail, check: as the function's. device, stream: where, and the stream's handle.
    """

    views: dict[str, ArrayView]
    ends: bool
    group_offset: int | None
    alpha: float
    beta: float
    tail: str
    check: str
    device: Device
    stream: int

    @property
    def sizes_name(self) -> str:
        """What the sizes are called in the caller's arguments."""
        return "offs" if self.ends else "group_sizes"

    @property
    def has_group_offset(self) -> bool:
        """Whether one was given, as an int or on the device."""
        return self.group_offset is not None or "group_offset" in self.views

    @property
    def lhs(self) -> ArrayView:
        """lhs's view."""
        return self.views["lhs"]

    @property
    def sizes(self) -> ArrayView:
        """The sizes' or end offsets' view."""
        return self.views["group_sizes"]

    def name_of(self, role: str) -> str:
        """What an operand is called in the caller's arguments."""
        return self.sizes_name if role == "group_sizes" else role

    def layout_key(self) -> tuple[Any, ...]:
        """All that the call's canonical form and the kind of its result depend on, but for the function's own settings; hashable."""
        layouts = tuple((role, view.signature()) for role, view in self.views.items())
        return (layouts, self.lhs.framework, self.ends, self.group_offset, self.alpha, self.beta, self.tail, self.device)

    def require_memory(self) -> None:
        """Refuses operands that have elements but no address, such as an `ArraySpec`."""
        for role, view in self.views.items():
            for name, part in view.parts(self.name_of(role)):
                if part.pointer == 0 and part.size and not (role == "c" and not self.beta):
                    raise ValueError(f"{name}: has shape {part.shape} but no memory (an ArraySpec?); pass an array to compute with")

    def refuse_overlap(self) -> None:
        """Refuses an out, and a workspace, that shares memory with another operand; only c may be exactly out."""
        for role, view in self.views.items():
            if not ROLES[role].written:
                continue
            for other, operand in self.views.items():
                if ROLES[other].written and role == "out" != other:
                    continue
                of_both, is_c = operand.parts(self.name_of(other)) if other != role else None, (role, other) == ("out", "c")
                for (one, mine), (two, theirs) in near_pairs(view.parts(role), of_both):
                    if (is_c and one[3:] == two[1:] and mine.same_elements(theirs)) or not mine.overlaps(theirs):
                        continue
                    exactly = f" without being exactly {two}" if is_c else ""
                    raise ValueError(f"{one}: shares memory with {two}{exactly}; give it memory of its own")


def parse(arguments: dict[str, Any]) -> Call:
    """Views of all arguments, with types, devices and settings checked; shapes are not looked at yet.

    Args:
        arguments: a public function's, by name. What a function does not have counts as left out.

    Raises:
        TypeError: an argument that is no array, or of a wrong kind of type; out immutable.
        ValueError: a setting that is no choice, devices that differ, beta without c or c without beta.
        NotImplementedError: operands that are not floating.
    """
    given = arguments.get
    tail, check, c = given("tail", "zero"), given("check", "none"), given("c")
    if type(tail) is not str or tail not in ("zero", "undefined"):
        raise ValueError(f'tail={tail!r}: must be "zero" or "undefined"')
    if type(check) is not str or check not in ("none", "sync"):
        raise ValueError(f'check={check!r}: must be "none" or "sync"')
    alpha, beta = _real("alpha", given("alpha", 1.0)), parse_beta(given("beta"), c)
    offs = given("offs")
    if (given("group_sizes") is None) == (offs is None):
        raise TypeError(f"group_sizes and offs: got {'neither' if offs is None else 'both'}, wanted exactly one of them")
    asked = None if given("stream") is None else stream_handle(given("stream"))
    lhs = arrays.view_of(arguments["lhs"], "lhs", asked)
    if lhs.device.kind in ("cpu", "any"):
        stream = asked or 0
    else:
        own = arrays.current_stream(lhs.framework, lhs.device) if asked is None else asked
        stream = normalize_stream(lhs.device.kind, own)
    views = {"lhs": lhs, "rhs": arrays.view_or_list_of(arguments["rhs"], "rhs", stream)}
    sizes_name = "group_sizes" if offs is None else "offs"
    views["group_sizes"] = _integers(given(sizes_name), sizes_name, stream)
    offset = None if given("group_offset") is None else _offset(given("group_offset"), stream)
    if isinstance(offset, ArrayView):
        views["group_offset"], offset = offset, None
    for role in ("c", "bias", "out", "workspace"):
        if given(role) is not None:
            views[role] = (arrays.view_or_list_of if ROLES[role].listed else arrays.view_of)(given(role), role, stream)
    for role in ("lhs", "rhs"):
        float_dtype(views[role].dtype, role)
    _check_writable(views)
    preferred = given("preferred_element_type")
    wanted = [] if preferred is None else [dtype_of(preferred, "preferred_element_type")]
    kind = compute_type_of(lhs.dtype, views["rhs"].dtype, *wanted)
    for name, value in (("alpha", alpha), ("beta", beta)):
        if abs(value) > FLOAT32_MAX and kind != "float64":
            raise ValueError(f"{name}={value}: is infinite in float32, in which these operands are accumulated; scale an operand as well")
    on_device = [(role, view) for role, view in views.items() if ROLES[role].elements != "integer"]
    device = arrays.common_device(on_device)
    for role in ("group_sizes", "group_offset"):
        view = views.get(role)
        if view is not None and view.device.kind != "cpu":
            name = sizes_name if role == "group_sizes" else role
            arrays.common_device([*on_device, (name, view)])
            if view.device == arrays.ANYWHERE:  # no elements, and a producer that does not say where they would be
                views[role] = dataclasses.replace(view, device=device)
            elif device.kind == "cpu":
                raise ValueError(f"{name} is on {view.device}, but lhs is on {device}; move one of them")
    return Call(views, offs is not None, offset, alpha, beta, tail, check, device, stream)


def parse_beta(beta: Any, c: Any) -> float:
    """beta with its default: 0 without c; with c it has to be given."""
    if beta is None:
        if c is not None:
            raise ValueError("beta: left out beside c; give beta=1.0 to add c, or beta=0.0 to ignore it")
        return 0.0
    value = _real("beta", beta)
    if value != 0 and c is None:
        raise ValueError(f"beta={value}: there is no c to scale; pass c, or leave beta out")
    return value


def _real(name: str, value: Any) -> float:
    if type(value) is float and -FLOAT32_MAX <= value <= FLOAT32_MAX:
        return value
    if isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real):
        raise NotImplementedError(f"{name}={value!r}: must be real")
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, np.floating, np.integer)):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted a real number on the host")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{name}={result}: must be finite")
    return result


def _integers(value: Any, name: str, stream: int) -> ArrayView:
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:  # nested lists of different lengths
            raise TypeError(f"{name}: got a {type(value).__name__} that is no array ({error}); wanted integers") from None
        if value.size == 0:  # no element says what type they would have
            value = value.astype(np.int64)
    view = arrays.view_of(value, name, stream)
    if view.dtype.kind not in "iu":
        raise TypeError(f"{name}: got {view.dtype!s}, wanted an integer type")
    if not view.dtype.isnative:
        raise TypeError(f"{name}: got {view.dtype!s} of foreign byte order; convert it to the native one")
    return view


def _offset(value: Any, stream: int) -> int | ArrayView:
    """group_offset as a host int, or as a view where it lies on a device."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (numbers.Number, np.generic, str)):
        raise TypeError(f"group_offset: got {type(value).__name__}, wanted an int or an integer array of shape (1,)")
    view = _integers(value, "group_offset", stream)
    if view.shape not in ((), (1,)):
        raise TypeError(f"group_offset: got shape {view.shape}, wanted an int or shape (1,)")
    if view.pointer == 0 and view.device.kind == "cpu":
        raise ValueError("group_offset: has no memory (an ArraySpec?); pass its value")
    return int(host_array(view).reshape(())) if view.device.kind == "cpu" else view


def _check_writable(views: dict[str, ArrayView]) -> None:
    """Refuses what cannot be written: JAX arrays, read-only ones, and an out whose elements overlap each other."""
    for role, view in views.items():
        if not ROLES[role].written:
            continue
        for name, part in view.parts(role):
            if part.framework == "jax":
                raise TypeError(f"{name}: JAX arrays are immutable; leave {role} away and use the result")
            if part.readonly:
                raise TypeError(f"{name}: is read-only; pass a writable array")
        name, part = view.parts(role)[0]  # all have the same strides
        reach = part.dtype.itemsize
        steps = zip(part.strides, part.shape, strict=True)
        for stride, extent in sorted(step for step in steps if step[1] > 1) if part.size else ():
            if stride < reach:
                raise ValueError(
                    f"{name}: its elements overlap in memory, it has strides {part.strides} (bytes) for shape {part.shape}; "
                    "pass an array of its own, not a broadcast or sliding view"
                )
            reach += stride * (extent - 1)
