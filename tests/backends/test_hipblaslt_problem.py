"""Configs as hipBLASLt's problems, and its handles: what needs no device."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.backends.base import Backend
from hipgroupgemm.backends.hipblaslt import HipblasltBackend
from hipgroupgemm.backends.hipblaslt import executable as of_executable
from hipgroupgemm.backends.hipblaslt.problem import Refused, patched_record, problem_of
from hipgroupgemm.config import GroupedGemmConfig
from hipgroupgemm.operands.views import Device

DEVICE = "rocm:0"


def spec(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: str = "float16") -> hgg.ArraySpec:
    return hgg.ArraySpec(shape, dtype, strides=strides, device=DEVICE)


def forward(lhs: hgg.ArraySpec, rhs: hgg.ArraySpec, **settings) -> GroupedGemmConfig:
    sizes = spec((rhs.shape[0],), dtype="int32")
    return hgg.config_for_ragged_dot(lhs, rhs, sizes, **settings)


def declared(config: GroupedGemmConfig) -> str | None:
    """What the base class has against it, or this backend's own terms; None where only the library can tell."""
    reason = Backend.can_handle(_Declares(), config, Device.of(DEVICE))
    if reason is None:
        try:
            problem_of(config)
        except Refused as error:
            return str(error)
    return reason


class _Declares(HipblasltBackend):
    def refusal(self, config: GroupedGemmConfig, device: Device) -> str | None:
        return None


def test_operands_trade_places(rng):
    m, k, n = (int(x) for x in rng.integers(9, 90, 3))
    config = forward(spec((m, k), (2 * k + 10, 2)), spec((5, k, n)), alpha=0.5)
    problem = problem_of(config)
    g = problem.gemm
    assert (g.m, g.n, g.k, g.count, g.batch, g.ragged) == (n, m, k, 5, 1, "n")
    assert (g.trans_a, g.trans_b, g.lda, g.ldb, g.ldc, g.ldd) == (False, False, n, k + 5, n, n)
    assert {letter: matrix.role for letter, matrix in problem.matrices.items()} == {"a": "rhs", "b": "lhs", "c": "out", "d": "out"}
    assert (problem.matrices["a"].group, problem.matrices["b"].row, problem.matrices["d"].row) == (2 * k * n, 2 * (k + 5), 2 * n)
    assert problem.swapped and not problem.empty
    record = patched_record(bytes(range(196)), problem, product=True)
    assert struct.unpack_from("<4I", record) == (n, m, 1, k)
    assert struct.unpack_from("<8I", record, 48) == (n, 0, n, 0, n, 0, k + 5, 0)
    assert record[16:48] == bytes(range(16, 48)) and record[80:] == bytes(range(80, 196))
    assert struct.unpack_from("<4I", patched_record(bytes(196), problem, product=False)) == (n, m, 1, 0)


def test_one_group_is_two_problems():
    """With a single problem hipBLASLt would offer kernels that demand sizes in multiples."""
    problem = problem_of(forward(spec((64, 32)), spec((1, 32, 48))))
    assert (problem.gemm.count, problem.groups) == (2, 1)


def test_sizes_of_each_batch_entry():
    """The capacity is that of all records together."""
    numbers = hgg.RaggedDotDimensionNumbers((([2], [2]), ([0], [1])), [1], [0])
    sizes = spec((4, 3), dtype="int32")
    config = hgg.config_for_ragged_dot(spec((4, 50, 16)), spec((3, 4, 16, 24)), sizes, ragged_dot_dimension_numbers=numbers)
    problem = problem_of(config)
    assert (problem.scans, problem.groups, problem.gemm.count, problem.gemm.batch) == (4, 12, 12, 1)
    assert problem.gemm.n == 4 * 50


@pytest.mark.parametrize("strides", [(2, 1), (2, 400), (400, 2), (0, 2), (2, 0)])
def test_strides_of_axes_of_extent_1_do_not_matter(strides):
    """(33, 1): one element a row, so the inner stride is nobody's."""
    shape = (33, 1) if strides[0] else (1, 33)
    packed = forward(spec(shape), spec((3, shape[1], 40)))
    odd = tuple(stride if extent == 1 else packed_stride for extent, stride, packed_stride in zip(shape, strides, (2, 2), strict=True))
    assert declared(packed) is None
    assert declared(forward(spec(shape, odd), spec((3, shape[1], 40)))) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: forward(spec((64, 32), (256, 4)), spec((3, 32, 48))), "lhs_inner_stride = 2"),
        (lambda: forward(spec((64, 32), (0, 2)), spec((3, 32, 48))), "lhs's rows overlap"),
        (
            lambda: forward(spec((2, 32), (2**34, 2)), spec((3, 32, 48))),
            "leading dimension is 8589934592; hipBLASLt's records hold 32 bits",
        ),
        (lambda: forward(spec((64, 32), dtype="float8_e4m3fn"), spec((3, 32, 48), dtype="float8_e4m3fn")), "lhs of type float8_e4m3fn"),
        (lambda: forward(spec((64, 32)), spec((3, 32, 48)), out=spec((64, 48), (2, 128))), "out is column-major"),
    ],
)
def test_refusals(config, reason):
    assert reason in str(declared(config()))


def test_an_empty_problem_has_no_product():
    for m, k, n in ((0, 8, 8), (8, 8, 0)):
        assert problem_of(forward(spec((m, k)), spec((2, k, n)))).empty
    assert problem_of(forward(spec((8, 8)), spec((0, 8, 8)))).empty
    assert not problem_of(forward(spec((8, 0)), spec((2, 0, 8)))).empty  # k = 0: bias and beta * c by the same kernel


class FakeHandle:
    made = closed = 0

    def __init__(self, device: int) -> None:
        FakeHandle.made += 1

    def close(self) -> None:
        FakeHandle.closed += 1


@pytest.fixture
def handles(monkeypatch):
    monkeypatch.setattr(of_executable.native, "Handle", FakeHandle)
    monkeypatch.setattr(FakeHandle, "made", 0)
    monkeypatch.setattr(FakeHandle, "closed", 0)
    return of_executable.Handles(limit=3)


def test_a_handle_for_each_stream(handles):
    first, again, other = handles.acquire(0, 7), handles.acquire(0, 7), handles.acquire(0, 8)
    assert first is again and first is not other
    assert FakeHandle.made == 2


def test_handles_without_users_make_room(handles):
    for stream in range(10):
        handles.release(handles.acquire(0, stream))
    assert (FakeHandle.made, FakeHandle.closed) == (10, 7)


def test_streams_share_a_handle_when_all_are_used(handles):
    used = [handles.acquire(0, stream) for stream in range(9)]
    assert (FakeHandle.made, FakeHandle.closed) == (3, 0)
    assert sorted(entry.users for entry in {id(entry): entry for entry in used}.values()) == [3, 3, 3]
    handles.acquire(1, 0)  # another device has none to share
    assert FakeHandle.made == 4
    for entry in used:
        handles.release(entry)
    assert handles.acquire(0, 99).users == 1


def test_a_capture_makes_no_handle(handles):
    """It would allocate and fill memory on the default stream, which may end the capture."""
    there = handles.acquire(0, 0)
    assert handles.acquire(0, 5, make=False) is there
    assert FakeHandle.made == 1


def test_a_capture_compiles_nothing(monkeypatch):
    """On a device that has never seen our kernels: compiling and loading them would end the capture."""

    class Capturing:
        def use_device(self, device: int) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def capture_id(self, stream: int) -> int:
            return 5

    monkeypatch.setattr(of_executable, "get_runtime", lambda kind: Capturing())
    monkeypatch.setattr(of_executable, "_ready", set())
    key = forward(spec((64, 32)), spec((3, 32, 48))).key()
    with pytest.raises(RuntimeError, match=r"stream 0x7 is under graph capture.*call plan\.prepare"):
        of_executable.HipblasltExecutable(key, Device.of(DEVICE), of_executable.NO_PRODUCT, 7)


def test_numbers_fill_the_scan_arguments():
    """Every field of the scan lands where device/arguments.h has it."""
    from device_host.layout import ARGUMENTS

    from hipgroupgemm.backends.base import Arguments
    from hipgroupgemm.backends.scan_arguments import ScanArguments
    from hipgroupgemm.operands.views import ArrayView

    device = Device.of(DEVICE)
    config = forward(spec((50, 16)), spec((3, 16, 24)))
    sizes = ArrayView(4096, (3,), (16,), np.dtype(np.uint16), device, "")
    offset = ArrayView(8192, (1,), (1,), np.dtype(np.int8), device, "")
    packed = ScanArguments()
    arguments = Arguments(config, {}, sizes, True, offset, "zero", "none", 0)
    packed.set_scan(config, arguments, 4096, starts=1, ends=2, covered_range=3, fault=4)
    found = np.frombuffer(packed.bytes, ARGUMENTS)[0]
    wanted = dict(sizes=4096, sizes_stride=16, group_offset=8192, ragged_extent=50, starts=1, ends=2, covered_range=3, fault=4)
    wanted |= dict(sizes_kind=2, sizes_type=5, group_offset_type=0, batch_count=1, group_count=3, group_total=3, mode=0, flags=3)
    assert {name: int(found[name]) for name in wanted} == wanted
