/* The C ABI over hipBLASLt's grouped GEMM (hipblaslt_ext::GroupedGemm), run from records in device memory.
 *
 * Everything is column-major and in hipBLASLt's own terms: problem g is D = alpha * op(A) op(B) + beta * C,
 * op(A) is m x k, op(B) is k x n, C and D are m x n, a leading dimension counts elements.
 *
 * The order of calls: hgg_handle_create, hgg_instance_create, hgg_set_problem, hgg_algorithms_*,
 * hgg_initialize, hgg_run (as often as you like), hgg_instance_destroy, hgg_handle_destroy. Any other order,
 * any id, index, null pointer or number, from any thread, is answered with a status and a text. No exception
 * leaves a function, and no function reads or writes device memory except hgg_initialize and hgg_run.
 *
 * Handles and instances are numbers, not pointers: the low half names a slot, the high half what has been in
 * it, so that a number is recognised after the object is gone. Zero is never valid. Every function that
 * takes an id first checks it, and a destroyed object lives on until the last call that is inside it returns.
 *
 * Device addresses and streams are passed as 64-bit numbers. The current device is put back before return.
 */
#ifndef HIPGROUPGEMM_H
#define HIPGROUPGEMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* What stands between the two marks is C without the preprocessor: cffi's cdef() takes it as it is. */
/* cffi: begin */

enum hgg_constants {
    HGG_ABI_VERSION = 1,
    HGG_RECORD_SIZE = 196,     /* bytes of one device record, and the distance between two */
    HGG_NAME_SIZE = 2048,      /* bytes for a solution's or kernel's name, the final zero included */
    HGG_REVISION_SIZE = 128,
    HGG_ALIGNMENT = 16         /* bytes; of workspaces and of record arrays */
};

enum hgg_status_code {
    HGG_OK = 0,
    HGG_INVALID_ARGUMENT = 1,  /* a null pointer, a count, a size or a code that no call takes */
    HGG_INVALID_ID = 2,        /* the number was never handed out, or names the other kind of object */
    HGG_CLOSED = 3,            /* the object, or the handle it belongs to, was destroyed */
    HGG_WRONG_ORDER = 4,       /* no problem set, or not initialised since the last change */
    HGG_UNSUPPORTED = 5,       /* hipBLASLt has no kernels for it, or the algorithm refuses the problem */
    HGG_NOT_FOUND = 6,         /* no algorithm with this index, or not with this name */
    HGG_WORKSPACE = 7,         /* null, short, misaligned, not on the device, or another instance's */
    HGG_WRONG_STREAM = 8,      /* not the stream that the handle was created for */
    HGG_UNVERIFIED = 9,        /* a split or stream-K algorithm with device records; see HGG_ALLOW_* */
    HGG_VERSION_MISMATCH = 10, /* the loaded hipBLASLt is not the one this was built for */
    HGG_FORKED = 11,           /* called in a child process of fork() */
    HGG_LIBRARY_ERROR = 12,    /* hipBLASLt returned an error: hgg_last_library_status() */
    HGG_HIP_ERROR = 13,        /* the HIP runtime returned an error: hgg_last_library_status() */
    HGG_OUT_OF_MEMORY = 14,    /* host memory */
    HGG_INTERNAL = 15          /* an exception of another kind; the text has its message */
};

/* Element types; the numbers are hipDataType's. */
enum hgg_data_type {
    HGG_R_32F = 0,
    HGG_R_64F = 1,
    HGG_R_16F = 2,
    HGG_R_16BF = 14,
    HGG_R_8F_E4M3 = 28,
    HGG_R_8F_E5M2 = 29,
    HGG_R_8F_E4M3_FNUZ = 1000,
    HGG_R_8F_E5M2_FNUZ = 1001
};

/* Compute types; alpha and beta have this type too (float32 for all but HGG_COMPUTE_64F). */
enum hgg_compute_type {
    HGG_COMPUTE_32F = 0,
    HGG_COMPUTE_32F_FAST_TF32 = 1,
    HGG_COMPUTE_32F_FAST_16F = 2,
    HGG_COMPUTE_32F_FAST_16BF = 3,
    HGG_COMPUTE_64F = 4
};

enum hgg_epilogue {
    HGG_EPILOGUE_DEFAULT = 0,
    HGG_EPILOGUE_BIAS = 1      /* a vector of m elements, added to every column of D */
};

/* Which of the sizes will differ on the device from those that hgg_set_problem is given. */
enum hgg_ragged {
    HGG_PROBLEM_RAGGED_N = 0,
    HGG_PROBLEM_RAGGED_M = 1,
    HGG_PROBLEM_RAGGED_K = 2,
    HGG_PROBLEM_FIXED = 3      /* none: a record has its problem's sizes, or zero extent */
};

/* What an algorithm is, read from its name. */
enum hgg_algorithm_flag {
    HGG_ALGORITHM_SPLIT = 1,         /* global split-U above 1, or chosen at run time */
    HGG_ALGORITHM_STREAM_K = 2,
    HGG_ALGORITHM_EXTRA_KERNEL = 4   /* seen at hgg_initialize: one run launches more than one kernel */
};

/* For hgg_initialize. Global split-U runs a second kernel that gets the user's records where it expects
 * its own, and stream-K divides the work by the host's sizes: neither may be used with device records
 * unless the caller has verified the algorithm, and says so with these. */
enum hgg_allow_flag {
    HGG_ALLOW_SPLIT = 1,
    HGG_ALLOW_STREAM_K = 2
};

typedef int32_t hgg_status;
typedef uint64_t hgg_handle;
typedef uint64_t hgg_instance;

typedef struct hgg_version {
    int32_t major;
    int32_t minor;
    int32_t patch;
} hgg_version;

typedef struct hgg_handle_info {
    int32_t device;
    uint64_t stream;
    hgg_version built_for;                 /* hipBLASLt's headers at compile time */
    hgg_version loaded;                    /* the library in this process */
    char revision[HGG_REVISION_SIZE];      /* its git revision; empty in some distributions */
    uint32_t instances;                    /* live instances on this handle */
} hgg_handle_info;

typedef struct hgg_types {
    int32_t type_a;
    int32_t type_b;
    int32_t type_c;
    int32_t type_d;
    int32_t compute;           /* hgg_compute_type */
    int32_t trans_a;           /* 0: A is stored m x k; 1: k x m */
    int32_t trans_b;           /* 0: B is stored k x n; 1: n x k */
    int32_t epilogue;          /* hgg_epilogue */
    int32_t bias_type;         /* hgg_data_type; read only with HGG_EPILOGUE_BIAS */
} hgg_types;

/* The sizes that hgg_set_problem hands to hipBLASLt. Every array has `count` entries; a null leading
 * dimension or batch stride means packed.
 *
 * The launch grid is made from these sizes, and device records that need more tiles leave output unwritten
 * without any error: give the capacity, not an example. If the ragged n sum to at most T, n = [T, 1, ..., 1]
 * covers every distribution, for every tile size; an equal split of T does not.
 *
 * The kernels on offer are chosen by these sizes too. Some demand that a size is a multiple, or at least the
 * width of a vector load; a ragged size must therefore be 1 in one problem, so that only kernels that take
 * every size are offered. (Measured on 7.1.1, gfx90a, fp16: m = 1 leaves nothing of NN and NT, n = 1 nothing
 * of NT, k = 1 everything.) */
typedef struct hgg_problem {
    uint32_t count;
    int32_t ragged;            /* hgg_ragged */
    const int64_t *m;
    const int64_t *n;
    const int64_t *k;
    const int64_t *batch;
    const int64_t *lda;
    const int64_t *ldb;
    const int64_t *ldc;
    const int64_t *ldd;
    const int64_t *stride_a;
    const int64_t *stride_b;
    const int64_t *stride_c;
    const int64_t *stride_d;
    double alpha;              /* rounded to the scale type; the records' own values are what counts */
    double beta;
} hgg_problem;

typedef struct hgg_algorithm {
    int32_t index;             /* hipBLASLt's solution index; only good together with the name */
    int32_t supported;         /* 1 if it takes the problem that is set */
    int32_t library_status;    /* hipblasStatus_t of the check */
    uint32_t flags;            /* hgg_algorithm_flag */
    uint64_t workspace_size;   /* bytes that it needs for the problem that is set; 0 if unsupported */
    char solution_name[HGG_NAME_SIZE];
    char kernel_name[HGG_NAME_SIZE];
} hgg_algorithm;

typedef struct hgg_instance_info {
    hgg_handle handle;
    hgg_types types;
    uint32_t count;            /* problems set; 0 before hgg_set_problem */
    int32_t initialized;
    int32_t algorithm_index;   /* -1 unless initialised */
    uint64_t workspace;        /* address and bytes as given to hgg_initialize */
    uint64_t workspace_size;
    uint64_t workspace_needed;
} hgg_instance_info;

uint32_t hgg_abi_version(void);

/* The hipBLASLt whose headers this library was compiled with. */
hgg_status hgg_built_for(hgg_version *version);

/* Text of the calling thread's last failure; "" if none. Good until that thread's next failure. */
const char *hgg_last_error(void);

/* hipblasStatus_t after HGG_LIBRARY_ERROR, hipError_t after HGG_HIP_ERROR, of the calling thread; else -1. */
int32_t hgg_last_library_status(void);

/* "HGG_OK" and so on; never null. */
const char *hgg_status_name(hgg_status status);

/* One hipBLASLt handle for one stream of one device (stream-K algorithms deadlock if a handle serves two
 * streams). Allocates about 26 MB of device memory. Refuses a hipBLASLt of another major.minor version. */
hgg_status hgg_handle_create(int32_t device, uint64_t stream, hgg_handle *handle);
hgg_status hgg_handle_get_info(hgg_handle handle, hgg_handle_info *info);

/* Closes the handle and every instance on it; calls still running in them finish first. */
hgg_status hgg_handle_destroy(hgg_handle handle);

hgg_status hgg_instance_create(hgg_handle handle, const hgg_types *types, hgg_instance *instance);
hgg_status hgg_instance_get_info(hgg_instance instance, hgg_instance_info *info);
hgg_status hgg_instance_destroy(hgg_instance instance);

/* Sets sizes: at least two problems, and 1 in one of the ragged sizes (see hgg_problem). Undoes
 * hgg_initialize. A record whose group is not used has zero extent. */
hgg_status hgg_set_problem(hgg_instance instance, const hgg_problem *problem);

/* hipBLASLt's ranking: at most max_count indices of supported algorithms that need at most max_workspace
 * bytes, best first. Writes the first min(*count, capacity) of them; *count may be above capacity. */
hgg_status hgg_algorithms_heuristic(hgg_instance instance, int32_t max_count, uint64_t max_workspace,
                                    int32_t *indices, int32_t capacity, int32_t *count);

/* All algorithms that support the problem and need at most max_workspace bytes, in the library's order. */
hgg_status hgg_algorithms_all(hgg_instance instance, uint64_t max_workspace, int32_t *indices,
                              int32_t capacity, int32_t *count);

/* Any algorithm that the library has for the instance's types, supported or not. */
hgg_status hgg_algorithm_get(hgg_instance instance, int32_t index, hgg_algorithm *algorithm);

/* Finds a pinned algorithm again. The index must name the solution (index -1: by name alone, which must be
 * unique); else HGG_NOT_FOUND, and the text says what the index names and where the name is. */
hgg_status hgg_algorithm_find(hgg_instance instance, int32_t index, const char *solution_name,
                              int32_t *found);

/* Readies the instance to run `index` with device records and this workspace. Needed again after
 * hgg_set_problem and for another algorithm or workspace, not for other records. The workspace is the
 * instance's own until the instance is destroyed, released or initialised anew. */
hgg_status hgg_initialize(hgg_instance instance, int32_t index, uint64_t workspace, uint64_t workspace_size,
                          uint32_t allow);

/* Undoes hgg_initialize: gives the workspace free. */
hgg_status hgg_release(hgg_instance instance);

/* hipBLASLt's record 0 for the problem that is set, HGG_RECORD_SIZE bytes, with the codes that it uses for
 * the bias type and the activation (either pointer may be null). Its operand addresses mean nothing. */
hgg_status hgg_template_record(hgg_instance instance, void *record, size_t size, int32_t *bias_type,
                               int32_t *activation_type);

/* Launches. `records` is a device address of `count` records (records_size in bytes, at least
 * count * HGG_RECORD_SIZE), and `stream` the handle's. Does not wait; can be captured in a graph. */
hgg_status hgg_run(hgg_instance instance, uint64_t records, uint64_t records_size, uint64_t stream);

/* cffi: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
