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
F16, F32 = 2, 0


def status_name(status: int) -> str:
    return FFI.string(LIB.hgg_status_name(status)).decode()


def text() -> str:
    return FFI.string(LIB.hgg_last_error()).decode()


def expect(status: int, wanted: str, *words: str) -> None:
    assert status_name(status) == wanted, text()
    for word in words:
        assert word in text()


def new_handle(device: int = 0, stream: int = 0) -> int:
    out = FFI.new("hgg_handle *")
    expect(LIB.hgg_handle_create(device, stream, out), "HGG_OK")
    return out[0]


def types(**changes: int) -> Any:
    values = dict(
        type_a=F16,
        type_b=F16,
        type_c=F16,
        type_d=F16,
        compute=0,
        trans_a=0,
        trans_b=0,
        epilogue=0,
        bias_type=0,
    )
    return FFI.new("hgg_types *", values | changes)


def new_instance(handle: int, **changes: int) -> int:
    out = FFI.new("hgg_instance *")
    expect(LIB.hgg_instance_create(handle, types(**changes), out), "HGG_OK")
    return out[0]


KEPT: list[Any] = []  # arrays that a problem points at


def problem(**changes: Any) -> Any:
    values: dict[str, Any] = dict(m=[64, 64], n=[100, 1], k=[32, 32], batch=[1, 1], alpha=1.0, beta=0.0) | changes
    p = FFI.new("hgg_problem *")
    p.count = values.pop("count", 2)
    for name, value in values.items():
        if name in ("alpha", "beta", "ragged"):
            setattr(p, name, value)
        elif value is not None:
            array = FFI.new("int64_t[]", value)
            KEPT.append(array)
            setattr(p, name, array)
    return p


def set_problem(instance: int, **changes: Any) -> None:
    expect(LIB.hgg_set_problem(instance, problem(**changes)), "HGG_OK")


def some_algorithm(instance: int) -> tuple[int, int]:
    """Index and bytes of workspace."""
    indices, count, algorithm = FFI.new("int32_t[4]"), FFI.new("int32_t *"), FFI.new("hgg_algorithm *")
    expect(LIB.hgg_algorithms_heuristic(instance, 4, 2**40, indices, 4, count), "HGG_OK")
    assert count[0] == 4
    expect(LIB.hgg_algorithm_get(instance, indices[0], algorithm), "HGG_OK")
    return indices[0], algorithm.workspace_size


@pytest.fixture
def ids() -> Any:
    handle = new_handle()
    yield handle, new_instance(handle)
    LIB.hgg_handle_destroy(handle)


@pytest.fixture
def ready(ids: tuple[int, int], device: Device) -> Any:
    """An instance with a problem, an algorithm's index and bytes, a workspace, and a record array."""
    _, instance = ids
    set_problem(instance)
    index, needed = some_algorithm(instance)
    workspace, records = device.malloc(needed), device.upload(np.zeros(2 * 196, np.uint8))
    yield instance, index, workspace, needed, records
    device.free(workspace)
    device.free(records)


def calls_on_instance(instance: int) -> dict[str, Callable[[], int]]:
    indices, one = FFI.new("int32_t[8]"), FFI.new("int32_t *")
    return {
        "hgg_instance_get_info": lambda: LIB.hgg_instance_get_info(instance, FFI.new("hgg_instance_info *")),
        "hgg_set_problem": lambda: LIB.hgg_set_problem(instance, problem()),
        "hgg_algorithms_heuristic": lambda: LIB.hgg_algorithms_heuristic(instance, 8, 2**40, indices, 8, one),
        "hgg_algorithms_all": lambda: LIB.hgg_algorithms_all(instance, 2**40, indices, 8, one),
        "hgg_algorithm_get": lambda: LIB.hgg_algorithm_get(instance, 1, FFI.new("hgg_algorithm *")),
        "hgg_algorithm_find": lambda: LIB.hgg_algorithm_find(instance, -1, b"name", one),
        "hgg_initialize": lambda: LIB.hgg_initialize(instance, 1, 4096, 4096, 0),
        "hgg_release": lambda: LIB.hgg_release(instance),
        "hgg_template_record": lambda: LIB.hgg_template_record(instance, FFI.new("char[196]"), 196, one, one),
        "hgg_run": lambda: LIB.hgg_run(instance, 4096, 4096, 0),
        "hgg_instance_destroy": lambda: LIB.hgg_instance_destroy(instance),
    }


def calls_on_handle(handle: int) -> dict[str, Callable[[], int]]:
    return {
        "hgg_handle_get_info": lambda: LIB.hgg_handle_get_info(handle, FFI.new("hgg_handle_info *")),
        "hgg_instance_create": lambda: LIB.hgg_instance_create(handle, types(), FFI.new("hgg_instance *")),
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
            expect(LIB.hgg_release(old), "HGG_CLOSED")
        seen.add(instance)
        expect(LIB.hgg_instance_destroy(instance), "HGG_OK")
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")


def test_handle_destroyed_before_its_instances(device: Device) -> None:
    before = device.bytes_in_use()
    handle = new_handle()
    instances = [new_instance(handle) for _ in range(3)]
    set_problem(instances[0])
    index, needed = some_algorithm(instances[0])
    workspace = device.malloc(needed)
    expect(LIB.hgg_initialize(instances[0], index, workspace, needed, 0), "HGG_OK")
    info = FFI.new("hgg_handle_info *")
    expect(LIB.hgg_handle_get_info(handle, info), "HGG_OK")
    assert info.instances == 3
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")
    for instance in instances:
        for name, function in calls_on_instance(instance).items():
            expect(function(), "HGG_CLOSED", name, "handle")
    device.free(workspace)
    assert device.bytes_in_use() == before, "the handle's device memory is still there"


def test_null_pointers(ready: tuple[int, int, int, int, int], ids: tuple[int, int]) -> None:
    handle, instance = ids
    null, one, indices = FFI.NULL, FFI.new("int32_t *"), FFI.new("int32_t[8]")
    calls = [
        LIB.hgg_built_for(null),
        LIB.hgg_handle_create(0, 0, null),
        LIB.hgg_handle_get_info(handle, null),
        LIB.hgg_instance_create(handle, null, FFI.new("hgg_instance *")),
        LIB.hgg_instance_create(handle, types(), null),
        LIB.hgg_instance_get_info(instance, null),
        LIB.hgg_set_problem(instance, null),
        LIB.hgg_algorithms_heuristic(instance, 8, 0, indices, 8, null),
        LIB.hgg_algorithms_heuristic(instance, 8, 0, null, 8, one),
        LIB.hgg_algorithms_all(instance, 0, indices, 8, null),
        LIB.hgg_algorithms_all(instance, 0, null, 8, one),
        LIB.hgg_algorithms_all(instance, 0, indices, -1, one),
        LIB.hgg_algorithm_get(instance, 1, null),
        LIB.hgg_algorithm_find(instance, 1, null, one),
        LIB.hgg_algorithm_find(instance, 1, b"name", null),
        LIB.hgg_template_record(instance, null, 196, one, one),
    ]
    assert [status_name(status) for status in calls] == ["HGG_INVALID_ARGUMENT"] * len(calls)
    for name in ("m", "n", "k", "batch"):
        expect(LIB.hgg_set_problem(instance, problem(**{name: None})), "HGG_INVALID_ARGUMENT", f"{name} is null")


def test_before_set_problem(ids: tuple[int, int]) -> None:
    for name, function in calls_on_instance(ids[1]).items():
        if name in (
            "hgg_algorithms_heuristic",
            "hgg_algorithms_all",
            "hgg_algorithm_get",
            "hgg_initialize",
            "hgg_template_record",
        ):
            expect(function(), "HGG_WRONG_ORDER", name, "hgg_set_problem")
    expect(LIB.hgg_run(ids[1], 4096, 4096, 0), "HGG_WRONG_ORDER", "hgg_initialize")
    expect(LIB.hgg_release(ids[1]), "HGG_OK")  # nothing to undo


def test_run_only_when_initialised(ready: tuple[int, int, int, int, int]) -> None:
    instance, index, workspace, needed, records = ready

    def refused() -> None:
        expect(LIB.hgg_run(instance, records, 392, 0), "HGG_WRONG_ORDER", "hgg_initialize")
        expect(
            LIB.hgg_template_record(instance, FFI.new("char[196]"), 196, FFI.NULL, FFI.NULL),
            "HGG_WRONG_ORDER",
        )

    refused()
    expect(LIB.hgg_initialize(instance, index, workspace, needed, 0), "HGG_OK")
    expect(LIB.hgg_run(instance, records, 392, 0), "HGG_OK")
    set_problem(instance, n=[200, 1])
    refused()
    expect(LIB.hgg_initialize(instance, index, workspace, needed, 0), "HGG_OK")
    expect(LIB.hgg_release(instance), "HGG_OK")
    refused()
    expect(LIB.hgg_initialize(instance, index, workspace, needed, 0), "HGG_OK")
    expect(LIB.hgg_set_problem(instance, problem(n=[0, 0])), "HGG_INVALID_ARGUMENT")  # refused before anything changed
    expect(LIB.hgg_run(instance, records, 392, 0), "HGG_OK")
    expect(LIB.hgg_initialize(instance, index, workspace, needed - 1, 0), "HGG_WORKSPACE")  # likewise
    expect(LIB.hgg_run(instance, records, 392, 0), "HGG_OK")


@pytest.mark.parametrize("index", [-(2**31), -1, 0, 1, 17, 2**31 - 1])
def test_bad_index(ready: tuple[int, int, int, int, int], index: int) -> None:
    instance, _, workspace, needed, _ = ready
    expect(LIB.hgg_algorithm_get(instance, index, FFI.new("hgg_algorithm *")), "HGG_NOT_FOUND", str(index))
    expect(LIB.hgg_initialize(instance, index, workspace, needed, 0), "HGG_NOT_FOUND", str(index))


def test_index_of_other_types(ready: tuple[int, int, int, int, int], ids: tuple[int, int]) -> None:
    """hipBLASLt itself would run a kernel for other transposes, and write nonsense."""
    transposed = new_instance(ids[0], trans_a=1)
    set_problem(transposed)
    foreign, _ = some_algorithm(transposed)
    expect(LIB.hgg_algorithm_get(ready[0], foreign, FFI.new("hgg_algorithm *")), "HGG_NOT_FOUND")
    expect(LIB.hgg_initialize(ready[0], foreign, ready[2], ready[3], 0), "HGG_NOT_FOUND")


@pytest.mark.parametrize(
    ("name", "value"),
    [(f"type_{x}", bad) for x in "abcd" for bad in (-1, 3, 5, 27, 255, 2**31 - 1)]
    + [("compute", -1), ("compute", 5), ("trans_a", 2), ("trans_b", -1), ("epilogue", 2)],
)
def test_bad_types(ids: tuple[int, int], name: str, value: int) -> None:
    out = FFI.new("hgg_instance *", 77)
    expect(LIB.hgg_instance_create(ids[0], types(**{name: value}), out), "HGG_INVALID_ARGUMENT", str(value))
    assert out[0] == 0


def test_bad_bias_type_only_with_bias(ids: tuple[int, int]) -> None:
    out = FFI.new("hgg_instance *")
    expect(LIB.hgg_instance_create(ids[0], types(bias_type=77), out), "HGG_OK")
    expect(
        LIB.hgg_instance_create(ids[0], types(bias_type=77, epilogue=1), out),
        "HGG_INVALID_ARGUMENT",
        "bias_type",
    )


def test_every_combination_of_types_answers(ids: tuple[int, int]) -> None:
    """hipBLASLt's constructor throws for some of these, and its later calls fail: none of it may get out."""
    out, count = FFI.new("hgg_instance *"), FFI.new("int32_t *")
    seen: dict[str, int] = {}
    kinds = (0, 1, 2, 14, 28, 29, 1000, 1001)
    for a, b, d, compute in itertools.product(kinds, kinds, kinds, (0, 4)):
        wanted = types(type_a=a, type_b=b, type_c=d, type_d=d, compute=compute)
        status = LIB.hgg_instance_create(ids[0], wanted, out)
        if not status:
            status = LIB.hgg_set_problem(out[0], problem())
        if not status and a == b and compute == 0 and d in (0, a):  # the others cost a search each
            status = LIB.hgg_algorithms_heuristic(out[0], 1, 2**40, FFI.NULL, 0, count)
        seen[status_name(status)] = seen.get(status_name(status), 0) + 1
        assert status == 0 or text()
        LIB.hgg_instance_destroy(out[0])
    assert set(seen) <= {"HGG_OK", "HGG_UNSUPPORTED", "HGG_LIBRARY_ERROR"}, seen
    assert seen["HGG_OK"] > 1


@pytest.mark.parametrize("device_index", [-1, 1, 2**31 - 1, -(2**31)])
def test_bad_device(device_index: int) -> None:
    out = FFI.new("hgg_handle *", 5)
    expect(LIB.hgg_handle_create(device_index, 0, out), "HGG_INVALID_ARGUMENT", str(device_index), "there are 1")
    assert out[0] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(count=0), "count is 0"),
        (dict(count=1), "count is 1"),  # one size only: kernels for multiples would be offered
        (dict(count=2**32 - 1), "count"),
        (dict(m=[0, 64]), "m[0] is 0"),
        (dict(m=[64, -1]), "m[1] is -1"),
        (dict(n=[2**32, 1]), "n[0] is 4294967296"),
        (dict(k=[32, -(2**63)]), "k[1]"),
        (dict(batch=[0, 1]), "batch[0] is 0"),
        (dict(n=[0, 0]), "every n is 0"),
        (dict(n=[64, 64]), "no problem has n = 1"),
        (dict(n=[64, 64], ragged=2), "no problem has k = 1"),
        (dict(k=[32, 1], ragged=1), "no problem has m = 1"),
        (dict(ragged=4), "ragged is 4"),
        (dict(ragged=-1), "ragged is -1"),
        (dict(lda=[63, 64]), "lda[0] is 63"),
        (dict(ldb=[32, 31]), "ldb[1] is 31"),
        (dict(ldc=[2**32, 64]), "ldc[0] is 4294967296"),
        (dict(ldd=[-1, 64]), "ldd[0] is -1"),
        (dict(stride_a=[-1, 0]), "stride_a[0] is -1"),
        (dict(stride_b=[0, 2**32]), "stride_b[1] is 4294967296"),
        (dict(k=[2**31, 1], batch=[2, 1]), "packed stride_a[0]"),
        (dict(alpha=float("nan")), "alpha"),
        (dict(beta=float("inf")), "beta"),
    ],
)
def test_bad_problem(ids: tuple[int, int], changes: dict[str, Any], words: str) -> None:
    expect(LIB.hgg_set_problem(ids[1], problem(**changes)), "HGG_INVALID_ARGUMENT", words)
    expect(LIB.hgg_algorithms_all(ids[1], 0, FFI.NULL, 0, FFI.new("int32_t *")), "HGG_WRONG_ORDER")


def test_sizes_that_only_64_bits_hold_in_one_matrix(ids: tuple[int, int]) -> None:
    """A matrix of more than 2^32 elements is fine as long as nobody strides over it."""
    set_problem(ids[1], m=[2**20] * 2, k=[2**20] * 2)


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
        create = LIB.hgg_handle_create(0, 0, FFI.new("hgg_handle *"))
        os._exit(len(wrong) + (status_name(create) != "HGG_FORKED"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    expect(LIB.hgg_handle_destroy(handle), "HGG_OK")  # the parent's are untouched


def test_statuses_have_names() -> None:
    names = [status_name(i) for i in range(16)]
    assert len(set(names)) == 16
    assert all(name.startswith("HGG_") for name in names)
    assert status_name(-1) == status_name(99) == "an unknown status"
