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
extern hgg_object _Py_NoneStruct, _Py_FalseStruct, PyList_Type, PyTuple_Type;
extern hgg_object *PyObject_Type(hgg_object *);
extern hgg_object *PyObject_GetAttrString(hgg_object *, const char *);
extern hgg_object *PyObject_CallMethod(hgg_object *, const char *, const char *, ...);
extern void Py_IncRef(hgg_object *);
extern void Py_DecRef(hgg_object *);
extern void PyErr_Clear(void);
extern ptrdiff_t PyList_Size(hgg_object *);
extern hgg_object *PyList_GetItem(hgg_object *, ptrdiff_t);
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

enum { HGG_MOST_AXES = 8, HGG_MOST_LAYOUT = 9 + 16 * HGG_MOST_AXES, HGG_MOST_KEY = 1024, HGG_HOST_DEVICE = 1, HGG_DL_FLOAT = 2 };

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

/* Reads one tensor of exactly these types and writes what is known of it but the address to the key: at most HGG_MOST_LAYOUT bytes, of
 * which the first is 0, left for the address's alignment. How many bytes, or 0 where it is no such tensor, has no memory, requires a
 * gradient that is recorded, or has its negation pending. */
static inline size_t hgg_read_tensor(const hgg_exchange *api, hgg_object *operand, hgg_object *types, int recording, char *key,
                                     hgg_tensor *tensor, uint64_t *address) {
    if (!hgg_is_of(operand, types) || (recording && !hgg_is_false(PyObject_GetAttrString(operand, "requires_grad")))) return 0;
    memset(tensor, 0, sizeof *tensor);
    if (api->read(operand, tensor)) {
        PyErr_Clear();
        return 0;
    }
    *address = (uint64_t)(uintptr_t)tensor->data + tensor->byte_offset;
    if (*address == 0 || tensor->axes > HGG_MOST_AXES || tensor->strides == NULL) return 0;
    if (tensor->code == HGG_DL_FLOAT && !hgg_is_false(PyObject_CallMethod(operand, "is_neg", NULL))) return 0;
    const size_t extents = (size_t)tensor->axes * sizeof(int64_t);
    key[0] = 0;
    key[1] = (char)tensor->axes;
    key[2] = (char)tensor->device_type;
    memcpy(key + 3, &tensor->device_id, 4);
    key[7] = (char)tensor->code;
    key[8] = (char)tensor->bits;
    memcpy(key + 9, tensor->shape, extents);
    memcpy(key + 9 + extents, tensor->strides, extents);
    return 9 + 2 * extents;
}

/* The addresses of a list or tuple of such tensors of one layout, as a tuple; their number and layout go to the key. NULL for what is no
 * such list. */
static inline hgg_object *hgg_read_list(const hgg_exchange *api, hgg_object *operand, hgg_object *types, int recording, char *key,
                                        size_t *used) {
    hgg_object *type = PyObject_Type(operand), *found = NULL;
    const int is_list = type == &PyList_Type, is_tuple = type == &PyTuple_Type;
    const ptrdiff_t count = is_list ? PyList_Size(operand) : is_tuple ? PyTuple_Size(operand) : 0;
    char other[HGG_MOST_LAYOUT], bits = 0;
    size_t length = 0;
    Py_DecRef(type);
    if (count == 0 || (found = PyTuple_New(count)) == NULL) return NULL;
    for (ptrdiff_t i = 0; i < count; ++i) {
        /* it is looked up anew each time: what Python runs in between may have changed the list */
        hgg_object *entry = is_list ? PyList_GetItem(operand, i) : PyTuple_GetItem(operand, i), *number = NULL;
        hgg_tensor tensor;
        uint64_t at = 0;
        size_t mine = 0;
        if (entry != NULL) {
            Py_IncRef(entry);
            mine = hgg_read_tensor(api, entry, types, recording, i ? other : key + 8, &tensor, &at);
            Py_DecRef(entry);
        }
        if (i == 0) length = mine;
        if (mine && mine == length && (i == 0 || memcmp(other, key + 8, mine) == 0)) number = PyLong_FromUnsignedLongLong(at);
        if (number == NULL) {
            Py_DecRef(found);
            return NULL;
        }
        PyTuple_SetItem(found, i, number);
        bits |= (char)(at & 15);
    }
    memcpy(key, &count, 8);
    key[8] = bits;
    *used += 8 + length;
    return found;
}

/* (key, {role: address}, stream) of the operands, which are torch tensors of exactly these types or None; of a list, which those may be
 * whose bit is set in `lists`, the addresses are a tuple. None where one of them is not read. The key has all but the addresses. */
static inline hgg_object *hgg_read_operands(const hgg_exchange *api, hgg_object *operands, hgg_object *roles, hgg_object *types,
                                            int recording, int lists) {
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
        char *mark = key + used++;
        *mark = 0;
        if (operand == &_Py_NoneStruct) continue;
        if (used + 8 + HGG_MOST_LAYOUT >= HGG_MOST_KEY) goto no;
        const size_t length = hgg_read_tensor(api, operand, types, recording, key + used, &tensor, &at);
        *mark = length ? 1 : 2;
        if (length) {
            key[used] = (char)(at & 15);
            used += length;
            address = PyLong_FromUnsignedLongLong(at);
            if (address == NULL) goto failed;
        } else {
            address = lists >> i & 1 ? hgg_read_list(api, operand, types, recording, key + used, &used) : NULL;
            if (address == NULL) goto no;
        }
        if (i == 0 && tensor.device_type != HGG_HOST_DEVICE && api->current_stream(tensor.device_type, tensor.device_id, &stream)) {
            Py_DecRef(address);
            goto no;
        }
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
    PyErr_Clear();
    Py_DecRef(addresses);
    return hgg_none();
failed:
    Py_DecRef(addresses);
    return NULL;
}

#endif
