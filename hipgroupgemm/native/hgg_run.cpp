// Making an instance ready, and running it.
#include "hgg_common.hpp"

#include <cinttypes>

namespace hgg {
namespace {

// Whether the device can use `address`. A kernel that reads anything else takes the whole device down with
// it, so this is asked before, once an address.
hgg_status check_device_memory(const char* call, const char* what, hgg_status bad, uint64_t address,
                               int device, bool pinned_too) {
    hipPointerAttribute_t attributes = {};
    const hipError_t error = hipPointerGetAttributes(&attributes, reinterpret_cast<const void*>(address));
    if (error != hipSuccess) {
        (void)hipGetLastError();  // it was only a question
        return fail(bad, static_cast<int32_t>(error),
                    "%s: %s 0x%" PRIx64
                    " is not memory that the HIP runtime knows (%s); wanted device memory",
                    call, what, address, hipGetErrorName(error));
    }
    const bool on_device = attributes.type == hipMemoryTypeDevice || attributes.type == hipMemoryTypeManaged
                           || attributes.type == hipMemoryTypeUnified;
    if (!on_device && !(pinned_too && attributes.type == hipMemoryTypeHost))
        return fail(bad, -1, "%s: %s 0x%" PRIx64 " is host memory, wanted device memory", call, what,
                    address);
    if (attributes.type == hipMemoryTypeDevice && attributes.device != device)
        return fail(bad, -1, "%s: %s 0x%" PRIx64 " is on device %d, the handle is for device %d", call, what,
                    address, attributes.device, device);
    return HGG_OK;
}

hgg_status refuse_unverified(const Algorithm& algorithm, uint32_t allow) {
    if ((algorithm.flags & (HGG_ALGORITHM_SPLIT | HGG_ALGORITHM_EXTRA_KERNEL)) && !(allow & HGG_ALLOW_SPLIT))
        return fail(HGG_UNVERIFIED, -1,
                    "hgg_initialize: algorithm %" PRId32
                    " splits k over several workgroups; its second kernel does not read device records as "
                    "its own. Pass HGG_ALLOW_SPLIT if you have verified it: %s",
                    algorithm.index, algorithm.solution_name.c_str());
    if ((algorithm.flags & HGG_ALGORITHM_STREAM_K) && !(allow & HGG_ALLOW_STREAM_K))
        return fail(HGG_UNVERIFIED, -1,
                    "hgg_initialize: algorithm %" PRId32
                    " is stream-K, which divides the work by the sizes given to hgg_set_problem. Pass "
                    "HGG_ALLOW_STREAM_K if you have verified it: %s",
                    algorithm.index, algorithm.solution_name.c_str());
    return HGG_OK;
}

}  // namespace
}  // namespace hgg

using namespace hgg;

extern "C" {

hgg_status hgg_initialize(hgg_instance id, int32_t index, uint64_t workspace, uint64_t workspace_size,
                          uint32_t allow) {
    static const char call[] = "hgg_initialize";
    return guarded(call, [&]() -> hgg_status {
        if (allow & ~uint32_t(HGG_ALLOW_SPLIT | HGG_ALLOW_STREAM_K))
            return fail(HGG_INVALID_ARGUMENT, -1, "%s: allow is 0x%" PRIx32 ", which has unknown bits", call,
                        allow);
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        if (!instance->epoch)
            return fail(HGG_WRONG_ORDER, -1, "%s: no problem is set; call hgg_set_problem first", call);
        const int device = instance->handle->device;
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(device);
        HGG_CHECK(device_status(device_guard));
        Algorithm* algorithm = nullptr;
        HGG_CHECK(lookup(call, *instance, index, algorithm));
        check_support(*instance, *algorithm);
        name(*instance, *algorithm);
        if (algorithm->status != HIPBLAS_STATUS_SUCCESS)
            return fail(HGG_UNSUPPORTED, static_cast<int32_t>(algorithm->status),
                        "%s: algorithm %" PRId32
                        " does not support the problem (isAlgoSupported returned %d, %s): %s",
                        call, index, static_cast<int>(algorithm->status),
                        library_status_name(algorithm->status), algorithm->solution_name.c_str());
        HGG_CHECK(refuse_unverified(*algorithm, allow));

        const uint64_t needed = algorithm->workspace_size;
        if (workspace_size < needed || (needed && !workspace))
            return fail(HGG_WORKSPACE, -1,
                        "%s: algorithm %" PRId32 " needs a workspace of %" PRIu64 " bytes, got %" PRIu64
                        " at 0x%" PRIx64,
                        call, index, needed, workspace_size, workspace);
        if (workspace % HGG_ALIGNMENT || workspace + workspace_size < workspace)
            return fail(HGG_WORKSPACE, -1,
                        "%s: the workspace is 0x%" PRIx64 ", %" PRIu64
                        " bytes; wanted an address aligned to %d bytes",
                        call, workspace, workspace_size, HGG_ALIGNMENT);
        if (needed)
            HGG_CHECK(check_device_memory(call, "the workspace", HGG_WORKSPACE, workspace, device, false));

        // From here on what was ready before is gone, whatever happens.
        instance->release();
        HGG_CHECK(claim_workspace(call, device, workspace, workspace ? workspace_size : 0, id));
        const hipblasStatus_t status =
            instance->gemm->initialize(algorithm->algo, reinterpret_cast<void*>(workspace), true,
                                       reinterpret_cast<hipStream_t>(instance->handle->stream));
        if (status != HIPBLAS_STATUS_SUCCESS) {
            instance->release();
            return library_failed("hgg_initialize: initialize", status);
        }
        // Names are a hint; what it is about to launch is not. Several kernels are joined by semicolons.
        if (instance->gemm->getKernelName().find(';') != std::string::npos) {
            algorithm->flags |= HGG_ALGORITHM_EXTRA_KERNEL;
            const hgg_status refused = refuse_unverified(*algorithm, allow);
            if (refused != HGG_OK) {
                instance->release();
                return refused;
            }
        }
        instance->initialized = true;
        instance->algorithm_index = index;
        instance->workspace = workspace;
        instance->workspace_size = workspace_size;
        instance->workspace_needed = needed;
        return HGG_OK;
    });
}

hgg_status hgg_release(hgg_instance id) {
    return guarded("hgg_release", [&]() -> hgg_status {
        Open instance;
        HGG_CHECK(instance.enter("hgg_release", id));
        instance->release();
        return HGG_OK;
    });
}

hgg_status hgg_run(hgg_instance id, uint64_t records, uint64_t records_size, uint64_t stream) {
    static const char call[] = "hgg_run";
    return guarded(call, [&]() -> hgg_status {
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        // hipBLASLt itself returns success here, and does nothing.
        if (!instance->initialized)
            return fail(
                HGG_WRONG_ORDER, -1,
                "%s: not initialised since the last change; call hgg_set_problem and hgg_initialize first",
                call);
        if (!records) return fail(HGG_INVALID_ARGUMENT, -1, "%s: records is null", call);
        if (records % HGG_ALIGNMENT)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "%s: records is 0x%" PRIx64 ", wanted alignment to %d bytes", call, records,
                        HGG_ALIGNMENT);
        const uint64_t needed = uint64_t(instance->count) * HGG_RECORD_SIZE;
        if (records_size < needed)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "%s: %" PRIu64 " bytes of records, wanted %" PRIu64 " (%" PRIu32 " x %d)", call,
                        records_size, needed, instance->count, HGG_RECORD_SIZE);
        if (stream != instance->handle->stream)
            return fail(HGG_WRONG_STREAM, -1,
                        "%s: stream 0x%" PRIx64 ", but the handle is for 0x%" PRIx64
                        "; hipBLASLt's handles serve one stream each",
                        call, stream, instance->handle->stream);
        const std::shared_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        if (instance->checked_records != records) {
            HGG_CHECK(check_device_memory(call, "the record array", HGG_INVALID_ARGUMENT, records,
                                          instance->handle->device, true));
            instance->checked_records = records;
        }
        const hipblasStatus_t status =
            instance->gemm->run(reinterpret_cast<void*>(records), reinterpret_cast<hipStream_t>(stream));
        if (status != HIPBLAS_STATUS_SUCCESS) return library_failed("hgg_run: run", status);
        return HGG_OK;
    });
}

}  // extern "C"
