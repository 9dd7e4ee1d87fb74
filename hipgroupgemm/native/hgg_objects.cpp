// The thread's error text, the names of statuses, the device guard; handles and instances, and which numbers
// name them.
#include "hgg_common.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include <pthread.h>

namespace hgg {
namespace {

// Plain bytes: setting an error must not be able to fail.
thread_local char t_text[4096];
thread_local int32_t t_library_status = -1;

std::atomic<bool> g_forked{false};

struct Workspace {
    int device;
    uint64_t begin;
    uint64_t end;
};

struct Registry {
    std::mutex mutex;
    uint64_t last = 0;  // the number given last; numbers are not used again
    std::map<uint64_t, std::shared_ptr<Handle>> handles;
    std::map<uint64_t, std::shared_ptr<Instance>> instances;
    std::map<uint64_t, Workspace> workspaces;  // by the instance that uses it
};

// Leaked: at process exit other threads may still call in, and the HIP runtime may be gone before us.
Registry& registry() {
    static Registry* const instance = new Registry;
    return *instance;
}

template <class T, class Other>
hgg_status find(const char* call, uint64_t id, const char* kind, const std::map<uint64_t, T>& objects,
                const char* other_kind, const std::map<uint64_t, Other>& others, T& found) {
    const auto place = objects.find(id);
    if (place != objects.end()) {
        found = place->second;
        return HGG_OK;
    }
    if (others.count(id))
        return fail(HGG_INVALID_ID, -1, "%s: %" PRIu64 " is %s, wanted %s", call, id, other_kind, kind);
    if (id == 0 || id > registry().last)
        return fail(HGG_INVALID_ID, -1, "%s: %" PRIu64 " was never handed out, wanted %s", call, id, kind);
    return fail(HGG_CLOSED, -1, "%s: %" PRIu64 ", %s, was closed, itself or with its handle", call, id, kind);
}

}  // namespace

// ---- errors ------------------------------------------------------------------------------------------

hgg_status fail(hgg_status status, int32_t library_status, const char* format, ...) noexcept {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(t_text, sizeof t_text, format, arguments);
    va_end(arguments);
    t_library_status = library_status;
    return status;
}

bool forked() noexcept {
    static const int hooked =
        pthread_atfork(nullptr, nullptr, [] { g_forked.store(true, std::memory_order_relaxed); });
    (void)hooked;
    return g_forked.load(std::memory_order_relaxed);
}

#define HGG_NAME(status) \
    case status: return #status

const char* library_status_name(hipblasStatus_t status) noexcept {
    switch (status) {
        HGG_NAME(HIPBLAS_STATUS_SUCCESS);
        HGG_NAME(HIPBLAS_STATUS_NOT_INITIALIZED);
        HGG_NAME(HIPBLAS_STATUS_ALLOC_FAILED);
        HGG_NAME(HIPBLAS_STATUS_INVALID_VALUE);
        HGG_NAME(HIPBLAS_STATUS_MAPPING_ERROR);
        HGG_NAME(HIPBLAS_STATUS_EXECUTION_FAILED);
        HGG_NAME(HIPBLAS_STATUS_INTERNAL_ERROR);
        HGG_NAME(HIPBLAS_STATUS_NOT_SUPPORTED);
        HGG_NAME(HIPBLAS_STATUS_ARCH_MISMATCH);
        HGG_NAME(HIPBLAS_STATUS_HANDLE_IS_NULLPTR);
        HGG_NAME(HIPBLAS_STATUS_INVALID_ENUM);
        HGG_NAME(HIPBLAS_STATUS_UNKNOWN);
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

// ---- locks ----------------------------------------------------------------------------------------------

std::shared_mutex& library_mutex() noexcept {
    static std::shared_mutex* const mutex = new std::shared_mutex;  // leaked, like the registry
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

hgg_status DeviceGuard::status() const noexcept {
    return error_ == hipSuccess ? HGG_OK : hip_failed("hipSetDevice", error_);
}

// ---- objects --------------------------------------------------------------------------------------------

Handle::~Handle() {
    // In a forked child the object is the parent's; destroying it here would free the parent's memory.
    if (!lt || forked()) return;
    const Alone alone(device);
    (void)hipblasLtDestroy(lt);
}

void Instance::release() noexcept {
    algorithm_index = -1;
    free_workspace(id);
}

void Instance::close() noexcept {
    release();
    if (!gemm) return;
    const Alone alone(handle->device);
    gemm.reset();
}

Instance::~Instance() {
    if (forked()) (void)gemm.release();
    else close();
}

hgg_status Open::enter(const char* call, uint64_t id) {
    HGG_CHECK(find_instance(call, id, instance_));
    lock_ = std::unique_lock<std::mutex>(instance_->mutex);
    // closed by another thread between the two lines above
    return instance_->gemm ? HGG_OK : fail(HGG_CLOSED, -1, "%s: the instance was closed meanwhile", call);
}

// ---- registry -------------------------------------------------------------------------------------------

uint64_t register_handle(std::shared_ptr<Handle> handle) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    r.handles[++r.last] = std::move(handle);
    return r.last;
}

uint64_t register_instance(std::shared_ptr<Instance> instance) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    if (!r.handles.count(instance->handle_id)) return 0;
    instance->id = ++r.last;
    r.instances[r.last] = std::move(instance);
    return r.last;
}

hgg_status find_handle(const char* call, uint64_t id, std::shared_ptr<Handle>& found) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    return find(call, id, "a handle", r.handles, "an instance", r.instances, found);
}

hgg_status find_instance(const char* call, uint64_t id, std::shared_ptr<Instance>& found) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    return find(call, id, "an instance", r.instances, "a handle", r.handles, found);
}

std::vector<std::shared_ptr<Instance>> instances_of(uint64_t handle) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    std::vector<std::shared_ptr<Instance>> found;
    for (const auto& [id, instance] : r.instances)
        if (instance->handle_id == handle) found.push_back(instance);
    return found;
}

void forget(uint64_t id) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    r.handles.erase(id);  // the caller holds a reference: no destructor runs under the lock
    r.instances.erase(id);
}

hgg_status claim_workspace(const char* call, const Instance& instance, uint64_t address, uint64_t size) {
    if (size == 0) return HGG_OK;
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    const int device = instance.handle->device;
    for (const auto& [owner, w] : r.workspaces)
        if (w.device == device && owner != instance.id && address < w.end && w.begin < address + size)
            return fail(HGG_WORKSPACE, -1,
                        "%s: the workspace 0x%" PRIx64 " of %" PRIu64 " bytes overlaps the one that instance "
                        "%" PRIu64 " uses (0x%" PRIx64 ", %" PRIu64
                        " bytes): two instances in one workspace give wrong results. Give each its own",
                        call, address, size, owner, w.begin, w.end - w.begin);
    r.workspaces[instance.id] = {device, address, address + size};
    return HGG_OK;
}

void free_workspace(uint64_t id) noexcept {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    r.workspaces.erase(id);
}

}  // namespace hgg

using namespace hgg;

extern "C" {

// Where the build found ROCm's libraries, colon by colon; native/_loader.py reads it from the file.
#ifndef HGG_ROCM_FOLDERS
#define HGG_ROCM_FOLDERS ""
#endif
extern const char hgg_rocm_folders[] = "HGG_ROCM_FOLDERS=" HGG_ROCM_FOLDERS;

uint32_t hgg_abi_version(void) { return HGG_ABI_VERSION; }
hgg_version hgg_built_for(void) { return kBuiltFor; }
const char* hgg_last_error(void) { return t_text; }
int32_t hgg_last_library_status(void) { return t_library_status; }

const char* hgg_status_name(hgg_status status) {
    switch (status) {
        HGG_NAME(HGG_OK);
        HGG_NAME(HGG_INVALID_ARGUMENT);
        HGG_NAME(HGG_INVALID_ID);
        HGG_NAME(HGG_CLOSED);
        HGG_NAME(HGG_WRONG_ORDER);
        HGG_NAME(HGG_UNSUPPORTED);
        HGG_NAME(HGG_NOT_FOUND);
        HGG_NAME(HGG_WORKSPACE);
        HGG_NAME(HGG_UNVERIFIED);
        HGG_NAME(HGG_VERSION_MISMATCH);
        HGG_NAME(HGG_FORKED);
        HGG_NAME(HGG_LIBRARY_ERROR);
        HGG_NAME(HGG_HIP_ERROR);
        HGG_NAME(HGG_INTERNAL);
    default: return "an unknown status";
    }
}

hgg_status hgg_handle_create(int32_t device, hgg_handle* out) {
    return guarded("hgg_handle_create", [&]() -> hgg_status {
        *out = 0;
        int devices = 0;
        const hipError_t counted = hipGetDeviceCount(&devices);
        if (counted != hipSuccess) return hip_failed("hgg_handle_create: hipGetDeviceCount", counted);
        if (device < 0 || device >= devices)
            return fail(HGG_INVALID_ARGUMENT, -1, "hgg_handle_create: device is %" PRId32 ", there are %d",
                        device, devices);
        auto handle = std::make_shared<Handle>();
        handle->device = device;
        {
            const Alone alone(device);
            HGG_CHECK(alone.status());
            hipblasStatus_t status = hipblasLtCreate(&handle->lt);
            if (status != HIPBLAS_STATUS_SUCCESS) {
                handle->lt = nullptr;
                return library_failed("hgg_handle_create: hipblasLtCreate", status);
            }
            int version = 0;
            status = hipblasLtGetVersion(handle->lt, &version);
            if (status != HIPBLAS_STATUS_SUCCESS)
                return library_failed("hgg_handle_create: hipblasLtGetVersion", status);
            handle->loaded = {version / 100000, version / 100 % 1000, version % 100};
            // It copies its revision without asking how much room there is.
            char revision[4096] = "";
            if (hipblasLtGetGitRevision(handle->lt, revision) == HIPBLAS_STATUS_SUCCESS) {
                revision[sizeof revision - 1] = 0;
                handle->revision = revision;
            }
        }
        // Its C++ classes change between minor versions: going on would corrupt memory.
        if (handle->loaded.major != kBuiltFor.major || handle->loaded.minor != kBuiltFor.minor)
            return fail(HGG_VERSION_MISMATCH, -1,
                        "hgg_handle_create: built for hipBLASLt %d.%d.%d, but %d.%d.%d is loaded. Rebuild "
                        "hipgroupgemm against the loaded one, or put the other first on the library path",
                        kBuiltFor.major, kBuiltFor.minor, kBuiltFor.patch, handle->loaded.major,
                        handle->loaded.minor, handle->loaded.patch);
        *out = register_handle(std::move(handle));
        return HGG_OK;
    });
}

hgg_status hgg_handle_get_info(hgg_handle id, hgg_handle_info* info) {
    return guarded("hgg_handle_get_info", [&]() -> hgg_status {
        std::shared_ptr<Handle> handle;
        HGG_CHECK(find_handle("hgg_handle_get_info", id, handle));
        std::memset(info, 0, sizeof *info);
        info->device = handle->device;
        info->built_for = kBuiltFor;
        info->loaded = handle->loaded;
        handle->revision.copy(info->revision, sizeof info->revision - 1);
        info->instances = static_cast<uint32_t>(instances_of(id).size());
        return HGG_OK;
    });
}

hgg_status hgg_handle_destroy(hgg_handle id) {
    return guarded("hgg_handle_destroy", [&]() -> hgg_status {
        std::shared_ptr<Handle> handle;
        HGG_CHECK(find_handle("hgg_handle_destroy", id, handle));
        forget(id);  // no instance is made from here on
        for (const auto& instance : instances_of(id)) {
            forget(instance->id);
            const std::lock_guard<std::mutex> lock(instance->mutex);
            instance->close();
        }
        return HGG_OK;  // the handle goes with its last user, which is here unless a call is still inside
    });
}

hgg_status hgg_instance_destroy(hgg_instance id) {
    return guarded("hgg_instance_destroy", [&]() -> hgg_status {
        std::shared_ptr<Instance> instance;
        HGG_CHECK(find_instance("hgg_instance_destroy", id, instance));
        forget(id);
        const std::lock_guard<std::mutex> lock(instance->mutex);
        instance->close();
        return HGG_OK;
    });
}

}  // extern "C"
