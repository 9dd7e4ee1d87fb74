// A stand-in for AMD's HIP runtime (libamdhip64.so.6) on a machine without a GPU. See README.md.
//
// Everything runs at once, under one lock, on the calling thread: a stream is a name, an event a time.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace standin {

// ---- calls and errors (device.cpp)

std::recursive_mutex& lock();

// STANDIN_LOG: 1 launches, 2 every call, 3 kernel arguments in hex; 0 still reports what was refused.
int log_level();
[[gnu::format(printf, 2, 3)]] void log(int level, const char* format, ...);

// Ends a call: a fault of an earlier kernel shows in every later call, as on a GPU.
hipError_t done(hipError_t error);
void set_fault(hipError_t error);
hipError_t fault();
void count_call(const char* name);

// A call that is not carried out: says so on stderr, and returns the error.
[[gnu::format(printf, 2, 3)]] hipError_t refuse(hipError_t error, const char* format, ...);

#define STANDIN_CALL()                                                          \
    const std::lock_guard<std::recursive_mutex> standin_guard(standin::lock()); \
    standin::count_call(__func__)

bool valid_stream(hipStream_t stream);  // stream.cpp
double seconds();

// ---- memory (memory.cpp)

// Device memory is one file mapped twice. Programs see addresses in a view that nobody may touch, so that a
// host program that reads a device pointer faults; the stand-in works through the other view.
bool is_device(const void* address);

// Where the stand-in can use `size` bytes at a program's address; null if they are device memory but not all
// inside one live allocation.
void* translate(const void* address, size_t size);

// The same for what a kernel reads: only device memory and pinned host memory will do. Otherwise it leaves
// a fault (hipErrorIllegalAddress) and returns null.
void* kernel_memory(const void* address, size_t size, const char* what);
template <class T>
T* kernel_array(const T* address, size_t count, const char* what) {
    return static_cast<T*>(kernel_memory(address, count * sizeof(T), what));
}

// Lets the code between construction and destruction use device addresses as they are: live allocations
// become accessible where programs see them, the guards between them stay shut.
class OpenMemory {
public:
    OpenMemory();
    ~OpenMemory();
    OpenMemory(const OpenMemory&) = delete;
    OpenMemory& operator=(const OpenMemory&) = delete;
};

// The first allocation whose padding somebody has written to; null if all is well.
const void* damaged_allocation();
std::string describe(const void* address);

// ---- launches (module.cpp, host_kernels.cpp, gemm.cpp)

struct Launch {
    std::string kernel;
    uint32_t grid[3];   // in blocks
    uint32_t block[3];  // in threads
    size_t shared_bytes;
    void** parameters;      // one pointer an argument, or null
    const char* arguments;  // packed arguments, or null
    size_t argument_bytes;
};

bool is_gemm(const std::string& kernel);
hipError_t run_gemm(const Launch& launch);
bool has_host_build(const std::string& kernel);
hipError_t run_host_build(const Launch& launch);

}  // namespace standin
