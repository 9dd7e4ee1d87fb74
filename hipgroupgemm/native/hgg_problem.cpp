// Setting a problem, and hipBLASLt's record for it.
#include "hgg_common.hpp"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

namespace hgg {
namespace {

constexpr int64_t kMax32 = UINT32_MAX;  // sizes and strides are 32-bit in the record

// hipBLASLt wants addresses at set_problem though it reads none of them when device records are run. This
// one is as aligned as any kernel could ask for, and faults if anybody reads it.
void* nowhere() { return reinterpret_cast<void*>(uintptr_t{1} << 16); }

struct Sizes {
    std::vector<int64_t> m, n, k, batch, lda, ldb, ldc, ldd, stride_a, stride_b, stride_c, stride_d;
};

hgg_status copy_sizes(const char* name, const int64_t* from, uint32_t count, int64_t least,
                      std::vector<int64_t>& to) {
    if (!from) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_set_problem: %s is null", name);
    to.assign(from, from + count);
    for (uint32_t i = 0; i < count; i++)
        if (to[i] < least || to[i] > kMax32)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: %s[%" PRIu32 "] is %" PRId64 ", wanted %" PRId64 " to %" PRId64,
                        name, i, to[i], least, kMax32);
    return HGG_OK;
}

// A leading dimension: at least the stored rows, at least 1, at most 32 bits.
hgg_status copy_leading(const char* name, const int64_t* from, const std::vector<int64_t>& rows,
                        std::vector<int64_t>& to) {
    to.resize(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        const int64_t least = std::max<int64_t>(rows[i], 1);
        to[i] = from ? from[i] : least;
        if (to[i] < least || to[i] > kMax32)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: %s[%zu] is %" PRId64 ", wanted %" PRId64
                        " (the rows as stored) to %" PRId64 " (the records have 32 bits for it)",
                        name, i, to[i], least, kMax32);
    }
    return HGG_OK;
}

// A batch stride. Packed means leading dimension times columns, which only matters with a batch.
hgg_status copy_stride(const char* name, const int64_t* from, const std::vector<int64_t>& leading,
                       const std::vector<int64_t>& columns, const std::vector<int64_t>& batch,
                       std::vector<int64_t>& to) {
    to.resize(leading.size());
    for (size_t i = 0; i < leading.size(); i++) {
        // Both factors are below 2^32 and not negative: the product fits in 64 unsigned bits.
        const uint64_t packed = uint64_t(leading[i]) * uint64_t(columns[i]);
        if (!from && packed > uint64_t(kMax32) && batch[i] > 1)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: the packed %s[%zu] is %" PRIu64 ", wanted at most %" PRId64
                        " (the records have 32 bits for it)",
                        name, i, packed, kMax32);
        to[i] = from ? from[i] : int64_t(std::min<uint64_t>(packed, uint64_t(kMax32)));
        if (to[i] < 0 || to[i] > kMax32)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: %s[%zu] is %" PRId64 ", wanted 0 to %" PRId64
                        " (the records have 32 bits for it)",
                        name, i, to[i], kMax32);
    }
    return HGG_OK;
}

hgg_status read_sizes(const hgg_problem& p, const hgg_types& types, Sizes& s) {
    HGG_CHECK(copy_sizes("m", p.m, p.count, 1, s.m));
    HGG_CHECK(copy_sizes("n", p.n, p.count, 0, s.n));
    HGG_CHECK(copy_sizes("k", p.k, p.count, 0, s.k));
    HGG_CHECK(copy_sizes("batch", p.batch, p.count, 1, s.batch));
    if (std::all_of(s.n.begin(), s.n.end(), [](int64_t n) { return n == 0; }))
        return fail(
            HGG_INVALID_ARGUMENT, -1,
            "hgg_set_problem: every n is 0. The launch grid is made from these sizes: give the capacity");
    if (p.ragged < HGG_PROBLEM_RAGGED_N || p.ragged > HGG_PROBLEM_FIXED)
        return fail(HGG_INVALID_ARGUMENT, -1,
                    "hgg_set_problem: ragged is %" PRId32 ", which is no hgg_ragged", p.ragged);
    const char letters[] = {'n', 'm', 'k'};
    const std::vector<int64_t>* ragged[] = {&s.n, &s.m, &s.k};
    if (p.ragged != HGG_PROBLEM_FIXED) {
        const auto& sizes = *ragged[p.ragged];
        if (std::find(sizes.begin(), sizes.end(), 1) == sizes.end())
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: %c is ragged, but no problem has %c = 1. hipBLASLt could then "
                        "offer kernels that need it to be a multiple, or at least some width, which the "
                        "sizes on the device need not be: give [capacity, 1, ...]",
                        letters[p.ragged], letters[p.ragged]);
    }
    HGG_CHECK(copy_leading("lda", p.lda, types.trans_a ? s.k : s.m, s.lda));
    HGG_CHECK(copy_leading("ldb", p.ldb, types.trans_b ? s.n : s.k, s.ldb));
    HGG_CHECK(copy_leading("ldc", p.ldc, s.m, s.ldc));
    HGG_CHECK(copy_leading("ldd", p.ldd, s.m, s.ldd));
    HGG_CHECK(copy_stride("stride_a", p.stride_a, s.lda, types.trans_a ? s.m : s.k, s.batch, s.stride_a));
    HGG_CHECK(copy_stride("stride_b", p.stride_b, s.ldb, types.trans_b ? s.k : s.n, s.batch, s.stride_b));
    HGG_CHECK(copy_stride("stride_c", p.stride_c, s.ldc, s.n, s.batch, s.stride_c));
    HGG_CHECK(copy_stride("stride_d", p.stride_d, s.ldd, s.n, s.batch, s.stride_d));
    return HGG_OK;
}

// alpha and beta in the type that hipBLASLt reads them in.
union Scalar {
    float f32;
    double f64;
};
Scalar scalar(double value, int32_t compute) {
    Scalar s = {};
    if (compute == HGG_COMPUTE_64F)
        s.f64 = value;
    else
        s.f32 = static_cast<float>(value);
    return s;
}

ProblemType problem_type(const hgg_types& t) {
    static constexpr hipblasComputeType_t compute[] = {HIPBLAS_COMPUTE_32F, HIPBLAS_COMPUTE_32F_FAST_TF32,
                                                       HIPBLAS_COMPUTE_32F_FAST_16F,
                                                       HIPBLAS_COMPUTE_32F_FAST_16BF, HIPBLAS_COMPUTE_64F};
    return ProblemType(t.trans_a ? HIPBLAS_OP_T : HIPBLAS_OP_N, t.trans_b ? HIPBLAS_OP_T : HIPBLAS_OP_N,
                       static_cast<hipDataType>(t.type_a), static_cast<hipDataType>(t.type_b),
                       static_cast<hipDataType>(t.type_c), static_cast<hipDataType>(t.type_d),
                       compute[t.compute]);
}

}  // namespace
}  // namespace hgg

using namespace hgg;

extern "C" {

hgg_status hgg_set_problem(hgg_instance id, const hgg_problem* problem) {
    return guarded("hgg_set_problem", [&]() -> hgg_status {
        if (!problem) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_set_problem: problem is null");
        Open instance;
        HGG_CHECK(instance.enter("hgg_set_problem", id));
        // A kernel that needs multiples could be offered if the library saw one size only.
        if (problem->count < 2 || problem->count > (1u << 24))
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: count is %" PRIu32
                        ", wanted 2 to %u (for one group give a second, of extent 1 here and 0 in its "
                        "record)",
                        problem->count, 1u << 24);
        if (!std::isfinite(problem->alpha) || !std::isfinite(problem->beta))
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "hgg_set_problem: alpha is %g and beta %g, wanted finite numbers", problem->alpha,
                        problem->beta);
        Sizes s;
        HGG_CHECK(read_sizes(*problem, instance->types, s));

        Scalar alpha = scalar(problem->alpha, instance->types.compute);
        Scalar beta = scalar(problem->beta, instance->types.compute);
        Inputs input;
        input.setA(nowhere());
        input.setB(nowhere());
        input.setC(nowhere());
        input.setD(nowhere());
        input.setAlpha(&alpha);
        input.setBeta(&beta);
        Epilogue epilogue;
        if (instance->types.epilogue == HGG_EPILOGUE_BIAS) {
            epilogue.setMode(HIPBLASLT_EPILOGUE_BIAS);
            epilogue.setBiasDataType(static_cast<hipDataType>(instance->types.bias_type));
            input.setBias(nowhere());
        }
        std::vector<Epilogue> epilogues(problem->count, epilogue);
        std::vector<Inputs> inputs(problem->count, input);
        ProblemType type = problem_type(instance->types);

        // From here on the old problem is gone, whatever happens.
        instance->release();
        instance->count = 0;
        instance->epoch = 0;
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        const hipblasStatus_t status =
            instance->gemm->setProblem(s.m, s.n, s.k, s.batch, s.lda, s.ldb, s.ldc, s.ldd, s.stride_a,
                                       s.stride_b, s.stride_c, s.stride_d, epilogues, inputs, type);
        if (status != HIPBLAS_STATUS_SUCCESS) return library_failed("hgg_set_problem: setProblem", status);
        static uint64_t epochs = 0;  // under the library's lock
        instance->epoch = ++epochs;
        instance->count = problem->count;
        return HGG_OK;
    });
}

hgg_status hgg_template_record(hgg_instance id, void* record, size_t size, int32_t* bias_type,
                               int32_t* activation_type) {
    return guarded("hgg_template_record", [&]() -> hgg_status {
        if (!record) return fail(HGG_INVALID_ARGUMENT, -1, "hgg_template_record: record is null");
        if (size != sizeof(Record))
            return fail(HGG_INVALID_ARGUMENT, -1, "hgg_template_record: size is %zu, wanted %zu", size,
                        sizeof(Record));
        Open instance;
        HGG_CHECK(instance.enter("hgg_template_record", id));
        if (!instance->epoch)
            return fail(HGG_WRONG_ORDER, -1,
                        "hgg_template_record: no problem is set; call hgg_set_problem first");
        // It needs an algorithm to be chosen: without one it reads a solution by an index that was never set.
        if (!instance->initialized)
            return fail(HGG_WRONG_ORDER, -1,
                        "hgg_template_record: not initialised; call hgg_initialize first");
        // It writes one record for every problem.
        std::vector<Record> records(instance->count);
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        const hipblasStatus_t status = instance->gemm->getDefaultValueForDeviceUserArguments(records.data());
        if (status != HIPBLAS_STATUS_SUCCESS)
            return library_failed("hgg_template_record: getDefaultValueForDeviceUserArguments", status);
        std::memcpy(record, records.data(), sizeof(Record));
        if (bias_type) *bias_type = records[0].biasType;
        if (activation_type) *activation_type = records[0].activationType;
        return HGG_OK;
    });
}

}  // extern "C"
