// Kernels of the project, run from their host build.
//
// STANDIN_KERNELS names shared libraries (separated by colons). For a kernel K such a library exports
//     extern "C" int standin_K(const uint32_t grid[3], const uint32_t block[3], size_t shared_bytes,
//                              void* const* arguments);
// which returns 0 or refuses, and, if K may be launched with packed arguments,
//     extern "C" const uint32_t standin_K_sizes[];   // how many, then the bytes of each (natural alignment)
#include "standin.hpp"

#include <dlfcn.h>

#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace standin {
namespace {

using HostKernel = int (*)(const uint32_t*, const uint32_t*, size_t, void* const*);

std::vector<void*>& libraries() {
    static auto* const all = [] {
        auto* list = new std::vector<void*>;
        const char* names = getenv("STANDIN_KERNELS");
        for (std::string rest = names ? names : ""; !rest.empty();) {
            const size_t colon = rest.find(':');
            const std::string one = rest.substr(0, colon);
            rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
            if (void* library = dlopen(one.c_str(), RTLD_NOW | RTLD_LOCAL))
                list->push_back(library);
            else
                log(0, "STANDIN_KERNELS: %s", dlerror());
        }
        return list;
    }();
    return *all;
}

void* find(const std::string& symbol) {
    for (void* library : libraries())
        if (void* found = dlsym(library, symbol.c_str())) return found;
    return nullptr;
}

// A kernel that touches a guard leaves through here, as a memory access fault.
thread_local sigjmp_buf* t_escape = nullptr;
thread_local void* t_fault_address = nullptr;

void on_fault(int signal, siginfo_t* info, void*) {
    if (t_escape) {
        t_fault_address = info->si_addr;
        siglongjmp(*t_escape, 1);
    }
    ::signal(signal, SIG_DFL);  // not ours: fault again, for good
}

class FaultHandler {
public:
    FaultHandler() {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        sigaction(SIGSEGV, &action, &segv_);
        sigaction(SIGBUS, &action, &bus_);
    }
    ~FaultHandler() {
        sigaction(SIGSEGV, &segv_, nullptr);
        sigaction(SIGBUS, &bus_, nullptr);
    }

private:
    struct sigaction segv_ = {}, bus_ = {};
};

// 0 fine, 1 refused, 2 fault.
int call(HostKernel kernel, const Launch& launch, void* const* arguments) {
    const OpenMemory open;
    const FaultHandler handler;
    sigjmp_buf escape;
    if (sigsetjmp(escape, 1)) {
        t_escape = nullptr;
        return 2;
    }
    t_escape = &escape;
    const int refused = kernel(launch.grid, launch.block, launch.shared_bytes, arguments);
    t_escape = nullptr;
    return refused ? 1 : 0;
}

}  // namespace

bool has_host_build(const std::string& kernel) { return find("standin_" + kernel) != nullptr; }

hipError_t run_host_build(const Launch& launch) {
    const auto kernel = reinterpret_cast<HostKernel>(find("standin_" + launch.kernel));
    const auto* sizes = static_cast<const uint32_t*>(find("standin_" + launch.kernel + "_sizes"));
    std::vector<void*> unpacked;
    void* const* arguments = launch.parameters;
    std::vector<char> bytes;
    if (!arguments) {
        if (!sizes)
            return refuse(hipErrorNotSupported,
                          "packed arguments for %s, whose host build does not say their sizes",
                          launch.kernel.c_str());
        bytes.assign(launch.arguments, launch.arguments + launch.argument_bytes);
        size_t at = 0;
        for (uint32_t i = 0; i < sizes[0]; i++) {
            const size_t size = sizes[1 + i], align = size % 8 == 0   ? 8
                                                      : size % 4 == 0 ? 4
                                                      : size % 2 == 0 ? 2
                                                                      : 1;
            at = (at + align - 1) / align * align;
            if (at + size > bytes.size())
                return refuse(hipErrorNotSupported, "%zu bytes of arguments for %s, wanted at least %zu",
                              bytes.size(), launch.kernel.c_str(), at + size);
            unpacked.push_back(bytes.data() + at);
            at += size;
        }
        arguments = unpacked.data();
    }
    const int outcome = call(kernel, launch, arguments);
    if (outcome == 1) return refuse(hipErrorNotSupported, "%s refused its launch", launch.kernel.c_str());
    if (outcome == 2) {
        log(0, "memory access fault in %s at %s", launch.kernel.c_str(), describe(t_fault_address).c_str());
        set_fault(hipErrorIllegalAddress);
    } else if (const void* damaged = damaged_allocation()) {
        log(0, "%s wrote outside %s", launch.kernel.c_str(), describe(damaged).c_str());
        set_fault(hipErrorIllegalAddress);
    }
    return fault();
}

}  // namespace standin
