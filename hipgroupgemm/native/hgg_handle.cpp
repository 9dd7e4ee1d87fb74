// Handles, and what an instance is before it has a problem.
#include "hgg_common.hpp"

#include <cinttypes>
#include <cstring>

namespace hgg {

Handle::~Handle() {
    // In a forked child the object is the parent's; destroying it here would free the parent's memory.
    if (!lt || forked()) return;
    const std::unique_lock<std::shared_mutex> library(library_mutex());
    const DeviceGuard device_guard(device);
    try {
        (void)hipblasLtDestroy(lt);
    } catch (...) {  // nothing may leave a destructor, and nobody is left to tell
    }
}

void Instance::release() noexcept {
    initialized = false;
    algorithm_index = -1;
    workspace = workspace_size = workspace_needed = 0;
    checked_records = 0;
    free_workspace(id);
}

void Instance::close() noexcept {
    release();
    if (!gemm) return;
    const std::unique_lock<std::shared_mutex> library(library_mutex());
    const DeviceGuard device_guard(handle->device);
    gemm.reset();
    count = 0;
    epoch = 0;
}

Instance::~Instance() {
    if (forked()) {
        (void)gemm.release();
        return;
    }
    if (gemm) close();
}

hgg_status Open::enter(const char* call, hgg_instance id) {
    HGG_CHECK(find_instance(call, id, instance_));
    lock_ = std::unique_lock<std::mutex>(instance_->mutex);
    if (!instance_->gemm)
        return fail(HGG_CLOSED, -1, "%s: the instance 0x%" PRIx64 " was closed, itself or with its handle",
                    call, id);
    return HGG_OK;
}

namespace {

bool known_type(int32_t type) {
    switch (type) {
    case HGG_R_32F:
    case HGG_R_64F:
    case HGG_R_16F:
    case HGG_R_16BF:
    case HGG_R_8F_E4M3:
    case HGG_R_8F_E5M2:
    case HGG_R_8F_E4M3_FNUZ:
    case HGG_R_8F_E5M2_FNUZ: return true;
    default: return false;
    }
}

hgg_status check_type(const char* what, int32_t type) {
    if (known_type(type)) return HGG_OK;
    return fail(HGG_INVALID_ARGUMENT, -1,
                "hgg_instance_create: %s is %" PRId32
                ", which is no hgg_data_type (float32 0, float64 1, float16 2, bfloat16 14, fp8 28, 29, "
                "1000, 1001)",
                what, type);
}

hgg_status check_flag(const char* what, int32_t value) {
    if (value == 0 || value == 1) return HGG_OK;
    return fail(HGG_INVALID_ARGUMENT, -1, "hgg_instance_create: %s is %" PRId32 ", wanted 0 or 1", what,
                value);
}

bool compute_type(int32_t compute, hipblasComputeType_t& type) {
    switch (compute) {
    case HGG_COMPUTE_32F: type = HIPBLAS_COMPUTE_32F; return true;
    case HGG_COMPUTE_32F_FAST_TF32: type = HIPBLAS_COMPUTE_32F_FAST_TF32; return true;
    case HGG_COMPUTE_32F_FAST_16F: type = HIPBLAS_COMPUTE_32F_FAST_16F; return true;
    case HGG_COMPUTE_32F_FAST_16BF: type = HIPBLAS_COMPUTE_32F_FAST_16BF; return true;
    case HGG_COMPUTE_64F: type = HIPBLAS_COMPUTE_64F; return true;
    default: return false;
    }
}

}  // namespace
}  // namespace hgg

using namespace hgg;

extern "C" {

hgg_status hgg_handle_create(int32_t device, uint64_t stream, hgg_handle* out) {
    return guarded("hgg_handle_create", [&]() -> hgg_status {
        if (!out) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_handle_create: handle is null");
        *out = 0;
        int devices = 0;
        const hipError_t counted = hipGetDeviceCount(&devices);
        if (counted != hipSuccess) return hip_failed("hgg_handle_create: hipGetDeviceCount", counted);
        if (device < 0 || device >= devices)
            return fail(HGG_INVALID_ARGUMENT, -1, "hgg_handle_create: device is %" PRId32 ", there are %d",
                        device, devices);
        auto handle = std::make_shared<Handle>();
        handle->device = device;
        handle->stream = stream;
        {
            const std::unique_lock<std::shared_mutex> library(library_mutex());
            const DeviceGuard device_guard(device);
            HGG_CHECK(device_status(device_guard));
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
        if (!info) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_handle_get_info: info is null");
        std::shared_ptr<Handle> handle;
        HGG_CHECK(find_handle("hgg_handle_get_info", id, handle));
        std::memset(info, 0, sizeof *info);
        info->device = handle->device;
        info->stream = handle->stream;
        info->built_for = kBuiltFor;
        info->loaded = handle->loaded;
        handle->revision.copy(info->revision, sizeof info->revision - 1);
        info->instances = count_instances(id);
        return HGG_OK;
    });
}

hgg_status hgg_handle_destroy(hgg_handle id) {
    return guarded("hgg_handle_destroy", [&]() -> hgg_status {
        std::shared_ptr<Handle> handle;
        std::vector<std::shared_ptr<Instance>> instances;
        HGG_CHECK(remove_handle("hgg_handle_destroy", id, handle, instances));
        for (const auto& instance : instances) {
            const std::lock_guard<std::mutex> lock(instance->mutex);
            instance->close();
        }
        return HGG_OK;  // the handle goes with its last user, which is here unless a call is still inside
    });
}

hgg_status hgg_instance_create(hgg_handle handle_id, const hgg_types* types, hgg_instance* out) {
    return guarded("hgg_instance_create", [&]() -> hgg_status {
        if (!out || !types)
            return fail(HGG_INVALID_ARGUMENT, -1, "hgg_instance_create: %s is null",
                        out ? "types" : "instance");
        *out = 0;
        std::shared_ptr<Handle> handle;
        HGG_CHECK(find_handle("hgg_instance_create", handle_id, handle));
        HGG_CHECK(check_type("type_a", types->type_a));
        HGG_CHECK(check_type("type_b", types->type_b));
        HGG_CHECK(check_type("type_c", types->type_c));
        HGG_CHECK(check_type("type_d", types->type_d));
        HGG_CHECK(check_flag("trans_a", types->trans_a));
        HGG_CHECK(check_flag("trans_b", types->trans_b));
        HGG_CHECK(check_flag("epilogue", types->epilogue));
        if (types->epilogue == HGG_EPILOGUE_BIAS) HGG_CHECK(check_type("bias_type", types->bias_type));
        hipblasComputeType_t compute = HIPBLAS_COMPUTE_32F;
        if (!compute_type(types->compute, compute))
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_instance_create: compute is %" PRId32 ", which is no hgg_compute_type",
                        types->compute);

        auto instance = std::make_shared<Instance>();
        instance->handle = handle;
        instance->types = *types;
        {
            const std::unique_lock<std::shared_mutex> library(library_mutex());
            const DeviceGuard device_guard(handle->device);
            HGG_CHECK(device_status(device_guard));
            try {
                instance->gemm = std::make_unique<lt::GroupedGemm>(
                    handle->lt, types->trans_a ? HIPBLAS_OP_T : HIPBLAS_OP_N,
                    types->trans_b ? HIPBLAS_OP_T : HIPBLAS_OP_N, static_cast<hipDataType>(types->type_a),
                    static_cast<hipDataType>(types->type_b), static_cast<hipDataType>(types->type_c),
                    static_cast<hipDataType>(types->type_d), compute);
            } catch (const std::bad_alloc&) {
                throw;
            } catch (const std::exception& e) {  // it throws for a combination of types that it does not know
                return fail(HGG_UNSUPPORTED, -1, "hgg_instance_create: hipBLASLt refuses these types: %s",
                            e.what());
            }
#if HGG_HAS_INSTANCE_WORKSPACE_LIMIT
            // The limit is enforced here, against what an algorithm really needs, and not there.
            instance->gemm->setMaxWorkspaceBytes(INT32_MAX);
#endif
        }
        const hgg_instance id = register_instance(instance, handle_id);
        if (!id)
            return fail(HGG_CLOSED, -1, "hgg_instance_create: the handle 0x%" PRIx64 " was closed meanwhile",
                        handle_id);
        *out = id;
        return HGG_OK;
    });
}

hgg_status hgg_instance_get_info(hgg_instance id, hgg_instance_info* info) {
    return guarded("hgg_instance_get_info", [&]() -> hgg_status {
        if (!info) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_instance_get_info: info is null");
        Open instance;
        HGG_CHECK(instance.enter("hgg_instance_get_info", id));
        info->handle = instance->handle_id;
        info->types = instance->types;
        info->count = instance->count;
        info->initialized = instance->initialized;
        info->algorithm_index = instance->algorithm_index;
        info->workspace = instance->workspace;
        info->workspace_size = instance->workspace_size;
        info->workspace_needed = instance->workspace_needed;
        return HGG_OK;
    });
}

hgg_status hgg_instance_destroy(hgg_instance id) {
    return guarded("hgg_instance_destroy", [&]() -> hgg_status {
        std::shared_ptr<Instance> instance;
        HGG_CHECK(remove_instance("hgg_instance_destroy", id, instance));
        const std::lock_guard<std::mutex> lock(instance->mutex);
        instance->close();
        return HGG_OK;
    });
}

}  // extern "C"
