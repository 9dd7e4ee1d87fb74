// Which numbers name which objects, and which workspaces are in use.
#include "hgg_common.hpp"

#include <cinttypes>

namespace hgg {
namespace {

enum Kind : uint32_t { kHandle = 0, kInstance = 1 };
const char* kind_name(uint32_t kind) { return kind == kHandle ? "handle" : "instance"; }

// id = generation << 32 | slot << 1 | kind. A slot's generation counts the objects that were in it, so a
// number whose object is gone is told from one that never was.
struct Slot {
    uint32_t generation = 0;
    bool used = false;
    Kind kind = kHandle;
    std::shared_ptr<Handle> handle;
    std::shared_ptr<Instance> instance;
    hgg_handle owner = 0;  // an instance's
};

struct Workspace {
    int device;
    uint64_t begin;
    uint64_t end;
    hgg_instance owner;
};

struct Registry {
    std::mutex mutex;
    std::vector<Slot> slots;
    std::vector<uint32_t> free[2];  // by kind, since the kind is part of the number
    std::vector<Workspace> workspaces;
};

// Leaked: at process exit other threads may still call in, and the HIP runtime may be gone before us.
Registry& registry() {
    static Registry* const instance = new Registry;
    return *instance;
}

uint64_t make_id(uint32_t generation, uint32_t slot, Kind kind) {
    return uint64_t(generation) << 32 | uint64_t(slot) << 1 | kind;
}

uint64_t take_slot(Registry& r, Kind kind, uint32_t& slot) {
    if (!r.free[kind].empty()) {
        slot = r.free[kind].back();
        r.free[kind].pop_back();
    } else {
        slot = uint32_t(r.slots.size());
        r.slots.emplace_back();
        // Room for giving the slot back, so that releasing an object cannot run out of memory.
        r.free[kind].reserve(r.slots.size());
    }
    Slot& s = r.slots[slot];
    s.kind = kind;
    s.used = true;
    s.generation++;
    return make_id(s.generation, slot, kind);
}

void give_back(Registry& r, uint32_t slot) {
    Slot& s = r.slots[slot];
    s.used = false;
    s.owner = 0;
    s.handle.reset();
    s.instance.reset();
    // A slot whose generations are used up is not handed out again.
    if (s.generation != UINT32_MAX) r.free[s.kind].push_back(slot);
}

// The slot of a live object, or a status that says why there is none.
hgg_status find_slot(Registry& r, const char* call, uint64_t id, Kind kind, uint32_t& slot) {
    const uint32_t low = uint32_t(id), generation = uint32_t(id >> 32);
    slot = low >> 1;
    if (id == 0)
        return fail(HGG_INVALID_ID, -1, "%s: the %s is 0, which is never valid", call, kind_name(kind));
    if (slot >= r.slots.size() || r.slots[slot].kind != (low & 1) || generation == 0
        || generation > r.slots[slot].generation)
        return fail(HGG_INVALID_ID, -1, "%s: 0x%" PRIx64 " was never handed out", call, id);
    if ((low & 1) != uint32_t(kind))
        return fail(HGG_INVALID_ID, -1, "%s: 0x%" PRIx64 " is %s %s, wanted %s", call, id,
                    kind == kHandle ? "an" : "a", kind_name(low & 1),
                    kind == kHandle ? "a handle" : "an instance");
    if (generation != r.slots[slot].generation || !r.slots[slot].used)
        return fail(HGG_CLOSED, -1, "%s: the %s 0x%" PRIx64 " was closed%s", call, kind_name(kind), id,
                    kind == kInstance ? ", itself or with its handle" : "");
    return HGG_OK;
}

}  // namespace

hgg_handle register_handle(std::shared_ptr<Handle> handle) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    const hgg_handle id = take_slot(r, kHandle, slot);
    r.slots[slot].handle = std::move(handle);
    return id;
}

// Zero if the handle was closed in the meantime.
hgg_instance register_instance(std::shared_ptr<Instance> instance, hgg_handle handle) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    if (find_slot(r, "hgg_instance_create", handle, kHandle, slot) != HGG_OK) return 0;
    instance->handle_id = handle;
    instance->id = take_slot(r, kInstance, slot);
    r.slots[slot].owner = handle;
    r.slots[slot].instance = std::move(instance);
    return r.slots[slot].instance->id;
}

hgg_status find_handle(const char* call, hgg_handle id, std::shared_ptr<Handle>& found) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    HGG_CHECK(find_slot(r, call, id, kHandle, slot));
    found = r.slots[slot].handle;
    return HGG_OK;
}

hgg_status find_instance(const char* call, hgg_instance id, std::shared_ptr<Instance>& found) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    HGG_CHECK(find_slot(r, call, id, kInstance, slot));
    found = r.slots[slot].instance;
    return HGG_OK;
}

hgg_status remove_handle(const char* call, hgg_handle id, std::shared_ptr<Handle>& handle,
                         std::vector<std::shared_ptr<Instance>>& instances) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    HGG_CHECK(find_slot(r, call, id, kHandle, slot));
    for (uint32_t i = 0; i < r.slots.size(); i++)
        if (r.slots[i].used && r.slots[i].kind == kInstance && r.slots[i].owner == id)
            instances.push_back(r.slots[i].instance);
    for (uint32_t i = 0; i < r.slots.size(); i++)
        if (r.slots[i].used && r.slots[i].kind == kInstance && r.slots[i].owner == id) give_back(r, i);
    handle = std::move(r.slots[slot].handle);
    give_back(r, slot);
    return HGG_OK;
}

hgg_status remove_instance(const char* call, hgg_instance id, std::shared_ptr<Instance>& instance) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t slot = 0;
    HGG_CHECK(find_slot(r, call, id, kInstance, slot));
    instance = std::move(r.slots[slot].instance);
    give_back(r, slot);
    return HGG_OK;
}

uint32_t count_instances(hgg_handle id) {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    uint32_t count = 0;
    for (const Slot& s : r.slots) count += s.used && s.kind == kInstance && s.owner == id;
    return count;
}

hgg_status claim_workspace(const char* call, int device, uint64_t address, uint64_t size, hgg_instance id) {
    if (size == 0) return HGG_OK;
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    for (const Workspace& w : r.workspaces)
        if (w.device == device && w.owner != id && address < w.end && w.begin < address + size)
            return fail(HGG_WORKSPACE, -1,
                        "%s: the workspace 0x%" PRIx64 " of %" PRIu64 " bytes overlaps the one that instance "
                        "0x%" PRIx64 " uses (0x%" PRIx64 ", %" PRIu64
                        " bytes): two instances in one workspace give wrong results. Give each its own, or "
                        "hgg_release the other",
                        call, address, size, w.owner, w.begin, w.end - w.begin);
    r.workspaces.push_back({device, address, address + size, id});
    return HGG_OK;
}

void free_workspace(hgg_instance id) noexcept {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    for (size_t i = r.workspaces.size(); i-- > 0;)
        if (r.workspaces[i].owner == id) {
            r.workspaces[i] = r.workspaces.back();
            r.workspaces.pop_back();
        }
}

}  // namespace hgg
