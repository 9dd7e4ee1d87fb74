// Streams and events. All work is done when a call returns, so a stream is a name and an event is a time.
#include "standin.hpp"

#include <map>
#include <set>

namespace standin {
namespace {

struct Stream {
    unsigned flags;
    int priority;
};
struct Event {
    unsigned flags;
    bool recorded;
    double time;
};

std::map<hipStream_t, Stream>& streams() {
    static auto* const all = new std::map<hipStream_t, Stream>;
    return *all;
}
std::map<hipEvent_t, Event>& events() {
    static auto* const all = new std::map<hipEvent_t, Event>;
    return *all;
}

// Numbers that are used once, so that a handle is known for dead; odd, so that nobody takes them for
// addresses.
template <class T>
T fresh_handle() {
    static uintptr_t next = 0x5ca1ab1e0001;
    next += 16;
    return reinterpret_cast<T>(next);
}

hipError_t create(hipStream_t* stream, unsigned flags, int priority) {
    if (!stream) return hipErrorInvalidValue;
    *stream = fresh_handle<hipStream_t>();
    streams()[*stream] = {flags, priority};
    return hipSuccess;
}

}  // namespace

bool valid_stream(hipStream_t stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    return number <= 2 || streams().count(stream) != 0;  // 0 and 1 the null stream, 2 the thread's own
}

}  // namespace standin

using namespace standin;

#define STANDIN_STREAM(stream) \
    if (!valid_stream(stream)) return done(hipErrorInvalidHandle)

extern "C" {

hipError_t hipStreamCreate(hipStream_t* stream) {
    STANDIN_CALL();
    return done(create(stream, hipStreamDefault, 0));
}

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
    STANDIN_CALL();
    return done(create(stream, flags, 0));
}

hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int priority) {
    STANDIN_CALL();
    return done(create(stream, flags, priority));
}

hipError_t hipStreamDestroy(hipStream_t stream) {
    STANDIN_CALL();
    return done(streams().erase(stream) ? hipSuccess : hipErrorInvalidHandle);
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    return done(hipSuccess);
}

hipError_t hipStreamQuery(hipStream_t stream) { return hipStreamSynchronize(stream); }

hipError_t hipStreamGetFlags(hipStream_t stream, unsigned* flags) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    const auto it = streams().find(stream);
    *flags = it == streams().end() ? 0 : it->second.flags;
    return done(hipSuccess);
}

hipError_t hipStreamGetPriority(hipStream_t stream, int* priority) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    const auto it = streams().find(stream);
    *priority = it == streams().end() ? 0 : it->second.priority;
    return done(hipSuccess);
}

hipError_t hipStreamGetDevice(hipStream_t stream, hipDevice_t* device) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    *device = 0;
    return done(hipSuccess);
}

hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
    STANDIN_CALL();
    if (least) *least = 0;
    if (greatest) *greatest = -1;
    return done(hipSuccess);
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    return done(events().count(event) ? hipSuccess : hipErrorInvalidHandle);
}

// Nothing is ever captured here.
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    *status = hipStreamCaptureStatusNone;
    return done(hipSuccess);
}

hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                   unsigned long long* id) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    *status = hipStreamCaptureStatusNone;
    if (id) *id = 0;
    return done(hipSuccess);
}

hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus* status,
                                      unsigned long long* id, hipGraph_t* graph, const hipGraphNode_t** nodes,
                                      size_t* count) {
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (count) *count = 0;
    return hipStreamGetCaptureInfo(stream, status, id);
}

hipError_t hipStreamBeginCapture(hipStream_t, hipStreamCaptureMode) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipStreamBeginCapture: no graphs here"));
}

hipError_t hipStreamEndCapture(hipStream_t, hipGraph_t*) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipStreamEndCapture: no graphs here"));
}

hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t*, hipGraph_t, unsigned long long) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipGraphInstantiateWithFlags: no graphs here"));
}

hipError_t hipGraphLaunch(hipGraphExec_t, hipStream_t) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipGraphLaunch: no graphs here"));
}

hipError_t hipGraphDestroy(hipGraph_t) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipGraphDestroy: no graphs here"));
}

hipError_t hipGraphExecDestroy(hipGraphExec_t) {
    STANDIN_CALL();
    return done(refuse(hipErrorNotSupported, "hipGraphExecDestroy: no graphs here"));
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
    STANDIN_CALL();
    *mode = hipStreamCaptureModeGlobal;
    return done(hipSuccess);
}

hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
    STANDIN_CALL();
    if (!event) return done(hipErrorInvalidValue);
    *event = fresh_handle<hipEvent_t>();
    events()[*event] = {flags, false, 0};
    return done(hipSuccess);
}

hipError_t hipEventCreate(hipEvent_t* event) { return hipEventCreateWithFlags(event, 0); }

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    STANDIN_CALL();
    STANDIN_STREAM(stream);
    const auto it = events().find(event);
    if (it == events().end()) return done(hipErrorInvalidHandle);
    it->second.recorded = true;
    it->second.time = seconds();
    return done(hipSuccess);
}

hipError_t hipEventSynchronize(hipEvent_t event) {
    STANDIN_CALL();
    return done(events().count(event) ? hipSuccess : hipErrorInvalidHandle);
}

hipError_t hipEventQuery(hipEvent_t event) { return hipEventSynchronize(event); }

hipError_t hipEventElapsedTime(float* ms, hipEvent_t start, hipEvent_t stop) {
    STANDIN_CALL();
    const auto a = events().find(start), b = events().find(stop);
    if (a == events().end() || b == events().end() || !a->second.recorded || !b->second.recorded)
        return done(hipErrorInvalidHandle);
    if ((a->second.flags | b->second.flags) & hipEventDisableTiming) return done(hipErrorInvalidHandle);
    *ms = float((b->second.time - a->second.time) * 1000);
    return done(hipSuccess);
}

hipError_t hipEventDestroy(hipEvent_t event) {
    STANDIN_CALL();
    return done(events().erase(event) ? hipSuccess : hipErrorInvalidHandle);
}

}  // extern "C"
