/* Two loops in C, bit-identical with the pure forms that run where there was no compiler: `pack` (anaphora/tokens.py)
 * and `chain` (anaphora/identity). What is unusual gets None, and the pure form decides: so its answers and errors are
 * the only ones. absent.py has the contract.
 *
 * `chain` digests one message a block; numbers are hexadecimal, lengths in bytes:
 *
 *   pickle    80 05                  protocol 5
 *             95 SIZE                a frame; SIZE is 8 bytes, little-endian, and counts what follows
 *             43 20 PARENT           bytes, 32 of them
 *             BEFORE                 94, memoize; 28, a mark, before more than three ids
 *             IDS                    4b u8, 4d u16 or 4a i32 each, the shortest, little-endian
 *             AFTER                  the tuple ends, and is memoized; extra keys, or 4e for None; 87 94 2e, the end
 *   cbor      83 58 20 PARENT        an array of three; bytes, 32 of them
 *             BEFORE                 the head of the array of ids
 *             IDS                    major type 0, or 1 below zero, with the shortest argument, big-endian
 *             AFTER                  extra keys, or f6 for null
 *   blake2b   PARENT IDS             ids as they are: 4 bytes each, little-endian
 *
 * The first two are digested with SHA-256. BEFORE and AFTER come from anaphora/identity/serializers.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(PYPY_VERSION) || defined(Py_GIL_DISABLED)
#error "pack reads lists in place, under CPython's global lock; elsewhere the pure forms run"
#endif

#include "blake2b.h"
#include "sha256.h"

#define ID_BYTES 4
#define DIGEST_BYTES 32
#define MAX_PICKLE_FRAME (64 * 1024)
/* Digests from so many bytes of ids on take longer than other threads should wait: about 0.1 ms. */
#define LONG_CHAIN_BYTES (64 * 1024)

/* -- pack ---------------------------------------------------------------------------------------------------------- */

/* Store an exact int that fits int32; return 0 for anything else. Runs no Python code. */
static inline int store_id(PyObject *id, int32_t *out)
{
    if (!PyLong_CheckExact(id))
        return 0;
#if PY_VERSION_HEX >= 0x030c0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)id)) { /* below 2**30 */
        *out = (int32_t)PyUnstable_Long_CompactValue((PyLongObject *)id);
        return 1;
    }
#endif
    int overflow;
    long value = PyLong_AsLongAndOverflow(id, &overflow);
    *out = (int32_t)value;
    return !overflow && *out == value;
}

/* One dimension of native int32 without gaps, as array('i') and numpy export it. */
static PyObject *pack_buffer(PyObject *ids)
{
    Py_buffer view;
    if (PyObject_GetBuffer(ids, &view, PyBUF_ND | PyBUF_FORMAT)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *packed;
    if (view.ndim == 1 && view.itemsize == ID_BYTES && view.format && !strcmp(view.format, "i"))
        packed = PyBytes_FromStringAndSize(view.buf, view.len);
    else
        packed = Py_NewRef(Py_None);
    PyBuffer_Release(&view);
    return packed;
}

static PyObject *pack(PyObject *module, PyObject *ids)
{
    (void)module;
    if (!PyList_CheckExact(ids) && !PyTuple_CheckExact(ids)) {
        if (PyObject_CheckBuffer(ids))
            return pack_buffer(ids);
        Py_RETURN_NONE;
    }
    PyObject **items = PySequence_Fast_ITEMS(ids);
    Py_ssize_t num_ids = PySequence_Fast_GET_SIZE(ids);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, num_ids * ID_BYTES);
    if (!packed)
        return NULL;
    char *out = PyBytes_AS_STRING(packed);
    for (Py_ssize_t i = 0; i < num_ids; i++) {
        int32_t id;
        if (!store_id(items[i], &id)) {
            Py_DECREF(packed);
            Py_RETURN_NONE;
        }
        memcpy(out + i * ID_BYTES, &id, ID_BYTES);
    }
    return packed;
}

/* -- chain --------------------------------------------------------------------------------------------------------- */

/* Chosen once: in a virtual machine to ask the processor takes longer than a chain. */
static sha256_compress *best_compress;

typedef enum { PICKLE, CBOR, BLAKE2B } chain_kind;

typedef struct {
    const uint8_t *bytes;
    size_t size;
} span;

typedef struct {
    chain_kind kind;
    span ids; /* whole blocks */
    size_t block_bytes;
    span before, after; /* blake2b: its key and its personalisation */
    sha256_compress *compress;
} chain_job;

static inline uint32_t load_little32(const uint8_t *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static inline uint8_t *put(uint8_t *out, span what)
{
    memcpy(out, what.bytes, what.size);
    return out + what.size;
}

/* Ids of a prompt differ in size at random, so both writers store five bytes and step over as many as count: there is
 * no branch to predict. */
#define MAX_ID_BYTES 5

static inline uint8_t *put_pickled(uint8_t *out, const uint8_t *id)
{
    static const uint8_t opcodes[] = {'J', 'M', 'K'}, sizes[] = {5, 3, 2};
    uint32_t value = load_little32(id);
    unsigned int shorter = (value < 1u << 16) + (value < 1u << 8);
    out[0] = opcodes[shorter];
    memcpy(out + 1, id, ID_BYTES);
    return out + sizes[shorter];
}

static inline uint8_t *put_cbor(uint8_t *out, const uint8_t *id)
{
    static const uint8_t sizes[] = {1, 2, 3, 5}, shifts[] = {0, 24, 16, 0};
    uint32_t value = load_little32(id), is_negative = value >> 31;
    value ^= 0u - is_negative;
    unsigned int longer = (value >= 24) + (value >= 1u << 8) + (value >= 1u << 16);
    out[0] = (uint8_t)(is_negative << 5 | (longer ? 23 + longer : value));
    store_big32(out + 1, value << shifts[longer]);
    return out + sizes[longer];
}

/* A chain's digests stand one behind the other, and its parent before them. */
static void chain_sha256(const chain_job *job, uint8_t *message, uint8_t *parent)
{
    static const uint8_t pickle_head[] = {0x80, 5, 0x95, 0, 0, 0, 0, 0, 0, 0, 0, 0x43, DIGEST_BYTES};
    static const uint8_t cbor_head[] = {0x83, 0x58, DIGEST_BYTES};
    const size_t size_at = 3, frame_at = 11;
    const span head = job->kind == PICKLE ? (span){pickle_head, sizeof pickle_head}
                                          : (span){cbor_head, sizeof cbor_head};
    uint8_t *parent_at = put(message, head), *ids_at = put(parent_at + DIGEST_BYTES, job->before);

    const uint8_t *id = job->ids.bytes, *end = id + job->ids.size;
    for (; id < end; parent += DIGEST_BYTES) {
        const uint8_t *block_end = id + job->block_bytes;
        uint8_t *out = ids_at;
        memcpy(parent_at, parent, DIGEST_BYTES);
        if (job->kind == PICKLE) {
            for (; id < block_end; id += ID_BYTES)
                out = put_pickled(out, id);
        } else {
            for (; id < block_end; id += ID_BYTES)
                out = put_cbor(out, id);
        }
        size_t num_bytes = (size_t)(put(out, job->after) - message);
        if (job->kind == PICKLE) {
            message[size_at] = (uint8_t)(num_bytes - frame_at);
            message[size_at + 1] = (uint8_t)((num_bytes - frame_at) >> 8);
        }
        sha256_digest(job->compress, message, num_bytes, parent + DIGEST_BYTES);
    }
}

static void chain_blake2b(const chain_job *job, uint8_t *message, uint8_t *parent)
{
    blake2b_state keyed = blake2b_start(DIGEST_BYTES, job->before.size, job->after.bytes, job->after.size);
    if (job->before.size) {
        uint8_t key[BLAKE2B_BLOCK_BYTES] = {0};
        put(key, job->before);
        blake2b_compress(&keyed, key, sizeof key, 0);
    }
    const uint8_t *ids = job->ids.bytes, *end = ids + job->ids.size;
    for (; ids < end; ids += job->block_bytes, parent += DIGEST_BYTES) {
        memcpy(message, parent, DIGEST_BYTES);
        memcpy(message + DIGEST_BYTES, ids, job->block_bytes);
        blake2b_finish(keyed, message, DIGEST_BYTES + job->block_bytes, parent + DIGEST_BYTES, DIGEST_BYTES);
    }
}

static int to_kind(PyObject *text, chain_kind *kind)
{
    static const char *const names[] = {[PICKLE] = "pickle", [CBOR] = "cbor", [BLAKE2B] = "blake2b"};
    for (int i = PICKLE; i <= BLAKE2B; i++) {
        if (PyUnicode_CompareWithASCIIString(text, names[i]) == 0) {
            *kind = (chain_kind)i;
            return 1;
        }
    }
    PyErr_Format(PyExc_ValueError, "kind: expected 'pickle', 'cbor' or 'blake2b', got %R", text);
    return 0;
}

static span to_span(PyObject *bytes)
{
    return (span){(const uint8_t *)PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)};
}

static PyObject *to_list(const uint8_t *digests, Py_ssize_t num_digests)
{
    PyObject *list = PyList_New(num_digests);
    for (Py_ssize_t i = 0; list && i < num_digests; i++) {
        PyObject *digest = PyBytes_FromStringAndSize((const char *)digests + i * DIGEST_BYTES, DIGEST_BYTES);
        if (!digest)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, digest);
    }
    return list;
}

static PyObject *chain(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *kind, *parent, *ids, *before, *after;
    Py_ssize_t block_size;
    int is_portable = 0;
    if (!PyArg_ParseTuple(args, "UOOnOO|p:chain", &kind, &parent, &ids, &block_size, &before, &after, &is_portable))
        return NULL;
    chain_job job;
    if (!to_kind(kind, &job.kind))
        return NULL;
    if (!PyBytes_CheckExact(parent) || PyBytes_GET_SIZE(parent) != DIGEST_BYTES || !PyBytes_CheckExact(ids) ||
        !PyBytes_CheckExact(before) || !PyBytes_CheckExact(after))
        Py_RETURN_NONE;
    const Py_ssize_t num_ids = PyBytes_GET_SIZE(ids) / ID_BYTES;
    if (PyBytes_GET_SIZE(ids) % ID_BYTES || block_size < 1 || num_ids % block_size)
        Py_RETURN_NONE;
    const Py_ssize_t num_blocks = num_ids / block_size;
    if (num_blocks == 0)
        return PyList_New(0);
    if (num_blocks > PY_SSIZE_T_MAX / 2 / DIGEST_BYTES)
        return PyErr_NoMemory();
    job.ids = to_span(ids);
    job.block_bytes = (size_t)block_size * ID_BYTES;
    job.before = to_span(before);
    job.after = to_span(after);
    job.compress = is_portable ? sha256_compress_portable : best_compress;
    if (job.kind == BLAKE2B && (job.before.size > BLAKE2B_MAX_KEY_BYTES || job.after.size > BLAKE2B_MAX_PERSON_BYTES))
        Py_RETURN_NONE;
    /* Room for the longest message: its head and parent, what comes from outside, ids, and what padding adds. */
    const size_t longest =
        64 + job.before.size + (size_t)block_size * MAX_ID_BYTES + job.after.size + SHA256_MAX_PADDING;
    if (job.kind == PICKLE && longest > MAX_PICKLE_FRAME)
        Py_RETURN_NONE;

    void (*chain_all)(const chain_job *, uint8_t *, uint8_t *) = job.kind == BLAKE2B ? chain_blake2b : chain_sha256;
    uint8_t *digests = PyMem_Malloc((size_t)(num_blocks + 1) * DIGEST_BYTES + longest);
    if (!digests)
        return PyErr_NoMemory();
    uint8_t *message = digests + (num_blocks + 1) * DIGEST_BYTES;
    memcpy(digests, PyBytes_AS_STRING(parent), DIGEST_BYTES);
    if (job.ids.size < LONG_CHAIN_BYTES) {
        chain_all(&job, message, digests);
    } else {
        Py_BEGIN_ALLOW_THREADS
        chain_all(&job, message, digests);
        Py_END_ALLOW_THREADS
    }
    PyObject *list = to_list(digests + DIGEST_BYTES, num_blocks);
    PyMem_Free(digests);
    return list;
}

static PyMethodDef methods[] = {
    {"pack", pack, METH_O, "See anaphora.compiled.absent.pack."},
    {"chain", chain, METH_VARARGS, "See anaphora.compiled.absent.chain."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__loops(void)
{
    best_compress = sha256_best_compress();
    return PyModuleDef_Init(&definition);
}
