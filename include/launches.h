/* A prepared list of kernel launches, made again with operands at other addresses: no Python between the call and the driver.
 *
 * C and C++. It links to no driver: whoever prepares a list looks the driver's functions up and hands them over in hgg_driver.
 */
#ifndef HGG_LAUNCHES_H
#define HGG_LAUNCHES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* CUDA's driver, or HIP's runtime, whose device takes the place of a context. */
typedef struct hgg_driver {
    void *context;         /* CUDA: the context that launches need */
    void *get_current;     /* cuCtxGetCurrent or hipGetDevice */
    void *set_current;     /* cuCtxSetCurrent or hipSetDevice */
    void *is_capturing;    /* cuStreamIsCapturing or hipStreamIsCapturing */
    void *replace_address; /* CUDA: cuTensorMapReplaceAddress, NULL where it has none */
    void *launch;          /* cuLaunchKernelEx or hipModuleLaunchKernel */
    int32_t device;        /* HIP: the device that launches need */
    int32_t is_hip;
} hgg_driver;

/* Where an operand's address goes: 8 bytes of a parameter, or a tensor map. */
typedef struct hgg_move {
    void *cell;
    uint64_t held;   /* the address that is there; 0 for none */
    uint64_t offset; /* bytes past the operand's address */
    uint32_t slot;   /* of the operand in the list of addresses */
    uint32_t is_tensor_map;
} hgg_move;

/* Plain; CUDA's programmatic launch, which may start before the launch in front of it has ended; or a library's own function
 * (uint64_t, uint64_t, uint64_t stream) -> status, with two parameters and no grid. */
enum { HGG_PLAIN = 0, HGG_PROGRAMMATIC = 1, HGG_LIBRARY_CALL = 2 };

typedef struct hgg_launch {
    void *function;
    void **parameters;
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    uint32_t kind;
} hgg_launch;

typedef struct hgg_launches {
    const hgg_driver *driver;
    void *stream; /* of those who do not name another */
    hgg_move *moves;
    const hgg_launch *launches;
    uint32_t move_count, launch_count;
} hgg_launches;

enum { HGG_LAUNCHED = 0, HGG_CAPTURING = 1 };
/* any other result is (status * 32 + the launch's number) * 8 plus the call that failed */
enum { HGG_GET_CURRENT = 2, HGG_SET_CURRENT = 3, HGG_REPLACE_ADDRESS = 4, HGG_LAUNCH = 5 };

/* CUlaunchAttribute and CUlaunchConfig of cuda.h, which keeps their layout for good */
typedef struct hgg_cuda_attribute {
    int32_t id, padding;
    union { int32_t allowed; char bytes[64]; } value;
} hgg_cuda_attribute;

typedef struct hgg_cuda_config {
    uint32_t grid[3], block[3], shared_bytes;
    void *stream;
    hgg_cuda_attribute *attributes;
    uint32_t attribute_count;
} hgg_cuda_config;

#define HGG_CU_PROGRAMMATIC_STREAM_SERIALIZATION 6

static inline int64_t hgg_failed(int status, int call, uint32_t number) { return ((int64_t)status * 32 + number) * 8 + call; }

static inline int hgg_launch_one(const hgg_driver *driver, void *stream, const hgg_launch *one) {
    if (one->kind == HGG_LIBRARY_CALL) {
        typedef int (*library_function)(uint64_t, uint64_t, uint64_t);
        const uint64_t first = *(const uint64_t *)one->parameters[0], second = *(const uint64_t *)one->parameters[1];
        return ((library_function)one->function)(first, second, (uint64_t)(uintptr_t)stream);
    }
    if (driver->is_hip) {
        typedef int (*launch_function)(void *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void *, void **, void **);
        return ((launch_function)driver->launch)(one->function, one->grid[0], one->grid[1], one->grid[2], one->block[0], one->block[1],
                                                 one->block[2], one->shared_bytes, stream, one->parameters, NULL);
    }
    typedef int (*launch_function)(const hgg_cuda_config *, void *, void **, void **);
    hgg_cuda_attribute attribute;
    hgg_cuda_config config;
    memset(&config, 0, sizeof config);
    memcpy(config.grid, one->grid, sizeof config.grid);
    memcpy(config.block, one->block, sizeof config.block);
    config.shared_bytes = one->shared_bytes;
    config.stream = stream;
    if (one->kind == HGG_PROGRAMMATIC) {
        memset(&attribute, 0, sizeof attribute);
        attribute.id = HGG_CU_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.allowed = 1;
        config.attributes = &attribute;
        config.attribute_count = 1;
    }
    return ((launch_function)driver->launch)(&config, one->function, one->parameters, NULL);
}

/* Points the launches at these addresses. */
static inline int64_t hgg_move_all(const hgg_launches *list, const uint64_t *addresses) {
    for (uint32_t i = 0; i < list->move_count; ++i) {
        hgg_move *move = &list->moves[i];
        const uint64_t address = addresses[move->slot] + move->offset;
        if (address == move->held) continue;
        if (move->is_tensor_map) {
            typedef int (*replace_function)(void *, void *);
            move->held = 0;
            const int status = ((replace_function)list->driver->replace_address)(move->cell, (void *)(uintptr_t)address);
            if (status) return hgg_failed(status, HGG_REPLACE_ADDRESS, 0);
        } else {
            memcpy(move->cell, &address, sizeof address);
        }
        move->held = address;
    }
    return HGG_LAUNCHED;
}

/* Makes the launches on a stream, with the list's device current. Where only plain calls are wanted and the stream is under graph capture,
 * nothing is done, and the caller, who has memory of its own for each capture, goes another way. */
static inline int64_t hgg_replay(const hgg_launches *list, void *stream, const uint64_t *addresses, int only_plain) {
    const hgg_driver *driver = list->driver;
    typedef int (*capturing_function)(void *, int *);
    int status, capturing = 0, device = driver->device, changed;
    void *context = NULL;
    int64_t result;
    if (driver->is_hip) {
        status = ((int (*)(int *))driver->get_current)(&device);
        changed = device != driver->device;
    } else {
        status = ((int (*)(void **))driver->get_current)(&context);
        changed = context != driver->context;
    }
    if (status) return hgg_failed(status, HGG_GET_CURRENT, 0);
    if (changed) {
        status = driver->is_hip ? ((int (*)(int))driver->set_current)(driver->device) : ((int (*)(void *))driver->set_current)(driver->context);
        if (status) return hgg_failed(status, HGG_SET_CURRENT, 0);
    }
    status = only_plain ? ((capturing_function)driver->is_capturing)(stream, &capturing) : 0;
    result = status || capturing ? HGG_CAPTURING : hgg_move_all(list, addresses);
    for (uint32_t i = 0; i < list->launch_count && result == HGG_LAUNCHED; ++i) {
        status = hgg_launch_one(driver, stream, &list->launches[i]);
        if (status) result = hgg_failed(status, HGG_LAUNCH, i);
    }
    if (changed) {
        status = driver->is_hip ? ((int (*)(int))driver->set_current)(device) : ((int (*)(void *))driver->set_current)(context);
        if (status && result == HGG_LAUNCHED) result = hgg_failed(status, HGG_SET_CURRENT, 0);
    }
    return result;
}

#endif
