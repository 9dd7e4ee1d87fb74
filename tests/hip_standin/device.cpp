// The device that is reported, errors, and the log.
#include "standin.hpp"

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace standin {
namespace {

thread_local hipError_t t_last = hipSuccess;
hipError_t g_fault = hipSuccess;
constexpr int kRuntimeVersion = 60443484;  // HIP 6.4.43484, as Debian's

std::map<std::string, long>& calls() {
    static auto* const all = new std::map<std::string, long>;
    return *all;
}

struct Report {
    ~Report() {
        if (log_level() < 1) return;
        for (const auto& [name, count] : calls()) log(1, "%8ld x %s", count, name.c_str());
    }
} g_report;

// "gfx90a:sramecc+:xnack-" unless STANDIN_ARCH says otherwise.
const char* architecture() {
    const char* wanted = getenv("STANDIN_ARCH");
    return wanted ? wanted : "gfx90a:sramecc+:xnack-";
}

int compute_units() {
    const char* wanted = getenv("STANDIN_CUS");
    return wanted ? atoi(wanted) : 104;
}

void properties(hipDeviceProp_tR0600& p) {
    memset(&p, 0, sizeof p);
    snprintf(p.name, sizeof p.name, "stand-in (host memory, no GPU)");
    snprintf(p.gcnArchName, sizeof p.gcnArchName, "%s", architecture());
    p.multiProcessorCount = compute_units();
    p.warpSize = 64;
    p.major = 9;
    p.totalGlobalMem = size_t(64) << 30;
    p.sharedMemPerBlock = p.sharedMemPerBlockOptin = 65536;
    p.maxSharedMemoryPerMultiProcessor = 65536;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 2048;
    for (int i = 0; i < 3; i++) p.maxThreadsDim[i] = 1024;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65536;
    p.clockRate = 1700000;
    p.memoryClockRate = 1600000;
    p.memoryBusWidth = 4096;
    p.l2CacheSize = 8 << 20;
    p.isLargeBar = 1;
    p.unifiedAddressing = 1;
    p.concurrentKernels = 1;
    p.canMapHostMemory = 1;
    p.asicRevision = 1;
    p.memoryPoolsSupported = 1;
    p.pciBusID = 1;
}

bool attribute(int which, int& value) {
    switch (which) {
    case hipDeviceAttributeMultiprocessorCount:
    case hipDeviceAttributePhysicalMultiProcessorCount: value = compute_units(); return true;
    case hipDeviceAttributeWarpSize: value = 64; return true;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeSharedMemPerBlockOptin:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor: value = 65536; return true;
    case hipDeviceAttributeMaxThreadsPerBlock:
    case hipDeviceAttributeMaxBlockDimX:
    case hipDeviceAttributeMaxBlockDimY:
    case hipDeviceAttributeMaxBlockDimZ: value = 1024; return true;
    case hipDeviceAttributeMaxGridDimX: value = 0x7fffffff; return true;
    case hipDeviceAttributeMaxGridDimY:
    case hipDeviceAttributeMaxGridDimZ: value = 65536; return true;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor: value = 2048; return true;
    case hipDeviceAttributeMaxRegistersPerBlock: value = 65536; return true;
    case hipDeviceAttributeL2CacheSize: value = 8 << 20; return true;
    case hipDeviceAttributeComputeCapabilityMajor: value = 9; return true;
    case hipDeviceAttributeComputeCapabilityMinor: value = 0; return true;
    case hipDeviceAttributeClockRate: value = 1700000; return true;
    case hipDeviceAttributeMemoryClockRate: value = 1600000; return true;
    case hipDeviceAttributeMemoryBusWidth: value = 4096; return true;
    case hipDeviceAttributeAsicRevision:
    case hipDeviceAttributeMemoryPoolsSupported:
    case hipDeviceAttributeUnifiedAddressing:
    case hipDeviceAttributeCanMapHostMemory:
    case hipDeviceAttributeConcurrentKernels: value = 1; return true;
    case hipDeviceAttributeIntegrated:
    case hipDeviceAttributeManagedMemory:
    case hipDeviceAttributeCooperativeLaunch:
    case hipDeviceAttributePciDeviceId:
    case hipDeviceAttributePciDomainID: value = 0; return true;
    case hipDeviceAttributePciBusId: value = 1; return true;
    default: return false;
    }
}

}  // namespace

std::recursive_mutex& lock() {
    static auto* const mutex = new std::recursive_mutex;
    return *mutex;
}

int log_level() {
    static const int level = getenv("STANDIN_LOG") ? atoi(getenv("STANDIN_LOG")) : 0;
    return level;
}

void log(int level, const char* format, ...) {
    if (log_level() < level) return;
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "standin: %s\n", text);
}

hipError_t done(hipError_t error) {
    if (g_fault != hipSuccess) error = g_fault;
    if (error != hipSuccess) t_last = error;
    return error;
}

void set_fault(hipError_t error) { g_fault = error; }
hipError_t fault() { return g_fault; }
void count_call(const char* name) {
    if (log_level()) calls()[name]++;
}

hipError_t refuse(hipError_t error, const char* format, ...) {
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log(0, "refused: %s", text);
    return error;
}

double seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace standin

using namespace standin;

#define STANDIN_DEVICE(device) \
    if ((device) != 0) return done(hipErrorInvalidDevice)

extern "C" {

hipError_t hipInit(unsigned) {
    STANDIN_CALL();
    return done(hipSuccess);
}

hipError_t hipGetDeviceCount(int* count) {
    STANDIN_CALL();
    *count = 1;
    return done(hipSuccess);
}

hipError_t hipGetDevice(int* device) {
    STANDIN_CALL();
    *device = 0;
    return done(hipSuccess);
}

hipError_t hipSetDevice(int device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    return done(hipSuccess);
}

hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
    STANDIN_CALL();
    STANDIN_DEVICE(ordinal);
    *device = 0;
    return done(hipSuccess);
}

hipError_t hipDeviceGetName(char* name, int length, hipDevice_t device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    snprintf(name, size_t(length), "stand-in (host memory, no GPU)");
    return done(hipSuccess);
}

hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    *bytes = size_t(64) << 30;
    return done(hipSuccess);
}

hipError_t hipDeviceGetPCIBusId(char* id, int length, int device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    snprintf(id, size_t(length), "0000:01:00.0");
    return done(hipSuccess);
}

hipError_t hipDeviceComputeCapability(int* major, int* minor, hipDevice_t device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    *major = 9;
    *minor = 0;
    return done(hipSuccess);
}

hipError_t hipDeviceCanAccessPeer(int* can, int, int) {
    STANDIN_CALL();
    *can = 0;
    return done(hipSuccess);
}

hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* p, int device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    properties(*p);
    return done(hipSuccess);
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t which, int device) {
    STANDIN_CALL();
    STANDIN_DEVICE(device);
    if (attribute(int(which), *value)) return done(hipSuccess);
    return done(refuse(hipErrorInvalidValue, "hipDeviceGetAttribute %d", int(which)));
}

hipError_t hipRuntimeGetVersion(int* version) {
    STANDIN_CALL();
    *version = kRuntimeVersion;
    return done(hipSuccess);
}

hipError_t hipDriverGetVersion(int* version) {
    STANDIN_CALL();
    *version = kRuntimeVersion;
    return done(hipSuccess);
}

hipError_t hipDeviceSynchronize(void) {
    STANDIN_CALL();
    return done(hipSuccess);
}

hipError_t hipGetLastError(void) {
    STANDIN_CALL();
    const hipError_t error = t_last;
    t_last = hipSuccess;
    return error;
}

hipError_t hipPeekAtLastError(void) {
    STANDIN_CALL();
    return t_last;
}

const char* hipGetErrorName(hipError_t error) {
    switch (error) {
    case hipSuccess: return "hipSuccess";
    case hipErrorInvalidValue: return "hipErrorInvalidValue";
    case hipErrorOutOfMemory: return "hipErrorOutOfMemory";
    case hipErrorInvalidDevice: return "hipErrorInvalidDevice";
    case hipErrorInvalidHandle: return "hipErrorInvalidHandle";
    case hipErrorNotFound: return "hipErrorNotFound";
    case hipErrorFileNotFound: return "hipErrorFileNotFound";
    case hipErrorNotSupported: return "hipErrorNotSupported";
    case hipErrorIllegalAddress: return "hipErrorIllegalAddress";
    case hipErrorNotReady: return "hipErrorNotReady";
    default: return "hipErrorUnknown";
    }
}

const char* hipGetErrorString(hipError_t error) { return hipGetErrorName(error); }

hipError_t hipDrvGetErrorName(hipError_t error, const char** name) {
    *name = hipGetErrorName(error);
    return hipSuccess;
}

hipError_t hipDrvGetErrorString(hipError_t error, const char** text) {
    *text = hipGetErrorString(error);
    return hipSuccess;
}

}  // extern "C"
