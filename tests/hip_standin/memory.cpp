// Device memory that is host memory, with guards around every allocation.
#include "standin.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace standin {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlign = 256;  // what hipMalloc promises
constexpr unsigned char kPadding = 0xc5;
constexpr unsigned char kFresh = 0xff;    // NaN in every floating type, a wild number in every other
constexpr size_t kFreshLimit = 8u << 20;  // larger allocations stay sparse, and read as zeros

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

struct Allocation {
    size_t size;   // as asked
    size_t begin;  // of the pages, as an offset into the arena
    size_t bytes;  // of the pages
};

struct Arena {
    size_t size = 0;
    char* program = nullptr;   // what programs see
    char* internal = nullptr;  // the stand-in's own view of the same memory
    size_t top = 1 << 21;
    bool wrapped = false;
    std::map<char*, Allocation> live;  // by the address that the program has
    std::map<char*, size_t> pinned;    // host memory
    std::map<char*, size_t> registered;
};

Arena& arena() {
    static Arena* const a = [] {
        auto* fresh = new Arena;  // leaked: programs free device memory while the process ends
        const char* wanted = getenv("STANDIN_ARENA_GIB");
        fresh->size = size_t(wanted ? atol(wanted) : 64) << 30;
        const int file = memfd_create("standin", MFD_CLOEXEC);
        if (file < 0 || ftruncate(file, off_t(fresh->size))) {
            perror("standin: arena");
            abort();
        }
        const int flags = MAP_SHARED | MAP_NORESERVE;
        fresh->internal =
            static_cast<char*>(mmap(nullptr, fresh->size, PROT_READ | PROT_WRITE, flags, file, 0));
        fresh->program = static_cast<char*>(mmap(nullptr, fresh->size, PROT_NONE, flags, file, 0));
        if (fresh->internal == MAP_FAILED || fresh->program == MAP_FAILED) {
            perror("standin: arena");
            abort();
        }
        close(file);
        return fresh;
    }();
    return *a;
}

char* internal(const Arena& a, const char* address) { return a.internal + (address - a.program); }

// The allocation that holds the address, or end().
std::map<char*, Allocation>::iterator holder(Arena& a, const char* address) {
    auto it = a.live.upper_bound(const_cast<char*>(address));
    if (it == a.live.begin()) return a.live.end();
    --it;
    return address < it->first + std::max<size_t>(it->second.size, 1) ? it : a.live.end();
}

std::map<char*, size_t>::iterator holder(std::map<char*, size_t>& blocks, const char* address) {
    auto it = blocks.upper_bound(const_cast<char*>(address));
    if (it == blocks.begin()) return blocks.end();
    --it;
    return address < it->first + it->second ? it : blocks.end();
}

// Addresses are used once, so that a use after free faults, until the arena's end; then gaps are used again.
size_t find_room(Arena& a, size_t bytes) {
    const size_t wanted = bytes + kPage;  // a guard page behind
    if (!a.wrapped && a.top + wanted <= a.size) {
        const size_t at = a.top;
        a.top += wanted;
        return at;
    }
    a.wrapped = true;
    size_t at = 1 << 21;
    for (const auto& [address, allocation] : a.live) {
        if (at + wanted <= allocation.begin) return at;
        at = allocation.begin + allocation.bytes + kPage;
    }
    return at + wanted <= a.size ? at : 0;
}

bool padding_intact(const Arena& a, const char* address, const Allocation& allocation) {
    const char* first = a.internal + allocation.begin;
    const char* mine = internal(a, address);
    const auto intact = [](const char* begin, const char* end) {
        return std::all_of(begin, end, [](char c) { return static_cast<unsigned char>(c) == kPadding; });
    };
    return intact(first, mine) && intact(mine + allocation.size, first + allocation.bytes);
}

hipError_t allocate(void** out, size_t size) {
    if (!out) return hipErrorInvalidValue;
    *out = nullptr;
    if (!size) return hipSuccess;
    Arena& a = arena();
    if (size > a.size) return hipErrorOutOfMemory;
    const size_t rounded = round_up(size, kAlign), bytes = round_up(rounded, kPage);
    const size_t begin = find_room(a, bytes);
    if (!begin) return hipErrorOutOfMemory;
    // The block ends where its pages end, as nearly as the alignment allows: the guard is right behind it.
    char* const address = a.program + begin + (bytes - rounded);
    if (size <= kFreshLimit) memset(internal(a, address), kFresh, size);
    memset(a.internal + begin, kPadding, bytes - rounded);
    memset(internal(a, address) + size, kPadding, rounded - size);
    a.live[address] = {size, begin, bytes};
    *out = address;
    return hipSuccess;
}

hipError_t release(void* pointer) {
    if (!pointer) return hipSuccess;
    Arena& a = arena();
    char* const address = static_cast<char*>(pointer);
    const auto host = a.pinned.find(address);
    if (host != a.pinned.end()) {
        free(pointer);
        a.pinned.erase(host);
        return hipSuccess;
    }
    const auto it = a.live.find(address);
    if (it == a.live.end()) return refuse(hipErrorInvalidValue, "free of %s", describe(pointer).c_str());
    const bool intact = padding_intact(a, address, it->second);
    if (!intact) log(0, "memory around %s was overwritten", describe(pointer).c_str());
    madvise(a.internal + it->second.begin, it->second.bytes, MADV_REMOVE);
    a.live.erase(it);
    if (!intact) set_fault(hipErrorIllegalAddress);
    return hipSuccess;
}

hipError_t copy(void* to, const void* from, size_t size, hipMemcpyKind kind) {
    if (!size) return hipSuccess;
    if (!to || !from) return hipErrorInvalidValue;
    const bool wrong = (kind == hipMemcpyHostToDevice && !is_device(to))
                       || (kind == hipMemcpyDeviceToHost && !is_device(from))
                       || (kind == hipMemcpyDeviceToDevice && (!is_device(to) || !is_device(from)))
                       || (kind == hipMemcpyHostToHost && (is_device(to) || is_device(from)));
    if (wrong || kind < hipMemcpyHostToHost || kind > hipMemcpyDefault) return hipErrorInvalidValue;
    void *x = translate(to, size), *y = translate(from, size);
    if (!x || !y)
        return refuse(hipErrorInvalidValue, "copy of %zu bytes from %s to %s", size, describe(from).c_str(),
                      describe(to).c_str());
    memmove(x, y, size);
    return hipSuccess;
}

hipError_t fill(void* to, const void* pattern, size_t width, size_t count) {
    if (!count) return hipSuccess;
    char* x = is_device(to) ? static_cast<char*>(translate(to, width * count)) : nullptr;
    if (!x)
        return refuse(hipErrorInvalidValue, "memset of %zu bytes at %s", width * count, describe(to).c_str());
    if (width == 1) {
        memset(x, *static_cast<const unsigned char*>(pattern), count);
    } else {
        for (size_t i = 0; i < count; i++) memcpy(x + i * width, pattern, width);
    }
    return hipSuccess;
}

}  // namespace

bool is_device(const void* address) {
    const Arena& a = arena();
    const char* c = static_cast<const char*>(address);
    return c >= a.program && c < a.program + a.size;
}

void* translate(const void* address, size_t size) {
    if (!is_device(address)) return const_cast<void*>(address);
    Arena& a = arena();
    const char* c = static_cast<const char*>(address);
    const auto it = holder(a, c);
    if (it == a.live.end() || size > size_t(it->first + it->second.size - c)) return nullptr;
    return internal(a, c);
}

void* kernel_memory(const void* address, size_t size, const char* what) {
    Arena& a = arena();
    const char* c = static_cast<const char*>(address);
    void* found = nullptr;
    if (is_device(address)) {
        found = translate(address, size);
    } else {
        for (auto* blocks : {&a.pinned, &a.registered}) {
            const auto it = holder(*blocks, c);
            if (it != blocks->end() && size <= size_t(it->first + it->second - c))
                found = const_cast<char*>(c);
        }
    }
    if (!found) {
        log(0, "memory access fault: %s, %zu bytes at %s", what, size, describe(address).c_str());
        set_fault(hipErrorIllegalAddress);
    }
    return found;
}

OpenMemory::OpenMemory() {
    const Arena& a = arena();
    for (const auto& [address, allocation] : a.live)
        mprotect(a.program + allocation.begin, allocation.bytes, PROT_READ | PROT_WRITE);
}

OpenMemory::~OpenMemory() {
    const Arena& a = arena();
    mprotect(a.program, a.size, PROT_NONE);
}

const void* damaged_allocation() {
    const Arena& a = arena();
    for (const auto& [address, allocation] : a.live)
        if (!padding_intact(a, address, allocation)) return address;
    return nullptr;
}

std::string describe(const void* address) {
    Arena& a = arena();
    const char* c = static_cast<const char*>(address);
    char text[200];
    if (!is_device(address)) {
        snprintf(text, sizeof text, "%p (not device memory)", address);
    } else if (const auto it = holder(a, c); it != a.live.end()) {
        snprintf(text, sizeof text, "%p (device, byte %zu of %zu)", address, size_t(c - it->first),
                 it->second.size);
    } else {
        snprintf(text, sizeof text, "%p (device memory that is not allocated)", address);
    }
    return text;
}

}  // namespace standin

using namespace standin;

extern "C" {

hipError_t hipMalloc(void** out, size_t size) {
    STANDIN_CALL();
    log(2, "hipMalloc %zu", size);
    return done(allocate(out, size));
}

hipError_t hipMallocAsync(void** out, size_t size, hipStream_t stream) {
    STANDIN_CALL();
    return done(valid_stream(stream) ? allocate(out, size) : hipErrorInvalidHandle);
}

hipError_t hipFree(void* pointer) {
    STANDIN_CALL();
    return done(release(pointer));
}

hipError_t hipFreeAsync(void* pointer, hipStream_t stream) {
    STANDIN_CALL();
    return done(valid_stream(stream) ? release(pointer) : hipErrorInvalidHandle);
}

hipError_t hipHostMalloc(void** out, size_t size, unsigned) {
    STANDIN_CALL();
    if (!out) return done(hipErrorInvalidValue);
    *out = nullptr;
    if (!size) return done(hipSuccess);
    *out = aligned_alloc(kPage, round_up(size, kPage));
    if (!*out) return done(hipErrorOutOfMemory);
    arena().pinned[static_cast<char*>(*out)] = size;
    return done(hipSuccess);
}

hipError_t hipHostAlloc(void** out, size_t size, unsigned flags) { return hipHostMalloc(out, size, flags); }
hipError_t hipMallocHost(void** out, size_t size) { return hipHostMalloc(out, size, 0); }
hipError_t hipHostFree(void* pointer) { return hipFree(pointer); }
hipError_t hipFreeHost(void* pointer) { return hipFree(pointer); }

hipError_t hipHostRegister(void* pointer, size_t size, unsigned) {
    STANDIN_CALL();
    if (!pointer || !size || is_device(pointer)) return done(hipErrorInvalidValue);
    arena().registered[static_cast<char*>(pointer)] = size;
    return done(hipSuccess);
}

hipError_t hipHostUnregister(void* pointer) {
    STANDIN_CALL();
    return done(arena().registered.erase(static_cast<char*>(pointer)) ? hipSuccess
                                                                      : hipErrorHostMemoryNotRegistered);
}

hipError_t hipHostGetDevicePointer(void** out, void* pointer, unsigned) {
    STANDIN_CALL();
    if (!out || !pointer) return done(hipErrorInvalidValue);
    *out = pointer;
    return done(hipSuccess);
}

hipError_t hipMemcpy(void* to, const void* from, size_t size, hipMemcpyKind kind) {
    STANDIN_CALL();
    log(2, "hipMemcpy %p from %p, %zu", to, from, size);
    return done(copy(to, from, size, kind));
}

hipError_t hipMemcpyAsync(void* to, const void* from, size_t size, hipMemcpyKind kind, hipStream_t stream) {
    STANDIN_CALL();
    log(2, "hipMemcpyAsync %p from %p, %zu", to, from, size);
    return done(valid_stream(stream) ? copy(to, from, size, kind) : hipErrorInvalidHandle);
}

hipError_t hipMemcpyWithStream(void* to, const void* from, size_t size, hipMemcpyKind kind,
                               hipStream_t stream) {
    return hipMemcpyAsync(to, from, size, kind, stream);
}
#if HIP_VERSION_MAJOR >= 7
using HostSource = const void*;
#else
using HostSource = void*;
#endif

hipError_t hipMemcpyHtoD(hipDeviceptr_t to, HostSource from, size_t size) {
    return hipMemcpy(to, from, size, hipMemcpyHostToDevice);
}
hipError_t hipMemcpyDtoH(void* to, hipDeviceptr_t from, size_t size) {
    return hipMemcpy(to, from, size, hipMemcpyDeviceToHost);
}
hipError_t hipMemcpyDtoD(hipDeviceptr_t to, hipDeviceptr_t from, size_t size) {
    return hipMemcpy(to, from, size, hipMemcpyDeviceToDevice);
}
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, HostSource from, size_t size, hipStream_t stream) {
    return hipMemcpyAsync(to, from, size, hipMemcpyHostToDevice, stream);
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t size, hipStream_t stream) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDeviceToHost, stream);
}
hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t size, hipStream_t stream) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDeviceToDevice, stream);
}

hipError_t hipMemset(void* to, int value, size_t size) {
    STANDIN_CALL();
    const unsigned char byte = static_cast<unsigned char>(value);
    return done(fill(to, &byte, 1, size));
}

hipError_t hipMemsetAsync(void* to, int value, size_t size, hipStream_t stream) {
    STANDIN_CALL();
    return valid_stream(stream) ? hipMemset(to, value, size) : done(hipErrorInvalidHandle);
}

hipError_t hipMemsetD8(hipDeviceptr_t to, unsigned char value, size_t count) {
    return hipMemset(to, value, count);
}
hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t count, hipStream_t stream) {
    return hipMemsetAsync(to, value, count, stream);
}

hipError_t hipMemsetD32(hipDeviceptr_t to, int value, size_t count) {
    STANDIN_CALL();
    return done(fill(to, &value, sizeof value, count));
}

hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t count, hipStream_t stream) {
    STANDIN_CALL();
    return valid_stream(stream) ? hipMemsetD32(to, value, count) : done(hipErrorInvalidHandle);
}

hipError_t hipMemGetInfo(size_t* available, size_t* total) {
    STANDIN_CALL();
    if (!available || !total) return done(hipErrorInvalidValue);
    const Arena& a = arena();
    *total = a.size;
    *available = a.size;
    for (const auto& [address, allocation] : a.live) *available -= allocation.bytes;
    return done(hipSuccess);
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* size, hipDeviceptr_t pointer) {
    STANDIN_CALL();
    Arena& a = arena();
    const auto it = is_device(pointer) ? holder(a, static_cast<char*>(pointer)) : a.live.end();
    if (it == a.live.end()) return done(hipErrorNotFound);
    if (base) *base = it->first;
    if (size) *size = it->second.size;
    return done(hipSuccess);
}

hipError_t hipPointerGetAttributes(hipPointerAttribute_t* out, const void* pointer) {
    STANDIN_CALL();
    if (!out || !pointer) return done(hipErrorInvalidValue);
    Arena& a = arena();
    memset(out, 0, sizeof *out);
    const char* c = static_cast<const char*>(pointer);
    if (is_device(pointer) && holder(a, c) != a.live.end()) {
        out->type = hipMemoryTypeDevice;
        out->devicePointer = const_cast<void*>(pointer);
        return done(hipSuccess);
    }
    if (holder(a.pinned, c) != a.pinned.end() || holder(a.registered, c) != a.registered.end()) {
        out->type = hipMemoryTypeHost;
        out->devicePointer = out->hostPointer = const_cast<void*>(pointer);
        return done(hipSuccess);
    }
    return done(hipErrorInvalidValue);  // what HIP answers for memory that it does not know
}

hipError_t hipPointerGetAttribute(void* out, hipPointer_attribute attribute, hipDeviceptr_t pointer) {
    STANDIN_CALL();
    hipPointerAttribute_t all;
    const hipError_t error = hipPointerGetAttributes(&all, pointer);
    if (error != hipSuccess) return error;
    switch (attribute) {
    case HIP_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<unsigned*>(out) = all.type; break;
    case HIP_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<void**>(out) = all.devicePointer; break;
    case HIP_POINTER_ATTRIBUTE_HOST_POINTER: *static_cast<void**>(out) = all.hostPointer; break;
    case HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(out) = all.device; break;
    case HIP_POINTER_ATTRIBUTE_IS_MANAGED: *static_cast<unsigned*>(out) = 0; break;
    default: return done(refuse(hipErrorNotSupported, "hipPointerGetAttribute %d", int(attribute)));
    }
    return done(hipSuccess);
}

}  // extern "C"
