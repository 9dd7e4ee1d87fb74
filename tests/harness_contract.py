"""What every workbench must do, on configs of every mode and layout: the same checks for the CPU's, the emulated and the real GPUs'."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from generators import BATCH, FORWARD, FORWARD_BATCHED, WEIGHT_GRADIENT, WEIGHT_GRADIENT_BATCHED, dtype_of

import hipgroupgemm as hgg
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.measure.harness import Harness, OperandSet

Mode = hgg.RaggedDotMode


def spec(shape: Sequence[int], dtype: str, order: Sequence[int] | None = None, pad: int = 0, step: int = 1) -> Any:
    """An operand that does not exist yet: axes in memory in `order`, `pad` elements behind each innermost run, `step` between elements."""
    axes = tuple(range(len(shape))) if order is None else tuple(order)
    strides, reach = [0] * len(shape), step
    for position, axis in enumerate(reversed(axes)):
        strides[axis] = reach * dtype_of(dtype).itemsize
        reach *= max(shape[axis], 1)
        if position == 0:
            reach += pad
    return hgg.ArraySpec(shape, dtype_of(dtype), strides=strides)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    config: GroupedGemmConfig
    sizes: Any

    @property
    def host_sizes(self) -> np.ndarray[Any, Any]:
        return np.array(self.sizes, np.int32)


def _config(numbers: Any, lhs: Any, rhs: Any, sizes: Any, **more: Any) -> GroupedGemmConfig:
    return hgg.config_for_ragged_dot(lhs, rhs, np.array(sizes, np.int32), numbers, **more)


def case_list() -> list[Case]:
    """Every mode, four types, transposes, paddings, batches, c and bias; odd extents, empty groups and rows that nobody covers."""
    cases = []

    def add(name: str, numbers: Any, lhs: Any, rhs: Any, sizes: Any, **more: Any) -> None:
        cases.append(Case(name, _config(numbers, lhs, rhs, sizes, **more), sizes))

    for dtype in ("bfloat16", "float16", "float32", "float64"):
        add(f"forward {dtype}", FORWARD, spec((37, 41), dtype), spec((3, 41, 67), dtype), [5, 0, 29])
        add(f"weight gradient {dtype}", WEIGHT_GRADIENT, spec((33, 19), dtype), spec((33, 21), dtype), [20, 0, 9])
    add("wider out", FORWARD, spec((21, 17), "bfloat16"), spec((2, 17, 9), "bfloat16"), [4, 16], preferred_element_type=np.float32)
    padded = {"out": spec((24, 70), "bfloat16", pad=3)}
    add("padded", FORWARD, spec((24, 15), "bfloat16", pad=1), spec((2, 15, 70), "bfloat16", (0, 2, 1), 5), [11, 12], **padded)
    column_major = {"out": spec((30, 18), "float32", (1, 0), pad=2)}
    add("column-major out", FORWARD, spec((30, 12), "float32", (1, 0)), spec((2, 12, 18), "float32"), [17, 10], **column_major)
    stepped = {"out": spec((16, 9), "float16", step=2)}
    add("stepped out", FORWARD, spec((16, 8), "float16", step=3), spec((2, 8, 9), "float16"), [7, 8], **stepped)
    c = {"c": spec((26, 20), "bfloat16", (1, 0), pad=1), "alpha": 1.5, "beta": -0.5}
    add("c", FORWARD, spec((26, 11), "bfloat16"), spec((3, 11, 20), "bfloat16"), [9, 1, 12], **c)
    add("bias", FORWARD, spec((18, 13), "float32"), spec((2, 13, 17), "float32"), [8, 9], bias=spec((2, 17), "float32"))
    c = {"c": spec((2, 15, 12), "float32"), "alpha": -2.0, "beta": 0.75}
    add("weight gradient with c", WEIGHT_GRADIENT, spec((25, 15), "float32"), spec((25, 12), "float32"), [0, 23], **c)
    for sizes in ([6, 7], [[6, 7], [0, 14]]):
        name = "a batch of sizes" if isinstance(sizes[0], list) else "sizes shared by a batch"
        add(f"forward, {name}", FORWARD_BATCHED, spec((2, 15, 10), "float32"), spec((2, 2, 10, 11), "float32"), sizes)
        add(f"weight gradient, {name}", WEIGHT_GRADIENT_BATCHED, spec((2, 15, 6), "float16"), spec((2, 15, 7), "float16"), sizes)
    slabs = {"out": spec((3, 10, 9), "float32", pad=1)}
    add("batch", BATCH, spec((3, 10, 8), "float32"), spec((3, 8, 9), "float32", (0, 2, 1)), [1, 1, 1], **slabs)
    for dtype in ("bfloat16", "float64"):
        config = _config(FORWARD, spec((14, 16), dtype), spec((2, 16, 24), dtype), [6, 5])
        config = dataclasses.replace(config, lhs_alignment=1, rhs_alignment=2, output_alignment=1)
        cases.append(Case(f"unaligned {dtype}", config, [6, 5]))
    add("nothing to contract", FORWARD, spec((9, 0), "float32"), spec((2, 0, 7), "float32"), [3, 4])
    add("no groups filled", FORWARD, spec((9, 5), "bfloat16"), spec((2, 5, 7), "bfloat16"), [0, 0])
    add("no columns", FORWARD, spec((9, 5), "bfloat16"), spec((2, 5, 0), "bfloat16"), [4, 5])
    return cases


def offset_config(mode=FORWARD, **more):
    if mode is WEIGHT_GRADIENT:
        lhs, rhs = hgg.ArraySpec((40, 9), "float32"), hgg.ArraySpec((40, 7), "float32")
        return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((7,), np.int32), mode, group_offset=1, group_count=3)
    lhs, rhs = hgg.ArraySpec((40, 9), "float32"), hgg.ArraySpec((3, 9, 7), "float32")
    return hgg.config_for_ragged_dot(lhs, rhs, hgg.ArraySpec((7,), np.int32), mode, group_offset=1, **more)


CASES = {case.name: case for case in case_list()}


# ---- memory ----------------------------------------------------------------------------------------------------------------------


def peek(bench: Harness, address: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes of the bench's memory."""
    host = np.empty(nbytes, np.uint8)
    if bench.device.kind == "cpu":
        ctypes.memmove(host.ctypes.data, address, nbytes)
    else:
        with bench.runtime.use_device(bench.device.index):
            bench.runtime.memcpy_async(host.ctypes.data, address, nbytes, bench.stream)
            bench.synchronize()
    return host


def poke(bench: Harness, address: int, values: np.ndarray[Any, Any]) -> None:
    """Writes bytes into the bench's memory."""
    host = np.ascontiguousarray(values).view(np.uint8)
    if bench.device.kind == "cpu":
        ctypes.memmove(address, host.ctypes.data, host.nbytes)
    else:
        with bench.runtime.use_device(bench.device.index):
            bench.runtime.memcpy_async(address, host.ctypes.data, host.nbytes, bench.stream)
            bench.synchronize()


def address_of(operands: OperandSet, name: str, at: Sequence[int]) -> int:
    strides = operands.layouts[name].byte_strides
    return operands.pointers[name] + sum(int(i) * stride for i, stride in zip(at, strides, strict=True))


def change(bench: Harness, operands: OperandSet, at: Sequence[int], value: float) -> None:
    """Gives one element of out another value."""
    poke(bench, address_of(operands, "out", at), np.array([value]).astype(operands.layouts["out"].dtype))


def element(bench: Harness, operands: OperandSet, at: Sequence[int]) -> float:
    layout = operands.layouts["out"]
    return float(peek(bench, address_of(operands, "out", at), layout.dtype.itemsize).view(layout.dtype)[0])


def put(bench: Harness, operands: OperandSet, values: np.ndarray[Any, Any], name: str = "out") -> None:
    """Writes all elements of an operand and nothing else."""
    layout = operands.layouts[name]
    if not layout.size:
        return
    reach = peek(bench, operands.pointers[name], layout.reach)
    np.ndarray(layout.shape, layout.dtype, reach.data, 0, layout.byte_strides)[...] = values
    poke(bench, operands.pointers[name], reach)


# ---- what is right ---------------------------------------------------------------------------------------------------------------


def covered_rows(case: Case) -> np.ndarray[Any, Any]:
    """(group of out, batch, m) bools: which rows some group fills, row by row from the definition."""
    config = case.config
    groups = config.group_count if config.ragged_mode is Mode.CONTRACTING else 1
    covered = np.zeros((groups, config.batch_count, config.m), bool)
    for batch in range(config.batch_count):
        sizes = np.broadcast_to(case.host_sizes, (config.batch_count, case.host_sizes.shape[-1]))[batch]
        if config.ragged_mode is Mode.BATCH:
            covered[:, batch] = True
        elif config.ragged_mode is Mode.CONTRACTING:
            covered[:, batch] = (sizes > 0)[:, None]
        else:
            covered[0, batch, : int(sizes.sum())] = True
    return covered


def right_result(bench: Harness, operands: OperandSet, case: Case, group_offset: int = 0) -> np.ndarray[Any, Any]:
    """alpha * P + beta * c + bias in float64, rounded once: written down row by row, apart from the judges."""
    config = case.config
    wide = {name: bench.values(operands, name).astype(np.float64) for name in operands.layouts if name != "out"}
    out = np.zeros(operands.layouts["out"].shape)
    if config.beta:
        out += config.beta * wide["c"]
    for batch in range(config.batch_count):
        a = wide["lhs"][0, batch]
        if config.ragged_mode is Mode.BATCH:
            out[0, batch] += config.alpha * (a @ wide["rhs"][0, batch])
            continue
        sizes = np.broadcast_to(case.host_sizes, (config.batch_count, case.host_sizes.shape[-1]))[batch]
        edges = [0, *itertools.accumulate(sizes.tolist())]
        for group in range(config.group_count):
            for row in range(edges[group + group_offset], edges[group + group_offset + 1]):
                if config.ragged_mode is Mode.CONTRACTING:
                    out[group, batch] += config.alpha * np.outer(a[:, row], wide["rhs"][0, batch, row])
                else:
                    out[0, batch, row] += config.alpha * (a[row] @ wide["rhs"][group, batch])
                    if "bias" in wide:
                        out[0, batch, row] += wide["bias"][group, 0, 0]
    return out.astype(operands.layouts["out"].dtype)


def right_operands(bench: Harness, case: Case, seed: int = 3) -> OperandSet:
    """Operands whose out holds the right result."""
    operands = bench.operands(case.config, seed=seed)
    bench.poison(operands)
    put(bench, operands, right_result(bench, operands, case))
    return operands


# ---- the checks ------------------------------------------------------------------------------------------------------------------


def check_right_result_passes(bench: Harness, case: Case) -> None:
    operands = right_operands(bench, case)
    verdict = bench.check(operands, case.host_sizes, seed=1)
    assert verdict.reason == ""
    assert 0 <= verdict.error <= verdict.error_limit
    sampled = bench.check(operands, case.host_sizes, seed=1, budget=1.0)
    assert sampled.reason == ""
    bench.release(operands)


def check_inputs(bench: Harness, case: Case) -> None:
    """Elements are numbers, the first address has the config's alignment, everything around them is NaN; two seeds differ."""
    operands = bench.operands(case.config, seed=11)
    again = bench.operands(case.config, seed=11)
    other = bench.operands(case.config, seed=12)
    for name, layout in operands.layouts.items():
        if not layout.size:
            continue
        address, values = operands.pointers[name], bench.values(operands, name)
        wanted = getattr(case.config, {"lhs": "lhs_alignment", "rhs": "rhs_alignment", "out": "output_alignment"}.get(name, ""), 1)
        assert address % wanted == 0, name
        assert wanted > 2 or address % (2 * wanted) != 0 or "unaligned" not in case.name, name
        around = peek(bench, address - 64, layout.reach + 128)
        mask = np.ones(around.size, bool)
        np.ndarray((*layout.shape, layout.dtype.itemsize), bool, mask.data, 64, (*layout.byte_strides, 1))[...] = False
        assert (around[mask] == 0xFF).all(), name
        if name == "out":
            assert np.isnan(values).all()
            continue
        wide = values.astype(np.float64)
        assert np.isfinite(wide).all(), name
        np.testing.assert_array_equal(values, bench.values(again, name))
        if values.size > 30:
            assert 0.4 < wide.std() < 1.6 and abs(wide.mean()) < 1, name
            assert (values != bench.values(other, name)).mean() > 0.5, name
    for one in (operands, again, other):
        bench.release(one)


def check_planted_faults(bench: Harness, case: Case, rng: np.random.Generator) -> None:
    """One wrong element, one NaN, one left unwritten, one touched byte of a gap or a guard, one wrong uncovered element: each is found."""
    operands = right_operands(bench, case)
    layout = operands.layouts["out"]
    covered = covered_rows(case)
    values = bench.values(operands)

    def planted(at: Sequence[int], value: float, words: str) -> None:
        kept = peek(bench, address_of(operands, "out", at), layout.dtype.itemsize)
        change(bench, operands, at, value)
        fault = bench.check(operands, case.host_sizes).reason
        assert words in fault, f"{at} = {value}: {fault!r}"
        assert f"row {at[2]} column {at[3]}" in fault
        poke(bench, address_of(operands, "out", at), kept)

    places = [tuple(int(i) for i in at) for at in np.argwhere(np.broadcast_to(covered[..., None], layout.shape))]
    for at in [places[int(rng.integers(len(places)))], places[0], places[-1]] if places else []:
        step = max(abs(float(values[at])), 1.0) * 0.2
        planted(at, float(values[at]) + step, "are wrong")
        planted(at, np.nan, "1 elements are NaN")
        planted(at, np.nan, "1 of ")
        kept = peek(bench, address_of(operands, "out", at), layout.dtype.itemsize)
        poke(bench, address_of(operands, "out", at), np.full(layout.dtype.itemsize, 0xFF, np.uint8))
        assert "1 elements were not written" in bench.check(operands, case.host_sizes).reason
        poke(bench, address_of(operands, "out", at), kept)
    places = [tuple(int(i) for i in at) for at in np.argwhere(np.broadcast_to(~covered[..., None], layout.shape))]
    for at in [places[int(rng.integers(len(places)))], places[0], places[-1]] if places else []:
        planted(at, float(values[at]) + 0.5, "no group covers")
        planted(at, np.nan, "no group covers")
    mask = np.ones(layout.reach + 128, bool)
    if layout.size:
        np.ndarray((*layout.shape, layout.dtype.itemsize), bool, mask.data, 64, (*layout.byte_strides, 1))[...] = False
        gaps = np.flatnonzero(mask)
        for offset in {int(gaps[0]), int(gaps[-1]), int(rng.choice(gaps)), int(gaps[gaps >= 64][0])}:
            poke(bench, operands.pointers["out"] - 64 + offset, np.zeros(1, np.uint8))
            assert "1 bytes between or around" in bench.check(operands, case.host_sizes).reason
            poke(bench, operands.pointers["out"] - 64 + offset, np.full(1, 0xFF, np.uint8))
    assert bench.check(operands, case.host_sizes).reason == ""
    bench.release(operands)


def check_others_rows_do_not_matter(bench: Harness, case: Case) -> None:
    """NaN in rows that no group covers, and in the weights of empty groups, is not the judge's business either."""
    config = case.config
    operands = right_operands(bench, case)
    lhs, rhs = bench.values(operands, "lhs"), bench.values(operands, "rhs")
    for batch in range(config.batch_count):
        sizes = np.broadcast_to(case.host_sizes, (config.batch_count, case.host_sizes.shape[-1]))[batch]
        end = int(sizes.sum())
        if config.ragged_mode is Mode.NON_CONTRACTING:
            lhs[0, batch, end:] = np.nan
            rhs[sizes == 0, batch] = np.nan
        elif config.ragged_mode is Mode.CONTRACTING:
            lhs[0, batch, :, end:] = np.nan
            rhs[0, batch, end:] = np.nan
    put(bench, operands, lhs, "lhs")
    put(bench, operands, rhs, "rhs")
    assert bench.check(operands, case.host_sizes).reason == ""
    bench.release(operands)


def check_same(bench: Harness, case: Case, rng: np.random.Generator) -> None:
    """Bits are compared, not values, and only those of elements."""
    operands = right_operands(bench, case)
    snapshot = bench.snapshot(operands)
    assert bench.same(operands, snapshot) == 0
    layout = operands.layouts["out"]
    if layout.size:
        for count in (1, 2):
            at = (*(int(rng.integers(extent)) for extent in layout.shape[:3]), count - 1)
            poke(bench, address_of(operands, "out", at), peek(bench, address_of(operands, "out", at), layout.dtype.itemsize) ^ 1)
            assert bench.same(operands, snapshot) == count
        bench.poison(operands)
        assert bench.same(operands, snapshot) == layout.size
    snapshot.free()
    bench.release(operands)


def check_sampling_finds_a_wrong_tile(bench: Harness) -> None:
    """A sample sees every tile, and the first and last rows of every group; full looks see single elements whatever the budget."""
    sizes = [1, 130, 2, 0, 100]
    config = _config(FORWARD, spec((240, 16), "float32"), spec((5, 16, 150), "float32"), sizes)
    case = Case("sampled", config, sizes)
    operands = right_operands(bench, case)
    values = bench.values(operands)
    budget = config.flops(sizes) / 6
    verdict = bench.check(operands, case.host_sizes, seed=5, budget=budget)
    assert verdict.reason == "" and " of 233 rows x " in verdict.amount
    tile = values.copy()
    tile[0, 0, 64:96, 64:96] += 1.0
    put(bench, operands, tile)
    assert "are wrong" in bench.check(operands, case.host_sizes, seed=5, budget=budget).reason
    for row in (0, 1, 130, 131, 132, 133, 232):
        wrong = values.copy()
        wrong[0, 0, row] += 1.0
        put(bench, operands, wrong)
        assert "are wrong" in bench.check(operands, case.host_sizes, seed=6, budget=1.0).reason, row
    put(bench, operands, values)
    change(bench, operands, (0, 0, 77, 77), np.nan)
    assert "1 elements are NaN, the first at row 77 column 77" in bench.check(operands, case.host_sizes, budget=1.0).reason
    put(bench, operands, values)
    change(bench, operands, (0, 0, 239, 149), 1e-30)
    assert "no group covers" in bench.check(operands, case.host_sizes, budget=1.0).reason
    bench.release(operands)


def check_digests_and_renewal(bench: Harness, case: Case) -> None:
    """A digest tells of any byte of an input, gaps and guards included, and of nothing else; renewed inputs are others, where they were."""
    operands = bench.operands(case.config, seed=13)
    inputs = [name for name in operands.layouts if name != "out"]
    before = bench.digest(operands)
    assert sorted(before) == sorted(inputs) and before == bench.digest(operands)
    bench.poison(operands)
    assert before == bench.digest(operands)
    for name in inputs:
        layout = operands.layouts[name]
        if not layout.size:
            continue
        for offset in (-1, 0, layout.reach // 2, layout.reach - 1, layout.reach):
            address = operands.pointers[name] + offset
            held = peek(bench, address, 1)
            poke(bench, address, held ^ 1)
            after = bench.digest(operands)
            assert [one for one in inputs if after[one] != before[one]] == [name], (name, offset)
            poke(bench, address, held)
        if layout.reach > 16 and (peek(bench, operands.pointers[name], 8) != peek(bench, operands.pointers[name] + 8, 8)).any():
            both = peek(bench, operands.pointers[name], 16)
            poke(bench, operands.pointers[name], np.roll(both, 8))
            assert bench.digest(operands)[name] != before[name], "two words that change places"
            poke(bench, operands.pointers[name], both)
    assert before == bench.digest(operands)
    values = {name: bench.values(operands, name) for name in inputs}
    where = [operands.pointers[name] for name in operands.layouts]
    bench.renew(operands, seed=14)
    assert where == [operands.pointers[name] for name in operands.layouts]
    for name in inputs:
        now = bench.values(operands, name)
        assert np.isfinite(now.astype(np.float64)).all()
        if now.size > 30:
            assert (now != values[name]).mean() > 0.5
            assert bench.digest(operands)[name] != before[name]
    bench.renew(operands, seed=13)
    for name in inputs:
        np.testing.assert_array_equal(bench.values(operands, name), values[name])
    bench.release(operands)


def check_sizes_in_place(bench: Harness) -> None:
    for dtype in (np.int32, np.int64):
        view = bench.sizes(np.array([[3, 4], [5, 6]], dtype))
        np.testing.assert_array_equal(bench.contents(view), [[3, 4], [5, 6]])
        bench.rewrite(view, np.array([[-1, 0], [2**31 - 1, 9]], dtype))
        found = bench.contents(view)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, [[-1, 0], [2**31 - 1, 9]])


def check_out_full_of_numbers(bench: Harness, case: Case) -> None:
    """What was finite before the run is judged as strictly, its gaps too, and a group may be left out."""
    operands = bench.operands(case.config, seed=15)
    bench.poison(operands, 0x42)
    values = bench.values(operands).astype(np.float64)
    assert np.isfinite(values).all() and (np.abs(values) > 1).all()
    if values.size and covered_rows(case).any():
        assert "are wrong" in bench.check(operands, case.host_sizes, fill=0x42).reason
    put(bench, operands, right_result(bench, operands, case))
    assert bench.check(operands, case.host_sizes, fill=0x42).reason == ""
    layout = operands.layouts["out"]
    if layout.size:
        poke(bench, operands.pointers["out"] + layout.reach, np.array([0xFF], np.uint8))
        assert "1 bytes between or around" in bench.check(operands, case.host_sizes, fill=0x42).reason
        poke(bench, operands.pointers["out"] + layout.reach, np.array([0x42], np.uint8))
    filled = np.flatnonzero(np.atleast_2d(case.host_sizes).any(axis=0))
    if layout.size and case.config.ragged_mode is not Mode.BATCH and filled.size and case.config.k:
        group = int(filled[-1])
        for batch in range(case.config.batch_count):
            sizes = np.broadcast_to(case.host_sizes, (case.config.batch_count, case.host_sizes.shape[-1]))[batch]
            if sizes[group]:
                contracting = case.config.ragged_mode is Mode.CONTRACTING
                change(bench, operands, (group, batch, 0, 0) if contracting else (0, batch, int(sizes[: group + 1].sum()) - 1, 0), 2.0**15)
        assert "are wrong" in bench.check(operands, case.host_sizes, fill=0x42).reason
        assert bench.check(operands, case.host_sizes, fill=0x42, without=group).reason == ""
    bench.release(operands)


def check_undefined_tail(bench: Harness) -> None:
    case = CASES["forward float32"]
    operands = right_operands(bench, case)
    fault = bench.check(operands, case.host_sizes, tail="undefined").reason
    assert "201 elements that no group covers are wrong" in fault  # 3 rows of 67 were written
    poke(bench, address_of(operands, "out", (0, 0, 34, 0)), np.full(3 * 67 * 4, 0xFF, np.uint8))
    assert bench.check(operands, case.host_sizes, tail="undefined").reason == ""
    bench.release(operands)


def check_small_errors(bench: Harness) -> None:
    """A sum that is off by a little everywhere stays within each element's bound, and is found by the norm of the whole."""
    case = CASES["forward float32"]
    operands = right_operands(bench, case)
    values = bench.values(operands)
    covered = np.broadcast_to(covered_rows(case)[..., None], values.shape)
    put(bench, operands, np.where(covered, values * np.float32(1 + 2.0**-21), values))
    fault = bench.check(operands, case.host_sizes).reason
    assert fault.startswith("relative error"), fault
    bench.release(operands)


def check_refusals(bench: Harness) -> None:
    case = CASES["forward bfloat16"]
    operands = right_operands(bench, case)
    for sizes, words in (([5, -1, 3], "at least 0"), ([5, 30, 3], "at most 37"), ([5, 6], "shape")):
        with np.testing.assert_raises_regex(ValueError, words):
            bench.check(operands, np.array(sizes))
    with np.testing.assert_raises_regex(ValueError, "beta=1"):
        bench.check(operands, case.host_sizes, beta=1.0)
    bench.release(operands)
    bench.release(operands)


def check_scalars_and_offsets(bench: Harness) -> None:
    """alpha and beta of a call instead of the config's, alpha = 0 that reads no product, and groups out of more."""
    case = CASES["c"]
    other = Case("c, other scalars", dataclasses.replace(case.config, alpha=-0.25, beta=2.0), case.sizes)
    operands = bench.operands(case.config, seed=21)
    bench.poison(operands)
    put(bench, operands, right_result(bench, operands, other))
    assert bench.check(operands, case.host_sizes, alpha=-0.25, beta=2.0).reason == ""
    assert "are wrong" in bench.check(operands, case.host_sizes).reason
    arguments = bench.arguments(operands, bench.sizes(case.host_sizes), alpha=-0.25, beta=2.0, tail="undefined", group_offset=0)
    assert (arguments.config.alpha, arguments.config.beta, arguments.config.key()) == (-0.25, 2.0, case.config.key())
    with np.testing.assert_raises_regex(ValueError, "beta=0"):
        bench.arguments(operands, bench.sizes(case.host_sizes), beta=0.0)
    put(bench, operands, (2.0 * bench.values(operands, "c").astype(np.float64)).astype(operands.layouts["out"].dtype))
    put(bench, operands, np.full(operands.layouts["lhs"].shape, np.nan), "lhs")
    assert bench.check(operands, case.host_sizes, alpha=0.0, beta=2.0).reason == ""
    bench.release(operands)
    sizes = [4, 9, 3, 8]
    config = _config(FORWARD, spec((30, 14), "float32"), spec((2, 14, 10), "float32"), sizes, group_offset=1)
    case = Case("groups out of more", config, sizes)
    operands = bench.operands(config, seed=22)
    bench.poison(operands)
    put(bench, operands, right_result(bench, operands, case, group_offset=1))
    assert bench.check(operands, case.host_sizes, group_offset=1).reason == ""
    assert "no group covers" in bench.check(operands, case.host_sizes, group_offset=2).reason
    change(bench, operands, (0, 0, 3, 9), 1e-20)
    assert "row 3 column 9" in bench.check(operands, case.host_sizes, group_offset=1).reason
    with np.testing.assert_raises_regex(ValueError, "group_offset=3"):
        bench.check(operands, case.host_sizes, group_offset=3)
    bench.release(operands)


def check_overflow(bench: Harness) -> None:
    """A sum past the type's largest number is infinity by right, of the right sign; of any other element infinity is wrong."""
    case = Case("overflow", _config(FORWARD, spec((24, 700), "float16"), spec((2, 700, 9), "float16"), [11, 12]), [11, 12])
    operands = bench.operands(case.config, seed=6)
    lhs = bench.values(operands, "lhs")
    lhs[0, 0, :5] = 40000.0
    lhs[0, 0, 12] *= 3000
    put(bench, operands, lhs, "lhs")
    bench.poison(operands)
    with np.errstate(over="ignore"):
        result = right_result(bench, operands, case)
    put(bench, operands, result)
    infinite = np.argwhere(np.isinf(result))
    assert len(infinite) > 20 and np.isfinite(result[0, 0, 20]).all()
    assert bench.check(operands, case.host_sizes).reason == ""
    for at, value in ((tuple(infinite[0]), -result[tuple(infinite[0])]), ((0, 0, 20, 3), np.inf)):
        change(bench, operands, at, value)
        assert f"row {at[2]} column {at[3]}" in bench.check(operands, case.host_sizes).reason
        change(bench, operands, at, result[at])
    bench.release(operands)
