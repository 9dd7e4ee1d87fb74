"""Every call in any order: a status and a text, never a crash. Through the C ABI itself, without the Python
layer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from standin_device import Device

from hipgroupgemm.native import load

LIBRARY = load()
FFI, LIB = LIBRARY.ffi, LIBRARY.lib
F16 = 2


def status_name(status: int) -> str:
    return FFI.string(LIB.hgg_status_name(status)).decode()


def text() -> str:
    return FFI.string(LIB.hgg_last_error()).decode()


def expect(status: int, wanted: str, *words: str) -> None:
    assert status_name(status) == wanted, text()
    for word in words:
        assert word in text()


def new_handle(device: int = 0) -> int:
    out = FFI.new("hgg_handle *")
    expect(LIB.hgg_handle_create(device, out), "HGG_OK")
    return out[0]


def problem(**changes: Any) -> Any:
    sizes = dict(m=64, n=100, k=32, batch=1, lda=64, ldb=32, ldc=64, ldd=64)
    types = dict(type_a=F16, type_b=F16, type_c=F16, type_d=F16, bias_type=-1)
    return FFI.new("hgg_problem *", dict(count=2, alpha=1.0, beta=0.0) | types | sizes | changes)


def create(handle: int, **changes: Any) -> tuple[int, int]:
    """A status, and an instance."""
    out = FFI.new("hgg_instance *", 77)
    status = LIB.hgg_instance_create(handle, problem(**changes), out)
    return status, out[0]


def new_instance(handle: int, **changes: Any) -> int:
    status, instance = create(handle, **changes)
    expect(status, "HGG_OK")
    return instance


def some_algorithm(instance: int) -> tuple[int, int]:
    """Index and bytes of workspace."""
    indices, count, algorithm = FFI.new("int32_t[4]"), FFI.new("int32_t *"), FFI.new("hgg_algorithm *")
    expect(LIB.hgg_algorithms(instance, 4, indices, 4, count), "HGG_OK")
    assert count[0] == 4
    expect(LIB.hgg_algorithm_get(instance, indices[0], algorithm), "HGG_OK")
    return indices[0], algorithm.workspace_size


def initialize(instance: int, index: int, workspace: int, nbytes: int) -> int:
    return int(LIB.hgg_initialize(instance, index, workspace, nbytes, 0, FFI.new("char[196]")))


@pytest.fixture
def ids() -> Any:
    handle = new_handle()
    yield handle, new_instance(handle)
    LIB.hgg_handle_destroy(handle)


@pytest.fixture
def ready(ids: tuple[int, int], device: Device) -> Any:
    """An instance, an algorithm's index and bytes, a workspace, and a record array."""
    _, instance = ids
    index, needed = some_algorithm(instance)
    workspace, records = device.malloc(needed), device.upload(np.zeros(2 * 196, np.uint8))
    yield instance, index, workspace, needed, records
    device.free(workspace)
    device.free(records)


def calls_on_instance(instance: int) -> dict[str, Callable[[], int]]:
    indices, one = FFI.new("int32_t[8]"), FFI.new("int32_t *")
    return {
        "hgg_algorithms": lambda: LIB.hgg_algorithms(instance, 8, indices, 8, one),
        "hgg_algorithm_get": lambda: LIB.hgg_algorithm_get(instance, 1, FFI.new("hgg_algorithm *")),
        "hgg_initialize": lambda: initialize(instance, 1, 4096, 4096),
        "hgg_run": lambda: LIB.hgg_run(instance, 4096, 0),
        "hgg_instance_destroy": lambda: LIB.hgg_instance_destroy(instance),
    }


def calls_on_handle(handle: int) -> dict[str, Callable[[], int]]:
    return {
        "hgg_handle_get_info": lambda: LIB.hgg_handle_get_info(handle, FFI.new("hgg_handle_info *")),
        "hgg_instance_create": lambda: create(handle)[0],
        "hgg_handle_destroy": lambda: LIB.hgg_handle_destroy(handle),
    }


@pytest.mark.parametrize("number", [0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 0xDEADBEEF00000007])
def test_numbers_that_are_no_ids(number: int) -> None:
    for call in [*calls_on_instance(number).items(), *calls_on_handle(number).items()]:
        name, function = call
        status = function()
        assert status_name(status) in ("HGG_INVALID_ID", "HGG_CLOSED"), (name, text())
        assert text().startswith(name)


def test_handle_for_instance_and_back(ids: tuple[int, int]) -> None:
    handle, instance = ids
    for name, function in calls_on_instance(handle).items():
        expect(function(), "HGG_INVALID_ID", name, "is a handle, wanted an instance")
    for name, function in calls_on_handle(instance).items():
        expect(function(), "HGG_INVALID_ID", name, "is an instance, wanted a handle")


def test_after_destroy(ids: tuple[int, int]) -> None:
    handle, instance = ids
    expect(LIB.hgg_instance_destroy(instance), "HGG_OK")
    for name, function in calls_on_instance(instance).items():
        expect(function(), "HGG_CLOSED", name)
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")
    for name, function in calls_on_handle(handle).items():
        expect(function(), "HGG_CLOSED", name)


def test_destroyed_numbers_do_not_come_back(device: Device) -> None:
    handle = new_handle()
    seen = set()
    for _ in range(100):
        instance = new_instance(handle)
        assert instance not in seen
        for old in list(seen)[:3]:
            expect(LIB.hgg_run(old, 4096, 0), "HGG_CLOSED")
        seen.add(instance)
        expect(LIB.hgg_instance_destroy(instance), "HGG_OK")
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")


def test_handle_destroyed_before_its_instances(device: Device) -> None:
    before = device.bytes_in_use()
    handle = new_handle()
    instances = [new_instance(handle) for _ in range(3)]
    index, needed = some_algorithm(instances[0])
    workspace = device.malloc(needed)
    expect(initialize(instances[0], index, workspace, needed), "HGG_OK")
    info = FFI.new("hgg_handle_info *")
    expect(LIB.hgg_handle_get_info(handle, info), "HGG_OK")
    assert info.instances == 3
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")
    for instance in instances:
        for name, function in calls_on_instance(instance).items():
            expect(function(), "HGG_CLOSED", name, "handle")
    device.free(workspace)
    assert device.bytes_in_use() == before, "the handle's device memory is still there"


def test_runs_only_when_initialised(ready: tuple[int, int, int, int, int]) -> None:
    instance, index, workspace, needed, records = ready
    expect(LIB.hgg_run(instance, records, 0), "HGG_WRONG_ORDER", "hgg_initialize")
    expect(initialize(instance, index, workspace, needed), "HGG_OK")
    expect(LIB.hgg_run(instance, records, 0), "HGG_OK")
    expect(initialize(instance, index, workspace, needed - 1), "HGG_WORKSPACE")  # refused before anything changed
    expect(LIB.hgg_run(instance, records, 0), "HGG_OK")


@pytest.mark.parametrize("index", [-(2**31), -1, 0, 1, 17, 2**31 - 1])
def test_bad_index(ready: tuple[int, int, int, int, int], index: int) -> None:
    instance, _, workspace, needed, _ = ready
    expect(LIB.hgg_algorithm_get(instance, index, FFI.new("hgg_algorithm *")), "HGG_NOT_FOUND", str(index))
    expect(initialize(instance, index, workspace, needed), "HGG_NOT_FOUND", str(index))


def test_index_of_other_types(ready: tuple[int, int, int, int, int], ids: tuple[int, int]) -> None:
    """hipBLASLt itself would run a kernel for other transposes, and write nonsense."""
    transposed = new_instance(ids[0], trans_a=1)
    foreign, _ = some_algorithm(transposed)
    expect(LIB.hgg_algorithm_get(ready[0], foreign, FFI.new("hgg_algorithm *")), "HGG_NOT_FOUND")
    expect(initialize(ready[0], foreign, ready[2], ready[3]), "HGG_NOT_FOUND")


def test_every_combination_of_types_answers(ids: tuple[int, int]) -> None:
    """hipBLASLt's constructor throws for some of these, and its later calls fail: none of it may get out."""
    count = FFI.new("int32_t *")
    seen: dict[str, int] = {}
    kinds = (0, 1, 2, 14, 28, 29, 1000, 1001)
    for a, b, d, compute in itertools.product(kinds, kinds, kinds, (0, 4)):
        status, instance = create(ids[0], type_a=a, type_b=b, type_c=d, type_d=d, compute=compute)
        if not status and a == b and compute == 0 and d in (0, a):  # the others cost a search each
            status = LIB.hgg_algorithms(instance, 1, FFI.NULL, 0, count)
        seen[status_name(status)] = seen.get(status_name(status), 0) + 1
        assert status == 0 or text()
        LIB.hgg_instance_destroy(instance)
    assert set(seen) <= {"HGG_OK", "HGG_UNSUPPORTED", "HGG_LIBRARY_ERROR"}, seen
    assert seen["HGG_OK"] > 1


@pytest.mark.parametrize("device_index", [-1, 1, 2**31 - 1, -(2**31)])
def test_bad_device(device_index: int) -> None:
    out = FFI.new("hgg_handle *", 5)
    expect(LIB.hgg_handle_create(device_index, out), "HGG_INVALID_ARGUMENT", str(device_index), "there are 1")
    assert out[0] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [(dict([(f"type_{x}", bad)]), f"type_{x} is {bad}") for x in "abcd" for bad in (-1, 3, 5, 27, 255, 2**31 - 1)]
    + [
        (dict(bias_type=77), "bias_type is 77"),
        (dict(compute=-1), "compute is -1"),
        (dict(compute=5), "compute is 5"),
        (dict(trans_a=2), "trans_a is 2"),
        (dict(trans_b=-1), "trans_b is -1"),
        (dict(ragged=4), "ragged is 4"),
        (dict(ragged=-1), "ragged is -1"),
        (dict(count=0), "count is 0"),
        (dict(count=1), "count is 1"),  # one size only: kernels for multiples would be offered
        (dict(count=2**32 - 1), "count"),
        (dict(m=0), "m is 0"),
        (dict(m=-1), "m is -1"),
        (dict(n=2**32), "n is 4294967296"),
        (dict(k=-(2**63)), "k is"),
        (dict(batch=0), "batch is 0"),
        (dict(lda=63), "lda is 63"),
        (dict(ldb=31), "ldb is 31"),
        (dict(ldb=99, trans_b=1), "ldb is 99"),
        (dict(ldc=2**32), "ldc is 4294967296"),
        (dict(ldd=-1), "ldd is -1"),
        (dict(stride_a=-1, batch=2), "stride_a is -1"),
        (dict(stride_b=2**32, batch=2), "stride_b is 4294967296"),
        (dict(alpha=float("nan")), "alpha"),
        (dict(beta=float("inf")), "beta"),
    ],
)
def test_bad_problem(ids: tuple[int, int], changes: dict[str, Any], words: str) -> None:
    status, instance = create(ids[0], **changes)
    expect(status, "HGG_INVALID_ARGUMENT", words)
    assert instance == 0


def test_sizes_that_only_64_bits_hold_in_one_matrix(ids: tuple[int, int]) -> None:
    """A matrix of more than 2^32 elements is fine as long as nobody strides over it."""
    new_instance(ids[0], m=2**20, k=2**20, lda=2**20, ldb=2**20, ldc=2**20, ldd=2**20)


@pytest.mark.parametrize(("max_count", "capacity"), [(-1, 8), (8, -1)])
def test_bad_counts(ids: tuple[int, int], max_count: int, capacity: int) -> None:
    expect(LIB.hgg_algorithms(ids[1], max_count, FFI.new("int32_t[8]"), capacity, FFI.new("int32_t *")), "HGG_INVALID_ARGUMENT", "-1")


def test_forked_child() -> None:
    handle = new_handle()
    instance = new_instance(handle)
    pid = os.fork()
    if pid == 0:
        wrong = [
            name
            for name, function in [*calls_on_instance(instance).items(), *calls_on_handle(handle).items()]
            if status_name(function()) != "HGG_FORKED" or not text().startswith(name) or "fork" not in text()
        ]
        create = LIB.hgg_handle_create(0, FFI.new("hgg_handle *"))
        os._exit(len(wrong) + (status_name(create) != "HGG_FORKED"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")  # the parent's are untouched


def test_statuses_have_names() -> None:
    names = [status_name(i) for i in range(14)]
    assert len(set(names)) == 14
    assert all(name.startswith("HGG_") for name in names)
    assert status_name(-1) == status_name(99) == "an unknown status"
