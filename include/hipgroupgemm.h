/* The C ABI over hipBLASLt's grouped GEMM (hipblaslt_ext::GroupedGemm), run from records in device memory.
 *
 * Everything is column-major and in hipBLASLt's own terms: problem g is D = alpha * op(A) op(B) + beta * C,
 * op(A) is m x k, op(B) is k x n, C and D are m x n, a leading dimension counts elements.
 *
 * The order of calls: hgg_handle_create, hgg_instance_create, hgg_algorithms, hgg_initialize, hgg_run (as often
 * as you like), hgg_instance_destroy, hgg_handle_destroy. Any other order, any id, index or number, from any
 * thread, is answered with a status and a text. Pointers are valid ones. No exception leaves a function.
 *
 * Handles and instances are numbers that are never handed out again, so a number is recognised after the object
 * is gone. Zero is never valid. Every function that takes an id first checks it, and a destroyed object lives on
 * until the last call that is inside it returns.
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
    HGG_INVALID_ARGUMENT = 1,  /* a count, a size or a code that no call takes */
    HGG_INVALID_ID = 2,        /* the number was never handed out, or names the other kind of object */
    HGG_CLOSED = 3,            /* the object, or the handle it belongs to, was destroyed */
    HGG_WRONG_ORDER = 4,       /* not initialised */
    HGG_UNSUPPORTED = 5,       /* hipBLASLt has no kernels for it, or the algorithm refuses the problem */
    HGG_NOT_FOUND = 6,         /* no algorithm with this index */
    HGG_WORKSPACE = 7,         /* null, short, misaligned, or another instance's */
    HGG_UNVERIFIED = 8,        /* a split or stream-K algorithm: wrong with device records */
    HGG_VERSION_MISMATCH = 9,  /* the loaded hipBLASLt is not the one this was built for */
    HGG_FORKED = 10,           /* called in a child process of fork() */
    HGG_LIBRARY_ERROR = 11,    /* hipBLASLt returned an error: hgg_last_library_status() */
    HGG_HIP_ERROR = 12,        /* the HIP runtime returned an error: hgg_last_library_status() */
    HGG_INTERNAL = 13          /* an exception; the text has its message */
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

/* Which of the sizes differs on the device, from record to record. */
enum hgg_ragged {
    HGG_RAGGED_N = 0,
    HGG_RAGGED_M = 1,
    HGG_RAGGED_K = 2,
    HGG_RAGGED_NONE = 3        /* none: a record has its problem's sizes, or zero extent */
};

/* What an algorithm is. Global split-U runs a second kernel that gets the user's records where it expects its
 * own, and stream-K divides the work by the host's sizes: hgg_initialize refuses both. */
enum hgg_algorithm_flag {
    HGG_ALGORITHM_SPLIT = 1,         /* global split-U above 1, or chosen at run time; by the name */
    HGG_ALGORITHM_STREAM_K = 2,      /* by the name */
    HGG_ALGORITHM_EXTRA_KERNEL = 4   /* seen at hgg_initialize: one run launches more than one kernel */
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
    hgg_version built_for;                 /* hipBLASLt's headers at compile time */
    hgg_version loaded;                    /* the library in this process */
    char revision[HGG_REVISION_SIZE];      /* its git revision; empty in some distributions */
    uint32_t instances;                    /* live instances on this handle */
} hgg_handle_info;

/* Types, and the sizes that hipBLASLt chooses kernels and makes its launch grid from. The records on the device
 * bring the sizes that are computed.
 *
 * All `count` problems have these sizes, but for the ragged one, which is [capacity, 1, 1, ...]: hipBLASLt's
 * launch grid then covers every distribution of a ragged size that sums to at most the capacity, for every tile
 * size, which an equal split would not (records that need more tiles leave output unwritten, without any error).
 * And kernels that demand multiples of the ragged size, or some least width, are not offered. (Measured on
 * 7.1.1, gfx90a, fp16: m = 1 leaves nothing of NN and NT, n = 1 nothing of NT, k = 1 everything.) */
typedef struct hgg_problem {
    int32_t type_a;            /* hgg_data_type */
    int32_t type_b;
    int32_t type_c;
    int32_t type_d;
    int32_t bias_type;         /* of a vector of m elements, added to every column of D; -1: there is none */
    int32_t compute;           /* hgg_compute_type */
    int32_t trans_a;           /* 0: A is stored m x k; 1: k x m */
    int32_t trans_b;           /* 0: B is stored k x n; 1: n x k */
    int32_t ragged;            /* hgg_ragged */
    uint32_t count;            /* problems, 2 or more: for one group give a second, whose record has zero extent */
    int64_t m;                 /* all sizes at least 1, the ragged one its capacity; at most 2^32 - 1 */
    int64_t n;
    int64_t k;
    int64_t batch;
    int64_t lda;               /* leading dimensions, at least the rows as stored */
    int64_t ldb;
    int64_t ldc;
    int64_t ldd;
    int64_t stride_a;          /* batch strides; not read where batch is 1 */
    int64_t stride_b;
    int64_t stride_c;
    int64_t stride_d;
    double alpha;              /* rounded to the scale type; the records' own values are what counts */
    double beta;
} hgg_problem;

typedef struct hgg_algorithm {
    int32_t index;             /* hipBLASLt's solution index; only good together with the name */
    int32_t supported;         /* 1 if it takes the problem */
    int32_t library_status;    /* hipblasStatus_t of the check */
    uint32_t flags;            /* hgg_algorithm_flag */
    uint64_t workspace_size;   /* bytes that it needs for the problem; 0 if unsupported */
    char solution_name[HGG_NAME_SIZE];
    char kernel_name[HGG_NAME_SIZE];
} hgg_algorithm;

uint32_t hgg_abi_version(void);

/* The hipBLASLt whose headers this library was compiled with. */
hgg_version hgg_built_for(void);

/* Text of the calling thread's last failure; "" if none. Good until that thread's next failure. */
const char *hgg_last_error(void);

/* hipblasStatus_t after HGG_LIBRARY_ERROR, hipError_t after HGG_HIP_ERROR, of the calling thread; else -1. */
int32_t hgg_last_library_status(void);

/* "HGG_OK" and so on; never null. */
const char *hgg_status_name(hgg_status status);

/* One hipBLASLt handle of a device, meant for one stream (stream-K algorithms deadlock if a handle serves two
 * streams). Allocates about 26 MB of device memory. Refuses a hipBLASLt of another major.minor version. */
hgg_status hgg_handle_create(int32_t device, hgg_handle *handle);
hgg_status hgg_handle_get_info(hgg_handle handle, hgg_handle_info *info);

/* Closes the handle and every instance on it; calls still running in them finish first. */
hgg_status hgg_handle_destroy(hgg_handle handle);

/* One grouped GEMM of hipBLASLt for one problem. */
hgg_status hgg_instance_create(hgg_handle handle, const hgg_problem *problem, hgg_instance *instance);
hgg_status hgg_instance_destroy(hgg_instance instance);

/* Indices of algorithms that support the problem. With max_count above 0: at most so many, in hipBLASLt's own
 * ranking, best first; with 0 all, in the library's order. Writes the first min(*count, capacity) of them. */
hgg_status hgg_algorithms(hgg_instance instance, int32_t max_count, int32_t *indices, int32_t capacity,
                          int32_t *count);

/* Any algorithm that the library has for the instance's types, supported or not. */
hgg_status hgg_algorithm_get(hgg_instance instance, int32_t index, hgg_algorithm *algorithm);

/* Readies the instance to run `index` with device records and this workspace, which is the instance's own until
 * it is destroyed or initialised anew; it is filled on the stream. Needed again for another algorithm or workspace, not for other records.
 * `record` gets hipBLASLt's record 0 for the problem, HGG_RECORD_SIZE bytes: the template, which has the codes
 * that it uses for the bias type and the activation. Its operand addresses mean nothing. */
hgg_status hgg_initialize(hgg_instance instance, int32_t index, uint64_t workspace, uint64_t workspace_size,
                          uint64_t stream, void *record);

/* Launches on the stream. `records` is the device address of the problem's `count` records. Does not
 * wait; can be captured in a graph. */
hgg_status hgg_run(hgg_instance instance, uint64_t records, uint64_t stream);

/* cffi: end */

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
