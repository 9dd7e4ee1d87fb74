"""Sizes on the device, the project's fill kernel (host build), its records, the real library, results."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from grouped import RECORD, gemm_problem
from standin_device import Device

from hipgroupgemm.native import GroupedGemm, Handle

ARGUMENT_BYTES = 648
COUNTS, I32, I64, RAGGED_N = 1, 2, 3, 0
OVERRIDE_ALPHA_BETA = 3


class Arguments:
    """The kernels' argument struct (device/arguments.h), by offset."""

    def __init__(self) -> None:
        self.data = np.zeros(ARGUMENT_BYTES, np.uint8)

    def put(self, offset: int, dtype: str, *values: float) -> None:
        raw = np.array(values, dtype).view(np.uint8)
        self.data[offset : offset + raw.size] = raw

    def operand(self, offset: int, base: int, row: int = 0, group: int = 0, batch: int = 0) -> None:
        self.put(offset, "<u8", base)
        self.put(offset + 8, "<i8", row, group, batch)


def launch(device: Device, name: bytes, arguments: Arguments, blocks: int, packed: bool) -> int:
    hip, module, function = device.hip, ctypes.c_void_p(), ctypes.c_void_p()
    device.check(hip.hipModuleLoadData(ctypes.byref(module), b"\x7fELF" + bytes(100)), "hipModuleLoadData")
    device.check(hip.hipModuleGetFunction(ctypes.byref(function), module, name), "hipModuleGetFunction")
    data = np.ascontiguousarray(arguments.data)
    if packed:
        size = ctypes.c_size_t(data.size)
        pointer = ctypes.cast(ctypes.pointer(size), ctypes.c_void_p).value
        extra = (ctypes.c_void_p * 5)(1, data.ctypes.data, 2, pointer, 3)
        return int(hip.hipModuleLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, None, None, extra))
    parameters = (ctypes.c_void_p * 1)(data.ctypes.data)
    return int(hip.hipModuleLaunchKernel(function, blocks, 1, 1, 256, 1, 1, 0, None, parameters, None))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("groups", [1, 7, 300, 2000])
@pytest.mark.parametrize("sizes_type", [(I32, np.int32), (I64, np.int64)])
def test_fill_then_run(handle: Handle, device: Device, groups: int, packed: bool, sizes_type: tuple[int, type]) -> None:
    rng = np.random.default_rng()
    m, k, rows = 24, 16, 3 * groups + 5
    sizes = rng.multinomial(rows - 2, rng.dirichlet(np.full(groups, 0.5)))  # two rows belong to no group
    a = rng.standard_normal((groups, k, m)).astype(np.float16)  # each m x k, column-major
    b = rng.standard_normal((rows, k)).astype(np.float16)  # k x rows, column-major
    d = np.full((rows, m), np.nan, np.float16)
    addresses = {name: device.upload(array) for name, array in {"a": a, "b": b, "d": d}.items()}
    sizes_address = device.upload(sizes.astype(sizes_type[1]))
    count = max(groups, 2)
    records = device.malloc(count * 196)

    gemm = GroupedGemm(handle, gemm_problem(m, rows, k, count))
    chosen = gemm.algorithms(1)[0]
    record = gemm.initialize(chosen.index, device.malloc(chosen.workspace_size), chosen.workspace_size, 0)
    template = np.frombuffer(record, RECORD).copy()
    template["m"], template["k"], template["batch"] = m, k, 1
    template["strideA1"], template["strideB1"], template["strideC1"], template["strideD1"] = m, k, m, m

    arguments = Arguments()
    item = sizes.astype(sizes_type[1]).itemsize
    arguments.put(0, "<u8", sizes_address)
    arguments.put(8, "<i8", item, item * groups)
    arguments.put(40, "<i8", rows)
    arguments.put(80, "<i4", COUNTS, sizes_type[0], 0, 1, groups, groups, RAGGED_N)
    arguments.put(108, "<u4", OVERRIDE_ALPHA_BETA)
    arguments.put(112, "<u8", records)
    arguments.put(120, "<i4", count)
    arguments.put(152, "<f4", 0.5)
    arguments.put(168, "<f4", 0.0)
    arguments.operand(184, addresses["d"], row=2 * m)
    arguments.operand(216, addresses["d"], row=2 * m)
    arguments.operand(248, addresses["a"], group=2 * m * k)
    arguments.operand(280, addresses["b"], row=2 * k)
    arguments.put(452, "u1", *template.view(np.uint8))
    for blocks in (1, 3):
        device.write(records, np.full(count * 196, 0xA5, np.uint8))
        device.write(addresses["d"], d)
        device.check(launch(device, b"hgg_fill", arguments, blocks, packed), "hgg_fill")
        gemm.run(records, 0)
        result = device.read(addresses["d"], d.size, np.float16).reshape(d.shape).astype(np.float64)
        start = 0
        for group, size in enumerate(sizes):
            x, y = b[start : start + size].astype(np.float64), a[group].astype(np.float64)
            exact, magnitude = 0.5 * (x @ y), 0.5 * (np.abs(x) @ np.abs(y))
            bound = (k + 4) * 2.0**-23 * magnitude + 2.0**-11 * np.abs(exact) + 2.0**-24
            assert (np.abs(result[start : start + size] - exact) <= bound).all(), group
            start += size
        assert np.isnan(result[start:]).all(), "rows of no group were written"


def test_a_kernel_that_leaves_its_memory_faults(device: Device) -> None:
    """The fill kernel, given a record array that is one record short."""
    sizes = device.upload(np.ones(4, np.int32))
    records = device.malloc(3 * 196)
    arguments = Arguments()
    arguments.put(0, "<u8", sizes)
    arguments.put(8, "<i8", 4, 16)
    arguments.put(40, "<i8", 4)
    arguments.put(80, "<i4", COUNTS, I32, 0, 1, 4, 4, RAGGED_N)
    arguments.put(112, "<u8", records)
    arguments.put(120, "<i4", 4)
    assert launch(device, b"hgg_fill", arguments, 1, packed=False) == 700
    assert device.take_fault() == 700
    arguments.put(0, "<u8", 4096)  # sizes at an address that nobody has
    assert launch(device, b"hgg_fill", arguments, 1, packed=False) == 700
    assert device.take_fault() == 700
