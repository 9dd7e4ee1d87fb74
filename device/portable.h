// What differs between the three builds: HIP (hipRTC, hipcc, or a bare clang without HIP's headers), CUDA
// (NVRTC, nvcc) and the host (any C++17 compiler).
//
// Kernels are written as phases. HGG_PHASE(t) { ... } runs its body once for every thread t of the block and
// ends in a barrier: on a GPU each thread runs the body once, on the host one thread runs it for all t in
// turn, in an order that the caller picks, so that a missing barrier shows up as a wrong result. HGG_STEP(t)
// is the same without the barrier. From one phase to the next live only shared memory, values that are the
// same in all threads, and what HGG_PRIVATE declares: a value for each thread, in registers on a GPU, of
// which thread t has HGG_OWN(name, t). So the host runs exactly the functions that the GPUs run. The one
// warp-wide operation, scan_warp (scan.h), stands between steps and has a host version that goes warp by
// warp.
#ifndef HGG_PORTABLE_H
#define HGG_PORTABLE_H

#include "arguments.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define HGG_CUDA 1
#elif defined(__HIPCC_RTC__) || defined(__HIPCC__) || defined(__HIP__)
#define HGG_HIP 1
#define HGG_GLOBAL __attribute__((address_space(1)))
#if !defined(__HIPCC_RTC__) && defined(__has_include)
#if __has_include(<hip/hip_runtime.h>)
#include <hip/hip_runtime.h>
#define HGG_HIP_HEADERS 1
#endif
#elif defined(__HIPCC_RTC__)
#define HGG_HIP_HEADERS 1
#endif
#else
#define HGG_HOST 1
#endif
#if !defined(HGG_GLOBAL)
#define HGG_GLOBAL
#endif

#if defined(HGG_HOST)

#include <cstring>

#define HGG_FUNCTION static inline
#define HGG_MEMBER inline
#define HGG_UNROLL
#define HGG_ROLLED
typedef hgg_u32 hgg_vector __attribute__((vector_size(16), may_alias));

#ifndef HGG_HOST_WARP
#define HGG_HOST_WARP 32
#endif

namespace hgg {
constexpr int kWarp = HGG_HOST_WARP;

// The block that runs now, and the order in which its threads are emulated: 0 forward, 1 backward, 2
// scattered.
struct Machine {
  hgg_u32 block = 0;
  hgg_u32 grid = 1;
  int order = 0;
};
inline Machine& machine() {
  static thread_local Machine one;
  return one;
}
inline int thread_of(int step) {
  const int order = machine().order;
  return order == 0 ? step : order == 1 ? HGG_THREADS - 1 - step : (step * 37 + 11) % HGG_THREADS;
}
HGG_FUNCTION hgg_u32 block_index() { return machine().block; }
HGG_FUNCTION hgg_u32 grid_size() { return machine().grid; }
HGG_FUNCTION void atomic_min(hgg_u32* at, hgg_u32 value) { *at = value < *at ? value : *at; }
HGG_FUNCTION void atomic_or(hgg_u32* at, hgg_u32 value) { *at |= value; }

// Runs the blocks of a grid one after the other, each on shared memory full of rubbish, as on a GPU.
template <class Shared, class Arguments, class Block>
void run_blocks(const Arguments& arguments, hgg_u32 grid, int order, const Block& block) {
  static thread_local Shared shared;
  machine().grid = grid;
  machine().order = order % 3;
  for (hgg_u32 i = 0; i < grid; ++i) {
    std::memset((void*)&shared, 0xa5, sizeof(shared));
    machine().block = order / 3 % 2 ? grid - 1 - i : i;
    block(arguments, shared);
  }
}
}  // namespace hgg

#define HGG_PHASE(t) \
  for (int t##_step = 0, t = 0; t##_step < HGG_THREADS && ((t = hgg::thread_of(t##_step)), true); ++t##_step)
#define HGG_STEP(t) HGG_PHASE(t)
#define HGG_COPIES HGG_THREADS
#define HGG_OWN(name, t) name[t]

#else  // a GPU

#if defined(HGG_CUDA)

#define HGG_FUNCTION static __device__ __forceinline__
#define HGG_MEMBER __device__ __forceinline__
#define HGG_KERNEL extern "C" __global__ void __launch_bounds__(HGG_THREADS)
#define HGG_BY_VALUE const __grid_constant__
#define HGG_SHARED __shared__
typedef uint4 hgg_vector;

#else

#if !defined(HGG_HIP_HEADERS)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif
#define HGG_FUNCTION static __device__ inline __attribute__((always_inline))
#define HGG_MEMBER __device__ inline __attribute__((always_inline))
#define HGG_KERNEL \
  extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(HGG_THREADS, HGG_THREADS)))
#define HGG_BY_VALUE const
#define HGG_SHARED __shared__
typedef hgg_u32 hgg_vector __attribute__((ext_vector_type(4), may_alias));

#endif

#define HGG_UNROLL _Pragma("unroll")
#define HGG_ROLLED _Pragma("unroll 1")

namespace hgg {
#if defined(HGG_HIP) && defined(__GFX9__)
constexpr int kWarp = 64;
#else
constexpr int kWarp = 32;
#endif

// The value `up` lanes below in the same warp; its own where there is none.
HGG_FUNCTION hgg_u32 shuffle_up(hgg_u32 value, int lane, int up) {
#if defined(HGG_CUDA)
  (void)lane;
  return __shfl_up_sync(0xffffffffu, value, up);
#else
  return (hgg_u32)__builtin_amdgcn_ds_bpermute(4 * (lane < up ? lane : lane - up), (int)value);
#endif
}
HGG_FUNCTION hgg_u64 shuffle_up(hgg_u64 value, int lane, int up) {
  const hgg_u32 low = shuffle_up((hgg_u32)value, lane, up),
                high = shuffle_up((hgg_u32)(value >> 32), lane, up);
  return (hgg_u64)high << 32 | low;
}

#if defined(HGG_HIP) && !defined(HGG_HIP_HEADERS)
HGG_FUNCTION int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
HGG_FUNCTION hgg_u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }
HGG_FUNCTION hgg_u32 grid_size() { return __builtin_amdgcn_grid_size_x() / HGG_THREADS; }
HGG_FUNCTION void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
HGG_FUNCTION void atomic_min(hgg_u32* at, hgg_u32 value) {
  __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
HGG_FUNCTION void atomic_or(hgg_u32* at, hgg_u32 value) {
  __hip_atomic_fetch_or(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
#else
HGG_FUNCTION int thread_index() { return (int)threadIdx.x; }
HGG_FUNCTION hgg_u32 block_index() { return blockIdx.x; }
HGG_FUNCTION hgg_u32 grid_size() { return gridDim.x; }
HGG_FUNCTION void barrier() { __syncthreads(); }
HGG_FUNCTION void atomic_min(hgg_u32* at, hgg_u32 value) { atomicMin(at, value); }
HGG_FUNCTION void atomic_or(hgg_u32* at, hgg_u32 value) { atomicOr(at, value); }
#endif
}  // namespace hgg

#define HGG_PHASE(t) for (int t = hgg::thread_index(), t##_once = 1; t##_once; t##_once = 0, hgg::barrier())
#define HGG_STEP(t) for (int t = hgg::thread_index(), t##_once = 1; t##_once; t##_once = 0)
#define HGG_COPIES 1
#define HGG_OWN(name, t) name[0]

#endif  // host or GPU

#define HGG_PRIVATE(Type, name) Type name[HGG_COPIES]

namespace hgg {

template <class T>
HGG_FUNCTION T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
HGG_FUNCTION T maximum(T a, T b) {
  return a < b ? b : a;
}

// Index of the lowest bit that is set; there is one.
HGG_FUNCTION int lowest_bit(hgg_u32 bits) {
#if defined(HGG_CUDA)
  return __ffs((int)bits) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

// Whole blocks of `unit` that hold `count`.
template <class T>
HGG_FUNCTION T ceiling(T count, T unit) {
  return (count + unit - 1) / unit;
}

// Memory at a device address. On HIP it is marked as global memory, which a bare 64-bit number does not say:
// plain generic accesses would also wait for shared memory.
template <class T>
HGG_FUNCTION T read(hgg_u64 address) {
  return *(const HGG_GLOBAL T*)address;
}
template <class T>
HGG_FUNCTION void write(hgg_u64 address, T value) {
  *(HGG_GLOBAL T*)address = value;
}

// The same at an address that may be no multiple of the type's size: then byte by byte.
template <class T>
HGG_FUNCTION T load(hgg_u64 address, bool aligned) {
  if (aligned) return read<T>(address);
  union {
    T value;
    unsigned char byte[sizeof(T)];
  } u;
  for (int i = 0; i < (int)sizeof(T); ++i) u.byte[i] = read<unsigned char>(address + i);
  return u.value;
}

template <class T>
HGG_FUNCTION void store(hgg_u64 address, T value, bool aligned) {
  if (aligned) {
    write<T>(address, value);
    return;
  }
  union {
    T value;
    unsigned char byte[sizeof(T)];
  } u;
  u.value = value;
  for (int i = 0; i < (int)sizeof(T); ++i) write<unsigned char>(address + i, u.byte[i]);
}

}  // namespace hgg

#endif
