// Statuses, the thread's error text, ids, and the two kinds of object behind them.
#pragma once

#include "hgg_library.hpp"

#include <cinttypes>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

namespace hgg {

// ---- errors ------------------------------------------------------------------------------------------

// A failure on its way to the ABI's edge. What carries the status is the return value, never a throw.
[[gnu::format(printf, 3, 4)]] hgg_status fail(hgg_status status, int32_t library_status, const char* format,
                                              ...) noexcept;
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

// ---- locks ----------------------------------------------------------------------------------------------

// hipBLASLt replaces its solution library the first time it is asked whether an algorithm is supported,
// while other calls copy a pointer to it without a lock (read in its source, 0.11). So launches share this
// lock and everything else holds it alone. It is always taken after an instance's own lock.
std::shared_mutex& library_mutex() noexcept;

// Makes `device` current and puts the caller's back.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) noexcept;
    ~DeviceGuard();
    hgg_status status() const noexcept;

private:
    int previous_ = -1;
    hipError_t error_;
};

// The library for oneself alone, and the device.
class Alone {
public:
    explicit Alone(int device) : lock_(library_mutex()), guard_(device) {}
    hgg_status status() const noexcept { return guard_.status(); }

private:
    std::unique_lock<std::shared_mutex> lock_;
    DeviceGuard guard_;
};

// ---- objects --------------------------------------------------------------------------------------------

struct Handle {
    int device = -1;
    hipblasLtHandle_t lt = nullptr;
    hgg_version loaded = {};
    std::string revision;

    ~Handle();
};

// One algorithm of the instance's types. `algo` is hipBLASLt's own; it never comes from the caller.
struct Algorithm {
    hipblasLtMatmulAlgo_t algo = {};
    bool checked = false;  // status and workspace_size are known
    hipblasStatus_t status = HIPBLAS_STATUS_NOT_INITIALIZED;
    uint64_t workspace_size = 0;
    bool named = false;  // names and flags are known
    std::string solution_name;
    std::string kernel_name;
    uint32_t flags = 0;
};

struct Instance {
    std::mutex mutex;
    uint64_t id = 0;
    uint64_t handle_id = 0;
    std::shared_ptr<Handle> handle;  // outlives `gemm`: declared before it
    hgg_problem problem = {};
    std::unique_ptr<lt::GroupedGemm> gemm;  // null once closed
    std::map<int32_t, Algorithm> algorithms;  // by index
    std::vector<int32_t> order;               // the library's, of all algorithms; empty: not asked yet
    int32_t algorithm_index = -1;             // -1: not initialised

    void release() noexcept;  // undoes hgg_initialize; holds mutex
    void close() noexcept;    // holds mutex
    ~Instance();
};

// ---- registry -------------------------------------------------------------------------------------------

uint64_t register_handle(std::shared_ptr<Handle> handle);
// Zero if the handle was closed in the meantime.
uint64_t register_instance(std::shared_ptr<Instance> instance);
hgg_status find_handle(const char* call, uint64_t id, std::shared_ptr<Handle>& found);
hgg_status find_instance(const char* call, uint64_t id, std::shared_ptr<Instance>& found);
// All instances of a handle.
std::vector<std::shared_ptr<Instance>> instances_of(uint64_t handle);
void forget(uint64_t id);

// Workspaces in use. Two instances in one workspace give wrong results without any error.
hgg_status claim_workspace(const char* call, const Instance& instance, uint64_t address, uint64_t size);
void free_workspace(uint64_t id) noexcept;

// Locks an open instance for the time that the object lives.
class Open {
public:
    hgg_status enter(const char* call, uint64_t id);
    Instance* operator->() const noexcept { return instance_.get(); }
    Instance& operator*() const noexcept { return *instance_; }

private:
    std::shared_ptr<Instance> instance_;  // released after the lock
    std::unique_lock<std::mutex> lock_;
};

}  // namespace hgg
