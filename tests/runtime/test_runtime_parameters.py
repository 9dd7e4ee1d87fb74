"""Parameter blocks: the layout that a driver reads, and what is refused."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hipgroupgemm.runtime.parameters import TENSOR_MAP, Blob, KernelParameters

SCALARS = {
    "ptr": ctypes.c_uint64,
    "i8": ctypes.c_int8,
    "u8": ctypes.c_uint8,
    "i16": ctypes.c_int16,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}
# blobs whose layout ctypes can show
BLOBS = {(5, 1): ctypes.c_uint8 * 5, (12, 4): ctypes.c_uint32 * 3, (24, 8): ctypes.c_uint64 * 3}


def value_of(kind: str | tuple[int, int]) -> st.SearchStrategy[object]:
    if isinstance(kind, tuple):
        return st.binary(min_size=kind[0], max_size=kind[0])
    if kind in ("f32", "f64"):
        return st.floats(width=32 if kind == "f32" else 64, allow_nan=False)
    bits = 64 if kind == "ptr" else int(kind[1:])
    if kind.startswith("i"):
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)
    return st.integers(0, (1 << bits) - 1)


slots = st.one_of(st.sampled_from(sorted(SCALARS)), st.sampled_from(sorted(BLOBS))).flatmap(
    lambda kind: st.tuples(st.just(kind), value_of(kind))
)


@given(st.lists(slots, max_size=24))
def test_layout_is_a_c_struct(chosen: list[tuple[str | tuple[int, int], object]]) -> None:
    kinds = [Blob(*kind) if isinstance(kind, tuple) else kind for kind, _ in chosen]
    values = [value for _, value in chosen]
    types = [BLOBS[kind] if isinstance(kind, tuple) else SCALARS[kind] for kind, _ in chosen]
    reference = type("S", (ctypes.Structure,), {"_fields_": [(f"f{i}", t) for i, t in enumerate(types)]})
    params = KernelParameters(kinds)
    assert list(params.offsets) == [getattr(reference, f"f{i}").offset for i in range(len(types))]
    assert len(params) == len(kinds) and params.buffer_address % 128 == 0
    assert list(params) == [bytes(k.nbytes) if isinstance(k, Blob) else 0 for k in kinds]
    params.set(*values)
    assert list(params) == values
    # what the driver reads: an array of addresses, each of a value
    addresses = (ctypes.c_void_p * max(len(kinds), 1)).from_address(params.address)
    for i, (ctype, value) in enumerate(zip(types, values, strict=True)):
        assert addresses[i] == params.buffer_address + params.offsets[i] == params.blob_address(i)
        stored = ctype.from_address(addresses[i] or 0)
        assert (bytes(stored) if isinstance(value, bytes) else stored.value) == value
    # one at a time gives the same bytes
    other = KernelParameters(kinds)
    for position, value in enumerate(values):
        other[position] = value
    assert ctypes.string_at(other.buffer_address, other.nbytes) == ctypes.string_at(params.buffer_address, params.nbytes)


def test_tensor_maps_are_aligned() -> None:
    params = KernelParameters(["i32", TENSOR_MAP, "i32", TENSOR_MAP], ["n", "a", "m", "b"])
    assert params.offsets == (0, 64, 192, 256)
    assert all(params.blob_address(params.index(name)) % 64 == 0 for name in "ab")
    assert params.index("m") == 2
    with pytest.raises(ValueError, match="not in tuple"):
        params.index("q")


def test_triton_spellings() -> None:
    params = KernelParameters(["*bf16", "*fp32", "fp32", "fp64", "i1"])
    assert params.offsets == (0, 8, 16, 24, 32)
    params.set(1, 2, 0.5, 0.25, True)
    assert list(params) == [1, 2, 0.5, 0.25, 1]


def test_numpy_scalars() -> None:
    params = KernelParameters(["i32", "f32", "i64"])
    params.set(np.int64(-3), np.float64(0.5), np.uint8(7))
    assert list(params) == [-3, 0.5, 7]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("i32", 2**31),
        ("i32", np.int64(2**31)),
        ("u32", -1),
        ("ptr", -1),
        ("ptr", None),
        ("i64", 1.0),
        ("f32", 1e39),
        ("f32", "1"),
        (Blob(4, 4), b"123"),
        (Blob(4, 4), b"12345"),
        (Blob(4, 4), 1),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_wrong_values(kind: str | Blob, value: object, whole: bool) -> None:
    params = KernelParameters(["i32", kind], ["count", "wrong"])
    with pytest.raises(ValueError, match=r"parameter wrong .*want a value of its [48] bytes"):
        if whole:
            params.set(1, value)
        else:
            params[1] = value


def test_wrong_blocks() -> None:
    with pytest.raises(ValueError, match="kind: got 'i33'"):
        KernelParameters(["i33"])
    with pytest.raises(ValueError, match="longer"):
        KernelParameters(["i32", "i32"]).set(1, 2, 3)
    with pytest.raises(ValueError, match="shorter"):
        KernelParameters([Blob(4)]).set()
    with pytest.raises(IndexError):
        KernelParameters(["i32"])[1] = 0
