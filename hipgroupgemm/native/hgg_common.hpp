// Statuses, the thread's error text, ids, and the two kinds of object behind them.
#pragma once

#include "hgg_library.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace hgg {

// ---- errors ------------------------------------------------------------------------------------------

// A failure on its way to the ABI's edge. What carries the status is the return value, never a throw.
[[gnu::format(printf, 3, 4)]] hgg_status fail(hgg_status status, int32_t library_status, const char* format,
                                              ...) noexcept;
const char* last_error() noexcept;
int32_t last_library_status() noexcept;
const char* library_status_name(hipblasStatus_t status) noexcept;

hgg_status library_failed(const char* call, hipblasStatus_t status) noexcept;
hgg_status hip_failed(const char* call, hipError_t error) noexcept;

bool forked() noexcept;  // true in a child of fork(); also installs the hook that knows it

// Runs f at the ABI's edge: nothing in a forked child, and no exception gets out.
template <class F>
hgg_status guarded(const char* call, F&& f) noexcept {
    if (forked())
        return fail(HGG_FORKED, -1,
                    "%s: called in a child process of fork(); a HIP device does not survive a fork. "
                    "Create handles in the child, or start it with spawn or forkserver",
                    call);
    try {
        return std::forward<F>(f)();
    } catch (const std::bad_alloc&) {
        return fail(HGG_OUT_OF_MEMORY, -1, "%s: out of host memory", call);
    } catch (const std::exception& e) {
        return fail(HGG_INTERNAL, -1, "%s: %s", call, e.what());
    } catch (...) {
        return fail(HGG_INTERNAL, -1, "%s: an exception that is no std::exception", call);
    }
}

#define HGG_CHECK(expression)                            \
    do {                                                 \
        const hgg_status check_status = (expression);    \
        if (check_status != HGG_OK) return check_status; \
    } while (0)

// ---- the library's lock ---------------------------------------------------------------------------------

// hipBLASLt replaces its solution library the first time it is asked whether an algorithm is supported,
// while other calls copy a pointer to it without a lock (read in its source, 0.11). So launches share this
// lock and everything else holds it alone. It is always taken after an instance's own lock.
std::shared_mutex& library_mutex() noexcept;

// Makes `device` current and puts the caller's back.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) noexcept;
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;
    hipError_t error() const noexcept { return error_; }

private:
    int previous_ = -1;
    hipError_t error_;
};

inline hgg_status device_status(const DeviceGuard& guard) noexcept {
    return guard.error() == hipSuccess ? HGG_OK : hip_failed("hipSetDevice", guard.error());
}

// ---- objects --------------------------------------------------------------------------------------------

struct Handle {
    int device = -1;
    uint64_t stream = 0;
    hipblasLtHandle_t lt = nullptr;
    hgg_version loaded = {};
    std::string revision;

    Handle() = default;
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    ~Handle();
};

// One algorithm of the instance's types. `algo` is hipBLASLt's own; it never comes from the caller.
struct Algorithm {
    hipblasLtMatmulAlgo_t algo = {};
    int32_t index = -1;
    bool named = false;
    std::string solution_name;
    std::string kernel_name;
    uint32_t flags = 0;
    // For the problem of this epoch only:
    uint64_t epoch = 0;
    hipblasStatus_t status = HIPBLAS_STATUS_NOT_INITIALIZED;
    uint64_t workspace_size = 0;
};

struct Instance {
    std::mutex mutex;
    hgg_instance id = 0;
    hgg_handle handle_id = 0;
    std::shared_ptr<Handle> handle;  // outlives `gemm`: declared before it
    hgg_types types = {};
    std::unique_ptr<lt::GroupedGemm> gemm;  // null once closed
    uint32_t count = 0;
    uint64_t epoch = 0;  // of the problem; 0: none yet
    std::map<int32_t, Algorithm> algorithms;
    std::vector<int32_t> order;  // the library's, of all algorithms
    bool enumerated = false;

    bool initialized = false;
    int32_t algorithm_index = -1;
    uint64_t workspace = 0;
    uint64_t workspace_size = 0;
    uint64_t workspace_needed = 0;
    uint64_t checked_records = 0;  // the record array that was last seen to be device memory

    void release() noexcept;  // gives the workspace free; holds mutex
    void close() noexcept;    // holds mutex
    ~Instance();
};

// ---- registry -------------------------------------------------------------------------------------------

hgg_handle register_handle(std::shared_ptr<Handle> handle);
hgg_instance register_instance(std::shared_ptr<Instance> instance, hgg_handle handle);
hgg_status find_handle(const char* call, hgg_handle id, std::shared_ptr<Handle>& found);
hgg_status find_instance(const char* call, hgg_instance id, std::shared_ptr<Instance>& found);
// Forget the object; the caller holds the last reference that the registry had.
hgg_status remove_handle(const char* call, hgg_handle id, std::shared_ptr<Handle>& handle,
                         std::vector<std::shared_ptr<Instance>>& instances);
hgg_status remove_instance(const char* call, hgg_instance id, std::shared_ptr<Instance>& instance);
uint32_t count_instances(hgg_handle id);

// Workspaces in use. Two instances in one workspace give wrong results without any error.
hgg_status claim_workspace(const char* call, int device, uint64_t address, uint64_t size, hgg_instance id);
void free_workspace(hgg_instance id) noexcept;

// ---- shared between the files -----------------------------------------------------------------------------

// Locks an open instance for the time that the object lives.
class Open {
public:
    hgg_status enter(const char* call, hgg_instance id);
    Instance* operator->() const noexcept { return instance_.get(); }
    Instance& operator*() const noexcept { return *instance_; }

private:
    std::shared_ptr<Instance> instance_;  // released after the lock
    std::unique_lock<std::mutex> lock_;
};

// With the instance locked, its device current and the library's lock held alone:
hgg_status enumerate(const char* call, Instance& instance);
hgg_status lookup(const char* call, Instance& instance, int32_t index, Algorithm*& algorithm);
void check_support(Instance& instance, Algorithm& algorithm);
bool fits(Instance& instance, Algorithm& algorithm, uint64_t max_workspace);
hgg_status list_fitting(const char* call, Instance& instance, uint64_t max_workspace,
                        std::vector<int32_t>& indices);
void name(Instance& instance, Algorithm& algorithm);

}  // namespace hgg
