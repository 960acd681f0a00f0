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

enum { ESCAPED_GAP = 255, ESCAPED_NIBBLE = 15, BLOCK_BYTES = 64, AHEAD_BYTES = 1024, PREFETCHED = 24 };

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

/* `to_values` has room for two of each element. With `prior`, that takes the digest of the old bits. */
#define DEFINE_FIND(ISA, ATTRIBUTE, BITS, T, LBITS, L)                                    \
  DEFINE_VALUES_OF_PAIRS(ISA, ATTRIBUTE, BITS, T, LBITS, L)                               \
  ATTRIBUTE static Py_ssize_t find_##ISA##_##BITS##_##LBITS(                              \
      const uint8_t *old, const uint8_t *new, Py_ssize_t n, int operation, int64_t begin, \
      void *to_locations, void *to_values, uint64_t prior[2]) {                           \
    L *locations = to_locations;                                                          \
    T *pairs = to_values;                                                                 \
    Py_ssize_t found = 0, at = 0, step = BLOCK_BYTES / sizeof(T);                         \
    for (; at + step <= n; at += step) {                                                  \
      __builtin_prefetch(old + at * sizeof(T) + AHEAD_BYTES);                             \
      __builtin_prefetch(new + at * sizeof(T) + AHEAD_BYTES);                             \
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

static PyObject *write_plane(PyObject *self, PyObject *args) {
  Py_buffer b[2] = {{0}};
  int plane;
  if (!PyArg_ParseTuple(args, "y*iw*", &b[0], &plane, &b[1])) {
    release(b, 2);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t n = items(&b[0]), width = b[0].itemsize;
  if (!is_integer_width(width) || b[1].itemsize != 1 || b[1].len != n || plane < 0 || plane >= width)
    refuse("a plane has one byte of each code");
  else {
    Py_BEGIN_ALLOW_THREADS
    BY_WIDTH(width, write_plane, b[0].buf, n, plane, b[1].buf);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
  }
  release(b, 2);
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

/* --- code_changes --------------------------------------------------------------------------------- */

/* All steps of a chunk without taking the interpreter lock in between: each time it is taken, another
 * thread may have to be waited for. */
static PyObject *code_changes(PyObject *self, PyObject *args) {
  Py_buffer b[8] = {{0}};
  int operation;
  long long begin;
  if (!PyArg_ParseTuple(args, "y*y*iLw*w*w*w*w*w*", &b[0], &b[1], &operation, &begin, &b[2], &b[3], &b[4],
                        &b[5], &b[6], &b[7])) {
    release(b, 8);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t width = b[0].itemsize, n = items(&b[0]);
  if (!is_integer_width(width) || b[1].itemsize != width || b[3].itemsize != width ||
      b[7].itemsize != width || b[1].len != b[0].len)
    refuse("the two arrays, values and escapes must have one width and the arrays one length");
  else if ((b[2].itemsize != 4 && b[2].itemsize != 8) || items(&b[2]) < n || items(&b[3]) / 2 < n ||
           items(&b[7]) < n)
    refuse("locations must be int32 or int64, all outputs as long as the arrays and values twice as long");
  else if (b[4].itemsize != 1 || b[5].itemsize != 8 || b[6].itemsize != 1 || items(&b[4]) < n ||
           items(&b[5]) < n || items(&b[6]) < (n + 1) / 2)
    refuse("gaps and nibbles must be uint8, wide gaps uint64, and all outputs long enough");
  else if (operation < XOR || operation > ADD)
    refuse("unknown operation");
  else if (begin < 0 || begin > (b[2].itemsize == 4 ? (int64_t)INT32_MAX : INT64_MAX) - n + (n > 0))
    refuse("the locations do not fit their dtype");
  else {
    Py_ssize_t found, wide = 0, escaped = 0;
    uint64_t prior[2] = {0, 0};
    Py_BEGIN_ALLOW_THREADS
    found = finds[log2_width(width)][b[2].itemsize == 8](b[0].buf, b[1].buf, n, operation, begin, b[2].buf,
                                                         b[3].buf, operation == OVERWRITE ? NULL : prior);
    if (found > 0) {
      wide = b[2].itemsize == 4 ? write_gaps_32(b[2].buf, found, b[4].buf, b[5].buf)
                                : write_gaps_64(b[2].buf, found, b[4].buf, b[5].buf);
      if (operation == ADD) BY_WIDTH(width, zigzag, b[3].buf, found, b[3].buf);
      if (operation != OVERWRITE) {
        BY_WIDTH(width, escaped = count_escapes, b[3].buf, found);
        /* Where most codes escape, nibbles are not used. */
        if (escaped <= found / 2) BY_WIDTH(width, write_nibbles, b[3].buf, found, b[6].buf, b[7].buf);
      }
    }
    Py_END_ALLOW_THREADS
    result = Py_BuildValue("nnnKK", found, wide, escaped, (unsigned long long)prior[0],
                           (unsigned long long)prior[1]);
  }
  release(b, 8);
  return result;
}

/* --- scatter -------------------------------------------------------------------------------------- */

#define DEFINE_SCATTER(BITS, T, LBITS, L)                                                             \
  static void scatter_##BITS##_##LBITS(T *target, const L *locations, Py_ssize_t n, const T *values,  \
                                       int operation, int64_t stride, int64_t shift, T *before) {     \
    for (Py_ssize_t i = 0; i < n; i++) {                                                              \
      if (i + PREFETCHED < n)                                                                         \
        __builtin_prefetch(target + ((int64_t)locations[i + PREFETCHED] * stride + shift), 1);        \
      int64_t at = (int64_t)locations[i] * stride + shift;                                            \
      T old = target[at];                                                                             \
      if (before) before[i] = old;                                                                    \
      target[at] = operation == XOR ? (T)(old ^ values[i])                                            \
                   : operation == ADD ? (T)(old + values[i])                                          \
                                      : values[i];                                                    \
    }                                                                                                 \
  }

#define DEFINE_SCATTERS(BITS, T)          \
  DEFINE_SCATTER(BITS, T, 32, int32_t)    \
  DEFINE_SCATTER(BITS, T, 64, int64_t)

DEFINE_SCATTERS(8, uint8_t)
DEFINE_SCATTERS(16, uint16_t)
DEFINE_SCATTERS(32, uint32_t)
DEFINE_SCATTERS(64, uint64_t)

#define DEFINE_RANGE(LBITS, L)                                                        \
  static void range_##LBITS(const L *locations, Py_ssize_t n, L *least, L *largest) { \
    L low = locations[0], high = locations[0];                                        \
    for (Py_ssize_t i = 1; i < n; i++) {                                              \
      low = locations[i] < low ? locations[i] : low;                                  \
      high = locations[i] > high ? locations[i] : high;                               \
    }                                                                                 \
    *least = low;                                                                     \
    *largest = high;                                                                  \
  }

DEFINE_RANGE(32, int32_t)
DEFINE_RANGE(64, int64_t)

/* Whether all locations * stride + shift are in [0, elements). */
static int all_inside(const Py_buffer *locations, int64_t stride, int64_t shift, int64_t elements) {
  Py_ssize_t n = items(locations);
  int64_t ends[2];
  if (n == 0) return 1;
  if (stride < 1) return 0;
  if (locations->itemsize == 4) {
    int32_t least, largest;
    range_32(locations->buf, n, &least, &largest);
    ends[0] = least;
    ends[1] = largest;
  } else {
    range_64(locations->buf, n, &ends[0], &ends[1]);
  }
  for (int i = 0; i < 2; i++)
    if (__builtin_mul_overflow(ends[i], stride, &ends[i]) || __builtin_add_overflow(ends[i], shift, &ends[i]))
      return 0;
  return ends[0] >= 0 && ends[1] < elements;
}

static PyObject *scatter(PyObject *self, PyObject *args) {
  Py_buffer b[5] = {{0}};
  int operation;
  long long stride, shift;
  PyObject *before, *done;
  if (!PyArg_ParseTuple(args, "w*y*y*iLLOO", &b[0], &b[1], &b[2], &operation, &stride, &shift, &before,
                        &done)) {
    release(b, 3);
    return NULL;
  }
  if ((before != Py_None && PyObject_GetBuffer(before, &b[3], PyBUF_WRITABLE) < 0) ||
      (done != Py_None && PyObject_GetBuffer(done, &b[4], PyBUF_WRITABLE) < 0)) {
    release(b, 5);
    return NULL;
  }
  PyObject *result = NULL;
  Py_ssize_t width = b[0].itemsize, n = items(&b[1]), elements = items(&b[0]);
  int wide = b[1].itemsize == 8;
  if (!is_integer_width(width) || b[2].itemsize != width || (!wide && b[1].itemsize != 4))
    refuse("target and values must have one width and locations be int32 or int64");
  else if (items(&b[2]) != n || (before != Py_None && (b[3].itemsize != width || items(&b[3]) != n)))
    refuse("there must be a value, and room for an old one, for each location");
  else if (done != Py_None && b[4].len != 1)
    refuse("done is one byte");
  else if (operation < XOR || operation > ADD)
    refuse("unknown operation");
  else {
    int inside;
    Py_BEGIN_ALLOW_THREADS
    inside = all_inside(&b[1], stride, shift, elements);
#define SCATTER(BITS)                                                                         \
  if (wide)                                                                                   \
    scatter_##BITS##_64(b[0].buf, b[1].buf, n, b[2].buf, operation, stride, shift, b[3].buf); \
  else                                                                                        \
    scatter_##BITS##_32(b[0].buf, b[1].buf, n, b[2].buf, operation, stride, shift, b[3].buf);
    if (inside) switch (width) {
        case 1: SCATTER(8) break;
        case 2: SCATTER(16) break;
        case 4: SCATTER(32) break;
        default: SCATTER(64) break;
      }
    if (inside && b[4].buf != NULL) *(uint8_t *)b[4].buf = 1;
    Py_END_ALLOW_THREADS
    result = inside ? Py_NewRef(Py_None) : refuse("a location is outside the target");
  }
  release(b, 5);
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
    {"write_plane", write_plane, METH_VARARGS, NULL},
    {"read_plane", read_plane, METH_VARARGS, NULL},
    {"zigzag", zigzag, METH_VARARGS, NULL},
    {"unzigzag", unzigzag, METH_VARARGS, NULL},
    {"scatter", scatter, METH_VARARGS, NULL},
    {"digest_run", digest_run, METH_VARARGS, NULL},
    {"digest_places", digest_places, METH_VARARGS, NULL},
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
