"""Tuning's device kernels in their host build, and the GPU's workbench around them, on a GPU that is host memory."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import harness_contract as contract
import numpy as np
import pytest
from device_host.build import DEVICE, INCLUDE, JUDGE_DRIVER, compile_host
from harness_contract import CASES
from harness_contract_tests import ContractTests
from host_gpu import HostKernels, host_bench

from hipgroupgemm.measure import device_harness as dj
from hipgroupgemm.measure.layouts import Layout


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_host(tmp_path_factory.mktemp("judge"), driver=JUDGE_DRIVER)


@pytest.fixture
def bench(library):
    with host_bench(library) as bench:
        yield bench
    assert not bench.runtime.blocks, "memory was not freed"
    assert not bench.runtime.events and not bench.runtime.streams


class TestContract(ContractTests):
    """On this bench."""


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_and_numpy_find_the_same_errors(bench, name, rng):
    """Both judges on results that are off here and there: counts, places and the relative error agree."""
    from hipgroupgemm.measure.harness import harness_for

    case = CASES[name]
    operands = bench.operands(case.config, seed=4)
    right = contract.right_result(bench, operands, case)
    if not right.size:
        return
    noisy = (right.astype(np.float64) * (1 + 0.1 * (rng.random(right.shape) < 0.05))).astype(right.dtype)
    contract.put(bench, operands, noisy)
    with harness_for("cpu") as host:
        there = host.operands(case.config, seed=5)
        for operand in operands.layouts:
            contract.put(host, there, bench.values(operands, operand), operand)
        for budget in (None, 1.0):
            mine = bench.check(operands, case.host_sizes, seed=9, budget=budget)
            theirs = host.check(there, case.host_sizes, seed=9, budget=budget)
            assert mine.reason == theirs.reason
            assert mine.amount == theirs.amount
            # where no element is off, what is left is the judges' own rounding
            np.testing.assert_allclose([mine.error, mine.error_limit], [theirs.error, theirs.error_limit], rtol=1e-9, atol=1e-14)


def test_flush_and_time(bench):
    bench.flush()
    bench.flush()
    assert bench.time(lambda: None) >= 0
    bench.synchronize()


def test_what_does_not_fit_is_refused_before_anything_is_made(bench):
    config = contract._config(contract.FORWARD, *(contract.spec(s, "float32") for s in ((2**14, 2**14), (1, 2**14, 8))), [5])
    before = bench.free_bytes()
    with pytest.raises(MemoryError, match="the operands take"):
        bench.operands(config, seed=0)
    assert bench.free_bytes() == before


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fnuz"])
def test_types_that_the_kernel_does_not_read_are_checked_on_the_host(bench, monkeypatch, dtype):
    config = contract._config(contract.FORWARD, *(contract.spec(s, dtype) for s in ((40, 90), (2, 90, 33))), [30, 8])
    case = contract.Case("8-bit", config, [30, 8])
    operands = contract.right_operands(bench, case)
    assert bench.check(operands, case.host_sizes).reason == ""
    contract.change(bench, operands, (0, 0, 29, 32), 100.0)
    assert "1 of" in bench.check(operands, case.host_sizes).reason
    monkeypatch.setattr("hipgroupgemm.measure.device_harness._ON_HOST", 0)
    with pytest.raises(NotImplementedError, match=f"{dtype} on cuda:0: the check reads"):
        bench.check(operands, case.host_sizes)
    bench.release(operands)


def test_a_bench_closes_although_its_device_has_failed(library, monkeypatch):
    bench = host_bench(library)
    bench.operands(CASES["forward float32"].config, seed=0)
    bench.flush()

    def fail(stream):
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(bench.runtime, "synchronize_stream", fail)
    with pytest.raises(RuntimeError, match="has failed"):
        bench.synchronize()
    bench.close()
    bench.close()
    assert not bench.runtime.blocks and not bench.runtime.streams


def test_addresses_past_32_bits(library):
    """Strides of terabytes, in a launch whose tile uses the first row, column and slab alone; and large indices in the walk."""
    kernels = HostKernels(library)
    memory = np.zeros(64, np.float64)
    memory[:3] = 3.0, 5.0, 15.0
    arguments = np.zeros((), dj.CHECK_ARGUMENTS)
    far = 1 << 41
    for i, name in enumerate(("lhs", "rhs", "out")):
        # the operand's first element lies `far` bytes, times the index, ahead of the one that is read
        arguments[name] = (memory.ctypes.data + 8 * i - 7 * far, 0, far, 0, 0, dj.TYPES["float64"], 1)
    tile = np.zeros(1, dj.CHECK_TILE)
    tile["k_end"], tile["batch"], tile["count"] = 1, 7, 1
    zero, findings = np.zeros(1, np.int64), np.zeros(1, dj.COUNTS)
    arguments["groups"], arguments["batches"], arguments["rows"], arguments["columns"] = 1, 8, 1 << 33, 1 << 20
    for name, array in (("tiles", tile), ("row_list", zero), ("column_list", zero), ("findings", findings)):
        arguments[name] = array.ctypes.data
    arguments["tile_count"] = arguments["column_count"] = arguments["alpha"] = 1
    kernels.launch("hgg_judge", arguments, 1, 0)
    assert findings["count"] == 1 and findings["wrong"] == 0 and findings["square_norm"] == 225
    memory[2] = 16.0
    kernels.launch("hgg_judge", arguments, 1, 0)
    assert findings["wrong"] == 1 and findings["first"] == 7 << 53 and findings["got"] == 16 and findings["wanted"] == 15


def test_grids_do_not_change_what_is_found(library, rng):
    kernels = HostKernels(library)
    values = rng.standard_normal((37, 300)).astype(np.float32)
    other = np.where(rng.random(values.shape) < 0.3, values + 1, values)
    layout = Layout((1, 1, 37, 290), (0, 0, 300, 1), values.dtype, 4)
    for grid in (1, 3, 40):
        findings = np.zeros(grid, dj.COUNTS)
        arguments = np.zeros((), dj.MEMORY_ARGUMENTS)
        arguments["extent"], arguments["stride"] = dj.walk_axes(layout)
        arguments["base"], arguments["other"], arguments["bytes"] = values.ctypes.data, other.ctypes.data, 4
        arguments["findings"] = findings.ctypes.data
        kernels.launch("hgg_same", arguments, grid, 0)
        assert findings["count"].sum() == (values != other)[:, :290].sum()


@pytest.mark.parametrize("length", [1, 7, 1000, 4097])
@pytest.mark.parametrize("first", [0, 3])
def test_a_table_is_repeated_along_the_walk(library, length, first):
    kernels = HostKernels(library)
    layout = Layout((2, 1, 3, 4500), (14000, 0, 4600, 1), np.dtype(np.uint16), 2)
    target, table = np.zeros(30000, np.uint16), np.arange(length, dtype=np.uint16) + 1
    arguments = np.zeros((), dj.MEMORY_ARGUMENTS)
    arguments["extent"], arguments["stride"] = dj.walk_axes(layout)
    arguments["base"], arguments["other"], arguments["bytes"] = target.ctypes.data, table.ctypes.data, 2
    arguments["count"], arguments["first"] = length, first
    kernels.launch("hgg_scatter", arguments, 3, 0)
    wanted = np.zeros(30000, np.uint16)
    numbers = (np.arange(2 * 3 * 4500) + first) % length + 1
    for index, (group, row) in enumerate(np.ndindex(2, 3)):
        wanted[group * 14000 + row * 4600 :][:4500] = numbers[index * 4500 :][:4500]
    np.testing.assert_array_equal(target, wanted)


def test_axes_of_a_walk():
    def axes(shape, strides):
        return dj.walk_axes(Layout(shape, strides, np.dtype(np.float32), 4))

    assert axes((2, 3, 4, 5), (60, 20, 5, 1)) == ([1, 1, 1, 120], [0, 0, 0, 4])
    assert axes((2, 1, 4, 5), (24, 7, 6, 1)) == ([1, 1, 8, 5], [0, 0, 24, 4])
    assert axes((1, 3, 4, 5), (0, 0, 1, 4)) == ([1, 1, 1, 20], [0, 0, 0, 4])
    assert axes((1, 1, 1, 1), (0, 0, 9, 9)) == ([1, 1, 1, 1], [0, 0, 0, 0])
    assert axes((1, 3, 0, 5), (0, 5, 5, 1)) == ([1, 1, 1, 0], [0, 0, 0, 0])


# ---- the structs -----------------------------------------------------------------------------------------------------------------


class Field(ctypes.Structure):
    _fields_ = (("type", ctypes.c_char_p), ("name", ctypes.c_char_p), ("offset", ctypes.c_int), ("size", ctypes.c_int))


def test_the_compiler_s_offsets_are_python_s(library):
    loaded = ctypes.CDLL(str(library))
    count = ctypes.c_int.in_dll(loaded, "hgg_test_layout_count").value
    seen = {}
    for field in (Field * count).in_dll(loaded, "hgg_test_layout"):
        seen.setdefault(field.type.decode(), {})[field.name.decode()] = (field.offset, field.size)
    wanted = {
        "hgg_findings": dj.COUNTS,
        "hgg_tensor": dj.TENSOR,
        "hgg_judge_tile": dj.CHECK_TILE,
        "hgg_judge_arguments": dj.CHECK_ARGUMENTS,
        "hgg_memory_arguments": dj.MEMORY_ARGUMENTS,
    }
    assert seen == {name: {field: (entry[1], entry[0].itemsize) for field, entry in dtype.fields.items()} for name, dtype in wanted.items()}
    constants = (ctypes.c_int * 5).in_dll(loaded, "hgg_test_constants")
    assert list(constants) == [dj._ROWS, dj._COLUMNS, dj.CHUNK, dj._KEPT, dj._ROWS_INSIDE]


def test_the_header_is_plain_c(tmp_path):
    compiler = next(name for name in ("gcc", "clang", "cc") if shutil.which(name))
    source = tmp_path / "plain.c"
    source.write_text('#include "judge_arguments.h"\nint main(void) { return (int)sizeof(hgg_judge_arguments) != 384; }\n')
    options = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{DEVICE}", f"-I{INCLUDE}"]
    subprocess.run([compiler, *options, str(source), "-o", str(tmp_path / "plain")], check=True)
    subprocess.run([str(tmp_path / "plain")], check=True)


def test_unknown_kernels_and_shapes_are_refused(library):
    kernels = HostKernels(library)
    arguments = np.zeros((), dj.MEMORY_ARGUMENTS)
    with pytest.raises(RuntimeError, match="hgg_other: 1"):
        kernels.launch("hgg_other", arguments, 1, 0)
    with pytest.raises(RuntimeError, match="hgg_same: 2"):
        kernels.launch("hgg_same", arguments, 0, 0)


# ---- wrong kernels -----------------------------------------------------------------------------------------------------------------

# name: (file, right text, wrong text)
MUTATIONS = {
    "a product left out": ("judge.h", "for (int d = 0; d < kDepth; ++d)", "for (int d = 1; d < kDepth; ++d)"),
    "the end of the contraction": ("judge.h", "k + d < tile.k_end", "k + d <= tile.k_end"),
    "the batch of lhs": ("judge.h", "address_in(a->lhs, 0, tile.batch,", "address_in(a->lhs, 0, 0,"),
    "the group of rhs": ("judge.h", "address_in(a->rhs, tile.group,", "address_in(a->rhs, 0,"),
    "no barrier before the product": (
        "judge.h",
        "HGG_PHASE(t) { judge.stage(shared.stage, k, t); }\n      HGG_PHASE(t) { judge.accumulate(",
        "HGG_PHASE(t) { judge.stage(shared.stage, k, t); judge.accumulate(",
    ),
    "sums not begun anew": ("judge.h", "HGG_OWN(sums, t).value[q] = HGG_OWN(sums, t).magnitude[q] = 0.0", "(void)q"),
    "NaN passes": ("judge.h", "if (error <= bound) return;  // NaN is not", "if (!(error > bound)) return;"),
    "NaN passes in full": ("judge.h", "    if (got == got) return;\n", "    return;\n"),
    "a bound without end": ("judge.h", "+ summed) + a->smallest;", "+ summed) + a->smallest + 1e30;"),
    "covered rows too many": ("judge.h", "if (row >= first && row < end) {", "if (row >= first && row <= end) {"),
    "covered rows too few": ("judge.h", "if (row >= first && row < end) {", "if (row >= first && row + 1 < end) {"),
    "c of uncovered rows": ("judge.h", "wanted = a.beta * value_in", "wanted = 0 * value_in"),
    "bias of the first group": ("judge.h", "address_in(a->bias, tile.group,", "address_in(a->bias, 0,"),
    "gaps that are elements": ("memory.h", "return byte < a.bytes;", "return byte <= a.bytes;"),
    "only the first guard": ("memory.h", "i < a.first ? i : i + a.skip", "i"),
    "a chunk short": ("findings.h", "minimum(first + kChunkElements, length)", "minimum(first + kChunkElements, length - 1)"),
    "half of the findings": ("findings.h", "half > 0; half /= 2", "half > 1; half /= 2"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_kernel_is_noticed(tmp_path, name):
    """The contract is worth something only if wrong kernels break it."""
    file, right, wrong = MUTATIONS[name]
    device = tmp_path / "device"
    shutil.copytree(DEVICE, device)
    text = (device / file).read_text(encoding="utf-8")
    assert text.count(right) == (2 if name == "the end of the contraction" else 1), f"{right!r} is in {file} {text.count(right)} times"
    (device / file).write_text(text.replace(right, wrong), encoding="utf-8")
    library: Path = compile_host(tmp_path, device, options=("-O1", "-w"), driver=JUDGE_DRIVER)
    rng = np.random.default_rng(1)
    with host_bench(library) as bench, pytest.raises(AssertionError):
        for case in CASES.values():
            contract.check_right_result_passes(bench, case)
            contract.check_others_rows_do_not_matter(bench, case)
            contract.check_planted_faults(bench, case, rng)
            contract.check_same(bench, case, rng)
