"""Grouped GEMMs from device records: results against NumPy, and what must be refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from grouped import RECORD, Grouped
from standin_device import Device

from hipgroupgemm.native import (
    GroupedGemm,
    Handle,
    NativeAlgorithm,
    NativeError,
    NativeValueError,
)

TRANSPOSES = [(False, False), (True, False), (False, True), (True, True)]
SEEDS = np.random.SeedSequence()


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh numbers every time; a failure prints their seed."""
    seed = SEEDS.spawn(1)[0]
    print("seed", seed.entropy, seed.spawn_key)
    return np.random.default_rng(seed)


def odd_groups(rng: np.random.Generator, groups: int, contracting: bool = False) -> dict[str, list[int]]:
    """Sizes with nothing in common; some groups are empty. n is ragged, or k."""
    m, fixed = int(rng.integers(9, 90)), int(rng.integers(9, 70))
    ragged = rng.integers(0, 40, groups)
    ragged[rng.integers(0, groups)] = 0
    ragged[0] = max(ragged[0], 1)
    sizes = {"n": [int(x) for x in ragged], "k": [fixed] * groups}
    if contracting:
        sizes["n"], sizes["k"] = sizes["k"], sizes["n"]
    return {"m": [m] * groups, "batch": [1] * groups, **sizes}


def ready(grouped: Grouped, handle: Handle, capacity: int | None = None, stream: int = 0) -> GroupedGemm:
    gemm = grouped.instance(handle, capacity)
    initialize(gemm, gemm.algorithms(1)[0], grouped.device, stream)
    return gemm


def initialize(gemm: GroupedGemm, algorithm: NativeAlgorithm, device: Device, stream: int = 0) -> bytes:
    return gemm.initialize(algorithm.index, device.malloc(algorithm.workspace_size), algorithm.workspace_size, stream)


@pytest.mark.parametrize("output", ["float16", "float32"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("bias", [False, True])
def test_results(
    handle: Handle,
    device: Device,
    rng: np.random.Generator,
    transposes: tuple[bool, bool],
    output: str,
    bias: bool,
) -> None:
    for alpha, beta in ((0.75, -0.5), (1.0, 0.0), (0.0, 2.0)):
        grouped = Grouped(
            device,
            rng,
            **odd_groups(rng, 9, contracting=transposes[1]),
            trans_a=transposes[0],
            trans_b=transposes[1],
            output=output,
            alpha=alpha,
            beta=beta,
            bias=bias,
        )
        gemm = ready(grouped, handle)
        grouped.run(gemm)
        assert grouped.errors() == []


@pytest.mark.parametrize("transposes", TRANSPOSES)
def test_every_algorithm(handle: Handle, device: Device, rng: np.random.Generator, transposes: tuple[bool, bool]) -> None:
    grouped = Grouped(device, rng, [24] * 3, [5, 0, 9], [17] * 3, [1] * 3, trans_a=transposes[0], trans_b=transposes[1])
    gemm = grouped.instance(handle)
    algorithms = gemm.algorithms()
    assert algorithms
    workspace = device.malloc(max(a.workspace_size for a in algorithms))
    for algorithm in algorithms:
        gemm.initialize(algorithm.index, workspace, algorithm.workspace_size, 0)
        grouped.run(gemm)
        assert grouped.errors() == [], algorithm.name


def test_batches(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    grouped = Grouped(device, rng, [33] * 4, [7, 0, 12, 1], [21] * 4, [3] * 4)
    grouped.run(ready(grouped, handle))
    assert grouped.errors() == []


def test_other_records_without_initialize(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    """The capacity covers every distribution; new sizes, alpha, beta and addresses need no new set-up."""
    groups, rows = 11, 230
    gemm = None
    for attempt in range(6):
        n = rng.multinomial(rows if attempt else rows - 1, rng.dirichlet(np.full(groups, 0.3)))
        if attempt == 1:
            n = np.zeros(groups, int)
            n[groups - 1] = rows
        grouped = Grouped(
            device,
            rng,
            [48] * groups,
            [int(x) for x in n],
            [40] * groups,
            [1] * groups,
            alpha=float(rng.standard_normal()),
            beta=float(rng.standard_normal()),
        )
        if gemm is None:
            gemm = ready(grouped, handle, rows)
        grouped.run(gemm)
        assert grouped.errors() == [], n
        grouped.free()


def test_more_tiles_than_the_capacity_stay_unwritten(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    """The trap that the capacity is for: hipBLASLt reports success. Here it shows as NaN left over."""
    groups = 4
    grouped = Grouped(device, rng, [64] * groups, [300] * groups, [32] * groups, [1] * groups)
    gemm = ready(grouped, handle, 300)
    grouped.run(gemm)
    assert any("nan" in error for error in grouped.errors())


def test_all_groups_empty_on_the_device(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    grouped = Grouped(device, rng, [32] * 5, [9, 3, 0, 2, 1], [16] * 5, [1] * 5)
    gemm = ready(grouped, handle)
    records = grouped.records()
    records["n"] = 0
    for name in "abcd":
        records[name] = 0  # nobody may look at them
    grouped.run(gemm, records)
    for matrix in grouped.d:
        values, gaps = matrix.download()
        assert np.isnan(values).all()
        assert np.isnan(gaps).all()


def test_two_thousand_groups(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    groups = 2000
    n = rng.integers(0, 4, groups)
    n[n.argmax()] = 0
    grouped = Grouped(device, rng, [16] * groups, [int(x) for x in n], [24] * groups, [1] * groups)
    gemm = ready(grouped, handle)
    grouped.run(gemm)
    assert grouped.errors() == []
    grouped.free()


def test_a_group_past_four_billion_elements(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    """Addresses are 64-bit: the second group's B starts more than 2^32 elements behind the first one's."""
    grouped = Grouped(device, rng, [32] * 2, [8, 8], [16] * 2, [1] * 2)
    gemm = ready(grouped, handle)
    far = 2**33 + 2**20  # bytes
    block = device.malloc(far + grouped.b[1].count * 2)
    records = grouped.records()
    for group, offset in enumerate((0, far)):
        matrix = grouped.b[group]
        device.write(block + offset, device.read(matrix.address, matrix.count, np.float16))
        records["b"][group] = block + offset
        device.free(matrix.address)
    grouped.run(gemm, records)
    assert grouped.errors() == []
    device.free(block)


def test_template_record(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    for bias in (False, True):
        grouped = Grouped(device, rng, **odd_groups(rng, 3), bias=bias)
        gemm = grouped.instance(handle)
        record = np.frombuffer(initialize(gemm, gemm.algorithms(1)[0], device), RECORD)[0]
        assert (record["m"], record["n"], record["k"]) == (grouped.m[0], sum(grouped.n), grouped.k[0])
        assert record["batch"] == 1
        assert (record["alpha"], record["beta"]) == (np.float32(grouped.alpha), np.float32(grouped.beta))
        assert (record["strideD1"], record["strideA1"], record["strideB1"]) == (grouped.m[0], grouped.m[0], grouped.k[0])
        assert record["activationType"] == 0
        assert record["biasType"] == 0  # float32, and also what no bias says


CORRUPTIONS = {
    "m": lambda r: r["m"] - 1,
    "n": lambda r: r["n"] - 1,
    "batch": lambda r: r["batch"] - 1,
    "k": lambda r: r["k"] - 1,
    "d": lambda r: r["d"] + 2,
    "c": lambda r: r["c"] + 2,
    "a": lambda r: r["a"] + 2,
    "b": lambda r: r["b"] + 2,
    "strideD1": lambda r: r["strideD1"] + 1,
    "strideD2": lambda r: r["strideD2"] + 1,
    "strideC1": lambda r: r["strideC1"] + 1,
    "strideC2": lambda r: r["strideC2"] + 1,
    "strideA1": lambda r: r["strideA1"] + 1,
    "strideA2": lambda r: r["strideA2"] + 1,
    "strideB1": lambda r: r["strideB1"] + 1,
    "strideB2": lambda r: r["strideB2"] + 1,
    "alpha": lambda r: -r["alpha"],
    "beta": lambda r: 0,
    "bias": lambda r: 0,
    "biasType": lambda r: 4,
    "activationType": lambda r: 5,
    "scaleAlphaVec": lambda r: r["bias"],
}


@pytest.fixture
def sound(handle: Handle, device: Device, rng: np.random.Generator) -> Iterator[tuple[Grouped, GroupedGemm]]:
    """A grouped GEMM in which every field matters: batches, C apart from D, beta, bias, gaps everywhere."""
    grouped = Grouped(device, rng, [20] * 3, [6, 8, 5], [12] * 3, [3] * 3, bias=True)
    yield grouped, ready(grouped, handle)
    grouped.free()


def test_the_sound_record_is_right(sound: tuple[Grouped, GroupedGemm]) -> None:
    sound[0].run(sound[1])
    assert sound[0].errors() == []


@pytest.mark.parametrize("field", CORRUPTIONS)
@pytest.mark.parametrize("group", [0, 2])
def test_one_corrupt_field_is_seen(sound: tuple[Grouped, GroupedGemm], device: Device, field: str, group: int) -> None:
    """What the other tests are worth: one wrong field of one record, and the comparison or launch fails."""
    grouped, gemm = sound
    records = grouped.records()
    before = records[group][field].item()
    records[group][field] = CORRUPTIONS[field](records[group])
    assert records[group][field].item() != before
    try:
        grouped.run(gemm, records)
    except (NativeError, RuntimeError):  # the fault, or an activation that is not known
        device.take_fault()
        return
    errors = grouped.errors()
    assert errors, f"a wrong {field} went unnoticed"
    assert all(error.startswith(f"group {group}:") for error in errors), errors


def test_workspaces(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    grouped = Grouped(device, rng, **odd_groups(rng, 5))
    gemm, other = grouped.instance(handle), grouped.instance(handle)
    chosen = gemm.algorithms(1)[0]
    index, least = chosen.index, chosen.workspace_size
    need = -(-least // 16) * 16
    block = device.malloc(4 * need + 64)
    for address, size, words in (
        (0, need, f"needs a workspace of {least} bytes"),
        (block, least - 1, f"needs a workspace of {least} bytes.*; got {least - 1}"),
        (block, 0, "got 0"),
        (block + 8, need, "aligned to 16 bytes"),
    ):
        with pytest.raises(NativeValueError, match=words):
            gemm.initialize(index, address, size, 0)
    gemm.initialize(index, block, 2 * need, 0)
    for offset in (0, need, 2 * need - 16):  # two in one workspace: wrong output, and no error, without this
        with pytest.raises(NativeValueError, match="overlaps"):
            other.initialize(index, block + offset, need, 0)
    with pytest.raises(NativeError, match="not initialised"):
        grouped.run(other)
    other.initialize(index, block + 2 * need, need, 0)
    gemm.initialize(index, block + need, need, 0)
    other.initialize(index, block, need, 0)
    gemm.close()
    other.initialize(index, block, 2 * need, 0)
    grouped.run(other)
    assert grouped.errors() == []
    other.close()


def test_records_and_streams(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    stream = device.stream()
    grouped = Grouped(device, rng, **odd_groups(rng, 5))
    gemm = ready(grouped, handle, stream=stream)
    records = device.upload(grouped.records())
    for address, words in ((0, "wanted a device address"), (records + 4, "aligned to 16")):
        with pytest.raises(NativeValueError, match=words):
            gemm.run(address, stream)
    grouped.run(gemm, stream=stream)
    assert grouped.errors() == []


def test_threads_on_their_own_handles(device: Device) -> None:
    """Handles, enumeration and runs at the same time; every result is checked."""
    problems: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng([seed, *SEEDS.entropy.to_bytes(16, "little")])  # type: ignore[union-attr]
        try:
            stream = device.stream()
            with Handle() as handle:
                for _ in range(3):
                    grouped = Grouped(device, rng, **odd_groups(rng, 4), trans_a=bool(seed % 2))
                    with ready(grouped, handle, stream=stream) as gemm:
                        assert len(gemm.algorithms()) in ((472, 480) if seed % 2 else (352, 360))
                        for _ in range(5):
                            grouped.run(gemm, stream=stream)
                            problems.extend(grouped.errors())
                    grouped.free()
        except Exception as error:  # must reach the main thread
            problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_threads_on_one_instance_while_it_is_closed(device: Device) -> None:
    """Whoever comes after the end is told so; nobody crashes, and what was written before is right."""
    rng = np.random.default_rng(SEEDS.spawn(1)[0])
    for _ in range(5):
        handle = Handle()
        grouped = Grouped(device, rng, **odd_groups(rng, 4))
        gemm = ready(grouped, handle)
        records = device.upload(grouped.records())
        problems: list[str] = []
        started = threading.Barrier(5)

        def work(
            gemm: GroupedGemm = gemm,
            records: int = records,
            problems: list[str] = problems,
            started: threading.Barrier = started,
        ) -> None:
            started.wait()
            try:
                while True:
                    gemm.run(records, 0)
                    gemm.algorithms()
            except NativeError as error:
                if error.status != "HGG_CLOSED":
                    problems.append(repr(error))

        for matrix in grouped.d:
            matrix.poison()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        gemm.run(records, 0)
        handle.close()
        for thread in threads:
            thread.join()
        assert problems == []
        assert grouped.errors() == []


def test_closed(handle: Handle, device: Device, rng: np.random.Generator) -> None:
    grouped = Grouped(device, rng, **odd_groups(rng, 3))
    gemm = ready(grouped, handle)
    assert not gemm.closed
    gemm.close()
    gemm.close()
    assert gemm.closed
    with pytest.raises(NativeError, match="was closed") as caught:
        grouped.run(gemm)
    assert (caught.value.call, caught.value.status) == ("hgg_run", "HGG_CLOSED")
    survivor = ready(grouped, handle)
    handle.close()
    handle.close()
    with pytest.raises(NativeError, match="handle"):
        survivor.algorithms()
    survivor.close()  # nothing is left to close; that is no error
    with pytest.raises(NativeError, match="was closed"):
        grouped.instance(handle)
