/* Reads a call's arrays through DLPack's C exchange API (dlpack.h 1.3: DLPackExchangeAPI), all in one call from Python.
 *
 * Of CPython only functions of its stable ABI are used, declared here, so that Python's headers are not needed.
 */
#ifndef HGG_EXCHANGE_H
#define HGG_EXCHANGE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct hgg_object hgg_object; /* PyObject */
extern hgg_object _Py_NoneStruct, _Py_FalseStruct;
extern hgg_object *PyObject_Type(hgg_object *);
extern hgg_object *PyObject_GetAttrString(hgg_object *, const char *);
extern hgg_object *PyObject_CallMethod(hgg_object *, const char *, const char *, ...);
extern void Py_IncRef(hgg_object *);
extern void Py_DecRef(hgg_object *);
extern void PyErr_Clear(void);
extern ptrdiff_t PyTuple_Size(hgg_object *);
extern hgg_object *PyTuple_GetItem(hgg_object *, ptrdiff_t);
extern hgg_object *PyTuple_New(ptrdiff_t);
extern int PyTuple_SetItem(hgg_object *, ptrdiff_t, hgg_object *);
extern hgg_object *PyDict_New(void);
extern int PyDict_SetItem(hgg_object *, hgg_object *, hgg_object *);
extern hgg_object *PyLong_FromUnsignedLongLong(unsigned long long);
extern hgg_object *PyBytes_FromStringAndSize(const char *, ptrdiff_t);

/* DLTensor and the table of functions, as dlpack.h has them */
typedef struct hgg_tensor {
    void *data;
    int32_t device_type, device_id, axes;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} hgg_tensor;

typedef struct hgg_exchange {
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    int (*read)(void *object, hgg_tensor *tensor);
    int (*current_stream)(int device_type, int32_t device, void **stream);
} hgg_exchange;

enum { HGG_MOST_AXES = 8, HGG_MOST_KEY = 1024, HGG_HOST_DEVICE = 1, HGG_DL_FLOAT = 2 };

static inline hgg_object *hgg_none(void) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

/* Whether Python says False; 0 with the error cleared where it raises. Takes the answer over. */
static inline int hgg_is_false(hgg_object *answer) {
    if (answer == NULL) {
        PyErr_Clear();
        return 0;
    }
    const int no = answer == &_Py_FalseStruct;
    Py_DecRef(answer);
    return no;
}

static inline int hgg_is_of(hgg_object *object, hgg_object *types) {
    hgg_object *type = PyObject_Type(object);
    int found = 0;
    for (ptrdiff_t i = 0; i < PyTuple_Size(types); ++i) found |= PyTuple_GetItem(types, i) == type;
    Py_DecRef(type);
    return found;
}

/* (key, {role: address}, stream) of the operands, which are torch tensors of exactly these types or None; None where one of them is no such
 * tensor, has no memory, requires a gradient that is recorded, or has its negation pending. The key has all but the addresses: alignment to 16 bytes, type, device, shape, strides. */
static inline hgg_object *hgg_read_operands(const hgg_exchange *api, hgg_object *operands, hgg_object *roles, hgg_object *types, int recording) {
    char key[HGG_MOST_KEY];
    size_t used = 0;
    const ptrdiff_t count = PyTuple_Size(operands);
    void *stream = NULL;
    hgg_object *addresses = PyDict_New(), *result;
    if (addresses == NULL) return NULL;
    for (ptrdiff_t i = 0; i < count; ++i) {
        hgg_object *operand = PyTuple_GetItem(operands, i), *address;
        hgg_tensor tensor;
        uint64_t at;
        if (operand == &_Py_NoneStruct) {
            key[used++] = 0;
            continue;
        }
        if (!hgg_is_of(operand, types) || (recording && !hgg_is_false(PyObject_GetAttrString(operand, "requires_grad")))) goto no;
        memset(&tensor, 0, sizeof tensor);
        if (api->read(operand, &tensor)) {
            PyErr_Clear();
            goto no;
        }
        at = (uint64_t)(uintptr_t)tensor.data + tensor.byte_offset;
        const size_t extents = (size_t)tensor.axes * sizeof(int64_t);
        if (at == 0 || tensor.axes > HGG_MOST_AXES || tensor.strides == NULL || used + 16 + 2 * extents + 8 > HGG_MOST_KEY) goto no;
        if (tensor.code == HGG_DL_FLOAT && !hgg_is_false(PyObject_CallMethod(operand, "is_neg", NULL))) goto no;
        if (i == 0 && tensor.device_type != HGG_HOST_DEVICE && api->current_stream(tensor.device_type, tensor.device_id, &stream)) {
            PyErr_Clear();
            goto no;
        }
        key[used++] = 1;
        key[used++] = (char)(at & 15);
        key[used++] = (char)tensor.axes;
        key[used++] = (char)tensor.device_type;
        memcpy(key + used, &tensor.device_id, 4), used += 4;
        key[used++] = (char)tensor.code;
        key[used++] = (char)tensor.bits;
        memcpy(key + used, tensor.shape, extents), used += extents;
        memcpy(key + used, tensor.strides, extents), used += extents;
        address = PyLong_FromUnsignedLongLong(at);
        if (address == NULL) goto failed;
        const int status = PyDict_SetItem(addresses, PyTuple_GetItem(roles, i), address);
        Py_DecRef(address);
        if (status) goto failed;
    }
    result = PyTuple_New(3);
    if (result == NULL) goto failed;
    PyTuple_SetItem(result, 0, PyBytes_FromStringAndSize(key, (ptrdiff_t)used));
    PyTuple_SetItem(result, 1, addresses);
    PyTuple_SetItem(result, 2, PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)stream));
    return result;
no:
    Py_DecRef(addresses);
    return hgg_none();
failed:
    Py_DecRef(addresses);
    return NULL;
}

#endif
