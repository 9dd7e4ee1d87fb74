"""Stream handles: one spelling inside, and the array protocols' spellings at the border.

Inside the package a stream is the driver's handle as an int, and 0 is the default stream. The protocols differ:

- ``__cuda_array_interface__`` (v3): 1 is the legacy default stream, 2 the per-thread one, 0 is not allowed.
- DLPack on CUDA: the same numbers, and -1 asks for no synchronisation.
- DLPack on ROCm: 0 is the default stream; 1 and 2 are not allowed.

CUDA's driver takes 0, 1 (CU_STREAM_LEGACY) and 2 (CU_STREAM_PER_THREAD) as handles; 0 and 1 are the same stream.
"""

from __future__ import annotations

_LEGACY, _PER_THREAD = 1, 2


def stream_handle(stream: object) -> int:
    """The integer handle of a stream object.

    Takes an int, None (the default stream), and objects with ``__cuda_stream__`` (the protocol of cuda.core and nvmath), ``cuda_stream``
    (torch), ``ptr`` (CuPy), ``handle`` (Numba, older cuda.core) or ``__int__`` (cuda.bindings, hip-python).

    Raises:
        TypeError: the object is none of these.
    """
    if stream is None:
        return 0
    if type(stream) is int:
        return stream
    if isinstance(stream, bool | float | str | bytes):
        raise TypeError(f"stream: got {stream!r}; want a stream object, its integer handle, or None")
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return int(pair[1])
    for name in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)  # ctypes has a handle in `value`, None for 0
    try:
        return int(stream)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        wanted = "an integer handle, None, or an object with __cuda_stream__, cuda_stream, ptr or handle"
        raise TypeError(f"stream: got a {type(stream).__name__}; want {wanted}") from None


def normalize_stream(kind: str, stream: object) -> int:
    """The handle that this package uses for ``stream`` on a "cuda" or "rocm" device; CUDA's 1 becomes 0, so that one stream has one.

    Raises:
        TypeError: ``stream`` is no stream.
        ValueError: a negative handle, or 1 or 2 on ROCm, where they are not valid.
    """
    handle = stream_handle(stream)
    if handle < 0:
        raise ValueError(f"stream: got {handle}; want a handle of 0 or more (0 is the default stream)")
    if kind == "rocm" and handle in (_LEGACY, _PER_THREAD):
        wanted = "0 for the default stream of a ROCm device, or a stream's handle"
        raise ValueError(f"stream: got {handle}, which only CUDA defines; want {wanted}")
    return 0 if kind != "rocm" and handle == _LEGACY else handle


def protocol_stream(kind: str, stream: int) -> int:
    """What to hand to a DLPack producer, or export in a CUDA array interface: the default stream is 1 on CUDA and 0 on ROCm."""
    return _LEGACY if kind == "cuda" and stream == 0 else stream
