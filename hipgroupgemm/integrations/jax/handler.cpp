// The XLA FFI handler: makes a recipe's launches on XLA's stream with the addresses of XLA's buffers.
//
// A recipe is a list of launches (launches.h) that Python has prepared for one problem on one device. It stays where it is as long as the
// process lives, as any compiled program may run it. Nothing here calls Python, allocates device memory or waits for the device, so XLA may
// record it in a command buffer.
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "launches.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace hgg {

struct Recipe {
    const hgg_launches *list;
    uint64_t slots;
    std::mutex mutex;  // its parameters are written in place
};

constexpr uint64_t kMostSlots = 16;
constexpr uint64_t kAlignment = 16;  // what the recipes are made for

static std::atomic<uint64_t> calls{0};
static std::mutex table_mutex;
static std::map<std::pair<int64_t, int32_t>, std::unique_ptr<Recipe>> table;

static Recipe *find(int64_t recipe, int32_t device) {
    const std::lock_guard<std::mutex> lock(table_mutex);
    const auto found = table.find({recipe, device});
    return found == table.end() ? nullptr : found->second.get();
}

static std::string failure(int64_t result) {
    static const char *const calls[] = {"", "", "asking for the current device", "making the device current", "pointing a tensor map at an operand"};
    const int64_t call = result & 7, number = result / 8 % 32, status = result / 256;
    const std::string what = call == HGG_LAUNCH ? "launch " + std::to_string(number) : calls[call];
    return "hipgroupgemm: " + what + " failed with the driver's status " + std::to_string(status);
}

// The operands' addresses, then those of the results; the last result is the scratch.
static ffi::Error run(void *stream, int32_t device, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t number) {
    Recipe *const recipe = find(number, device);
    if (recipe == nullptr) {
        return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "hipgroupgemm: device " + std::to_string(device) + " has no recipe " +
                              std::to_string(number) + "; a program runs in the process that has lowered it");
    }
    const uint64_t count = arguments.size() + results.size();
    uint64_t addresses[kMostSlots];
    if (count != recipe->slots) return ffi::Error(ffi::ErrorCode::kInternal, "hipgroupgemm: not the recipe's buffers");
    for (uint64_t i = 0; i < count; ++i) {
        void *address = nullptr;
        if (i < arguments.size()) {
            const auto buffer = arguments.get<ffi::AnyBuffer>(i);
            if (!buffer.has_value()) return buffer.error();
            address = buffer->untyped_data();
        } else {
            auto buffer = results.get<ffi::AnyBuffer>(i - arguments.size());
            if (!buffer.has_value()) return buffer.error();
            address = (*buffer)->untyped_data();
        }
        addresses[i] = reinterpret_cast<uint64_t>(address);
        if (addresses[i] % kAlignment) {
            return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                              "hipgroupgemm: buffer " + std::to_string(i) + " is not aligned to 16 bytes, as XLA's are");
        }
    }
    for (uint64_t i = 0; i < count; ++i) {
        if (addresses[i] == 0) addresses[i] = addresses[count - 1];  // no elements, so nothing is read there
    }
    ++calls;
    const std::lock_guard<std::mutex> lock(recipe->mutex);
    const int64_t result = hgg_replay(recipe->list, stream, addresses, 0);
    return result == HGG_LAUNCHED ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, failure(result));
}

}  // namespace hgg

// Keeps a recipe for a device. False where there is one already: it stays, since a program may be running it.
extern "C" __attribute__((visibility("default"))) int32_t hgg_add_recipe(int64_t number, int32_t device, const hgg_launches *list,
                                                                         uint64_t slots) {
    if (slots > hgg::kMostSlots || slots == 0) return -1;
    auto recipe = std::make_unique<hgg::Recipe>();
    recipe->list = list;
    recipe->slots = slots;
    const std::lock_guard<std::mutex> lock(hgg::table_mutex);
    return hgg::table.emplace(std::make_pair(number, device), std::move(recipe)).second;
}

// How often the handler has run; what a command buffer replays is not counted.
extern "C" __attribute__((visibility("default"))) uint64_t hgg_call_count() { return hgg::calls; }

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error *hgg_ragged_dot(XLA_FFI_CallFrame *frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hgg_ragged_dot, hgg::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("recipe"),
                              {ffi::Traits::kCmdBufferCompatible});

// The same for recipes with memory of their own, whose calls must not be reordered: never in a command buffer.
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error *hgg_ragged_dot_ordered(XLA_FFI_CallFrame *frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(hgg_ragged_dot_ordered, hgg::run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void *>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("recipe"));
