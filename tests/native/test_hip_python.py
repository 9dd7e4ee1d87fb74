"""hip-python on the stand-in, in one process with the shim: one runtime, one set of streams and pointers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from grouped import Grouped
from rocm.bindings import hip
from standin_device import Device

from hipgroupgemm.native import Handle, _rocm, load


def check(result: Any) -> Any:
    """What a call returned behind its error code."""
    error, *values = result if isinstance(result, tuple) else (result,)
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else tuple(values)


def test_there_is_one_runtime() -> None:
    assert check(hip.hipGetDeviceCount()) == 1
    assert _rocm.mapped("libamdhip64.so") == [load().hip]


def test_its_streams_and_memory_serve_the_shim(device: Device) -> None:
    stream = check(hip.hipStreamCreate())
    with Handle() as handle:
        grouped = Grouped(device, np.random.default_rng(), [24] * 3, [5, 0, 9], [16] * 3, [1] * 3)
        gemm = grouped.instance(handle)
        chosen = gemm.algorithms(1)[0]
        workspace, data = check(hip.hipMalloc(chosen.workspace_size)), grouped.records()
        gemm.initialize(chosen.index, int(workspace), chosen.workspace_size, int(stream))
        records = check(hip.hipMalloc(data.nbytes))
        kind = hip.hipMemcpyKind.hipMemcpyHostToDevice
        check(hip.hipMemcpyAsync(records, data.view(np.uint8), data.nbytes, kind, stream))
        for matrix in grouped.d:
            matrix.poison()
        gemm.run(int(records), int(stream))
        check(hip.hipStreamSynchronize(stream))
        assert grouped.errors() == []
    check(hip.hipStreamDestroy(stream))


def test_properties() -> None:
    properties = check(hip.hipGetDeviceProperties(0))
    assert properties.gcnArchName.startswith("gfx90a")
    assert properties.multiProcessorCount == 104


def test_nothing_is_captured() -> None:
    stream = check(hip.hipStreamCreate())
    assert int(check(hip.hipStreamIsCapturing(stream))) == 0
    with pytest.raises(RuntimeError, match="801"):
        check(hip.hipStreamBeginCapture(stream, hip.hipStreamCaptureMode.hipStreamCaptureModeThreadLocal))
