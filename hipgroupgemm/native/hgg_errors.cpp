// The thread's error text, the names of statuses, the fork hook and the device guard.
#include "hgg_common.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>

#include <pthread.h>

namespace hgg {
namespace {

// Plain bytes: setting an error must not be able to fail.
thread_local char t_text[4096];
thread_local int32_t t_library_status = -1;

std::atomic<bool> g_forked{false};
void in_child() noexcept { g_forked.store(true, std::memory_order_relaxed); }

}  // namespace

hgg_status fail(hgg_status status, int32_t library_status, const char* format, ...) noexcept {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(t_text, sizeof t_text, format, arguments);
    va_end(arguments);
    t_library_status = library_status;
    return status;
}

const char* last_error() noexcept { return t_text; }
int32_t last_library_status() noexcept { return t_library_status; }

bool forked() noexcept {
    static const int hooked = pthread_atfork(nullptr, nullptr, in_child);
    (void)hooked;
    return g_forked.load(std::memory_order_relaxed);
}

const char* library_status_name(hipblasStatus_t status) noexcept {
    switch (status) {
    case HIPBLAS_STATUS_SUCCESS: return "HIPBLAS_STATUS_SUCCESS";
    case HIPBLAS_STATUS_NOT_INITIALIZED: return "HIPBLAS_STATUS_NOT_INITIALIZED";
    case HIPBLAS_STATUS_ALLOC_FAILED: return "HIPBLAS_STATUS_ALLOC_FAILED";
    case HIPBLAS_STATUS_INVALID_VALUE: return "HIPBLAS_STATUS_INVALID_VALUE";
    case HIPBLAS_STATUS_MAPPING_ERROR: return "HIPBLAS_STATUS_MAPPING_ERROR";
    case HIPBLAS_STATUS_EXECUTION_FAILED: return "HIPBLAS_STATUS_EXECUTION_FAILED";
    case HIPBLAS_STATUS_INTERNAL_ERROR: return "HIPBLAS_STATUS_INTERNAL_ERROR";
    case HIPBLAS_STATUS_NOT_SUPPORTED: return "HIPBLAS_STATUS_NOT_SUPPORTED";
    case HIPBLAS_STATUS_ARCH_MISMATCH: return "HIPBLAS_STATUS_ARCH_MISMATCH";
    case HIPBLAS_STATUS_HANDLE_IS_NULLPTR: return "HIPBLAS_STATUS_HANDLE_IS_NULLPTR";
    case HIPBLAS_STATUS_INVALID_ENUM: return "HIPBLAS_STATUS_INVALID_ENUM";
    case HIPBLAS_STATUS_UNKNOWN: return "HIPBLAS_STATUS_UNKNOWN";
    default: return "a status without a name";
    }
}

hgg_status library_failed(const char* call, hipblasStatus_t status) noexcept {
    return fail(HGG_LIBRARY_ERROR, static_cast<int32_t>(status), "%s returned %d (%s)", call,
                static_cast<int>(status), library_status_name(status));
}

hgg_status hip_failed(const char* call, hipError_t error) noexcept {
    // The runtime keeps the error for hipGetLastError; it has been reported, so it must not surface again.
    (void)hipGetLastError();
    return fail(HGG_HIP_ERROR, static_cast<int32_t>(error), "%s returned %d (%s: %s)", call,
                static_cast<int>(error), hipGetErrorName(error), hipGetErrorString(error));
}

std::shared_mutex& library_mutex() noexcept {
    // Leaked, like the registry: another thread may still be inside when the process runs its destructors.
    static std::shared_mutex* const mutex = new std::shared_mutex;
    return *mutex;
}

DeviceGuard::DeviceGuard(int device) noexcept {
    int current = -1;
    error_ = hipGetDevice(&current);
    if (error_ == hipSuccess && current != device) {
        error_ = hipSetDevice(device);
        if (error_ == hipSuccess) previous_ = current;
    }
}

DeviceGuard::~DeviceGuard() {
    if (previous_ >= 0) (void)hipSetDevice(previous_);
}

}  // namespace hgg

extern "C" {

uint32_t hgg_abi_version(void) { return HGG_ABI_VERSION; }

hgg_status hgg_built_for(hgg_version* version) {
    if (!version) return hgg::fail(HGG_INVALID_ARGUMENT, -1, "hgg_built_for: version is null");
    *version = hgg::kBuiltFor;
    return HGG_OK;
}

const char* hgg_last_error(void) { return hgg::last_error(); }

int32_t hgg_last_library_status(void) { return hgg::last_library_status(); }

const char* hgg_status_name(hgg_status status) {
    switch (status) {
    case HGG_OK: return "HGG_OK";
    case HGG_INVALID_ARGUMENT: return "HGG_INVALID_ARGUMENT";
    case HGG_INVALID_ID: return "HGG_INVALID_ID";
    case HGG_CLOSED: return "HGG_CLOSED";
    case HGG_WRONG_ORDER: return "HGG_WRONG_ORDER";
    case HGG_UNSUPPORTED: return "HGG_UNSUPPORTED";
    case HGG_NOT_FOUND: return "HGG_NOT_FOUND";
    case HGG_WORKSPACE: return "HGG_WORKSPACE";
    case HGG_WRONG_STREAM: return "HGG_WRONG_STREAM";
    case HGG_UNVERIFIED: return "HGG_UNVERIFIED";
    case HGG_VERSION_MISMATCH: return "HGG_VERSION_MISMATCH";
    case HGG_FORKED: return "HGG_FORKED";
    case HGG_LIBRARY_ERROR: return "HGG_LIBRARY_ERROR";
    case HGG_HIP_ERROR: return "HGG_HIP_ERROR";
    case HGG_OUT_OF_MEMORY: return "HGG_OUT_OF_MEMORY";
    case HGG_INTERNAL: return "HGG_INTERNAL";
    default: return "an unknown status";
    }
}

}  // extern "C"
