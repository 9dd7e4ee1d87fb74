"""What a prepared algorithm of sm_90 launches for each kind of call, and with which arguments; without a device, nothing is compiled."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import struct
import sys
import types

import numpy as np
import pytest

import hipgroupgemm as hgg
from hipgroupgemm.backends import list_tables
from hipgroupgemm.backends.base import Arguments
from hipgroupgemm.backends.triton import compiler, defaults, descriptors, executable, kernel_config, specs
from hipgroupgemm.operands.arrays import ArraySpec
from hipgroupgemm.operands.views import ArrayView, Device
from hipgroupgemm.problem.dimension_numbers import BASIC, RaggedDotDimensionNumbers
from hipgroupgemm.runtime.parameters import TENSOR_MAP

WGRAD = RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
DEVICE = kernel_config.DeviceProperties(compiler.target_of("sm_90"), 132, 232448)
LIMITED = kernel_config.DeviceProperties(compiler.target_of("sm_90"), 3, 232448, True)
CUDA, CPU = Device("cuda", 0), Device("cpu", 0)
BASE, SIZES = 1 << 20, 1 << 24


class Launch:
    """Notes that it was run, and with what."""

    def __init__(self, runtime, name, parameters):
        self.runtime, self.name, self.parameters, self.grid = runtime, name, parameters, None

    def set_grid(self, grid):
        self.grid = grid

    def run(self):
        values = dict(zip(self.parameters.names or (), (self.parameters[i] for i in range(len(self.parameters))), strict=False))
        self.runtime.launched.append((self.name, values))


class Runtime:
    """Launches nothing."""

    kind = "cuda"

    def __init__(self):
        self.launched, self.compiled = [], []

    @contextlib.contextmanager
    def use_device(self, _):
        yield

    def capture_id(self, _):
        return 0

    def prepare_launch(self, function, grid, block, shared, stream, parameters, programmatic=False):
        return Launch(self, function, parameters)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    def compile_kernel(spec):
        made.compiled.append(spec)
        kinds, names = [], []
        for name, kind in spec.signature:
            if kind != "constexpr":
                rank = len(kind[2]) if isinstance(kind, tuple) else 0
                kinds += [TENSOR_MAP, *["i32"] * rank, *["i64"] * rank] if rank else [kind]
                names += [name, *(f"{name}.{i}" for i in range(2 * rank))]
        scanning = dict(spec.constants).get("GROUPS", 0) > 0
        return compiler.CompiledKernel(b"", "scanning" if scanning else "behind", 0, 128, (((1, 8), 0),) * 3, tuple(kinds), tuple(names))

    monkeypatch.setattr(executable, "compile_kernel", compile_kernel)
    monkeypatch.setattr(executable, "scan_function", lambda *_: "scan")
    monkeypatch.setattr(executable, "scan_is_loaded", lambda *_: True)
    monkeypatch.setattr(executable, "_module_of", lambda *_: types.SimpleNamespace(get_function=lambda name, _: name))
    monkeypatch.setattr(descriptors, "TensorMapEncoder", Encoder)
    monkeypatch.setattr(executable, "Scratch", Scratch)
    monkeypatch.setattr(executable, "PinnedRing", lambda *_: types.SimpleNamespace(put=lambda *_: None))
    monkeypatch.setattr(executable, "numpy_view", lambda *_: np.zeros(3))
    return made


class Scratch:
    """Memory that nobody uses."""

    def __init__(self, *_):
        pass

    def reserve(self):
        pass

    def pointer(self, _):
        return BASE


class Encoder:
    """Notes what it was asked to encode."""

    itemsize = 2
    encoded, replaced = [], []

    def __init__(self, *_, **__):
        pass

    def encode(self, into, address, shape, strides):
        self.encoded.append(address)

    def replace_address(self, into, address):
        self.replaced.append(address)


def config_of(mode, rows=64, groups=6, **kwargs):
    sizes = ArraySpec((groups,), "int32")
    if mode == "rows":
        return hgg.config_for_ragged_dot(ArraySpec((rows, 64), "bfloat16"), ArraySpec((groups, 64, 64), "bfloat16"), sizes, BASIC, **kwargs)
    return hgg.config_for_ragged_dot(ArraySpec((rows, 64), "bfloat16"), ArraySpec((rows, 64), "bfloat16"), sizes, WGRAD, **kwargs)


def call(config, dtype="int32", step=None, device=CUDA, ends=False, offset=0, at=SIZES, out=3 << 20):
    dtype = np.dtype(dtype)
    view = ArrayView(at, (config.group_total,), (step or dtype.itemsize,), dtype, device, "")
    return Arguments(config, {"lhs": 1 << 20, "rhs": 2 << 20, "out": out, "group_sizes": at}, view, ends, offset, "zero", "none", 0)


def make(runtime, config):
    key = config.key()
    kernel = next(c for _, c in defaults.ordered(key, DEVICE) if c.kernel == "tma")
    return executable.TritonExecutable(runtime, CUDA, key, kernel, DEVICE, 0, None)


def names(runtime):
    found = [name for name, _ in runtime.launched]
    runtime.launched.clear()
    return found


@pytest.mark.parametrize("mode", ["rows", "contracting"])
def test_one_launch_where_the_kernel_can_read_the_sizes(mode, runtime):
    config = config_of(mode)
    ready = make(runtime, config)
    for arguments in (
        call(config),
        call(config, "int64"),
        call(config, "int64", step=24),
        call(config, ends=True),
        call(config, "uint8", device=CPU),  # they come to the device as int64
        call(config, at=SIZES + 4),
    ):
        ready.execute(arguments)
        ready.execute(arguments)
        assert names(runtime) == ["scanning", "scanning"]
    assert len(runtime.compiled) == 1
    for arguments in (call(config, "uint8"), call(config, "int16", ends=True), call(config, at=SIZES + 2), call(config, offset=1)):
        ready.execute(arguments)
        assert names(runtime) == ["scan", "behind"]
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    assert len(runtime.compiled) == 2


@pytest.mark.parametrize("mode", ["rows", "contracting"])
def test_arguments_of_the_scan(mode, runtime):
    config = config_of(mode)
    ready = make(runtime, config)
    for arguments, wanted in [
        (call(config), {"sizes": SIZES, "sizes_step": 1, "sizes_are_wide": 0, "sizes_are_ends": 0}),
        (call(config, "int64", ends=True), {"sizes": SIZES, "sizes_step": 2, "sizes_are_wide": 1, "sizes_are_ends": 1}),
        (call(config, "int32", step=20), {"sizes": SIZES, "sizes_step": 5, "sizes_are_wide": 0, "sizes_are_ends": 0}),
        (call(config, "int16", device=CPU), {"sizes_step": 2, "sizes_are_wide": 1, "sizes_are_ends": 0}),
    ]:
        ready.execute(arguments)
        (_, values) = runtime.launched.pop()
        assert {name: values[name] for name in wanted} == wanted
        assert values["groups"] == 6 and values["fault"] == BASE + ready._offsets["fault"]


def test_no_rows_are_scanned_and_compile_nothing(runtime):
    config = config_of("rows")
    ready = make(runtime, config)
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    ready.execute(call(config_of("rows", rows=0)))
    assert names(runtime) == ["scan"]  # wrong sizes are flagged all the same
    ready.execute(call(config))
    assert names(runtime) == ["scanning"]
    assert len(runtime.compiled) == 1


def test_an_empty_contraction_is_written(runtime):
    config = config_of("contracting")
    ready = make(runtime, config)
    ready.execute(call(config_of("contracting", rows=0)))
    assert names(runtime) == ["scanning"]


@pytest.mark.parametrize(("groups", "room"), [(1, 128), (128, 128), (129, 256), (1000, 1024), (1024, 1024), (1025, 0)])
def test_room_for_groups(groups, room):
    key = config_of("rows", rows=4096, groups=groups).key()
    alone = [c for _, c in defaults.ordered(key, DEVICE) if c.kernel == "tma" and c.blocks == 1]
    small = min(alone, key=lambda c: c.shared_bytes(2, 2))
    assert specs.room_for_groups(small, key, DEVICE) == room
    constants = dict(specs.spec_of(small, key, DEVICE).constants)
    assert constants["GROUPS"] == room and constants["PROGRAMMATIC"] is not bool(room)


@pytest.mark.parametrize("mode", ["rows", "contracting"])
def test_a_warm_call_writes_what_changed(mode, runtime):
    config = config_of(mode)
    ready = make(runtime, config)
    Encoder.encoded.clear()
    ready.execute(call(config))
    assert sorted(Encoder.encoded) == [1 << 20, 2 << 20, 3 << 20]
    Encoder.encoded.clear(), Encoder.replaced.clear(), runtime.launched.clear()

    def execute(lhs, rhs, out, at):
        """The Python functions of this package that a call enters, this test's own left out."""
        arguments = call(config, at=at)
        arguments.pointers.update(lhs=lhs, rhs=rhs, out=out)
        entered = []
        sys.setprofile(lambda frame, event, _: entered.append(frame.f_code) if event == "call" else None)
        try:
            ready.execute(arguments)
        finally:
            sys.setprofile(None)
        return [code.co_name for code in entered if "hipgroupgemm/" in code.co_filename and not code.co_name.startswith("__")]

    entered = execute(5 << 20, 6 << 20, 7 << 20, SIZES + 64)
    writes = ["write"] * (4 if mode == "contracting" else 3)
    assert [name for name in entered if name != "<dictcomp>"] == [
        "execute",
        "_move_sizes",
        "write",
        *writes,
    ]  # and what it calls of the runtime, which is a double here
    assert Encoder.replaced == [5 << 20, 6 << 20, 7 << 20] and not Encoder.encoded
    (_, values) = runtime.launched.pop()
    assert values["sizes"] == SIZES + 64
    if mode == "contracting":
        assert values["out_pointer"] == 7 << 20
    Encoder.replaced.clear()
    execute(5 << 20, 8 << 20, 7 << 20, SIZES)
    assert Encoder.replaced == [8 << 20] and not Encoder.encoded
    (_, values) = runtime.launched.pop()
    assert values["sizes"] == SIZES


def test_other_rows_encode_nothing_anew(runtime):
    config, other = config_of("rows"), config_of("rows", rows=63)
    ready = make(runtime, config)
    ready.execute(call(config))
    Encoder.encoded.clear(), runtime.launched.clear()
    ready.execute(call(other))
    (_, values) = runtime.launched.pop()
    assert values["M"] == 63 and not Encoder.encoded


def test_a_portable_kernel_s_pointers_move(runtime):
    sizes = ArraySpec((6,), "int32")
    lhs, rhs = ArraySpec((64, 65), "bfloat16"), ArraySpec((6, 65, 64), "bfloat16")
    config = hgg.config_for_ragged_dot(
        lhs, rhs, sizes, BASIC, c=ArraySpec((64, 64), "bfloat16"), beta=2.0, bias=ArraySpec((6, 64), "bfloat16")
    )  # fmt: skip
    _, kernel = defaults.ordered(config.key(), DEVICE)[0]
    ready = executable.TritonExecutable(runtime, CUDA, config.key(), kernel, DEVICE, 0, None)
    for step in (1, 2, 2, 3):
        arguments = call(config, at=SIZES + 4 * step)
        wanted = {name: (step << 24) + (i << 20) for i, name in enumerate(("lhs", "rhs", "out", "c", "bias"), 1)}
        arguments.pointers.update(wanted)
        ready.execute(arguments)
        (name, _), (_, values) = runtime.launched
        runtime.launched.clear()
        assert name == "scan" and {role: values[role] for role in wanted} == wanted
        assert values["beta"] == 2 and values["swizzle"] == kernel.swizzle
    (address,) = struct.unpack_from("<Q", ready._scan_parameters[0])
    assert address == SIZES + 12


@pytest.mark.parametrize("mode", ["rows", "contracting"])
def test_tensor_maps_of_a_list(mode, runtime, monkeypatch):
    """They are written where an address has changed, and what is launched points at their table."""
    monkeypatch.setattr(kernel_config, "HOPPER_FEATURES", kernel_config.HOPPER_FEATURES | {"rhs_listed", "out_listed"})  # as they would be
    role, size = ("rhs", 64 * 64 * 2) if mode == "rows" else ("out", 64 * 64 * 2)
    config = dataclasses.replace(config_of(mode), **{f"{role}_listed": True})
    put = []
    monkeypatch.setattr(
        list_tables, "PinnedRing", lambda *_: types.SimpleNamespace(put=lambda values, at, _: put.append((bytes(values), at)))
    )
    monkeypatch.setattr(Encoder, "encode", lambda self, into, address, shape, strides: ctypes.memmove(into, noted(address, shape), 128))
    monkeypatch.setattr(Encoder, "replace_address", lambda self, into, address: ctypes.memmove(into, struct.pack("<Q", address), 8))
    ready = make(runtime, config)
    arguments = call(config)
    first = tuple((9 << 20) + 3 * size * group for group in (2, 0, 1, 5, 4, 3))
    second = (*first[:3], 7 << 20, *first[4:])
    tables = BASE + ready._offsets["tables"]
    for addresses in (first, first, second, second, first):
        arguments = call(config)
        arguments.pointers[role], arguments.lists = addresses[0], {role: addresses}
        put.clear(), runtime.launched.clear()
        before = ready._tables.held
        ready.execute(arguments)
        assert len(put) == (before != arguments.lists)
        (_, values) = runtime.launched.pop()
        assert values[f"{role}_maps"] == tables and tables % 64 == 0
        if mode == "contracting":
            assert values["out_pointer"] == tables + 6 * 128
        for raw, at in put:
            assert at == tables and struct.unpack("<6Q", raw[6 * 128 :]) == addresses
            maps = [raw[128 * group : 128 * group + 128] for group in range(6)]
            assert maps == [noted(address, (1, 1, 64, 64)) for address in addresses]


def noted(address, shape):
    """A tensor map that says what it is of."""
    return struct.pack(f"<{1 + len(shape)}Q", address, *shape).ljust(128, b"\1")


def test_split_k_adds_up_into_out(runtime):
    sizes = ArraySpec((2,), "int32")
    config = hgg.config_for_ragged_dot(ArraySpec((65536, 64), "float32"), ArraySpec((65536, 64), "float32"), sizes, WGRAD)
    kernel = next(k for _, k in defaults.ordered(config.key(), DEVICE) if k.split > 1)
    ready = executable.TritonExecutable(runtime, CUDA, config.key(), kernel, DEVICE, 0, None)
    for out, workspace in ((3 << 20, None), (4 << 20, None), (4 << 20, 9 << 20), (5 << 20, 9 << 20)):
        arguments = call(config, out=out)
        if workspace:
            arguments.workspace = ArrayView(workspace, (1 << 20,), (1,), np.dtype("uint8"), CUDA, "")
        ready.execute(arguments)
        (scan, _), (_, main), (_, adder) = runtime.launched
        runtime.launched.clear()
        assert scan == "scan" and main["out"] == adder["out"] == out
        assert main["partials"] == adder["partials"] == (workspace or BASE + ready._offsets["partials"])
        assert (adder["M"], adder["N"], adder["groups"]) == (64, 64, 2)


def test_an_address_that_could_not_be_written_is_written_again(runtime):
    config = config_of("rows")
    ready = make(runtime, config)
    ready.execute(call(config))

    def fail(*_):
        raise OSError("driver")

    places = ready._places
    ready._places = [*places, executable._Place("out", 0, types.SimpleNamespace(replace_address=fail))]
    with pytest.raises(OSError, match="driver"):
        ready.execute(call(config, out=4 << 20))
    ready._places = places
    Encoder.replaced.clear()
    ready.execute(call(config))
    assert Encoder.replaced == [3 << 20]


def test_a_capture_without_anything_prepared(runtime, monkeypatch):
    config = config_of("rows")
    monkeypatch.setattr(runtime, "capture_id", lambda _: 7)
    with pytest.raises(RuntimeError, match="prepare"):
        make(runtime, config)


@pytest.mark.parametrize("groups", [6, 1100])
@pytest.mark.parametrize("mode", ["rows", "contracting"])
def test_on_some_multiprocessors_no_grid_is_larger(mode, groups, runtime, monkeypatch):
    """Nor do two grids run at a time: a kernel behind a scan is not launched early."""
    config = config_of(mode, rows=1 << 20, groups=groups)
    prepared = []
    prepare = runtime.prepare_launch
    monkeypatch.setattr(runtime, "prepare_launch", lambda *a, **o: (prepared.append((prepare(*a, **o), a[1][0], o)), prepared[-1][0])[1])
    kernel = next(k for _, k in defaults.ordered(config.key(), DEVICE) if k.kernel == "tma" and k.blocks > 1)
    for properties, most in ((DEVICE, 132 * kernel.blocks), (LIMITED, 3)):
        prepared.clear()
        executable.TritonExecutable(runtime, CUDA, config.key(), kernel, properties, 0, None).execute(call(config))
        used = {launch.name: (launch.grid or (grid,))[0] for launch, grid, _ in prepared}
        assert max(used.values()) <= most and (groups == 6 or len(used) == 2)
        assert (max(used.values()) > 3) is (most > 3), "the limit is what keeps it small"
        assert any(options.get("programmatic") for *_, options in prepared) is (groups == 1100 and most > 3)
