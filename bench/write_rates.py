"""How fast an NVIDIA GPU takes 1 GiB of writes, by pattern: what bounds a weight gradient, whose output is most of its traffic.

Every pattern writes all of a matrix of 2^19 rows of 1024 bf16 (2 KiB), random bits, once. Times by the harness, as in `peers.py`.

    python bench/write_rates.py
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hipgroupgemm.measure.harness import harness_for
from hipgroupgemm.measure.timer import Timed, time_rounds

SOURCE = r"""
typedef unsigned long long u64; typedef unsigned int u32;
#define KERNEL extern "C" __global__ void
__device__ __forceinline__ uint4 bits(u64 i) { u32 a = (u32)i * 2654435761u; return make_uint4(a, a ^ 0x5bd1e995u, a * 7u, ~a); }
template <int HOW> __device__ __forceinline__ void put(char* p, uint4 v) {
#define VALUES "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
  if (HOW == 0) asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: VALUES : "memory");
  if (HOW == 1) asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" :: VALUES : "memory");
  if (HOW == 2) asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" :: VALUES : "memory");
  if (HOW == 3) {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" :: VALUES, "l"(policy) : "memory");
  }
}
// tiles of ROWS x BYTES in a matrix of `rows` rows of `pitch` bytes; consecutive tiles go down `window` row tiles, then along
template <int HOW, int ROWS, int BYTES> __device__ void tiles(char* out, int rows, int pitch, int window) {
  const int across = pitch / BYTES, down = rows / ROWS, per = window * across;
  const int lanes = BYTES / 16;
  for (int t = blockIdx.x; t < across * down; t += gridDim.x) {
    const int tm = t / per * window + t % per % window, tn = t % per / window;
    char* base = out + (u64)tm * ROWS * pitch + (u64)tn * BYTES;
    for (int i = threadIdx.x; i < ROWS * lanes; i += blockDim.x)
      put<HOW>(base + (u64)(i / lanes) * pitch + i % lanes * 16, bits(i + t));
  }
}
#define TILES(name, how, rows, bytes) \
  KERNEL name(char* out, int n, int pitch, int window) { tiles<how, rows, bytes>(out, n, pitch, window); }
TILES(plain_128x128, 0, 128, 128)
TILES(plain_128x512, 0, 128, 512)
TILES(plain_128x2048, 0, 128, 2048)
TILES(cs_128x512, 1, 128, 512)
TILES(no_allocate_128x512, 2, 128, 512)
TILES(first_128x512, 3, 128, 512)
TILES(first_128x128, 3, 128, 128)
KERNEL linear(char* out, int rows, int pitch, int window) {
  const u64 count = (u64)rows * pitch / 16;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) put<0>(out + i * 16, bits(i));
}
KERNEL linear_first(char* out, int rows, int pitch, int window) {
  const u64 count = (u64)rows * pitch / 16;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) put<3>(out + i * 16, bits(i));
}
// bulk copies from shared memory: one of `window` bytes a row piece, so many pieces in flight as 64 KiB hold
KERNEL bulk(char* out, int rows, int pitch, int window) {
  extern __shared__ __align__(128) uint4 shared[];
  for (int i = threadIdx.x; i < 65536 / 16; i += blockDim.x) shared[i] = bits(i + blockIdx.x);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const u32 at = (u32)__cvta_generic_to_shared(shared);
  const u64 total = (u64)rows * pitch, chunk = 65536;
  for (u64 c = blockIdx.x; c < total / chunk; c += gridDim.x) {
    for (u32 p = threadIdx.x * window; p < chunk; p += 32 * window)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                   :: "l"(out + c * chunk + p), "r"(at + p), "r"(window) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""
ROWS, PITCH = 1 << 19, 2048


def main() -> int:
    import cupy
    import torch

    harness = harness_for("cuda:0")
    stream = cupy.cuda.ExternalStream(harness.stream)
    module = cupy.RawModule(code=SOURCE, options=("-std=c++17", "-arch=sm_90"), backend="nvrtc")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.empty(ROWS * PITCH, dtype=torch.int8, device="cuda")
    source = torch.randint(-128, 127, (ROWS * PITCH,), dtype=torch.int8, device="cuda")
    calls: dict[str, Any] = {}

    def add(name: str, kernel: str, blocks: int, threads: int, window: int, shared: int = 0) -> None:
        function = module.get_function(kernel)
        if shared:
            function.max_dynamic_shared_size_bytes = shared
        arguments = (out.data_ptr(), np.int32(ROWS), np.int32(PITCH), np.int32(window))

        def call() -> None:
            function((blocks * multiprocessors,), (threads,), arguments, shared_mem=shared, stream=stream)

        calls[name] = call

    calls["memset"] = out.zero_
    calls["copy (half is read)"] = lambda: out[: out.numel() // 2].copy_(source[: out.numel() // 2])
    for kernel in ("linear", "linear_first"):
        add(f"{kernel}, 2 x 512 threads", kernel, 2, 512, 0)
    add("linear, 8 x 256 threads", "linear", 8, 256, 0)
    plain = ("plain_128x128", "plain_128x512", "plain_128x2048")
    hinted = ("first_128x128", "cs_128x512", "no_allocate_128x512", "first_128x512")
    for kernel in (*plain, *hinted):
        for window in (1, 8):
            add(f"{kernel}, window {window}", kernel, 1, 256, window)
    add("plain_128x512, window 1, 2 blocks", "plain_128x512", 2, 256, 1)
    for piece in (512, 2048, 16384):
        add(f"bulk copies of {piece}", "bulk", 1, 128, piece, 65536)
    torch.cuda.synchronize()
    entries = {name: Timed() for name in calls}
    names = {id(entry): name for name, entry in entries.items()}

    def once(entry: Timed, number: int) -> float:
        harness.flush()
        return harness.time(calls[names[id(entry)]])

    with torch.cuda.stream(torch.cuda.ExternalStream(harness.stream)):
        time_rounds(list(entries.values()), once, rounds=(9, 16))
    for name, entry in entries.items():
        ms = entry.median
        print(f"{name:38s} {ms * 1e3:7.1f} us  {ROWS * PITCH / ms / 1e9:5.2f} TB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
