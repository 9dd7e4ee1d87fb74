// Code modules, their functions, and launches.
#include "standin.hpp"

#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <vector>

namespace standin {
namespace {

struct Function {
    std::string name;
};
struct Module {
    std::string origin;
    std::vector<std::unique_ptr<Function>> functions;
};

std::set<hipModule_t>& modules() {
    static auto* const all = new std::set<hipModule_t>;
    return *all;
}
std::set<hipFunction_t>& functions() {
    static auto* const all = new std::set<hipFunction_t>;
    return *all;
}

hipError_t add_module(hipModule_t* out, std::string origin) {
    auto* module = new Module{std::move(origin), {}};
    *out = reinterpret_cast<hipModule_t>(module);
    modules().insert(*out);
    return hipSuccess;
}

// Device code comes as an ELF file or as a bundle of them.
bool is_code(const char* bytes) {
    return !memcmp(bytes, "\177ELF", 4) || !memcmp(bytes, "__CLANG_OFFLOAD_BUNDLE__", 24)
           || !memcmp(bytes, "CCOB", 4);
}

// A code object is not looked into (it is compressed): which file a GEMM kernel is in shows in the names of both.
bool in_file(const std::string& file, const std::string& kernel) {
    if (kernel.rfind("Cijk_", 0) != 0 || file == "memory") return true;
    const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
    return has(file, "_GG_") && has(file, kernel.substr(5, 9)) && has(file, "_Bias_") == has(kernel, "_Bias_");
}

hipError_t launch(hipFunction_t function, Launch& l, hipStream_t stream, void** extra) {
    if (!functions().count(function)) return hipErrorInvalidHandle;
    if (!valid_stream(stream)) return hipErrorInvalidHandle;
    if (fault() != hipSuccess) return fault();
    l.kernel = reinterpret_cast<Function*>(function)->name;
    for (int i = 0; i < 3; i++)
        if (l.grid[i] == 0 || l.block[i] == 0) return hipErrorInvalidValue;
    if (uint64_t(l.block[0]) * l.block[1] * l.block[2] > 1024) return hipErrorInvalidValue;
    if (l.shared_bytes > 65536) return hipErrorInvalidValue;
    if (l.parameters && extra) return hipErrorInvalidValue;
    if (extra) {
        const size_t* size = nullptr;
        for (void** e = extra; *e != HIP_LAUNCH_PARAM_END; e += 2) {
            if (*e == HIP_LAUNCH_PARAM_BUFFER_POINTER)
                l.arguments = static_cast<const char*>(e[1]);
            else if (*e == HIP_LAUNCH_PARAM_BUFFER_SIZE)
                size = static_cast<const size_t*>(e[1]);
            else
                return hipErrorInvalidValue;
        }
        if (!l.arguments || !size) return hipErrorInvalidValue;
        l.argument_bytes = *size;
    }
    log(1, "launch %s, grid %u %u %u, block %u %u %u, %zu bytes shared, %zu bytes of arguments",
        l.kernel.c_str(), l.grid[0], l.grid[1], l.grid[2], l.block[0], l.block[1], l.block[2], l.shared_bytes,
        l.argument_bytes);
    if (has_host_build(l.kernel)) return run_host_build(l);
    if (is_gemm(l.kernel)) return run_gemm(l);
    return refuse(hipErrorNotSupported, "kernel %s has no host build here", l.kernel.c_str());
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
    STANDIN_CALL();
    log(2, "hipModuleLoad %s", path);
    if (!module || !path) return done(hipErrorInvalidValue);
    char head[24] = "";
    std::ifstream file(path, std::ios::binary);
    if (!file.read(head, sizeof head)) return done(hipErrorFileNotFound);
    if (!is_code(head)) return done(hipErrorInvalidImage);
    return done(add_module(module, path));
}

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
    STANDIN_CALL();
    if (!module || !image) return done(hipErrorInvalidValue);
    if (!is_code(static_cast<const char*>(image))) return done(hipErrorInvalidImage);
    return done(add_module(module, "memory"));
}

hipError_t hipModuleLoadDataEx(hipModule_t* module, const void* image, unsigned, hipJitOption*, void**) {
    return hipModuleLoadData(module, image);
}

hipError_t hipModuleUnload(hipModule_t module) {
    STANDIN_CALL();
    if (!modules().erase(module)) return done(hipErrorInvalidHandle);
    auto* m = reinterpret_cast<Module*>(module);
    for (const auto& f : m->functions) functions().erase(reinterpret_cast<hipFunction_t>(f.get()));
    delete m;
    return done(hipSuccess);
}

hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
    STANDIN_CALL();
    if (!function || !name) return done(hipErrorInvalidValue);
    if (!modules().count(module)) return done(hipErrorInvalidHandle);
    log(2, "hipModuleGetFunction %s", name);
    if (!has_host_build(name) && !is_gemm(name) && !strstr(name, "Cijk_"))
        return done(refuse(hipErrorNotFound, "kernel %s has no host build here", name));
    if (!in_file(reinterpret_cast<Module*>(module)->origin, name)) return done(hipErrorNotFound);
    auto& list = reinterpret_cast<Module*>(module)->functions;
    list.push_back(std::make_unique<Function>(Function{name}));
    *function = reinterpret_cast<hipFunction_t>(list.back().get());
    functions().insert(*function);
    return done(hipSuccess);
}

hipError_t hipModuleGetGlobal(hipDeviceptr_t*, size_t*, hipModule_t, const char* name) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotFound, "global variable %s", name));
}

hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) {
    STANDIN_CALL();
    return done(hipSuccess);
}

hipError_t hipFuncGetAttribute(int* value, hipFunction_attribute which, hipFunction_t function) {
    STANDIN_CALL();
    if (!functions().count(function)) return done(hipErrorInvalidHandle);
    switch (which) {
    case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; return done(hipSuccess);
    case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: *value = 0; return done(hipSuccess);
    case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = 64; return done(hipSuccess);
    default: return done(refuse(hipErrorNotSupported, "hipFuncGetAttribute %d", int(which)));
    }
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, hipStream_t stream,
                                 void** parameters, void** extra) {
    STANDIN_CALL();
    Launch l = {"", {gx, gy, gz}, {bx, by, bz}, shared, parameters, nullptr, 0};
    return done(launch(function, l, stream, extra));
}

// Unlike the call above, this one counts its grid in threads.
hipError_t hipExtModuleLaunchKernel(hipFunction_t function, uint32_t gx, uint32_t gy, uint32_t gz,
                                    uint32_t bx, uint32_t by, uint32_t bz, size_t shared, hipStream_t stream,
                                    void** parameters, void** extra, hipEvent_t start, hipEvent_t stop,
                                    uint32_t) {
    STANDIN_CALL();
    if (!bx || !by || !bz || gx % bx || gy % by || gz % bz) return done(hipErrorInvalidValue);
    if (start) (void)hipEventRecord(start, stream);
    Launch l = {"", {gx / bx, gy / by, gz / bz}, {bx, by, bz}, shared, parameters, nullptr, 0};
    const hipError_t error = launch(function, l, stream, extra);
    if (stop) (void)hipEventRecord(stop, stream);
    return done(error);
}

// Not HIP's: forgets a kernel's fault, which a real device keeps until the process ends.
hipError_t hipStandinClearFault(void) {
    const std::lock_guard<std::recursive_mutex> guard(lock());
    const hipError_t was = fault();
    set_fault(hipSuccess);
    (void)hipGetLastError();
    return was;
}

}  // extern "C"
