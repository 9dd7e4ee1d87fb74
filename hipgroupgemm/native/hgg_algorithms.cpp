// Which algorithms there are, what they need, and finding one again.
#include "hgg_common.hpp"

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cstdlib>
#include <cstring>

namespace hgg {
namespace {

// The text between `_token` and the next underscore, of every part of the name that begins so.
template <class F>
void each_value(const std::string& name, const char* token, F&& f) {
    const std::string marker = std::string("_") + token;
    for (size_t at = name.find(marker); at != std::string::npos; at = name.find(marker, at + 1)) {
        const size_t begin = at + marker.size(), end = std::min(name.find('_', begin), name.size());
        f(name.substr(begin, end - begin));
    }
}

bool all_digits(const std::string& s) {
    return !s.empty() && std::all_of(s.begin(), s.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// TensileLite writes the parameters into the solution's name: GSU1 is no split, GSU0 and GSUn1 leave the
// choice to the run; SK0 is no stream-K. A name without the token is judged by the kernels that it launches.
uint32_t flags_of(const std::string& solution) {
    uint32_t flags = 0;
    each_value(solution, "GSU", [&](const std::string& value) {
        const bool negative = value.size() > 1 && value[0] == 'n' && all_digits(value.substr(1));
        if (negative || (all_digits(value) && value != "1")) flags |= HGG_ALGORITHM_SPLIT;
    });
    each_value(solution, "SK", [&](const std::string& value) {
        if (all_digits(value) && value.find_first_not_of('0') != std::string::npos)
            flags |= HGG_ALGORITHM_STREAM_K;
    });
    return flags;
}

constexpr int kAskAtMost = 1 << 16;  // algorithms; more than any library has for one problem

// What every handle of a device gets from getAllAlgos, which takes a second the first time. Under the
// library's lock.
struct Catalogue {
    int device;
    hgg_types types;
    std::vector<hipblasLtMatmulAlgo_t> algorithms;
};
std::vector<Catalogue>& catalogues() {
    static auto* const all = new std::vector<Catalogue>;  // leaked, as the registry is
    return *all;
}

bool same_kernels(const hgg_types& x, const hgg_types& y) {  // the epilogue does not enter getAllAlgos
    return x.type_a == y.type_a && x.type_b == y.type_b && x.type_c == y.type_c && x.type_d == y.type_d
           && x.compute == y.compute && x.trans_a == y.trans_a && x.trans_b == y.trans_b;
}

hipblasComputeType_t compute_of(const hgg_types& types) {
    switch (types.compute) {
    case HGG_COMPUTE_32F_FAST_TF32: return HIPBLAS_COMPUTE_32F_FAST_TF32;
    case HGG_COMPUTE_32F_FAST_16F: return HIPBLAS_COMPUTE_32F_FAST_16F;
    case HGG_COMPUTE_32F_FAST_16BF: return HIPBLAS_COMPUTE_32F_FAST_16BF;
    case HGG_COMPUTE_64F: return HIPBLAS_COMPUTE_64F;
    default: return HIPBLAS_COMPUTE_32F;
    }
}

int32_t adopt(Instance& instance, hipblasLtMatmulAlgo_t algo) {
    const int32_t index = lt::getIndexFromAlgo(algo);
    if (index < 0) return -1;
    Algorithm& a = instance.algorithms[index];
    if (a.index < 0) {
        a.algo = algo;
        a.index = index;
    }
    return index;
}

hgg_status no_kernels(const char* call, hipblasStatus_t status) {
    return fail(
        HGG_UNSUPPORTED, static_cast<int32_t>(status),
        "%s: hipBLASLt returned %d (%s), as it does when it has no kernel library for this device; its own "
        "message is on stderr",
        call, static_cast<int>(status), library_status_name(status));
}

hgg_status ready(const char* call, Instance& instance) {
    if (instance.epoch) return HGG_OK;
    return fail(HGG_WRONG_ORDER, -1, "%s: no problem is set; call hgg_set_problem first", call);
}

hgg_status write_indices(const std::vector<int32_t>& from, int32_t* indices, int32_t capacity,
                         int32_t* count) {
    *count = static_cast<int32_t>(from.size());
    for (size_t i = 0; i < from.size() && i < static_cast<size_t>(std::max(capacity, 0)); i++)
        indices[i] = from[i];
    return HGG_OK;
}

hgg_status check_output(const char* call, const int32_t* indices, int32_t capacity, const int32_t* count) {
    if (!count) return fail(HGG_INVALID_ARGUMENT, -1, "%s: count is null", call);
    if (capacity < 0 || (capacity > 0 && !indices))
        return fail(HGG_INVALID_ARGUMENT, -1, "%s: indices is %s with capacity %" PRId32, call,
                    indices ? "set" : "null", capacity);
    return HGG_OK;
}

}  // namespace

hgg_status enumerate(const char* call, Instance& instance) {
    if (instance.enumerated) return HGG_OK;
    const int device = instance.handle->device;
    auto& all = catalogues();
    auto known = std::find_if(all.begin(), all.end(), [&](const Catalogue& c) {
        return c.device == device && same_kernels(c.types, instance.types);
    });
    if (known == all.end()) {
        std::vector<hipblasLtMatmulHeuristicResult_t> results;
        const hgg_types& t = instance.types;
        const hipblasStatus_t status = lt::getAllAlgos(
            instance.handle->lt, lt::GemmType::HIPBLASLT_GROUPED_GEMM,
            t.trans_a ? HIPBLAS_OP_T : HIPBLAS_OP_N, t.trans_b ? HIPBLAS_OP_T : HIPBLAS_OP_N,
            static_cast<hipDataType>(t.type_a), static_cast<hipDataType>(t.type_b),
            static_cast<hipDataType>(t.type_c), static_cast<hipDataType>(t.type_d), compute_of(t), results);
        if (status == HIPBLAS_STATUS_INVALID_VALUE) return no_kernels(call, status);
        if (status != HIPBLAS_STATUS_SUCCESS) return library_failed(call, status);
        Catalogue fresh = {device, t, {}};
        for (const auto& result : results) fresh.algorithms.push_back(result.algo);
        all.push_back(std::move(fresh));
        known = all.end() - 1;
    }
    instance.order.clear();
    for (const auto& algo : known->algorithms) {
        const int32_t index = adopt(instance, algo);
        if (index >= 0) instance.order.push_back(index);
    }
    instance.enumerated = true;
    return HGG_OK;
}

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
    return HGG_OK;
}

void check_support(Instance& instance, Algorithm& algorithm) {
    if (algorithm.epoch == instance.epoch) return;
    size_t workspace = 0;
    hipblasLtMatmulAlgo_t algo = algorithm.algo;  // the call may write to it
    algorithm.status = instance.gemm->isAlgoSupported(algo, workspace);
    algorithm.workspace_size = algorithm.status == HIPBLAS_STATUS_SUCCESS ? workspace : 0;
    algorithm.epoch = instance.epoch;
}

bool fits(Instance& instance, Algorithm& algorithm, uint64_t max_workspace) {
    check_support(instance, algorithm);
    return algorithm.status == HIPBLAS_STATUS_SUCCESS && algorithm.workspace_size <= max_workspace;
}

// All that support the problem within the limit, in the library's order.
hgg_status list_fitting(const char* call, Instance& instance, uint64_t max_workspace,
                        std::vector<int32_t>& indices) {
    HGG_CHECK(enumerate(call, instance));
    for (const int32_t index : instance.order)
        if (fits(instance, instance.algorithms[index], max_workspace)) indices.push_back(index);
    return HGG_OK;
}

void name(Instance& instance, Algorithm& algorithm) {
    if (algorithm.named) return;
    algorithm.solution_name = lt::getSolutionNameFromAlgo(instance.handle->lt, algorithm.algo);
    algorithm.kernel_name = lt::getKernelNameFromAlgo(instance.handle->lt, algorithm.algo);
    algorithm.flags |= flags_of(algorithm.solution_name);
    algorithm.named = true;
}

}  // namespace hgg

using namespace hgg;

extern "C" {

hgg_status hgg_algorithms_heuristic(hgg_instance id, int32_t max_count, uint64_t max_workspace,
                                    int32_t* indices, int32_t capacity, int32_t* count) {
    static const char call[] = "hgg_algorithms_heuristic";
    return guarded(call, [&]() -> hgg_status {
        HGG_CHECK(check_output(call, indices, capacity, count));
        *count = 0;
        if (max_count < 1)
            return fail(HGG_INVALID_ARGUMENT, -1, "%s: max_count is %" PRId32 ", wanted at least 1", call,
                        max_count);
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        HGG_CHECK(ready(call, *instance));
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        // Its limit is not enforced and its workspace sizes are wrong for grouped problems. So it ranks
        // without one, and what does not fit is left out here, before the list is cut.
        Preference preference;
        preference.setMaxWorkspaceBytes(INT_MAX);
        std::vector<int32_t> ranked;
        const size_t wanted = static_cast<size_t>(max_count);
        for (int ask = std::min(max_count, kAskAtMost);; ask = std::min(ask * 4, kAskAtMost)) {
            // With many groups the search takes long: ask for no more than it takes.
            std::vector<hipblasLtMatmulHeuristicResult_t> results;
            const hipblasStatus_t status = instance->gemm->algoGetHeuristic(ask, preference, results);
            if (status == HIPBLAS_STATUS_INVALID_VALUE) return no_kernels(call, status);
            if (status != HIPBLAS_STATUS_SUCCESS) return library_failed(call, status);
            ranked.clear();
            for (const auto& result : results) {
                if (ranked.size() == wanted) break;
                const int32_t index = adopt(*instance, result.algo);
                if (index < 0 || std::find(ranked.begin(), ranked.end(), index) != ranked.end()) continue;
                if (fits(*instance, instance->algorithms[index], max_workspace)) ranked.push_back(index);
            }
            const bool exhausted = results.size() < static_cast<size_t>(ask) || ask == kAskAtMost;
            if (ranked.size() == wanted || exhausted) break;
            // Asking for more only helps if there is more that fits; to count it is quick.
            std::vector<int32_t> all;
            HGG_CHECK(list_fitting(call, *instance, max_workspace, all));
            if (ranked.size() >= all.size()) break;
        }
        return write_indices(ranked, indices, capacity, count);
    });
}

hgg_status hgg_algorithms_all(hgg_instance id, uint64_t max_workspace, int32_t* indices, int32_t capacity,
                              int32_t* count) {
    static const char call[] = "hgg_algorithms_all";
    return guarded(call, [&]() -> hgg_status {
        HGG_CHECK(check_output(call, indices, capacity, count));
        *count = 0;
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        HGG_CHECK(ready(call, *instance));
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        std::vector<int32_t> fitting;
        HGG_CHECK(list_fitting(call, *instance, max_workspace, fitting));
        return write_indices(fitting, indices, capacity, count);
    });
}

hgg_status hgg_algorithm_get(hgg_instance id, int32_t index, hgg_algorithm* out) {
    static const char call[] = "hgg_algorithm_get";
    return guarded(call, [&]() -> hgg_status {
        if (!out) return fail(HGG_INVALID_ARGUMENT, -1, "%s: algorithm is null", call);
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        HGG_CHECK(ready(call, *instance));
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        Algorithm* algorithm = nullptr;
        HGG_CHECK(lookup(call, *instance, index, algorithm));
        check_support(*instance, *algorithm);
        name(*instance, *algorithm);
        if (algorithm->solution_name.size() >= HGG_NAME_SIZE
            || algorithm->kernel_name.size() >= HGG_NAME_SIZE)
            return fail(HGG_UNSUPPORTED, -1,
                        "%s: the names of algorithm %" PRId32 " have %zu and %zu characters, room is "
                        "for %d: cut short, they would not identify it",
                        call, index, algorithm->solution_name.size(), algorithm->kernel_name.size(),
                        HGG_NAME_SIZE - 1);
        std::memset(out, 0, sizeof *out);
        out->index = algorithm->index;
        out->supported = algorithm->status == HIPBLAS_STATUS_SUCCESS;
        out->library_status = static_cast<int32_t>(algorithm->status);
        out->flags = algorithm->flags;
        out->workspace_size = algorithm->workspace_size;
        algorithm->solution_name.copy(out->solution_name, HGG_NAME_SIZE - 1);
        algorithm->kernel_name.copy(out->kernel_name, HGG_NAME_SIZE - 1);
        return HGG_OK;
    });
}

hgg_status hgg_algorithm_find(hgg_instance id, int32_t index, const char* solution_name, int32_t* found) {
    static const char call[] = "hgg_algorithm_find";
    return guarded(call, [&]() -> hgg_status {
        if (!solution_name || !found)
            return fail(HGG_INVALID_ARGUMENT, -1, "%s: %s is null", call, found ? "solution_name" : "found");
        *found = -1;
        if (index < -1 || !*solution_name)
            return fail(HGG_INVALID_ARGUMENT, -1,
                        "%s: index is %" PRId32 " and the name '%s', wanted an index or -1, and a name", call,
                        index, solution_name);
        Open instance;
        HGG_CHECK(instance.enter(call, id));
        const std::unique_lock<std::shared_mutex> library(library_mutex());
        const DeviceGuard device_guard(instance->handle->device);
        HGG_CHECK(device_status(device_guard));
        HGG_CHECK(enumerate(call, *instance));
        const auto pinned = instance->algorithms.find(index);
        if (pinned != instance->algorithms.end()) {
            name(*instance, pinned->second);
            if (pinned->second.solution_name == solution_name) {
                *found = index;
                return HGG_OK;
            }
        }
        int32_t elsewhere = -1, matches = 0;
        for (auto& [other, algorithm] : instance->algorithms) {
            name(*instance, algorithm);
            if (algorithm.solution_name == solution_name) {
                elsewhere = other;
                matches++;
            }
        }
        if (index == -1 && matches == 1) {
            *found = elsewhere;
            return HGG_OK;
        }
        if (index == -1)
            return fail(HGG_NOT_FOUND, -1, "%s: %" PRId32 " of %zu algorithms have the name '%s', wanted one",
                        call, matches, instance->algorithms.size(), solution_name);
        return fail(HGG_NOT_FOUND, -1,
                    "%s: index %" PRId32 " is %s%s, not '%s', which %s (index %" PRId32
                    "); another process or library may have numbered them differently",
                    call, index, pinned == instance->algorithms.end() ? "no algorithm" : "algorithm ",
                    pinned == instance->algorithms.end() ? "" : pinned->second.solution_name.c_str(),
                    solution_name, matches ? "is another" : "does not exist", elsewhere);
    });
}

}  // extern "C"
