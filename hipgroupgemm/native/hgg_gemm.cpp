// Grouped GEMMs: setting the problem, the algorithms for it, readying one, running it.
#include "hgg_common.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

namespace hgg {
namespace {

constexpr int64_t kMax32 = UINT32_MAX;  // sizes and strides are 32-bit in the record

// hipBLASLt wants addresses at setProblem though it reads none of them when device records are run. This
// one is as aligned as any kernel could ask for, and faults if anybody reads it.
void* nowhere() { return reinterpret_cast<void*>(uintptr_t{1} << 16); }

hipblasOperation_t operation(int32_t transposed) { return transposed ? HIPBLAS_OP_T : HIPBLAS_OP_N; }
hipDataType data_type(int32_t type) { return static_cast<hipDataType>(type); }
hipblasComputeType_t compute_of(int32_t compute) {
    static constexpr hipblasComputeType_t types[] = {HIPBLAS_COMPUTE_32F, HIPBLAS_COMPUTE_32F_FAST_TF32,
                                                     HIPBLAS_COMPUTE_32F_FAST_16F,
                                                     HIPBLAS_COMPUTE_32F_FAST_16BF, HIPBLAS_COMPUTE_64F};
    return types[compute];
}

hgg_status check_type(const char* what, int32_t type) {
    for (const int32_t known : {HGG_R_32F, HGG_R_64F, HGG_R_16F, HGG_R_16BF, HGG_R_8F_E4M3, HGG_R_8F_E5M2,
                                HGG_R_8F_E4M3_FNUZ, HGG_R_8F_E5M2_FNUZ})
        if (type == known) return HGG_OK;
    return fail(HGG_INVALID_ARGUMENT, -1, "hgg_instance_create: %s is %" PRId32 ", which is no hgg_data_type",
                what, type);
}

hgg_status check_range(const char* what, int64_t value, int64_t least, int64_t most) {
    if (least <= value && value <= most) return HGG_OK;
    return fail(HGG_INVALID_ARGUMENT, -1,
                "hgg_instance_create: %s is %" PRId64 ", wanted %" PRId64 " to %" PRId64, what, value, least,
                most);
}

hgg_status check_problem(const hgg_problem& p) {
    HGG_CHECK(check_type("type_a", p.type_a));
    HGG_CHECK(check_type("type_b", p.type_b));
    HGG_CHECK(check_type("type_c", p.type_c));
    HGG_CHECK(check_type("type_d", p.type_d));
    if (p.bias_type != -1) HGG_CHECK(check_type("bias_type", p.bias_type));
    HGG_CHECK(check_range("compute", p.compute, HGG_COMPUTE_32F, HGG_COMPUTE_64F));
    HGG_CHECK(check_range("trans_a", p.trans_a, 0, 1));
    HGG_CHECK(check_range("trans_b", p.trans_b, 0, 1));
    HGG_CHECK(check_range("ragged", p.ragged, HGG_RAGGED_N, HGG_RAGGED_NONE));
    HGG_CHECK(check_range("count", p.count, 2, 1 << 24));
    HGG_CHECK(check_range("m", p.m, 1, kMax32));
    HGG_CHECK(check_range("n", p.n, 1, kMax32));
    HGG_CHECK(check_range("k", p.k, 1, kMax32));
    HGG_CHECK(check_range("batch", p.batch, 1, kMax32));
    HGG_CHECK(check_range("lda", p.lda, p.trans_a ? p.k : p.m, kMax32));
    HGG_CHECK(check_range("ldb", p.ldb, p.trans_b ? p.n : p.k, kMax32));
    HGG_CHECK(check_range("ldc", p.ldc, p.m, kMax32));
    HGG_CHECK(check_range("ldd", p.ldd, p.m, kMax32));
    if (p.batch > 1) {
        HGG_CHECK(check_range("stride_a", p.stride_a, 0, kMax32));
        HGG_CHECK(check_range("stride_b", p.stride_b, 0, kMax32));
        HGG_CHECK(check_range("stride_c", p.stride_c, 0, kMax32));
        HGG_CHECK(check_range("stride_d", p.stride_d, 0, kMax32));
    }
    if (!std::isfinite(p.alpha) || !std::isfinite(p.beta))
        return fail(HGG_INVALID_ARGUMENT, -1,
                    "hgg_instance_create: alpha is %g and beta %g, wanted finite numbers", p.alpha, p.beta);
    return HGG_OK;
}

hipblasStatus_t set_problem(const hgg_problem& p, lt::GroupedGemm& gemm) {
    const auto all = [&](int64_t value) { return std::vector<int64_t>(p.count, value); };
    const auto size = [&](int32_t ragged, int64_t value) {
        auto sizes = all(p.ragged == ragged ? 1 : value);
        sizes[0] = value;
        return sizes;
    };
    const auto stride = [&](int64_t given, int64_t leading, int64_t columns) {
        const uint64_t packed = uint64_t(leading) * uint64_t(columns);  // both below 2^32
        return all(p.batch > 1 ? given : int64_t(std::min(packed, uint64_t(kMax32))));
    };
    auto m = size(HGG_RAGGED_M, p.m), n = size(HGG_RAGGED_N, p.n), k = size(HGG_RAGGED_K, p.k);
    auto batch = all(p.batch), lda = all(p.lda), ldb = all(p.ldb), ldc = all(p.ldc), ldd = all(p.ldd);
    auto stride_a = stride(p.stride_a, p.lda, p.trans_a ? p.m : p.k);
    auto stride_b = stride(p.stride_b, p.ldb, p.trans_b ? p.k : p.n);
    auto stride_c = stride(p.stride_c, p.ldc, p.n), stride_d = stride(p.stride_d, p.ldd, p.n);
    union {  // in the type that hipBLASLt reads them in
        float f32;
        double f64;
    } alpha = {}, beta = {};
    if (p.compute == HGG_COMPUTE_64F) alpha.f64 = p.alpha, beta.f64 = p.beta;
    else alpha.f32 = static_cast<float>(p.alpha), beta.f32 = static_cast<float>(p.beta);
    Inputs input;
    input.setA(nowhere());
    input.setB(nowhere());
    input.setC(nowhere());
    input.setD(nowhere());
    input.setAlpha(&alpha);
    input.setBeta(&beta);
    Epilogue epilogue;
    if (p.bias_type != -1) {
        epilogue.setMode(HIPBLASLT_EPILOGUE_BIAS);
        epilogue.setBiasDataType(data_type(p.bias_type));
        input.setBias(nowhere());
    }
    std::vector<Epilogue> epilogues(p.count, epilogue);
    std::vector<Inputs> inputs(p.count, input);
    ProblemType type(operation(p.trans_a), operation(p.trans_b), data_type(p.type_a), data_type(p.type_b),
                     data_type(p.type_c), data_type(p.type_d), compute_of(p.compute));
    return gemm.setProblem(m, n, k, batch, lda, ldb, ldc, ldd, stride_a, stride_b, stride_c, stride_d, epilogues,
                           inputs, type);
}

// ---- algorithms -----------------------------------------------------------------------------------------

// TensileLite writes the parameters into the solution's name, between underscores: GSU1 is no split, GSU0 and
// GSUn1 leave the choice to the run; SK0 is no stream-K. A name without them is judged by the kernels that it
// launches.
uint32_t flags_of(const std::string& name) {
    uint32_t flags = 0;
    for (size_t at = name.find('_'); at != std::string::npos; at = name.find('_', at + 1)) {
        const size_t begin = at + 1, end = std::min(name.find('_', begin), name.size());
        const std::string part = name.substr(begin, end - begin);
        const auto digits = [&](size_t from) {
            return from < part.size() && part.find_first_not_of("0123456789", from) == std::string::npos;
        };
        if (part.rfind("GSU", 0) == 0 && part != "GSU1" && digits(part.rfind("GSUn", 0) == 0 ? 4 : 3))
            flags |= HGG_ALGORITHM_SPLIT;
        if (part.rfind("SK", 0) == 0 && digits(2) && part.find_first_not_of('0', 2) != std::string::npos)
            flags |= HGG_ALGORITHM_STREAM_K;
    }
    return flags;
}

// What every handle of a device gets from getAllAlgos, which takes a second the first time. Under the
// library's lock.
struct Catalogue {
    int device;
    hgg_problem types;
    std::vector<hipblasLtMatmulAlgo_t> algorithms;
};
std::vector<Catalogue>& catalogues() {
    static auto* const all = new std::vector<Catalogue>;  // leaked, as the registry is
    return *all;
}

bool same_kernels(const hgg_problem& x, const hgg_problem& y) {  // what enters getAllAlgos
    return x.type_a == y.type_a && x.type_b == y.type_b && x.type_c == y.type_c && x.type_d == y.type_d
           && x.compute == y.compute && x.trans_a == y.trans_a && x.trans_b == y.trans_b;
}

int32_t adopt(Instance& instance, hipblasLtMatmulAlgo_t algo) {
    const int32_t index = lt::getIndexFromAlgo(algo);
    if (index >= 0 && !instance.algorithms.count(index)) instance.algorithms[index].algo = algo;
    return index;
}

hgg_status listing_failed(const char* call, hipblasStatus_t status) {
    if (status != HIPBLAS_STATUS_INVALID_VALUE) return library_failed(call, status);
    return fail(HGG_UNSUPPORTED, static_cast<int32_t>(status),
                "%s: hipBLASLt returned %d (%s), as it does when it has no kernel library for this device; its "
                "own message is on stderr",
                call, static_cast<int>(status), library_status_name(status));
}

// Fills in the instance's algorithms and their order.
hgg_status enumerate(const char* call, Instance& instance) {
    if (!instance.order.empty()) return HGG_OK;
    const int device = instance.handle->device;
    const hgg_problem& p = instance.problem;
    auto& all = catalogues();
    auto known = std::find_if(all.begin(), all.end(), [&](const Catalogue& c) {
        return c.device == device && same_kernels(c.types, p);
    });
    if (known == all.end()) {
        std::vector<hipblasLtMatmulHeuristicResult_t> results;
        const hipblasStatus_t status =
            lt::getAllAlgos(instance.handle->lt, lt::GemmType::HIPBLASLT_GROUPED_GEMM, operation(p.trans_a),
                            operation(p.trans_b), data_type(p.type_a), data_type(p.type_b),
                            data_type(p.type_c), data_type(p.type_d), compute_of(p.compute), results);
        if (status != HIPBLAS_STATUS_SUCCESS) return listing_failed(call, status);
        Catalogue fresh = {device, p, {}};
        for (const auto& result : results) fresh.algorithms.push_back(result.algo);
        known = all.insert(all.end(), std::move(fresh));
    }
    for (const auto& algo : known->algorithms) {
        const int32_t index = adopt(instance, algo);
        if (index >= 0) instance.order.push_back(index);
    }
    return HGG_OK;
}

bool supported(Instance& instance, Algorithm& algorithm) {
    if (!algorithm.checked) {
        // The heuristic's and getAllAlgos' workspace sizes are wrong for grouped problems; this one is right.
        size_t workspace = 0;
        hipblasLtMatmulAlgo_t algo = algorithm.algo;  // the call may write to it
        algorithm.status = instance.gemm->isAlgoSupported(algo, workspace);
        algorithm.workspace_size = algorithm.status == HIPBLAS_STATUS_SUCCESS ? workspace : 0;
        algorithm.checked = true;
    }
    return algorithm.status == HIPBLAS_STATUS_SUCCESS;
}

hgg_status refuse_unverified(int32_t index, const Algorithm& algorithm) {
    if (!algorithm.flags) return HGG_OK;
    return fail(HGG_UNVERIFIED, -1,
                "hgg_initialize: algorithm %" PRId32
                " is stream-K or splits k over several workgroups, and either is wrong with device records: %s",
                index, algorithm.solution_name.c_str());
}

// The algorithm of that index, its support checked and its names asked.
hgg_status lookup(const char* call, Instance& instance, int32_t index, Algorithm*& algorithm) {
    auto found = instance.algorithms.find(index);
    if (found == instance.algorithms.end()) {
        HGG_CHECK(enumerate(call, instance));
        found = instance.algorithms.find(index);
    }
    if (found == instance.algorithms.end())
        return fail(HGG_NOT_FOUND, -1,
                    "%s: hipBLASLt has no algorithm of index %" PRId32 " for these types (it has %zu)", call,
                    index, instance.algorithms.size());
    algorithm = &found->second;
    (void)supported(instance, *algorithm);
    if (!algorithm->named) {
        algorithm->solution_name = lt::getSolutionNameFromAlgo(instance.handle->lt, algorithm->algo);
        algorithm->kernel_name = lt::getKernelNameFromAlgo(instance.handle->lt, algorithm->algo);
        algorithm->flags = flags_of(algorithm->solution_name);
        algorithm->named = true;
    }
    return HGG_OK;
}

}  // namespace
}  // namespace hgg

using namespace hgg;

extern "C" {

hgg_status hgg_instance_create(hgg_handle handle_id, const hgg_problem* problem, hgg_instance* out) {
    return guarded("hgg_instance_create", [&]() -> hgg_status {
        *out = 0;
        const hgg_problem& p = *problem;
        auto instance = std::make_shared<Instance>();
        HGG_CHECK(find_handle("hgg_instance_create", handle_id, instance->handle));
        HGG_CHECK(check_problem(p));
        instance->handle_id = handle_id;
        instance->problem = p;
        {
            const Alone alone(instance->handle->device);
            HGG_CHECK(alone.status());
            try {
                instance->gemm = std::make_unique<lt::GroupedGemm>(
                    instance->handle->lt, operation(p.trans_a), operation(p.trans_b), data_type(p.type_a),
                    data_type(p.type_b), data_type(p.type_c), data_type(p.type_d), compute_of(p.compute));
            } catch (const std::runtime_error& e) {  // for a combination of types that it does not know
                return fail(HGG_UNSUPPORTED, -1, "hgg_instance_create: hipBLASLt refuses these types: %s",
                            e.what());
            }
#if HGG_HAS_INSTANCE_WORKSPACE_LIMIT
            // It does not enforce the limit, and what an algorithm really needs is known here.
            instance->gemm->setMaxWorkspaceBytes(INT32_MAX);
#endif
            const hipblasStatus_t status = set_problem(p, *instance->gemm);
            if (status != HIPBLAS_STATUS_SUCCESS) {
                instance->gemm.reset();
                return library_failed("hgg_instance_create: setProblem", status);
            }
        }
        *out = register_instance(instance);
        return *out ? HGG_OK : fail(HGG_CLOSED, -1, "hgg_instance_create: the handle was closed meanwhile");
    });
}

hgg_status hgg_algorithms(hgg_instance id, int32_t max_count, int32_t* indices, int32_t capacity,
                          int32_t* count) {
    static const char call[] = "hgg_algorithms";
    return guarded(call, [&]() -> hgg_status {
        *count = 0;
        if (max_count < 0 || capacity < 0)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "%s: max_count is %" PRId32 " and capacity %" PRId32 ", wanted 0 or more", call,
                        max_count, capacity);
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        const Alone alone(instance->handle->device);
        HGG_CHECK(alone.status());
        std::vector<int32_t> listed;
        if (max_count) {
            Preference preference;
            preference.setMaxWorkspaceBytes(INT_MAX);  // it is not enforced
            std::vector<hipblasLtMatmulHeuristicResult_t> results;
            // With many groups the search takes long: ask for no more than it takes.
            const hipblasStatus_t status = instance->gemm->algoGetHeuristic(max_count, preference, results);
            if (status != HIPBLAS_STATUS_SUCCESS) return listing_failed(call, status);
            for (const auto& result : results) listed.push_back(adopt(*instance, result.algo));
        } else {
            HGG_CHECK(enumerate(call, *instance));
            listed = instance->order;
        }
        int32_t written = 0;
        for (size_t i = 0; i < listed.size(); i++) {
            const int32_t index = listed[i];
            const auto begin = listed.begin();
            if (index < 0 || (max_count && std::find(begin, begin + long(i), index) != begin + long(i))) continue;
            if (!supported(*instance, instance->algorithms[index])) continue;
            if (written < capacity) indices[written] = index;
            written++;
        }
        *count = written;
        return HGG_OK;
    });
}

hgg_status hgg_algorithm_get(hgg_instance id, int32_t index, hgg_algorithm* out) {
    static const char call[] = "hgg_algorithm_get";
    return guarded(call, [&]() -> hgg_status {
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        const Alone alone(instance->handle->device);
        HGG_CHECK(alone.status());
        Algorithm* algorithm = nullptr;
        HGG_CHECK(lookup(call, *instance, index, algorithm));
        const std::string &solution = algorithm->solution_name, &kernel = algorithm->kernel_name;
        if (std::max(solution.size(), kernel.size()) >= HGG_NAME_SIZE)
            return fail(HGG_UNSUPPORTED, -1,
                        "%s: a name of algorithm %" PRId32 " has %zu characters, room is for %d: cut short, it "
                        "would not identify it",
                        call, index, std::max(solution.size(), kernel.size()), HGG_NAME_SIZE - 1);
        std::memset(out, 0, sizeof *out);
        out->index = index;
        out->supported = algorithm->status == HIPBLAS_STATUS_SUCCESS;
        out->library_status = static_cast<int32_t>(algorithm->status);
        out->flags = algorithm->flags;
        out->workspace_size = algorithm->workspace_size;
        solution.copy(out->solution_name, HGG_NAME_SIZE - 1);
        kernel.copy(out->kernel_name, HGG_NAME_SIZE - 1);
        return HGG_OK;
    });
}

hgg_status hgg_initialize(hgg_instance id, int32_t index, uint64_t workspace, uint64_t workspace_size,
                          uint64_t stream, void* record) {
    static const char call[] = "hgg_initialize";
    return guarded(call, [&]() -> hgg_status {
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        const Alone alone(instance->handle->device);
        HGG_CHECK(alone.status());
        Algorithm* algorithm = nullptr;
        HGG_CHECK(lookup(call, *instance, index, algorithm));
        if (algorithm->status != HIPBLAS_STATUS_SUCCESS)
            return fail(HGG_UNSUPPORTED, static_cast<int32_t>(algorithm->status),
                        "%s: algorithm %" PRId32
                        " does not support the problem (isAlgoSupported returned %d, %s): %s",
                        call, index, static_cast<int>(algorithm->status),
                        library_status_name(algorithm->status), algorithm->solution_name.c_str());
        HGG_CHECK(refuse_unverified(index, *algorithm));
        const uint64_t needed = algorithm->workspace_size;
        if (workspace_size < needed || (needed && !workspace) || workspace % HGG_ALIGNMENT)
            return fail(HGG_WORKSPACE, -1,
                        "%s: algorithm %" PRId32 " needs a workspace of %" PRIu64
                        " bytes, aligned to %d bytes; got %" PRIu64 " at 0x%" PRIx64,
                        call, index, needed, HGG_ALIGNMENT, workspace_size, workspace);

        // From here on what was ready before is gone, whatever happens.
        instance->release();
        HGG_CHECK(claim_workspace(call, *instance, workspace, workspace ? workspace_size : 0));
        const hipblasStatus_t status =
            instance->gemm->initialize(algorithm->algo, reinterpret_cast<void*>(workspace), true,
                                       reinterpret_cast<hipStream_t>(stream));
        if (status != HIPBLAS_STATUS_SUCCESS) {
            instance->release();
            return library_failed("hgg_initialize: initialize", status);
        }
        // Names are a hint; what it is about to launch is not. Several kernels are joined by semicolons.
        if (instance->gemm->getKernelName().find(';') != std::string::npos) {
            algorithm->flags |= HGG_ALGORITHM_EXTRA_KERNEL;
            instance->release();
            return refuse_unverified(index, *algorithm);
        }
        // It writes one record for every problem.
        std::vector<Record> records(instance->problem.count);
        const hipblasStatus_t told = instance->gemm->getDefaultValueForDeviceUserArguments(records.data());
        if (told != HIPBLAS_STATUS_SUCCESS) {
            instance->release();
            return library_failed("hgg_initialize: getDefaultValueForDeviceUserArguments", told);
        }
        std::memcpy(record, records.data(), sizeof(Record));
        instance->algorithm_index = index;
        return HGG_OK;
    });
}

hgg_status hgg_run(hgg_instance id, uint64_t records, uint64_t stream) {
    static const char call[] = "hgg_run";
    return guarded(call, [&]() -> hgg_status {
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        // hipBLASLt itself returns success in both cases, and does nothing.
        if (instance->algorithm_index < 0)
            return fail(HGG_WRONG_ORDER, -1, "%s: not initialised; call hgg_initialize first", call);
        if (!records || records % HGG_ALIGNMENT)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "%s: records is 0x%" PRIx64 ", wanted a device address aligned to %d bytes", call,
                        records, HGG_ALIGNMENT);
        const std::shared_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard guard(instance->handle->device);
        HGG_CHECK(guard.status());
        const hipblasStatus_t status = instance->gemm->run(
            reinterpret_cast<void*>(records), reinterpret_cast<hipStream_t>(stream));
        if (status == HIPBLAS_STATUS_SUCCESS) return HGG_OK;
        return fail(HGG_LIBRARY_ERROR, static_cast<int32_t>(status),
                    "%s: hipBLASLt returned %d (%s) for algorithm %" PRId32
                    ", %s; so it does where its catalogue lists a kernel whose code file is missing",
                    call, static_cast<int>(status), library_status_name(status), instance->algorithm_index,
                    instance->algorithms[instance->algorithm_index].solution_name.c_str());
    });
}

}  // extern "C"
