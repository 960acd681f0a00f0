/* The loops of the codec that touch every byte of a model: see kernels.py, which documents each
 * function, and portable.py, which does the same in numpy where this file was not compiled.
 *
 * Every function takes contiguous buffers whose item size says how wide its integers are, checks all
 * lengths before it writes anything, and runs without the interpreter lock. Integers are in the
 * machine's byte order in arrays and little-endian in payloads; big-endian machines use portable.py.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "portable.py serves big-endian machines"
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#include <immintrin.h>
#endif

enum { XOR = 1, OVERWRITE = 2, ADD = 3 };

enum { ESCAPED_GAP = 255, ESCAPED_NIBBLE = 15, NIBBLES_PER_ESCAPE = 4 };
enum { BLOCK_BYTES = 64, AHEAD_BYTES = 2048, PREFETCHED = 24 };

/* A thread takes so many elements at a time, and is started for so many; past a few, memory is the limit. */
enum { PIECE_ELEMENTS = 1 << 14, THREAD_ELEMENTS = 1 << 14, MOST_THREADS = 8 };

/* Elements that are looked at twice while they are in the nearest cache. */
enum { PIECE = 256 };

/* --- arguments ------------------------------------------------------------------------------------ */

static Py_ssize_t items(const Py_buffer *buffer) { return buffer->len / buffer->itemsize; }

static int is_integer_width(Py_ssize_t width) {
  return width == 1 || width == 2 || width == 4 || width == 8;
}

static PyObject *refuse(const char *why) {
  PyErr_SetString(PyExc_ValueError, why);
  return NULL;
}

static void release(Py_buffer *buffers, int count) {
  for (int i = 0; i < count; i++)
    if (buffers[i].obj != NULL) PyBuffer_Release(&buffers[i]);
}

/* --- hash ----------------------------------------------------------------------------------------- */

/* A sum has no order, and what was added can be taken away: see digest.py. */

static inline uint64_t mix(uint64_t x) {
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93u;
  x ^= x >> 32;
  x *= 0xD6E8FEB86659FD93u;
  return x ^ x >> 32;
}

static inline void add_element(uint64_t sum[2], uint64_t position, uint64_t bits) {
  sum[0] += mix(position * 0x9E3779B97F4A7C15u + bits * 0xC2B2AE3D27D4EB4Fu + 0x165667B19E3779F9u);
  sum[1] += mix(position * 0x85EBCA77C2B2AE63u + bits * 0xFF51AFD7ED558CCDu + 0x27D4EB2F165667C5u);
}

/* --- find_changes --------------------------------------------------------------------------------- */

/* One bit for each element of a 64-byte block that differs; lowest bit, first element. */

#define DEFINE_PORTABLE_MASK(BITS, T)                                                    \
  static inline uint64_t mask_portable_##BITS(const uint8_t *old, const uint8_t *new) {  \
    uint64_t a[8], b[8], any = 0;                                                        \
    memcpy(a, old, BLOCK_BYTES);                                                         \
    memcpy(b, new, BLOCK_BYTES);                                                         \
    for (int i = 0; i < 8; i++) any |= a[i] ^ b[i];                                      \
    if (!any) return 0;                                                                  \
    uint64_t mask = 0;                                                                   \
    for (int word = 0; word < 8; word++)                                                 \
      for (uint64_t diff = a[word] ^ b[word], lane = 0; diff; lane++) {                  \
        if ((T)diff) mask |= (uint64_t)1 << (word * (64 / BITS) + lane);                 \
        diff = BITS == 64 ? 0 : diff >> (BITS % 64);                                     \
      }                                                                                  \
    return mask;                                                                         \
  }

DEFINE_PORTABLE_MASK(8, uint8_t)
DEFINE_PORTABLE_MASK(16, uint16_t)
DEFINE_PORTABLE_MASK(32, uint32_t)
DEFINE_PORTABLE_MASK(64, uint64_t)

/* The lowest bit's number, 0 if there is none. */
static inline int first_portable(uint64_t mask) { return mask ? __builtin_ctzll(mask) : 0; }

#ifdef X86

#define AVX2 __attribute__((target("avx2,bmi")))
#define AVX512 __attribute__((target("avx512f,avx512bw,bmi")))

AVX2 static inline int first_avx2(uint64_t mask) { return (int)_tzcnt_u64(mask) & 63; }
#define first_avx512 first_avx2

#define LOAD2(FROM, OFFSET) _mm256_loadu_si256((const __m256i *)((FROM) + (OFFSET)))

AVX2 static inline uint64_t mask_avx2_8(const uint8_t *old, const uint8_t *new) {
  uint32_t low = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(LOAD2(old, 0), LOAD2(new, 0)));
  uint32_t high = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(LOAD2(old, 32), LOAD2(new, 32)));
  return low | (uint64_t)high << 32;
}

AVX2 static inline uint64_t mask_avx2_16(const uint8_t *old, const uint8_t *new) {
  __m256i low = _mm256_cmpeq_epi16(LOAD2(old, 0), LOAD2(new, 0));
  __m256i high = _mm256_cmpeq_epi16(LOAD2(old, 32), LOAD2(new, 32));
  /* packs works within halves of 128 bits; the permutation puts the elements back in order. */
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return (uint32_t)~_mm256_movemask_epi8(packed);
}

AVX2 static inline uint64_t mask_avx2_32(const uint8_t *old, const uint8_t *new) {
  __m256i low = _mm256_cmpeq_epi32(LOAD2(old, 0), LOAD2(new, 0));
  __m256i high = _mm256_cmpeq_epi32(LOAD2(old, 32), LOAD2(new, 32));
  int equal = _mm256_movemask_ps(_mm256_castsi256_ps(low)) |
              _mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8;
  return (uint16_t)~equal;
}

AVX2 static inline uint64_t mask_avx2_64(const uint8_t *old, const uint8_t *new) {
  __m256i low = _mm256_cmpeq_epi64(LOAD2(old, 0), LOAD2(new, 0));
  __m256i high = _mm256_cmpeq_epi64(LOAD2(old, 32), LOAD2(new, 32));
  int equal = _mm256_movemask_pd(_mm256_castsi256_pd(low)) |
              _mm256_movemask_pd(_mm256_castsi256_pd(high)) << 4;
  return (uint8_t)~equal;
}

#define DEFINE_AVX512_MASK(BITS)                                                             \
  AVX512 static inline uint64_t mask_avx512_##BITS(const uint8_t *old, const uint8_t *new) { \
    return _mm512_cmpneq_epi##BITS##_mask(_mm512_loadu_si512(old), _mm512_loadu_si512(new)); \
  }

DEFINE_AVX512_MASK(8)
DEFINE_AVX512_MASK(16)
DEFINE_AVX512_MASK(32)
DEFINE_AVX512_MASK(64)

#endif /* X86 */

/* Old and new bits of an element beside each other. */
#define DEFINE_PAIR(BITS, T, BOTH)                                 \
  static inline void put_pair_##BITS(T *pair, T old, T new) {      \
    BOTH both = (BOTH)(old | (BOTH)((BOTH)new << BITS));           \
    memcpy(pair, &both, sizeof both);                              \
  }

DEFINE_PAIR(8, uint8_t, uint16_t)
DEFINE_PAIR(16, uint16_t, uint32_t)
DEFINE_PAIR(32, uint32_t, uint64_t)

static inline void put_pair_64(uint64_t *pair, uint64_t old, uint64_t new) {
  pair[0] = old;
  pair[1] = new;
}

#define PUT(BITS, T, L, i)                               \
  {                                                      \
    T a, b;                                              \
    memcpy(&a, old + (i) * sizeof(T), sizeof(T));        \
    memcpy(&b, new + (i) * sizeof(T), sizeof(T));        \
    locations[found] = (L)(begin + (i));                 \
    put_pair_##BITS(pairs + 2 * found, a, b);            \
  }

/* Appends the changed elements of a block. Most blocks have none, one or two, in no order that a
 * processor could guess, so two are put without asking and count only if they are there. What is put
 * in vain lies within the outputs, since no more than `at` elements were found before. That makes
 * stores dear, and so both bits take one; what becomes of them is computed for what was found only. */
#define EMIT(ISA, BITS, T, L)                                   \
  for (int sure = 0; sure < 2; sure++) {                        \
    Py_ssize_t i = at + first_##ISA(mask);                      \
    PUT(BITS, T, L, i)                                          \
    found += mask != 0;                                         \
    mask &= mask - 1;                                           \
  }                                                             \
  while (mask) {                                                \
    Py_ssize_t i = at + __builtin_ctzll(mask);                  \
    PUT(BITS, T, L, i)                                          \
    found++;                                                    \
    mask &= mask - 1;                                           \
  }

#define VALUE(T, operation, old, new) \
  ((operation) == XOR ? (T)((old) ^ (new)) : (operation) == ADD ? (T)((new) - (old)) : (new))

/* Makes values of pairs, in place, and with `prior` the digest of the old bits. In pieces, so that the
 * compiler sees that nothing overlaps and uses vectors. */
#define DEFINE_VALUES_OF_PAIRS(ISA, ATTRIBUTE, BITS, T, LBITS, L)                              \
  ATTRIBUTE static void values_of_pairs_##ISA##_##BITS##_##LBITS(                              \
      T *values, Py_ssize_t n, int operation, const L *locations, uint64_t prior[2]) {         \
    uint64_t sum[2] = {0, 0};                                                                  \
    for (Py_ssize_t at = 0; at < n; at += PIECE) {                                             \
      int size = n - at < PIECE ? (int)(n - at) : PIECE;                                       \
      T pairs[2 * PIECE], old[PIECE];                                                          \
      memcpy(pairs, values + 2 * at, 2 * size * sizeof(T));                                    \
      for (int i = 0; i < size; i++) {                                                         \
        old[i] = pairs[2 * i];                                                                 \
        values[at + i] = VALUE(T, operation, pairs[2 * i], pairs[2 * i + 1]);                  \
      }                                                                                        \
      for (int i = 0; prior && i < size; i++)                                                  \
        add_element(sum, (uint64_t)locations[at + i], old[i]);                                 \
    }                                                                                          \
    if (prior) memcpy(prior, sum, sizeof sum);                                                 \
  }

/* `to_values` has room for two of each element. With `prior`, that takes the digest of the old bits.
 * What is scanned is fetched as if for once only, so that it pushes less out of the caches. */
#define DEFINE_FIND(ISA, ATTRIBUTE, BITS, T, LBITS, L)                                    \
  DEFINE_VALUES_OF_PAIRS(ISA, ATTRIBUTE, BITS, T, LBITS, L)                               \
  ATTRIBUTE static Py_ssize_t find_##ISA##_##BITS##_##LBITS(                              \
      const uint8_t *old, const uint8_t *new, Py_ssize_t n, int operation, int64_t begin, \
      void *to_locations, void *to_values, uint64_t prior[2]) {                           \
    L *locations = to_locations;                                                          \
    T *pairs = to_values;                                                                 \
    Py_ssize_t found = 0, at = 0, step = BLOCK_BYTES / sizeof(T);                         \
    for (; at + step <= n; at += step) {                                                  \
      __builtin_prefetch(old + at * sizeof(T) + AHEAD_BYTES, 0, 0);                       \
      __builtin_prefetch(new + at * sizeof(T) + AHEAD_BYTES, 0, 0);                       \
      uint64_t mask = mask_##ISA##_##BITS(old + at * sizeof(T), new + at * sizeof(T));    \
      EMIT(ISA, BITS, T, L)                                                               \
    }                                                                                     \
    for (; at < n; at++)                                                                  \
      if (memcmp(old + at * sizeof(T), new + at * sizeof(T), sizeof(T)) != 0) {           \
        PUT(BITS, T, L, at)                                                               \
        found++;                                                                          \
      }                                                                                   \
    values_of_pairs_##ISA##_##BITS##_##LBITS(pairs, found, operation, locations, prior);  \
    return found;                                                                         \
  }

#define DEFINE_FINDS(ISA, ATTRIBUTE)                            \
  DEFINE_FIND(ISA, ATTRIBUTE, 8, uint8_t, 32, int32_t)          \
  DEFINE_FIND(ISA, ATTRIBUTE, 8, uint8_t, 64, int64_t)          \
  DEFINE_FIND(ISA, ATTRIBUTE, 16, uint16_t, 32, int32_t)        \
  DEFINE_FIND(ISA, ATTRIBUTE, 16, uint16_t, 64, int64_t)        \
  DEFINE_FIND(ISA, ATTRIBUTE, 32, uint32_t, 32, int32_t)        \
  DEFINE_FIND(ISA, ATTRIBUTE, 32, uint32_t, 64, int64_t)        \
  DEFINE_FIND(ISA, ATTRIBUTE, 64, uint64_t, 32, int32_t)        \
  DEFINE_FIND(ISA, ATTRIBUTE, 64, uint64_t, 64, int64_t)

typedef Py_ssize_t (*find_function)(const uint8_t *, const uint8_t *, Py_ssize_t, int, int64_t, void *,
                                    void *, uint64_t[2]);

#define FINDS(ISA)                                          \
  {                                                         \
    {find_##ISA##_8_32, find_##ISA##_8_64},                 \
    {find_##ISA##_16_32, find_##ISA##_16_64},               \
    {find_##ISA##_32_32, find_##ISA##_32_64},               \
    {find_##ISA##_64_32, find_##ISA##_64_64},               \
  }

DEFINE_FINDS(portable, )
static const find_function finds_portable[4][2] = FINDS(portable);
#ifdef X86
DEFINE_FINDS(avx2, AVX2)
DEFINE_FINDS(avx512, AVX512)
static const find_function finds_avx2[4][2] = FINDS(avx2);
static const find_function finds_avx512[4][2] = FINDS(avx512);
#endif

static const find_function (*finds)[2] = finds_portable;
static const char *instructions = "portable";

/* Returns -1 if this machine cannot run them. */
static int use_instructions(const char *name) {
  if (strcmp(name, "portable") == 0) {
    finds = finds_portable;
    instructions = "portable";
    return 0;
  }
#ifdef X86
  __builtin_cpu_init();
  if (strcmp(name, "avx2") == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) {
    finds = finds_avx2;
    instructions = "avx2";
    return 0;
  }
  if (strcmp(name, "avx512") == 0 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("bmi")) {
    finds = finds_avx512;
    instructions = "avx512";
    return 0;
  }
#endif
  return -1;
}

static int log2_width(Py_ssize_t width) { return width == 1 ? 0 : width == 2 ? 1 : width == 4 ? 2 : 3; }

static PyObject *find_changes(PyObject *self, PyObject *args) {
  Py_buffer b[4] = {{0}};
  int operation;
  long long begin;
  if (!PyArg_ParseTuple(args, "y*y*iLw*w*", &b[0], &b[1], &operation, &begin, &b[2], &b[3])) {
    release(b, 4);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t width = b[0].itemsize, n = items(&b[0]);
  if (!is_integer_width(width) || b[1].itemsize != width || b[3].itemsize != width || b[1].len != b[0].len)
    refuse("the two arrays and the values must have one width and the arrays one length");
  else if ((b[2].itemsize != 4 && b[2].itemsize != 8) || items(&b[2]) < n || items(&b[3]) / 2 < n)
    refuse("locations must be int32 or int64 and as many as the arrays have elements, values twice as many");
  else if (operation < XOR || operation > ADD)
    refuse("unknown operation");
  else if (begin < 0 || (n > 0 && begin > (b[2].itemsize == 4 ? INT32_MAX : INT64_MAX) - (n - 1)))
    refuse("the locations do not fit their dtype");
  else {
    Py_ssize_t found;
    Py_BEGIN_ALLOW_THREADS
    found = finds[log2_width(width)][b[2].itemsize == 8](b[0].buf, b[1].buf, n, operation, begin, b[2].buf,
                                                         b[3].buf, NULL);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(found);
  }
  release(b, 4);
  return result;
}

/* --- gaps ----------------------------------------------------------------------------------------- */

/* Both return the number of wide gaps, or -1. */

#define DEFINE_GAPS(LBITS, L)                                                                          \
  static Py_ssize_t write_gaps_##LBITS(const L *locations, Py_ssize_t n, uint8_t *gaps, uint64_t *wide) { \
    Py_ssize_t escaped = 0;                                                                            \
    for (Py_ssize_t i = 1; i < n; i++) {                                                               \
      if (locations[i] <= locations[i - 1]) return -1;                                                 \
      uint64_t gap = (uint64_t)locations[i] - (uint64_t)locations[i - 1] - 1;                          \
      gaps[i - 1] = gap < ESCAPED_GAP ? (uint8_t)gap : ESCAPED_GAP;                                    \
      /* Put without asking, and counted only if it is one: which are cannot be guessed. */            \
      wide[escaped] = gap - ESCAPED_GAP;                                                               \
      escaped += gap >= ESCAPED_GAP;                                                                   \
    }                                                                                                  \
    return escaped;                                                                                    \
  }                                                                                                    \
  static Py_ssize_t read_gaps_##LBITS(const uint8_t *gaps, Py_ssize_t n, const uint64_t *wide,         \
                                      Py_ssize_t available, uint64_t first, uint64_t end,              \
                                      L *locations) {                                                  \
    Py_ssize_t used = 0;                                                                               \
    uint64_t at = first;                                                                               \
    locations[0] = (L)at;                                                                              \
    for (Py_ssize_t i = 1; i < n; i++) {                                                               \
      uint64_t gap = gaps[i - 1];                                                                      \
      if (gap == ESCAPED_GAP) {                                                                        \
        if (used == available) return -1;                                                              \
        /* Keeps the sum below from wrapping around: end is at most 2^63. */                           \
        if (wide[used] >= end) return -2;                                                              \
        gap += wide[used++];                                                                           \
      }                                                                                                \
      /* Not as a sum, which could wrap around; at is below end. */                                    \
      if (gap >= end - 1 - at) return -2;                                                              \
      at += gap + 1;                                                                                   \
      locations[i] = (L)at;                                                                            \
    }                                                                                                  \
    return used;                                                                                       \
  }

DEFINE_GAPS(32, int32_t)
DEFINE_GAPS(64, int64_t)

static PyObject *write_gaps(PyObject *self, PyObject *args) {
  Py_buffer b[3] = {{0}};
  if (!PyArg_ParseTuple(args, "y*w*w*", &b[0], &b[1], &b[2])) {
    release(b, 3);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[0]);
  if ((b[0].itemsize != 4 && b[0].itemsize != 8) || b[1].itemsize != 1 || b[2].itemsize != 8)
    refuse("locations must be int32 or int64, gaps uint8 and wide gaps uint64");
  else if (n < 1 || items(&b[1]) != n - 1 || items(&b[2]) < n - 1)
    refuse("n locations have n - 1 gaps");
  else {
    Py_ssize_t escaped;
    Py_BEGIN_ALLOW_THREADS
    escaped = b[0].itemsize == 4 ? write_gaps_32(b[0].buf, n, b[1].buf, b[2].buf)
                                 : write_gaps_64(b[0].buf, n, b[1].buf, b[2].buf);
    Py_END_ALLOW_THREADS
    result = escaped < 0 ? refuse("the locations are not strictly ascending") : PyLong_FromSsize_t(escaped);
  }
  release(b, 3);
  return result;
}

static PyObject *read_gaps(PyObject *self, PyObject *args) {
  Py_buffer b[3] = {{0}};
  unsigned long long first, end;
  if (!PyArg_ParseTuple(args, "y*y*KKw*", &b[0], &b[1], &first, &end, &b[2])) {
    release(b, 3);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[2]);
  uint64_t largest = b[2].itemsize == 4 ? INT32_MAX : INT64_MAX;
  if (b[0].itemsize != 1 || b[1].itemsize != 8 || (b[2].itemsize != 4 && b[2].itemsize != 8))
    refuse("gaps must be uint8, wide gaps uint64 and locations int32 or int64");
  else if (n < 1 || items(&b[0]) != n - 1 || first >= end || end - 1 > largest)
    refuse("n locations have n - 1 gaps, and their dtype must hold the last possible one");
  else {
    Py_ssize_t used;
    Py_BEGIN_ALLOW_THREADS
    used = b[2].itemsize == 4 ? read_gaps_32(b[0].buf, n, b[1].buf, items(&b[1]), first, end, b[2].buf)
                              : read_gaps_64(b[0].buf, n, b[1].buf, items(&b[1]), first, end, b[2].buf);
    Py_END_ALLOW_THREADS
    result = used == -1   ? refuse("there are fewer wide gaps than their marks")
             : used == -2 ? refuse("a location is outside its span")
                          : PyLong_FromSsize_t(used);
  }
  release(b, 3);
  return result;
}

/* --- codes ---------------------------------------------------------------------------------------- */

/* With zigzag, 0, -1, 1, -2, ... become 0, 1, 2, 3, ...: small steps either way are small numbers. */
#define ZIGZAG(T, BITS, v) ((T)(((T)(v) << 1) ^ (T) - (T)((T)(v) >> (BITS - 1))))
#define UNZIGZAG(T, z) ((T)(((T)(z) >> 1) ^ (T) - (T)((z) & 1)))

#define DEFINE_VALUES(BITS, T)                                                                           \
  static Py_ssize_t write_nibbles_##BITS(const T *codes, Py_ssize_t n, uint8_t *nibbles, T *escapes) {    \
    Py_ssize_t escaped = 0;                                                                              \
    for (Py_ssize_t i = 0; i < n; i += 2) {                                                              \
      uint8_t pair = 0;                                                                                  \
      for (int j = 0; j < 2 && i + j < n; j++) {                                                         \
        T code = codes[i + j];                                                                           \
        uint8_t nibble = code < ESCAPED_NIBBLE ? (uint8_t)code : ESCAPED_NIBBLE;                         \
        if (code >= ESCAPED_NIBBLE) escapes[escaped++] = code;                                           \
        pair |= nibble << 4 * j;                                                                         \
      }                                                                                                  \
      nibbles[i / 2] = pair;                                                                             \
    }                                                                                                    \
    return escaped;                                                                                      \
  }                                                                                                      \
  static Py_ssize_t count_escapes_##BITS(const T *codes, Py_ssize_t n) {                                 \
    Py_ssize_t escaped = 0;                                                                              \
    for (Py_ssize_t i = 0; i < n; i++) escaped += codes[i] >= ESCAPED_NIBBLE;                            \
    return escaped;                                                                                      \
  }                                                                                                      \
  static Py_ssize_t read_nibbles_##BITS(const uint8_t *nibbles, Py_ssize_t n, const T *escapes,          \
                                        Py_ssize_t available, T *codes) {                                \
    Py_ssize_t used = 0;                                                                                 \
    for (Py_ssize_t i = 0; i < n; i++) {                                                                 \
      T code = nibbles[i / 2] >> 4 * (i & 1) & 15;                                                       \
      if (code == ESCAPED_NIBBLE) {                                                                      \
        if (used == available) return -1;                                                                \
        code = escapes[used++];                                                                          \
      }                                                                                                  \
      codes[i] = code;                                                                                   \
    }                                                                                                    \
    return used;                                                                                         \
  }                                                                                                      \
  static void write_plane_##BITS(const T *codes, Py_ssize_t n, int plane, uint8_t *bytes) {              \
    for (Py_ssize_t i = 0; i < n; i++) bytes[i] = (uint8_t)(codes[i] >> 8 * plane);                      \
  }                                                                                                      \
  static void used_bits_##BITS(const T *codes, Py_ssize_t n, uint64_t *bits) {                           \
    T any = 0;                                                                                           \
    for (Py_ssize_t i = 0; i < n; i++) any |= codes[i];                                                  \
    *bits |= any;                                                                                        \
  }                                                                                                      \
  static void read_plane_##BITS(const uint8_t *bytes, Py_ssize_t n, int plane, T *codes) {               \
    for (Py_ssize_t i = 0; i < n; i++) codes[i] |= (T)((T)bytes[i] << 8 * plane);                        \
  }                                                                                                      \
  static void zigzag_##BITS(const T *values, Py_ssize_t n, T *codes) {                                   \
    for (Py_ssize_t i = 0; i < n; i++) codes[i] = ZIGZAG(T, BITS, values[i]);                            \
  }                                                                                                      \
  static void unzigzag_##BITS(T *codes, Py_ssize_t n) {                                                  \
    for (Py_ssize_t i = 0; i < n; i++) codes[i] = UNZIGZAG(T, codes[i]);                                 \
  }

DEFINE_VALUES(8, uint8_t)
DEFINE_VALUES(16, uint16_t)
DEFINE_VALUES(32, uint32_t)
DEFINE_VALUES(64, uint64_t)

/* Calls the function of the given item size; the arguments are the same for all. */
#define BY_WIDTH(WIDTH, NAME, ...)                  \
  do {                                              \
    switch (WIDTH) {                                \
      case 1: NAME##_8(__VA_ARGS__); break;         \
      case 2: NAME##_16(__VA_ARGS__); break;        \
      case 4: NAME##_32(__VA_ARGS__); break;        \
      default: NAME##_64(__VA_ARGS__); break;       \
    }                                               \
  } while (0)

static PyObject *write_nibbles(PyObject *self, PyObject *args) {
  Py_buffer b[3] = {{0}};
  if (!PyArg_ParseTuple(args, "y*w*w*", &b[0], &b[1], &b[2])) {
    release(b, 3);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  if (!is_integer_width(width) || b[1].itemsize != 1 || b[2].itemsize != width)
    refuse("codes and escapes must have one width and nibbles be uint8");
  else if (b[1].len != (n + 1) / 2 || items(&b[2]) < n)
    refuse("two codes share a byte of nibbles, and there may be as many escapes as codes");
  else {
    Py_ssize_t escaped = 0;
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, escaped = write_nibbles, b[0].buf, n, b[1].buf, b[2].buf);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(escaped);
  }
  release(b, 3);
  return result;
}

static PyObject *read_nibbles(PyObject *self, PyObject *args) {
  Py_buffer b[3] = {{0}};
  if (!PyArg_ParseTuple(args, "y*y*w*", &b[0], &b[1], &b[2])) {
    release(b, 3);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[2]), width = b[2].itemsize;
  if (!is_integer_width(width) || b[0].itemsize != 1 || b[1].itemsize != width)
    refuse("codes and escapes must have one width and nibbles be uint8");
  else if (b[0].len != (n + 1) / 2)
    refuse("two codes share a byte of nibbles");
  else {
    Py_ssize_t used = 0;
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, used = read_nibbles, b[0].buf, n, b[1].buf, items(&b[1]), b[2].buf);
    Py_END_ALLOW_THREADS
    result = used < 0 ? refuse("there are fewer escaped values than their marks") : PyLong_FromSsize_t(used);
  }
  release(b, 3);
  return result;
}

static PyObject *read_plane(PyObject *self, PyObject *args) {
  Py_buffer b[2] = {{0}};
  int plane;
  if (!PyArg_ParseTuple(args, "y*iw*", &b[0], &plane, &b[1])) {
    release(b, 2);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[1]), width = b[1].itemsize;
  if (!is_integer_width(width) || b[0].itemsize != 1 || b[0].len != n || plane < 0 || plane >= width)
    refuse("a plane has one byte of each code");
  else {
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, read_plane, b[0].buf, n, plane, b[1].buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
  }
  release(b, 2);
  return result;
}

static PyObject *zigzag(PyObject *self, PyObject *args) {
  Py_buffer b[2] = {{0}};
  if (!PyArg_ParseTuple(args, "y*w*", &b[0], &b[1])) {
    release(b, 2);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  if (!is_integer_width(width) || b[1].itemsize != width || items(&b[1]) != n)
    refuse("values and codes must be integers of 1, 2, 4 or 8 bytes, and as many");
  else {
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, zigzag, b[0].buf, n, b[1].buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
  }
  release(b, 2);
  return result;
}

static PyObject *unzigzag(PyObject *self, PyObject *args) {
  Py_buffer b[1] = {{0}};
  if (!PyArg_ParseTuple(args, "w*", &b[0])) return NULL;
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  if (!is_integer_width(width))
    refuse("values must be integers of 1, 2, 4 or 8 bytes");
  else {
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, unzigzag, b[0].buf, n);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
  }
  release(b, 1);
  return result;
}

/* --- planes ---------------------------------------------------------------------------------------- */

enum { PLANES = 8 };

typedef struct {
  Py_buffer numbers;
  Py_ssize_t n;
  int width;
} Part;

static int read_part(PyObject *from, Part *part) {
  PyObject *numbers;
  if (!PyTuple_Check(from)) {
    refuse("a part is a tuple");
    return -1;
  }
  if (!PyArg_ParseTuple(from, "iO", &part->width, &numbers) ||
      PyObject_GetBuffer(numbers, &part->numbers, PyBUF_SIMPLE) < 0)
    return -1;
  if (!is_integer_width(part->width) || part->numbers.len % part->width ||
      (uintptr_t)part->numbers.buf % part->width) {
    refuse("numbers have 1, 2, 4 or 8 bytes each and are aligned");
    return -1;
  }
  part->n = part->numbers.len / part->width;
  return 0;
}

/* A bytes object for each plane that is not left out, by its number, and where its bytes go. */
static PyObject *make_planes(const Part *parts, Py_ssize_t count, uint64_t used, uint8_t *to[PLANES]) {
  PyObject *planes = PyDict_New();
  for (int plane = 0; planes != NULL && plane < PLANES; plane++) {
    Py_ssize_t size = 0;
    for (Py_ssize_t i = 0; i < count; i++) size += parts[i].width > plane ? parts[i].n : 0;
    if (plane == 0 ? size == 0 : (used >> 8 * plane & 255) == 0) continue;
    PyObject *number = PyLong_FromLong(plane), *bytes = PyBytes_FromStringAndSize(NULL, size);
    if (number == NULL || bytes == NULL || PyDict_SetItem(planes, number, bytes) < 0)
      Py_CLEAR(planes);
    else
      to[plane] = (uint8_t *)PyBytes_AsString(bytes);
    Py_XDECREF(number);
    Py_XDECREF(bytes);
  }
  return planes;
}

static void fill_plane(const Part *parts, Py_ssize_t count, int plane, uint8_t *at) {
  for (Py_ssize_t i = 0; i < count; i++)
    if (parts[i].width > plane) {
      BY_WIDTH(parts[i].width, write_plane, parts[i].numbers.buf, parts[i].n, plane, at);
      at += parts[i].n;
    }
}

static PyObject *planes_of(const Part *parts, Py_ssize_t count) {
  uint8_t *to[PLANES] = {NULL};
  uint64_t used = 0;
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < count; i++)
    BY_WIDTH(parts[i].width, used_bits, parts[i].numbers.buf, parts[i].n, &used);
  Py_END_ALLOW_THREADS
  PyObject *planes = make_planes(parts, count, used, to);
  if (planes == NULL) return NULL;
  /* Nobody else has these bytes objects yet, so they may be written to. */
  Py_BEGIN_ALLOW_THREADS
  for (int plane = 0; plane < PLANES; plane++)
    if (to[plane] != NULL) fill_plane(parts, count, plane, to[plane]);
  Py_END_ALLOW_THREADS
  return planes;
}

static PyObject *write_planes(PyObject *self, PyObject *list) {
  if (!PyList_Check(list)) return refuse("the parts must be a list");
  Py_ssize_t count = PyList_Size(list), read = 0;
  Part *parts = PyMem_Calloc(count ? count : 1, sizeof(Part));
  if (parts == NULL) return PyErr_NoMemory();
  while (read < count && read_part(PyList_GetItem(list, read), &parts[read]) == 0) read++;
  PyObject *result = read < count ? NULL : planes_of(parts, count);
  for (Py_ssize_t i = 0; i < count; i++)
    if (parts[i].numbers.obj != NULL) PyBuffer_Release(&parts[i].numbers);
  PyMem_Free(parts);
  return result;
}

/* --- code_changes --------------------------------------------------------------------------------- */

/* No more is written for a chunk: for each element a wide gap of 8 bytes, a gap byte, half a byte of
 * nibbles and a code of at most 8; and what brings each of these to a multiple of 8. */
enum { CODED_BYTES_PER_ELEMENT = 18, CODED_BYTES_PER_CHUNK = 32 };

/* One chunk, and what was found in it. */
typedef struct {
  Py_buffer old, new;
  int operation, width, location_width, has_nibbles;
  int64_t begin, first, last;
  Py_ssize_t n, found, wide, codes;
  const uint8_t *gaps_at, *wide_at, *nibbles_at, *codes_at;
  uint64_t prior[2];
} Chunk;

static int read_chunk(PyObject *from, Chunk *chunk) {
  PyObject *old, *new;
  long long begin;
  int is_wide;
  if (!PyTuple_Check(from)) {
    refuse("a chunk is a tuple");
    return -1;
  }
  if (!PyArg_ParseTuple(from, "OOiLp", &old, &new, &chunk->operation, &begin, &is_wide) ||
      PyObject_GetBuffer(old, &chunk->old, PyBUF_SIMPLE) < 0 ||
      PyObject_GetBuffer(new, &chunk->new, PyBUF_SIMPLE) < 0)
    return -1;
  const char *wrong = NULL;
  chunk->width = (int)chunk->old.itemsize;
  chunk->n = items(&chunk->old);
  chunk->begin = begin;
  chunk->location_width = is_wide ? 8 : 4;
  if (!is_integer_width(chunk->width) || chunk->new.itemsize != chunk->width || chunk->new.len != chunk->old.len)
    wrong = "the two arrays must have one width and one length";
  else if (chunk->operation < XOR || chunk->operation > ADD)
    wrong = "unknown operation";
  else if (begin < 0 || begin > (is_wide ? INT64_MAX : (int64_t)INT32_MAX) - chunk->n + (chunk->n > 0))
    wrong = "the locations do not fit their dtype";
  if (wrong != NULL) refuse(wrong);
  return wrong == NULL ? 0 : -1;
}

static void release_chunks(Chunk *chunks, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; i++) {
    if (chunks[i].old.obj != NULL) PyBuffer_Release(&chunks[i].old);
    if (chunks[i].new.obj != NULL) PyBuffer_Release(&chunks[i].new);
  }
  PyMem_Free(chunks);
}

static uint8_t *aligned(uint8_t *at) { return (uint8_t *)(((uintptr_t)at + 7) & ~(uintptr_t)7); }

/* Writes the codes of a chunk from `at` on; returns where they end. */
static uint8_t *code_chunk(Chunk *chunk, void *locations, void *values, uint8_t *at) {
  int width = chunk->width, operation = chunk->operation, is_wide = chunk->location_width == 8;
  Py_ssize_t escaped = 0;
  Py_ssize_t found = finds[log2_width(width)][is_wide](chunk->old.buf, chunk->new.buf, chunk->n, operation,
                                                       chunk->begin, locations, values,
                                                       operation == OVERWRITE ? NULL : chunk->prior);
  chunk->found = found;
  chunk->gaps_at = chunk->wide_at = chunk->nibbles_at = chunk->codes_at = at;
  if (found == 0) return at;
  chunk->first = is_wide ? ((int64_t *)locations)[0] : ((int32_t *)locations)[0];
  chunk->last = is_wide ? ((int64_t *)locations)[found - 1] : ((int32_t *)locations)[found - 1];
  uint8_t *wide = aligned(at + found - 1);
  chunk->wide = is_wide ? write_gaps_64(locations, found, at, (uint64_t *)wide)
                        : write_gaps_32(locations, found, at, (uint64_t *)wide);
  uint8_t *nibbles = wide + 8 * chunk->wide, *codes = nibbles;
  if (operation == ADD) BY_WIDTH(width, zigzag, values, found, values);
  if (operation != OVERWRITE) {
    BY_WIDTH(width, escaped = count_escapes, values, found);
    chunk->has_nibbles = escaped * NIBBLES_PER_ESCAPE <= found;
  }
  chunk->codes = chunk->has_nibbles ? escaped : found;
  if (chunk->has_nibbles) {
    codes = aligned(nibbles + (found + 1) / 2);
    BY_WIDTH(width, write_nibbles, values, found, nibbles, (void *)codes);
  } else
    memcpy(codes, values, width * found);
  chunk->wide_at = wide;
  chunk->nibbles_at = nibbles;
  chunk->codes_at = codes;
  return aligned(codes + width * chunk->codes);
}

static PyObject *coded(const Chunk *chunk) {
  Py_ssize_t found = chunk->found;
  return Py_BuildValue("nLLy#y#y#y#KK", found, (long long)chunk->first, (long long)chunk->last,
                       (const char *)chunk->gaps_at, found ? found - 1 : 0, (const char *)chunk->wide_at,
                       8 * chunk->wide, (const char *)chunk->nibbles_at,
                       chunk->has_nibbles ? (found + 1) / 2 : 0, (const char *)chunk->codes_at,
                       chunk->width * chunk->codes, (unsigned long long)chunk->prior[0],
                       (unsigned long long)chunk->prior[1]);
}

/* All steps of several chunks without taking the interpreter lock in between: each time it is taken,
 * another thread may have to be waited for, and what Python does meanwhile finds its memory pushed out
 * of the caches by the last chunk. */
static PyObject *code_changes(PyObject *self, PyObject *args) {
  PyObject *list, *result = NULL;
  Py_buffer b[3] = {{0}};
  if (!PyArg_ParseTuple(args, "Ow*w*w*", &list, &b[0], &b[1], &b[2])) {
    release(b, 3);
    return NULL;
  }
  Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : 0, read = 0, room = 0;
  int too_small = 0;
  Chunk *chunks = PyMem_Calloc(count ? count : 1, sizeof(Chunk));
  if (chunks == NULL) {
    release(b, 3);
    return PyErr_NoMemory();
  }
  while (read < count && read_chunk(PyList_GetItem(list, read), &chunks[read]) == 0) {
    Chunk *chunk = &chunks[read++];
    room += chunk->n * CODED_BYTES_PER_ELEMENT + CODED_BYTES_PER_CHUNK;
    too_small |= b[0].len / chunk->location_width < chunk->n || b[1].len / chunk->width / 2 < chunk->n;
  }
  if (PyErr_Occurred())
    ;
  else if (!PyList_Check(list))
    refuse("the chunks must be a list");
  else if (too_small || b[2].len < room)
    refuse("there must be room for a location, two values and all codes of each element");
  else if ((uintptr_t)b[0].buf % 8 || (uintptr_t)b[1].buf % 8 || (uintptr_t)b[2].buf % 8)
    refuse("the memory that is written to must be aligned");
  else {
    Py_BEGIN_ALLOW_THREADS
    uint8_t *at = b[2].buf;
    for (Py_ssize_t i = 0; i < count; i++) at = code_chunk(&chunks[i], b[0].buf, b[1].buf, at);
    Py_END_ALLOW_THREADS
    result = PyList_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++) {
      PyObject *item = coded(&chunks[i]);
      if (item == NULL || PyList_SetItem(result, i, item) < 0) Py_CLEAR(result);
    }
  }
  release_chunks(chunks, count);
  release(b, 3);
  return result;
}

/* --- many elements of many arrays ------------------------------------------------------------------ */

/* One write into one array, or a piece of one that a thread takes: (target, where, values, operation,
 * stride, shift, canonical) as kernels.py describes it. */
typedef struct {
  uint8_t *target;
  int64_t elements;        /* of the target */
  const int32_t *narrow;   /* where: one of these two, or consecutive from `first` on */
  const int64_t *wide;
  int64_t first;
  const uint8_t *values;
  Py_ssize_t n;
  int64_t stride, shift;
  const int32_t *canonical_narrow; /* what the digest takes for positions; `where` if there is neither */
  const int64_t *canonical_wide;
  uint8_t *before;
  uint64_t *sums;          /* two: of the digest */
  int width, operation;
} Write;

typedef struct Batch Batch;
typedef void (*piece_function)(Batch *, const Write *, Py_ssize_t from, Py_ssize_t to);

struct Batch {
  Write *writes;
  Py_buffer *buffers; /* four for each write: target, where, values, canonical */
  Py_ssize_t count;
  piece_function run;
  Py_ssize_t next_write, next_element; /* the piece that is taken next; the lock guards both */
  pthread_mutex_t lock;
  int outside;        /* a location was outside its target */
  Py_ssize_t limit;   /* samples of each write */
  Py_ssize_t compared, different;
};

static void end_batch(Batch *batch) {
  for (Py_ssize_t i = 0; i < 4 * batch->count; i++)
    if (batch->buffers[i].obj != NULL) PyBuffer_Release(&batch->buffers[i]);
  PyMem_Free(batch->writes);
  PyMem_Free(batch->buffers);
}

/* The locations, if they are an array; otherwise they are the number of the first of a run. */
static int read_where(PyObject *where, Py_buffer *buffer, Write *write) {
  if (PyLong_Check(where)) {
    write->first = PyLong_AsLongLong(where);
    return write->first == -1 && PyErr_Occurred() ? -1 : 0;
  }
  if (PyObject_GetBuffer(where, buffer, PyBUF_SIMPLE) < 0) return -1;
  if ((buffer->itemsize != 4 && buffer->itemsize != 8) || items(buffer) != write->n) {
    refuse("there must be an int32 or int64 location for each value");
    return -1;
  }
  write->narrow = buffer->itemsize == 4 ? buffer->buf : NULL;
  write->wide = buffer->itemsize == 8 ? buffer->buf : NULL;
  return 0;
}

static int read_write(PyObject *from, Py_buffer *b, Write *write, int writable) {
  PyObject *target, *where, *values, *canonical;
  long long stride, shift;
  if (!PyTuple_Check(from)) {
    refuse("a write is a tuple");
    return -1;
  }
  if (!PyArg_ParseTuple(from, "OOOiLLO", &target, &where, &values, &write->operation, &stride, &shift,
                        &canonical) ||
      PyObject_GetBuffer(target, &b[0], writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0 ||
      PyObject_GetBuffer(values, &b[2], PyBUF_SIMPLE) < 0)
    return -1;
  if (!is_integer_width(b[0].itemsize) || b[2].itemsize != b[0].itemsize) {
    refuse("target and values must have one width");
    return -1;
  }
  if (write->operation < XOR || write->operation > ADD) {
    refuse("unknown operation");
    return -1;
  }
  write->width = (int)b[0].itemsize;
  write->target = b[0].buf;
  write->elements = items(&b[0]);
  write->values = b[2].buf;
  write->n = items(&b[2]);
  write->stride = stride;
  write->shift = shift;
  if (read_where(where, &b[1], write) < 0) return -1;
  if (canonical != Py_None) {
    if (PyObject_GetBuffer(canonical, &b[3], PyBUF_SIMPLE) < 0) return -1;
    if ((b[3].itemsize != 4 && b[3].itemsize != 8) || items(&b[3]) != write->n) {
      refuse("there must be an int32 or int64 canonical position for each value");
      return -1;
    }
    write->canonical_narrow = b[3].itemsize == 4 ? b[3].buf : NULL;
    write->canonical_wide = b[3].itemsize == 8 ? b[3].buf : NULL;
  }
  return 0;
}

/* Takes the buffers of a list of writes; end_batch gives them back, also after a failure. */
static int begin_batch(Batch *batch, PyObject *list, int writable) {
  memset(batch, 0, sizeof *batch);
  if (!PyList_Check(list)) {
    refuse("the writes must be a list");
    return -1;
  }
  Py_ssize_t count = PyList_Size(list);
  batch->writes = PyMem_Calloc(count ? count : 1, sizeof(Write));
  batch->buffers = PyMem_Calloc(count ? 4 * count : 1, sizeof(Py_buffer));
  if (batch->writes == NULL || batch->buffers == NULL) {
    PyErr_NoMemory();
    return -1;
  }
  batch->count = count;
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *from = PyList_GetItem(list, i);
    if (from == NULL || read_write(from, &batch->buffers[4 * i], &batch->writes[i], writable) < 0) return -1;
  }
  return 0;
}

/* Each write's old bits begin at a multiple of eight bytes. */
static Py_ssize_t before_bytes(const Write *write) { return (write->n * write->width + 7) & ~(Py_ssize_t)7; }

static int place_before(Batch *batch, const Py_buffer *before) {
  Py_ssize_t at = 0;
  for (Py_ssize_t i = 0; i < batch->count; i++) {
    batch->writes[i].before = (uint8_t *)before->buf + at;
    at += before_bytes(&batch->writes[i]);
  }
  if (before->len == at) return 0;
  refuse("there must be exactly the room that the old bits take");
  return -1;
}

/* --- threads --- */

static void *work(void *argument) {
  Batch *batch = argument;
  for (;;) {
    pthread_mutex_lock(&batch->lock);
    while (batch->next_write < batch->count && batch->next_element >= batch->writes[batch->next_write].n) {
      batch->next_write++;
      batch->next_element = 0;
    }
    Py_ssize_t index = batch->next_write, from = batch->next_element;
    batch->next_element += PIECE_ELEMENTS;
    pthread_mutex_unlock(&batch->lock);
    if (index >= batch->count) return NULL;
    const Write *write = &batch->writes[index];
    Py_ssize_t to = from + PIECE_ELEMENTS < write->n ? from + PIECE_ELEMENTS : write->n;
    batch->run(batch, write, from, to);
  }
}

/* Runs over all elements of all writes, in this thread and in as many others as are worth it. If one
 * cannot be started, the rest do its work. The interpreter lock is not held. */
static void run_batch(Batch *batch, piece_function run, int threads) {
  pthread_t others[MOST_THREADS];
  Py_ssize_t elements = 0;
  int started = 0;
  for (Py_ssize_t i = 0; i < batch->count; i++) elements += batch->writes[i].n;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  batch->run = run;
  batch->next_write = batch->next_element = 0;
  pthread_mutex_init(&batch->lock, NULL);
  while (started + 1 < threads && (started + 1) * (Py_ssize_t)THREAD_ELEMENTS < elements &&
         pthread_create(&others[started], NULL, work, batch) == 0)
    started++;
  work(batch);
  while (started > 0) pthread_join(others[--started], NULL);
  pthread_mutex_destroy(&batch->lock);
}

/* --- locations --- */

#define DEFINE_RANGE(LBITS, L)                                                                         \
  static void range_##LBITS(const L *locations, Py_ssize_t n, int64_t *least, int64_t *largest) {      \
    L low = locations[0], high = locations[0];                                                         \
    for (Py_ssize_t i = 1; i < n; i++) {                                                               \
      low = locations[i] < low ? locations[i] : low;                                                   \
      high = locations[i] > high ? locations[i] : high;                                                \
    }                                                                                                  \
    *least = low;                                                                                      \
    *largest = high;                                                                                   \
  }

DEFINE_RANGE(32, int32_t)
DEFINE_RANGE(64, int64_t)

/* Notes whether a location * stride + shift is not in [0, elements). */
static void check_piece(Batch *batch, const Write *write, Py_ssize_t from, Py_ssize_t to) {
  int64_t ends[2];
  int outside = write->stride < 1;
  if (write->narrow != NULL)
    range_32(write->narrow + from, to - from, &ends[0], &ends[1]);
  else if (write->wide != NULL)
    range_64(write->wide + from, to - from, &ends[0], &ends[1]);
  else
    outside |= __builtin_add_overflow(write->first, from, &ends[0]) ||
               __builtin_add_overflow(write->first, to - 1, &ends[1]);
  for (int i = 0; i < 2 && !outside; i++)
    outside = __builtin_mul_overflow(ends[i], write->stride, &ends[i]) ||
              __builtin_add_overflow(ends[i], write->shift, &ends[i]) || ends[i] < 0 ||
              ends[i] >= write->elements;
  if (outside) __atomic_store_n(&batch->outside, 1, __ATOMIC_RELAXED);
}

#define AT_NARROW(i) ((int64_t)narrow[i] * stride + shift)
#define AT_WIDE(i) (wide[i] * stride + shift)
#define AT_RUN(i) ((first + (i)) * stride + shift)

/* Defines NAME_BITS(write, ..., from, to), whose loop LOOP(AT) is compiled for each kind of location. */
#define DEFINE_PIECE(NAME, BITS, T, RESULT, START, LOOP)                                                \
  static RESULT NAME##_##BITS(const Write *write, Py_ssize_t from, Py_ssize_t to, Py_ssize_t step) {    \
    T *target = (T *)write->target;                                                                     \
    const T *values = (const T *)write->values;                                                         \
    T *before = (T *)write->before;                                                                     \
    const int32_t *narrow = write->narrow;                                                              \
    const int64_t *wide = write->wide;                                                                  \
    int64_t first = write->first, stride = write->stride, shift = write->shift;                         \
    int operation = write->operation;                                                                   \
    (void)values, (void)before, (void)operation, (void)step;                                            \
    START                                                                                               \
    if (narrow != NULL) LOOP(T, AT_NARROW)                                                              \
    else if (wide != NULL) LOOP(T, AT_WIDE)                                                             \
    else LOOP(T, AT_RUN)                                                                                \
    FINISH_##NAME                                                                                       \
  }

#define DEFINE_PIECES(NAME, RESULT, START, LOOP)           \
  DEFINE_PIECE(NAME, 8, uint8_t, RESULT, START, LOOP)      \
  DEFINE_PIECE(NAME, 16, uint16_t, RESULT, START, LOOP)    \
  DEFINE_PIECE(NAME, 32, uint32_t, RESULT, START, LOOP)    \
  DEFINE_PIECE(NAME, 64, uint64_t, RESULT, START, LOOP)

#define COMBINED(T, OLD, i)                          \
  (operation == XOR   ? (T)((OLD) ^ values[i])       \
   : operation == ADD ? (T)((OLD) + values[i])       \
                      : values[i])

/* --- scatter --- */

#define SCATTER_LOOP(T, AT)                                                    \
  for (Py_ssize_t i = from; i < to; i++) {                                     \
    if (i + PREFETCHED < to) __builtin_prefetch(target + AT(i + PREFETCHED), 1); \
    int64_t at = AT(i);                                                        \
    T old = target[at];                                                        \
    if (before) before[i] = old;                                               \
    target[at] = COMBINED(T, old, i);                                          \
  }
#define FINISH_scatter

DEFINE_PIECES(scatter, void, , SCATTER_LOOP)

static void scatter_piece(Batch *batch, const Write *write, Py_ssize_t from, Py_ssize_t to) {
  (void)batch;
  BY_WIDTH(write->width, scatter, write, from, to, 1);
}

static PyObject *scatter(PyObject *self, PyObject *args) {
  PyObject *list, *before, *done;
  Py_buffer b[2] = {{0}};
  Batch batch;
  int threads;
  if (!PyArg_ParseTuple(args, "OOOi", &list, &before, &done, &threads)) return NULL;
  PyObject *result = NULL;
  if (begin_batch(&batch, list, 1) < 0 ||
      (before != Py_None &&
       (PyObject_GetBuffer(before, &b[0], PyBUF_WRITABLE) < 0 || place_before(&batch, &b[0]) < 0)) ||
      (done != Py_None && PyObject_GetBuffer(done, &b[1], PyBUF_WRITABLE) < 0))
    ;
  else if (done != Py_None && b[1].len != 1)
    refuse("done is one byte");
  else {
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, check_piece, threads);
    if (!batch.outside) {
      run_batch(&batch, scatter_piece, threads);
      if (b[1].buf != NULL) *(uint8_t *)b[1].buf = 1;
    }
    Py_END_ALLOW_THREADS
    result = batch.outside ? refuse("a location is outside the target") : Py_NewRef(Py_None);
  }
  release(b, 2);
  end_batch(&batch);
  return result;
}

/* --- count_different --- */

#define COMPARE_LOOP(T, AT)                                                     \
  for (Py_ssize_t i = from; i < to; i += step) {                                \
    if (to - i > 8 * step) __builtin_prefetch(target + AT(i + 8 * step));       \
    different += target[AT(i)] != COMBINED(T, before[i], i);                    \
  }
#define FINISH_compare return different;

DEFINE_PIECES(compare, Py_ssize_t, Py_ssize_t different = 0;, COMPARE_LOOP)

static void compare_piece(Batch *batch, const Write *write, Py_ssize_t from, Py_ssize_t to) {
  Py_ssize_t step = (write->n + batch->limit - 1) / batch->limit, different = 0;
  Py_ssize_t start = (from + step - 1) / step * step;
  if (start >= to) return;
  BY_WIDTH(write->width, different = compare, write, start, to, step);
  __atomic_fetch_add(&batch->compared, (to - start + step - 1) / step, __ATOMIC_RELAXED);
  __atomic_fetch_add(&batch->different, different, __ATOMIC_RELAXED);
}

static PyObject *count_different(PyObject *self, PyObject *args) {
  PyObject *list;
  Py_buffer b[1] = {{0}};
  Batch batch;
  Py_ssize_t limit;
  int threads;
  if (!PyArg_ParseTuple(args, "Oy*ni", &list, &b[0], &limit, &threads)) return NULL;
  PyObject *result = NULL;
  if (begin_batch(&batch, list, 0) < 0 || place_before(&batch, &b[0]) < 0)
    ;
  else if (limit < 1)
    refuse("there must be a sample at least");
  else {
    batch.limit = limit;
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, check_piece, threads);
    if (!batch.outside) run_batch(&batch, compare_piece, threads);
    Py_END_ALLOW_THREADS
    result = batch.outside ? refuse("a location is outside the target")
                           : Py_BuildValue("nn", batch.compared, batch.different);
  }
  release(b, 1);
  end_batch(&batch);
  return result;
}

/* --- digest --------------------------------------------------------------------------------------- */

#define DEFINE_DIGEST(BITS, T)                                                                        \
  static void digest_run_##BITS(const T *bits, Py_ssize_t n, uint64_t begin, uint64_t sum[2]) {       \
    for (Py_ssize_t i = 0; i < n; i++) add_element(sum, begin + i, bits[i]);                          \
  }                                                                                                   \
  static void digest_places_##BITS(const T *bits, Py_ssize_t n, const int32_t *narrow,                \
                                   const int64_t *wide, uint64_t sum[2]) {                            \
    for (Py_ssize_t i = 0; i < n; i++)                                                                \
      add_element(sum, narrow ? (uint64_t)narrow[i] : (uint64_t)wide[i], bits[i]);                    \
  }

DEFINE_DIGEST(8, uint8_t)
DEFINE_DIGEST(16, uint16_t)
DEFINE_DIGEST(32, uint32_t)
DEFINE_DIGEST(64, uint64_t)

static PyObject *digest_run(PyObject *self, PyObject *args) {
  Py_buffer b[1] = {{0}};
  unsigned long long begin;
  if (!PyArg_ParseTuple(args, "y*K", &b[0], &begin)) return NULL;
  uint64_t sum[2] = {0, 0};
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  int bad = !is_integer_width(width);
  if (!bad) {
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, digest_run, b[0].buf, n, begin, sum);
    Py_END_ALLOW_THREADS
  }
  release(b, 1);
  return bad ? refuse("bits must be integers of 1, 2, 4 or 8 bytes")
             : Py_BuildValue("KK", (unsigned long long)sum[0], (unsigned long long)sum[1]);
}

static PyObject *digest_places(PyObject *self, PyObject *args) {
  Py_buffer b[2] = {{0}};
  if (!PyArg_ParseTuple(args, "y*y*", &b[0], &b[1])) {
    release(b, 2);
    return NULL;
  }
  uint64_t sum[2] = {0, 0};
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  int bad = !is_integer_width(width) || (b[1].itemsize != 4 && b[1].itemsize != 8) || items(&b[1]) != n;
  if (!bad) {
    const int32_t *narrow = b[1].itemsize == 4 ? b[1].buf : NULL;
    const int64_t *wide = b[1].itemsize == 8 ? b[1].buf : NULL;
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, digest_places, b[0].buf, n, narrow, wide, sum);
    Py_END_ALLOW_THREADS
  }
  release(b, 2);
  return bad ? refuse("there must be an int32 or int64 location for each element")
             : Py_BuildValue("KK", (unsigned long long)sum[0], (unsigned long long)sum[1]);
}

/* Of elements of many arrays, in threads. */

#define DIGEST_LOOP(T, AT)                                                                    \
  for (Py_ssize_t i = from; i < to; i++) {                                                    \
    if (i + PREFETCHED < to) __builtin_prefetch(target + AT(i + PREFETCHED));                 \
    int64_t position = write->canonical_narrow != NULL ? write->canonical_narrow[i]           \
                       : write->canonical_wide != NULL ? write->canonical_wide[i]             \
                       : narrow != NULL                ? narrow[i]                            \
                       : wide != NULL                  ? wide[i]                              \
                                                       : first + i;                           \
    add_element(sum, (uint64_t)position, target[AT(i)]);                                      \
  }
#define FINISH_gather                                          \
  __atomic_fetch_add(&write->sums[0], sum[0], __ATOMIC_RELAXED); \
  __atomic_fetch_add(&write->sums[1], sum[1], __ATOMIC_RELAXED);

DEFINE_PIECES(gather, void, uint64_t sum[2] = {0};, DIGEST_LOOP)

static void digest_piece(Batch *batch, const Write *write, Py_ssize_t from, Py_ssize_t to) {
  (void)batch;
  BY_WIDTH(write->width, gather, write, from, to, 1);
}

static PyObject *digest_targets(PyObject *self, PyObject *args) {
  PyObject *list;
  Py_buffer b[1] = {{0}};
  Batch batch;
  int threads;
  if (!PyArg_ParseTuple(args, "Ow*i", &list, &b[0], &threads)) return NULL;
  PyObject *result = NULL;
  if (begin_batch(&batch, list, 0) < 0)
    ;
  else if (b[0].itemsize != 8 || items(&b[0]) != 2 * batch.count)
    refuse("there must be room for two 64-bit sums of each write");
  else {
    memset(b[0].buf, 0, b[0].len);
    for (Py_ssize_t i = 0; i < batch.count; i++) batch.writes[i].sums = (uint64_t *)b[0].buf + 2 * i;
    Py_BEGIN_ALLOW_THREADS
    run_batch(&batch, check_piece, threads);
    if (!batch.outside) run_batch(&batch, digest_piece, threads);
    Py_END_ALLOW_THREADS
    result = batch.outside ? refuse("a location is outside the target") : Py_NewRef(Py_None);
  }
  release(b, 1);
  end_batch(&batch);
  return result;
}

/* --- module --------------------------------------------------------------------------------------- */

static PyObject *py_use_instructions(PyObject *self, PyObject *args) {
  PyObject *name;
  if (!PyArg_ParseTuple(args, "U", &name)) return NULL;
  PyObject *ascii = PyUnicode_AsASCIIString(name);
  if (ascii == NULL) return NULL;
  int failed = use_instructions(PyBytes_AsString(ascii));
  Py_DECREF(ascii);
  return failed ? refuse("this processor lacks these instructions") : Py_NewRef(Py_None);
}

static PyObject *py_instructions(PyObject *self, PyObject *args) { return PyUnicode_FromString(instructions); }

static PyMethodDef methods[] = {
    {"find_changes", find_changes, METH_VARARGS, NULL},
    {"code_changes", code_changes, METH_VARARGS, NULL},
    {"write_gaps", write_gaps, METH_VARARGS, NULL},
    {"read_gaps", read_gaps, METH_VARARGS, NULL},
    {"write_nibbles", write_nibbles, METH_VARARGS, NULL},
    {"read_nibbles", read_nibbles, METH_VARARGS, NULL},
    {"write_planes", write_planes, METH_O, NULL},
    {"read_plane", read_plane, METH_VARARGS, NULL},
    {"zigzag", zigzag, METH_VARARGS, NULL},
    {"unzigzag", unzigzag, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {"count_different", count_different, METH_VARARGS, NULL},
    {"digest_run", digest_run, METH_VARARGS, NULL},
    {"digest_places", digest_places, METH_VARARGS, NULL},
    {"digest_targets", digest_targets, METH_VARARGS, NULL},
    {"use_instructions", py_use_instructions, METH_VARARGS, NULL},
    {"instructions", py_instructions, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int choose(PyObject *module) {
  if (use_instructions("avx512") < 0 && use_instructions("avx2") < 0) use_instructions("portable");
  return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, choose}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_kernels", "Compiled loops of the codec.", 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&module); }
