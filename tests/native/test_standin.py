"""The stand-in itself: what it promises is what the other tests rely on."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from standin_device import Device

INVALID_VALUE, NOT_FOUND, ILLEGAL_ADDRESS, INVALID_HANDLE = 1, 500, 700, 400


def in_child(code: str) -> subprocess.CompletedProcess[str]:
    setup = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    setup += "import ctypes, numpy as np\nfrom standin_device import Device\ndevice = Device()\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("access", ["ctypes.string_at(p, 1)", "ctypes.memset(p, 0, 1)"])
def test_the_host_cannot_touch_device_memory(access: str) -> None:
    result = in_child(f"p = device.malloc(64)\n{access}\nprint('reached')")
    assert result.returncode == -11, (result.returncode, result.stdout, result.stderr)
    assert "reached" not in result.stdout


def test_bytes_go_there_and_back(device: Device) -> None:
    rng = np.random.default_rng()
    for size in (1, 2, 255, 256, 257, 4095, 4096, 4097, 100_001):
        data = rng.integers(0, 256, size, np.uint8)
        address = device.upload(data)
        assert address % 256 == 0
        assert (device.read(address, size, np.uint8) == data).all()
        device.free(address)


def test_fresh_memory_is_nan(device: Device) -> None:
    address = device.malloc(1000)
    assert np.isnan(device.read(address, 500, np.float16)).all()
    assert np.isnan(device.read(address, 250, np.float32)).all()
    device.free(address)


@pytest.mark.parametrize("size", [1, 100, 4096])
def test_copies_past_the_end_are_refused(device: Device, size: int) -> None:
    address = device.malloc(size)
    for start, count in ((0, size + 1), (size, 1), (-1, 1)):
        with pytest.raises(RuntimeError, match=f"HIP error {INVALID_VALUE}"):
            device.read(address + start, count, np.uint8)
        with pytest.raises(RuntimeError, match=f"HIP error {INVALID_VALUE}"):
            device.write(address + start, np.zeros(count, np.uint8))
    device.free(address)


def test_free(device: Device) -> None:
    address = device.malloc(100)
    for wrong in (address + 1, 4096):
        with pytest.raises(RuntimeError, match="hipFree"):
            device.free(wrong)
    device.free(address)
    with pytest.raises(RuntimeError, match="hipFree"):
        device.free(address)
    with pytest.raises(RuntimeError, match="hipMemcpy"):
        device.read(address, 1, np.uint8)
    device.free(0)


def test_addresses_come_back_only_when_all_are_used() -> None:
    os.environ["STANDIN_ARENA_GIB"] = "1"
    try:
        result = in_child(
            "seen = []\n"
            "for i in range(40):\n"
            "    p = device.malloc(100 << 20)\n"
            "    seen.append(p)\n"
            "    device.free(p)\n"
            "assert len(set(seen[:10])) == 10 and set(seen[10:]) <= set(seen[:10]), seen\n"
            "held = [device.malloc(100 << 20) for _ in range(9)]\n"
            "assert len(set(held)) == 9\n"
            "try:\n"
            "    device.malloc(300 << 20)\n"
            "except RuntimeError as e:\n"
            "    print(e)\n"
        )
    finally:
        del os.environ["STANDIN_ARENA_GIB"]
    assert result.stdout.strip() == "hipMalloc: HIP error 2", result.stderr


def test_pointer_attributes(device: Device) -> None:
    attributes = ctypes.create_string_buffer(256)

    def kind(address: int) -> int | str:
        error = device.hip.hipPointerGetAttributes(attributes, ctypes.c_void_p(address))
        return f"error {error}" if error else int.from_bytes(attributes.raw[:4], "little")

    block, pinned = device.malloc(100), device.pinned(100)
    assert [kind(block), kind(block + 99), kind(pinned), kind(pinned + 99)] == [2, 2, 1, 1]
    unknown = f"error {INVALID_VALUE}"
    host = np.zeros(8)
    for address in (block + 100, block - 1, pinned + 100, host.ctypes.data, 0):
        assert kind(address) == unknown
    device.free(block)
    device.free(pinned)
    assert [kind(block), kind(pinned)] == [unknown] * 2


def test_streams_and_events(device: Device) -> None:
    hip, stream = device.hip, device.stream()
    assert hip.hipStreamSynchronize(ctypes.c_void_p(stream)) == 0
    status = ctypes.c_int(7)
    assert hip.hipStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)) == 0
    assert status.value == 0
    assert hip.hipStreamBeginCapture(ctypes.c_void_p(stream), 0) != 0
    events = [ctypes.c_void_p() for _ in range(2)]
    for event in events:
        assert hip.hipEventCreate(ctypes.byref(event)) == 0
    ms = ctypes.c_float()
    assert hip.hipEventElapsedTime(ctypes.byref(ms), *events) == INVALID_HANDLE  # not recorded
    for event in events:
        assert hip.hipEventRecord(event, ctypes.c_void_p(stream)) == 0
    assert hip.hipEventElapsedTime(ctypes.byref(ms), *events) == 0
    assert 0 <= ms.value < 1000
    assert hip.hipStreamDestroy(ctypes.c_void_p(stream)) == 0
    for call in (
        hip.hipStreamDestroy(ctypes.c_void_p(stream)),
        hip.hipStreamSynchronize(ctypes.c_void_p(stream)),
        hip.hipEventRecord(events[0], ctypes.c_void_p(stream)),
    ):
        assert call == INVALID_HANDLE


def module(device: Device) -> ctypes.c_void_p:
    out = ctypes.c_void_p()
    image = b"\x7fELF" + bytes(100)
    assert device.hip.hipModuleLoadData(ctypes.byref(out), image) == 0
    return out


def test_unknown_things_are_refused(device: Device) -> None:
    hip, out = device.hip, ctypes.c_void_p()
    assert hip.hipModuleLoadData(ctypes.byref(out), b"no code at all, surely not") != 0
    assert hip.hipModuleLoad(ctypes.byref(out), b"/nowhere.co") != 0
    assert hip.hipModuleGetFunction(ctypes.byref(out), module(device), b"some_kernel") == NOT_FOUND
    value = ctypes.c_int()
    assert hip.hipDeviceGetAttribute(ctypes.byref(value), 4711, 0) == INVALID_VALUE
    assert hip.hipSetDevice(1) != 0
    assert hip.hipGetLastError() != 0
    assert hip.hipGetLastError() == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Cijk_Ailk_Bljk_HHS_BH_UserArgs_MT64x64x32_SK3_X", 40),
        ("Cijk_Ailk_Bljk_HHS_BH_MT64x64x32_X", 40),
        ("Cijk_Ailk_Bljk_HHS_BH_UserArgs_MT64x64x32_X", 36),
    ],
)
def test_gemms_of_an_unknown_kind_are_refused(device: Device, name: str, words: int) -> None:
    function = ctypes.c_void_p()
    hip = device.hip
    assert hip.hipModuleGetFunction(ctypes.byref(function), module(device), name.encode()) == 0
    for kind, split in ((0, 1), (1, 1), (2, 2), (3, 1)):
        arguments = np.zeros(10, np.uint32)
        arguments[0] = kind << 30
        arguments[1], arguments[3] = split, 1
        size = ctypes.c_size_t(words)
        extra = (ctypes.c_void_p * 5)(1, arguments.ctypes.data, 2, ctypes.cast(ctypes.pointer(size), ctypes.c_void_p).value, 3)
        assert hip.hipModuleLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, None, None, extra) == 801


def test_a_fault_stays_until_it_is_taken(device: Device) -> None:
    function, hip = ctypes.c_void_p(), device.hip
    name = b"Cijk_Ailk_Bljk_HHS_BH_UserArgs_MT64x64x32_X"
    assert hip.hipModuleGetFunction(ctypes.byref(function), module(device), name) == 0
    block = device.malloc(100)  # too short for one record
    arguments = np.zeros(5, np.uint64)
    words = arguments.view(np.uint32)
    words[0], words[1], words[3] = 1 | 2 << 30, 1, 1
    arguments[2] = block
    size = ctypes.c_size_t(40)
    pointer = ctypes.cast(ctypes.pointer(size), ctypes.c_void_p).value
    extra = (ctypes.c_void_p * 5)(1, arguments.ctypes.data, 2, pointer, 3)
    assert hip.hipModuleLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, None, None, extra) == ILLEGAL_ADDRESS
    assert hip.hipDeviceSynchronize() == ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match=str(ILLEGAL_ADDRESS)):
        device.malloc(1)
    assert device.take_fault() == ILLEGAL_ADDRESS
    assert hip.hipDeviceSynchronize() == 0
    device.free(block)
