"""Launches made again from C: against a driver of our own that notes every call."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import types

import numpy as np
import pytest

from hipgroupgemm.runtime import replay
from hipgroupgemm.runtime.errors import DeviceError
from hipgroupgemm.runtime.host_code import HostCodeError, compile_host_code, load_host_code
from hipgroupgemm.runtime.objects import LaunchDescription

DRIVER = r"""
#include <stdint.h>
#include <string.h>
#define PUBLIC __attribute__((visibility("default")))
PUBLIC uint64_t current = 7, noted[64], count = 0;
PUBLIC int capturing = 0, failing = 0;
static void note(uint64_t value) { if (count < 64) noted[count++] = value; }
PUBLIC int cuCtxGetCurrent(void **c) { *c = (void *)current; return failing == 1 ? 11 : 0; }
PUBLIC int cuCtxSetCurrent(void *c) { note(1); note((uint64_t)c); current = (uint64_t)c; return failing == 2 ? 12 : 0; }
PUBLIC int cuStreamIsCapturing(void *s, int *c) { *c = capturing; return failing == 3 ? 13 : 0; }
PUBLIC int cuTensorMapReplaceAddress(uint64_t *map, void *a) { if (failing == 4) return 14; note(2); map[0] = (uint64_t)a; return 0; }
struct attribute { int id; char pad[4]; int value; char rest[60]; };
struct config { uint32_t g[3], b[3], shared; void *stream; struct attribute *attributes; uint32_t n; };
PUBLIC int cuLaunchKernelEx(const struct config *c, void *f, void **p, void **extra) {
    note(3); note((uint64_t)f); note((uint64_t)c->stream); note(c->g[0] * 10000 + c->g[1] * 100 + c->g[2]);
    note(c->b[0] * 10000 + c->b[1] * 100 + c->b[2]); note(c->shared);
    note(c->n ? c->attributes[0].id * 10 + c->attributes[0].value : 0); note(*(uint64_t *)p[0]); note(extra == 0);
    return failing == 5 && (uint64_t)f == 200 ? 1 : 0;
}
PUBLIC int hipGetDevice(int *d) { *d = (int)current; return failing == 1 ? 11 : 0; }
PUBLIC int hipSetDevice(int d) { note(1); note(d); current = d; return failing == 2 ? 12 : 0; }
PUBLIC int hipStreamIsCapturing(void *s, int *c) { *c = capturing; return failing == 3 ? 13 : 0; }
PUBLIC int hipModuleLaunchKernel(void *f, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, uint32_t shared,
                                 void *stream, void **p, void **extra) {
    note(3); note((uint64_t)f); note((uint64_t)stream); note(gx * 10000 + gy * 100 + gz); note(bx * 10000 + by * 100 + bz); note(shared);
    note(0); note(*(uint64_t *)p[0]); note(extra == 0);
    return failing == 5 && (uint64_t)f == 200 ? 1 : 0;
}
"""


class Launch:
    """A launch of one parameter, eight bytes."""

    def __init__(self, function, programmatic=False):
        self.function, self.programmatic = function, programmatic
        self.value = ctypes.c_uint64(5)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.value))

    @property
    def cell(self):
        return ctypes.addressof(self.value)

    def describe(self):
        return LaunchDescription(self.function, ctypes.addressof(self.pointers), (9, 2, 3), (32, 4, 5), 77, self.programmatic)

    def fail(self, status):
        raise DeviceError(f"launch of {self.function}", status, "refused")


class Runtime:
    """Stands where a CUDA or HIP runtime does."""

    def __init__(self, kind, library):
        self.kind, self.library, self._forked = kind, library, False

    def launch_functions(self, device):
        if self.kind == "rocm":
            names = {"get_current": "hipGetDevice", "set_current": "hipSetDevice", "is_capturing": "hipStreamIsCapturing"}
            return {"device": device, "is_hip": 1}, {**names, "launch": "hipModuleLaunchKernel"}
        names = {"get_current": "cuCtxGetCurrent", "set_current": "cuCtxSetCurrent", "is_capturing": "cuStreamIsCapturing"}
        return {"context": device}, {**names, "replace_address": "cuTensorMapReplaceAddress", "launch": "cuLaunchKernelEx"}

    def _fail(self, call, status):
        return DeviceError(call, status, "")

    def check_process(self):
        raise RuntimeError("forked")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "driver.so"
    path.write_bytes(compile_host_code(DRIVER, "c"))
    return str(path)


@pytest.fixture(params=["cuda", "rocm"])
def case(request, library):
    driver = ctypes.CDLL(library)
    state = {name: ctypes.c_uint64.in_dll(driver, name) for name in ("current", "count")}
    state |= {name: ctypes.c_int.in_dll(driver, name) for name in ("capturing", "failing")}
    for name, value in (("current", 7), ("count", 0), ("capturing", 0), ("failing", 0)):
        state[name].value = value
    noted = (ctypes.c_uint64 * 64).in_dll(driver, "noted")
    made = types.SimpleNamespace(**state, first=Launch(100), second=Launch(200, request.param == "cuda"), map=np.zeros(16, np.uint64))

    def told():
        found, state["count"].value = list(noted[: state["count"].value]), 0
        return found

    made.told, made.runtime = told, Runtime(request.param, library)
    moves = [replay.Move(made.first.cell, 1), replay.Move(made.second.cell, 0)]
    if request.param == "cuda":
        moves.append(replay.Move(made.map.ctypes.data, 1, True))
    made.list = replay.make_replay(made.runtime, 7, 0xABC, moves, [5, 5], [made.first, made.second])
    return made


def launched(case, first, second):
    """What the driver notes of both launches."""
    common = [0xABC, 90203, 320405, 77]
    attribute = 61 if case.runtime.kind == "cuda" else 0
    return [3, 100, *common, 0, first, 1, 3, 200, *common, attribute, second, 1]


def test_addresses_go_where_they_belong(case):
    replaced = [2] if case.runtime.kind == "cuda" else []
    assert case.list.run([1 << 40, 1 << 41])
    assert case.told() == [*replaced, *launched(case, 1 << 41, 1 << 40)]
    if replaced:
        assert case.map[0] == 1 << 41
    assert case.list.run([1 << 42, 1 << 41])  # slot 1 stays, so its map is left alone
    assert case.told() == launched(case, 1 << 41, 1 << 42)


def test_the_device_is_made_current_and_restored(case):
    case.current.value = 3
    assert case.list.run([8, 16])
    noted = case.told()
    assert noted[:2] == [1, 7] and noted[-2:] == [1, 3] and case.current.value == 3


def test_nothing_is_done_under_capture(case):
    case.capturing.value = 1
    assert not case.list.run([8, 16])
    assert case.told() == [] and (case.first.value.value, case.second.value.value) == (5, 5)
    case.capturing.value, case.failing.value = 0, 3  # not known: as under capture
    assert not case.list.run([8, 16])
    assert case.told() == []


def test_failures_say_which_call(case):
    cuda = case.runtime.kind == "cuda"
    for failing, text, status in ((1, "GetCurrent", 11), (5, "launch of 200", 1), *(((4, "ReplaceAddress", 14),) if cuda else ())):
        case.failing.value = failing
        with pytest.raises(DeviceError, match=text) as caught:
            case.list.run([8 + failing, 16 + failing])
        assert caught.value.status == status
    case.failing.value = 0
    case.told()
    assert case.list.run([8, 24])
    assert case.told()[-9:] == launched(case, 24, 8)[-9:]
    case.current.value, case.failing.value = 3, 2
    with pytest.raises(DeviceError, match="SetCurrent"):
        case.list.run([8, 16])


def test_no_replay_in_a_forked_process(case):
    case.runtime._forked = True
    with pytest.raises(RuntimeError, match="forked"):
        case.list.run([8, 16])
    assert case.told() == []


def test_a_driver_without_the_functions_is_launched_from_python(library):
    runtime = Runtime("cuda", library)
    runtime.launch_functions = lambda _: ({"context": 1}, {"launch": "cuNoSuchFunction"})
    assert replay.make_replay(runtime, 0, 0, [], [], []) is None


def test_no_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    with pytest.raises(HostCodeError, match="cannot be run"):
        compile_host_code("int x;", "c")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostCodeError, match="no compiler"):
        compile_host_code("int x;", "c")
    replay._replay_function.cache_clear()
    try:
        assert "no compiler" in replay.replay_unavailable()
        assert replay.make_replay(Runtime("cuda", ""), 0, 0, [], [], []) is None
    finally:
        replay._replay_function.cache_clear()


def test_code_is_compiled_once_and_wrong_code_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("HIPGROUPGEMM_CACHE_DIR", str(tmp_path))
    source = f'__attribute__((visibility("default"))) int answer(void) {{ return {struct.calcsize("P") * 5}; }}'
    code = compile_host_code(source, "c")
    monkeypatch.setattr(subprocess, "run", None)
    assert compile_host_code(source, "c") == code
    assert load_host_code(code, "answer").answer() == 40
    with pytest.raises(HostCodeError, match="cannot be loaded"):
        load_host_code(code[:100], "answer")
    monkeypatch.undo()
    with pytest.raises(HostCodeError, match="error"):
        compile_host_code("int x = ;", "c")
