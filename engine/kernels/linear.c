/* Linear layers with packed weights: y[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n]).
 *
 * Decoding reads every weight once per token, so weights are stored in the order in which they are read: groups of as
 * many outputs (panels of one vector each) as one pass computes, and inside a group unit after unit, a unit being 4
 * bytes of every row (two bfloat16 inputs or one float32). With AVX-512 one linear stream suits hardware prefetching best:
 * separate streams per panel, software prefetching and blocks over the inputs all measured slower. On a Zen 3 four
 * streams for one row are 1.6 times as fast as one.
 *
 * It is also the order of bfloat16 tiles (AMX): 16 units of the 16 outputs of a panel.
 *
 * Every output is one chain of additions over the inputs in ascending order, for any number of rows and threads:
 * the same row gives the same bits alone and in any batch.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")
/* 16 registers hold six rows of two panels, 32 seven of four. */
#ifdef __AVX512F__
enum { LANES = 16, PANELS = 4 };
#else
enum { LANES = 8, PANELS = 2 };
#endif
enum { GROUP = PANELS * LANES, MOST_ROWS = 7, MOST_BESIDE = 64 / GROUP };
enum { FLOAT32 = 0, BFLOAT16 = 1 };

typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct rows { /* rows of weights as they lie elsewhere, in a mapped file for example; the stride is in bytes */
    const char *first;
    int64_t stride, count;
};

struct packed {
    const void *weights;      /* [groups][units][GROUP] of 4 bytes; NULL: every call packs group after group of `parts` */
    const float *bias;        /* [outputs], or NULL */
    const struct rows *parts; /* one below the other, `outputs` rows of `row_bytes` in all */
    int64_t outputs, units, dtype, row_bytes;
};

/* Whether bfloat16 is multiplied in tiles, for which Linux must be asked once: their registers are 8 KiB of what it
 * saves of a thread (Linux, Documentation/arch/x86/xstate.rst). It refuses if a thread's stack for signals is too
 * small. */
static int in_tiles(int64_t dtype) {
    if (dtype != BFLOAT16) return 0;
#ifdef HAS_TILES
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int granted = -1;
    if (granted < 0) granted = !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
    return granted;
#else
    return 0;
#endif
}

/* Instruction set that layers of the dtype are computed with. */
const char *linear_path(int64_t dtype) {
    if (in_tiles(dtype)) return "amx_bf16";
#ifdef __AVX512BF16__
    if (dtype == BFLOAT16) return "avx512_bf16";
#endif
#if defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "";
#endif
}

/* Row format of the bfloat16 kernel: without an instruction for pairs, widened to float32 beforehand. */
#ifdef __AVX512BF16__
enum { WIDENED = 0 };
#else
enum { WIDENED = 1 };
#endif
INLINE int is_widened(int64_t dtype) { return dtype == BFLOAT16 && WIDENED; }

#define SPLAT(value) ((value) - (floats){}) /* a scalar in every lane */

/* Groups side by side times some rows: sums of group g from `sums` + g * MOST_ROWS * GROUP on. The constants unroll all
 * inner loops, so that the sums stay in registers. */
INLINE void tile(const int dtype, const int beside, const int rows, const char *x, int64_t x_stride, const uint32_t *w,
                 int64_t units, float *sums) {
    floats sum[MOST_BESIDE * PANELS][MOST_ROWS];
    const int panels = beside * PANELS;
    UNROLL for (int p = 0; p < panels; p++)
        UNROLL for (int m = 0; m < rows; m++) sum[p][m] = (floats){};
    for (int64_t u = 0; u < units; u++, w += GROUP) {
#define UNIT(P) (*(const words *)(w + (P) / PANELS * units * GROUP + (P) % PANELS * LANES))
#ifdef __AVX512BF16__
        if (dtype == BFLOAT16) {
            words unit[MOST_BESIDE * PANELS];
            UNROLL for (int p = 0; p < panels; p++) unit[p] = UNIT(p);
            UNROLL for (int m = 0; m < rows; m++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(((const int *)(x + m * x_stride))[u]);
                UNROLL for (int p = 0; p < panels; p++)
                    sum[p][m] = (floats)_mm512_dpbf16_ps((__m512)sum[p][m], (__m512bh)unit[p], pair);
            }
            continue;
        }
#endif
        /* One input of a pair for all rows, then the other, read again: to keep both takes registers of the sums. */
        const int inputs = dtype == FLOAT32 ? 1 : 2;
        UNROLL for (int i = 0; i < inputs; i++) {
            floats weight[MOST_BESIDE * PANELS];
            UNROLL for (int p = 0; p < panels; p++) {
                const words unit = UNIT(p);
                if (dtype == FLOAT32) weight[p] = (floats)unit;
                else weight[p] = i ? (floats)(unit & 0xffff0000u) : (floats)(unit << 16);
            }
            UNROLL for (int m = 0; m < rows; m++) {
                floats value = SPLAT(((const float *)(x + m * x_stride))[inputs * u + i]);
                UNROLL for (int p = 0; p < panels; p++) sum[p][m] += weight[p] * value;
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < panels; p++)
            *(floats *)(sums + (p / PANELS * MOST_ROWS + m) * GROUP + p % PANELS * LANES) = sum[p][m];
}

/* Groups that are computed side by side for so few rows that one has too few sums: an addition waits for the one before,
 * and several streams of weights are fetched at once. */
static int64_t most_beside(int64_t rows) { return rows == 1 ? MOST_BESIDE : rows == 2 && MOST_BESIDE > 1 ? 2 : 1; }

/* Groups times at most MOST_ROWS rows; as many sums as there are registers for. With 7 rows the compiler has no
 * register left for an input, which the instruction for pairs tolerates and the one for float32 does not (90 GF/s, not
 * 111); widened weights take as many registers as there are panels more. */
INLINE int64_t group_rows(const int dtype, int64_t beside, int64_t rows, const char *x, int64_t x_stride,
                          const uint32_t *w, int64_t units, float *sums) {
#define TILE(BESIDE, ROWS) tile(dtype, BESIDE, ROWS, x, x_stride, w, units, sums); return ROWS;
    if (beside > 1 && rows == 1) { TILE(MOST_BESIDE, 1) }
#if !defined(__AVX512F__)
    if (beside > 1) { TILE(2, 2) }
#endif
    const int64_t most = dtype == FLOAT32 ? 6 : WIDENED ? 5 : 7;
    switch (rows < most ? rows : most) {
        case 1: TILE(1, 1) case 2: TILE(1, 2) case 3: TILE(1, 3) case 4: TILE(1, 4) case 5: TILE(1, 5)
        case 6: TILE(1, 6) case 7: TILE(1, 7)
    }
    return rows;
}

INLINE uint16_t rounded(float value) { /* to the nearest bfloat16, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

INLINE void store(const struct packed *packed, int64_t rows, int64_t first, float *sums, void *y) {
    const int64_t left = packed->outputs - first, count = left < GROUP ? left : GROUP;
    for (int64_t m = 0; m < rows; m++) {
        float *sum = sums + m * GROUP;
        if (packed->bias)
            for (int64_t n = 0; n < count; n++) sum[n] += packed->bias[first + n];
        if (packed->dtype == FLOAT32) {
            memcpy((float *)y + m * packed->outputs + first, sum, count * sizeof(float));
            continue;
        }
        uint16_t *to = (uint16_t *)y + m * packed->outputs + first;
        if (count == GROUP)
            for (int64_t n = 0; n < GROUP; n++) to[n] = rounded(sum[n]);
        else
            for (int64_t n = 0; n < count; n++) to[n] = rounded(sum[n]);
    }
}

/* The transpose of LANES vectors: step by step, blocks of 1, 2, 4 and 8 lanes are swapped between two of them. */
INLINE void transpose(words *row) {
    UNROLL for (uint32_t step = 1; step < LANES; step *= 2) {
        words low, high; /* lanes to take; those of the second vector are numbered from LANES on */
        UNROLL for (uint32_t i = 0; i < LANES; i++) {
            low[i] = i & step ? LANES + i - step : i;
            high[i] = i & step ? LANES + i : i + step;
        }
        UNROLL for (uint32_t i = 0; i < LANES; i++) {
            if (i & step) continue;
            const words a = row[i], b = row[i + step];
#ifdef __clang__
            UNROLL for (uint32_t j = 0; j < LANES; j++) {
                row[i][j] = low[j] < LANES ? a[low[j]] : b[low[j] - LANES];
                row[i + step][j] = high[j] < LANES ? a[high[j]] : b[high[j] - LANES];
            }
#else
            row[i] = __builtin_shuffle(a, b, low);
            row[i + step] = __builtin_shuffle(a, b, high);
#endif
        }
    }
}

/* LANES units of LANES rows, `stride` bytes apart, to units GROUP words apart. The reads are short and not
 * prefetched; non-temporal stores of whole lines need no fetch first: 3 times faster. */
INLINE void pack_square(const char *from, int64_t stride, uint32_t *to, const int past_caches) {
    words square[LANES];
    UNROLL for (int i = 0; i < LANES; i++) {
        square[i] = *(const words *)(from + i * stride);
        __builtin_prefetch(from + i * stride + 128, 0, 2);
    }
    transpose(square);
#ifdef __AVX512F__
    if (past_caches) {
        UNROLL for (int i = 0; i < LANES; i++) _mm512_stream_si512((void *)(to + i * GROUP), (__m512i)square[i]);
        return;
    }
#endif
    UNROLL for (int i = 0; i < LANES; i++) *(words *)(to + i * GROUP) = square[i];
}

/* Some rows of a group, some bytes of each: the slow path for incomplete blocks. */
static void pack_rest(const char *from, int64_t stride, int64_t rows, int64_t bytes, uint32_t *to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < bytes; b += 4) {
            uint32_t word = 0;
            memcpy(&word, from + r * stride + b, bytes - b < 4 ? bytes - b : 4);
            to[b / 4 * GROUP + r] = word;
        }
}

/* At most GROUP rows, `stride` bytes apart, to as many lanes from `to` on. */
INLINE void pack_rows(const char *from, int64_t stride, int64_t rows, int64_t row_bytes, uint32_t *to,
                      const int past_caches) {
    const int64_t square_units = row_bytes / (4 * LANES) * LANES, square_rows = rows / LANES * LANES;
    for (int64_t u = 0; u < square_units; u += LANES) {
        for (int64_t r = 0; r < square_rows; r += LANES)
            pack_square(from + r * stride + u * 4, stride, to + u * GROUP + r, past_caches);
        pack_rest(from + square_rows * stride + u * 4, stride, rows - square_rows, 4 * LANES,
                  to + u * GROUP + square_rows);
    }
    pack_rest(from + square_units * 4, stride, rows, row_bytes - square_units * 4, to + square_units * GROUP);
}

/* The group whose first row is number `first`, zero-padded to whole groups and units. `to` starts a cache
 * line. */
INLINE void pack_group(const struct rows *part, int64_t outputs, int64_t row_bytes, int64_t first, uint32_t *to,
                       const int past_caches) {
    const int64_t left = outputs - first, rows = left < GROUP ? left : GROUP;
    if (rows < GROUP) memset(to, 0, (row_bytes + 3) / 4 * GROUP * 4);
    while (first >= part->count) first -= part++->count;
    for (int64_t done = 0, here; done < rows; done += here, part++, first = 0) {
        here = part->count - first < rows - done ? part->count - first : rows - done;
        const char *from = part->first + first * part->stride;
        if (past_caches && done % LANES == 0) /* such a write takes a whole aligned vector */
            pack_rows(from, part->stride, here, row_bytes, to + done, 1);
        else
            pack_rows(from, part->stride, here, row_bytes, to + done, 0);
    }
}

/* All rows of `parts` packed to `to`, which starts a cache line. */
void linear_pack(const struct rows *parts, int64_t outputs, int64_t row_bytes, uint32_t *to) {
    for (int64_t first = 0; first < outputs; first += GROUP, to += (row_bytes + 3) / 4 * GROUP)
        pack_group(parts, outputs, row_bytes, first, to, 1);
#ifdef __AVX512F__
    _mm_sfence(); /* other threads see what went past the caches */
#endif
}

struct task {
    const struct packed *packed;
    const char *x;
    char *y;
    int64_t rows, chunk, next; /* number of the next group, or row of x, that a thread takes */
    char *ready;               /* x as it is multiplied, if it is not multiplied as it is */
};

/* A tile has 16 rows of 64 bytes: rows of x times 16 units, or 16 units times the outputs of a panel. */
enum { TILE_ROWS = 16, TILE_UNITS = 16, TILE_BYTES = TILE_ROWS * TILE_UNITS * 4 };
INLINE int64_t tiles_of(int64_t count) { return (count + TILE_ROWS - 1) / TILE_ROWS; }

#ifdef HAS_TILES
/* GCC's intrinsics do not say what they read (amxtileintrin.h: of the configuration 8 bytes, of tiles none), so that
 * what was written to it could be left out or come later. */
#define IN_MEMORY(ADDRESS) __asm__ volatile("" : : "r"(ADDRESS) : "memory")

static void configure_tiles(void) {
    struct { uint8_t palette, start_row, unused[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } config = {1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = TILE_ROWS;
    IN_MEMORY(&config);
    _tile_loadconfig(&config);
}

#define ZERO_SUMS _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3)
/* `last`: the units that fill no tile, with zeros. */
#define WEIGHTS(T) ((T) < units / TILE_UNITS ? w + (T) * TILE_UNITS * GROUP : last)

/* One group times one tile's rows of x, which asks memory for the weights ahead: sums [16][GROUP]. */
static void one_tile(const char *x, const uint32_t *w, int64_t units, const uint32_t *last, float *sums) {
    enum { ROW = GROUP * 4, AHEAD = TILE_UNITS * GROUP };
    ZERO_SUMS;
    for (int64_t t = 0; t < tiles_of(units); t++) {
        const uint32_t *at = WEIGHTS(t);
        for (int i = 0; i < AHEAD; i += LANES) _mm_prefetch(at + AHEAD + i, _MM_HINT_T1);
        _tile_loadd(4, x + t * TILE_BYTES, 64);
        _tile_loadd(5, at, ROW);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, at + LANES, ROW);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, at + 2 * LANES, ROW);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, at + 3 * LANES, ROW);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, ROW);
    _tile_stored(1, sums + LANES, ROW);
    _tile_stored(2, sums + 2 * LANES, ROW);
    _tile_stored(3, sums + 3 * LANES, ROW);
}

/* One group times two tiles' rows, with fewer loads for a product; the weights are in a cache: sums [32][GROUP]. */
static void two_tiles(const char *x, const uint32_t *w, int64_t units, const uint32_t *last, float *sums) {
    enum { ROW = GROUP * 4 };
    const char *below = x + tiles_of(units) * TILE_BYTES;
    for (int p = 0; p < PANELS; p += 2) {
        ZERO_SUMS;
        for (int64_t t = 0; t < tiles_of(units); t++) {
            const uint32_t *at = WEIGHTS(t) + p * LANES;
            _tile_loadd(4, x + t * TILE_BYTES, 64);
            _tile_loadd(6, at, ROW);
            _tile_loadd(7, at + LANES, ROW);
            _tile_loadd(5, below + t * TILE_BYTES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        float *to = sums + p * LANES;
        _tile_stored(0, to, ROW);
        _tile_stored(1, to + LANES, ROW);
        _tile_stored(2, to + TILE_ROWS * GROUP, ROW);
        _tile_stored(3, to + TILE_ROWS * GROUP + LANES, ROW);
    }
}

static void groups_in_tiles(struct task *task, int64_t from, int64_t to, uint32_t *room) {
    const struct packed *packed = task->packed;
    const int64_t units = packed->units, rest = units % TILE_UNITS;
    float sums[2 * TILE_ROWS * GROUP] __attribute__((aligned(64)));
    uint32_t last[TILE_UNITS * GROUP] __attribute__((aligned(64))) = {0};
    configure_tiles();
    for (int64_t g = from; g < to; g++) {
        const uint32_t *w = room;
        if (packed->weights) w = (const uint32_t *)packed->weights + g * units * GROUP;
        else pack_group(packed->parts, packed->outputs, packed->row_bytes, g * GROUP, room, 0);
        memcpy(last, w + (units - rest) * GROUP, rest * GROUP * 4);
        IN_MEMORY(last);
        for (int64_t m = 0, done; m < task->rows; m += done) {
            const int64_t left = task->rows - m, most = m == 0 || left <= TILE_ROWS ? TILE_ROWS : 2 * TILE_ROWS;
            const char *x = task->x + m / TILE_ROWS * tiles_of(units) * TILE_BYTES;
            done = left < most ? left : most;
            if (most == TILE_ROWS) one_tile(x, w, units, last, sums);
            else two_tiles(x, w, units, last, sums);
            store(packed, done, g * GROUP, sums, task->y + m * packed->outputs * 2);
        }
    }
    _tile_release(); /* what is not in use need not be saved */
}
#endif

/* `room`: for one packed group, if the weights are not packed. */
static void groups(struct task *task, int64_t from, int64_t to, uint32_t *room) {
    const struct packed *packed = task->packed;
    const int64_t x_stride = packed->units * (is_widened(packed->dtype) ? 8 : 4);
    const int64_t y_stride = packed->outputs * (packed->dtype == FLOAT32 ? 4 : 2);
    float sums[MOST_BESIDE * MOST_ROWS * GROUP] __attribute__((aligned(64)));
    for (int64_t g = from, beside; g < to; g += beside) {
        const uint32_t *w = room;
        beside = packed->weights && g + most_beside(task->rows) <= to ? most_beside(task->rows) : 1;
        if (packed->weights)
            w = (const uint32_t *)packed->weights + g * packed->units * GROUP;
        else
            pack_group(packed->parts, packed->outputs, packed->row_bytes, g * GROUP, room, 0);
        for (int64_t m = 0, done; m < task->rows; m += done) {
            const char *x = task->x + m * x_stride;
            if (packed->dtype == FLOAT32)
                done = group_rows(FLOAT32, beside, task->rows - m, x, x_stride, w, packed->units, sums);
            else
                done = group_rows(BFLOAT16, beside, task->rows - m, x, x_stride, w, packed->units, sums);
            for (int64_t i = 0; i < beside; i++)
                store(packed, done, (g + i) * GROUP, sums + i * MOST_ROWS * GROUP, task->y + m * y_stride);
        }
    }
}

static void work(void *argument) {
    struct task *task = argument;
    const int64_t all = (task->packed->outputs + GROUP - 1) / GROUP;
    uint32_t *room = NULL;
    if (!task->packed->weights) {
        room = aligned_alloc(64, task->packed->units * GROUP * 4);
        if (!room) abort(); /* a result that was not computed must not be used */
    }
    for (;;) {
        const int64_t from = __atomic_fetch_add(&task->next, task->chunk, __ATOMIC_RELAXED);
        if (from >= all) break;
        const int64_t to = from + task->chunk < all ? from + task->chunk : all;
#ifdef HAS_TILES
        if (in_tiles(task->packed->dtype)) {
            groups_in_tiles(task, from, to, room);
            continue;
        }
#endif
        groups(task, from, to, room);
    }
    free(room);
}

/* Some rows as one tile after the other, filled up with zeros. */
static void into_tiles(const char *x, int64_t rows, int64_t units, char *to) {
    for (int64_t t = 0; t < units; t += TILE_UNITS)
        for (int64_t m = 0; m < TILE_ROWS; m++, to += 64) {
            const int64_t left = m < rows ? (units - t) * 4 : 0;
            if (left < 64) memset(to, 0, 64);
            if (left) memcpy(to, x + (m * units + t) * 4, left < 64 ? left : 64);
        }
}

/* Rows of bfloat16, whole units each, as float32. */
static void widen(const uint16_t *x, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

static void prepare(void *argument) {
    struct task *task = argument;
    const int64_t units = task->packed->units;
    for (;;) {
        const int64_t first = __atomic_fetch_add(&task->next, TILE_ROWS, __ATOMIC_RELAXED), left = task->rows - first;
        if (left <= 0) break;
        const int64_t rows = left < TILE_ROWS ? left : TILE_ROWS;
        const char *x = task->x + first * units * 4;
        if (in_tiles(task->packed->dtype))
            into_tiles(x, rows, units, task->ready + first / TILE_ROWS * tiles_of(units) * TILE_BYTES);
        else
            widen((const uint16_t *)x, rows * units * 2, (float *)task->ready + first * units * 2);
    }
}

/* Bytes of x as it is multiplied; 0: as it is. */
static int64_t ready_bytes(const struct packed *packed, int64_t rows) {
    if (in_tiles(packed->dtype)) return tiles_of(rows) * tiles_of(packed->units) * TILE_BYTES;
    return is_widened(packed->dtype) ? (rows * packed->units * 8 + 63) / 64 * 64 : 0;
}

/* x [rows, 4-byte units of inputs] and y [rows, outputs], contiguous. `parallel` is GOMP_parallel of
 * torch's OpenMP, so that the process has one pool of threads; NULL for the calling thread alone. */
void linear_run(const struct packed *packed, const void *x, void *y, int64_t rows, int64_t threads,
                void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    enum { FEW_ROWS = 64 }; /* one thread has them ready before others are awake */
    const int64_t all = (packed->outputs + GROUP - 1) / GROUP, bytes = ready_bytes(packed, rows);
    struct task task = {packed, x, y, rows, all, 0, NULL};
    if (bytes) {
        task.ready = aligned_alloc(64, (size_t)bytes);
        if (!task.ready) abort(); /* a result that was not computed must not be used */
        if (parallel && rows > FEW_ROWS) parallel(prepare, &task, (unsigned)threads, 0);
        else prepare(&task);
        task.x = task.ready;
        task.next = 0;
    }
    if (parallel) {
        task.chunk = all / (4 * threads) ? all / (4 * threads) : 1;
        parallel(work, &task, (unsigned)threads, 0);
    } else {
        work(&task);
    }
    free(task.ready);
}

/* Bytes that linear_pack writes. */
int64_t linear_packed_bytes(int64_t outputs, int64_t row_bytes) {
    return (outputs + GROUP - 1) / GROUP * GROUP * ((row_bytes + 3) / 4) * 4;
}

/* Reads every byte once in one linear stream; the result depends on all of them, so that no read is optimised away. */
uint32_t read_bytes(const void *from, int64_t count) {
    const char *at_byte = from;
    words sum[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * (int64_t)sizeof(words) <= count; i += 4 * sizeof(words))
        for (int j = 0; j < 4; j++) sum[j] += *(const words *)(at_byte + i + j * sizeof(words));
    const words all = sum[0] + sum[1] + sum[2] + sum[3];
    uint32_t result = 0;
    for (int j = 0; j < LANES; j++) result += all[j];
    for (; i < count; i++) result += (unsigned char)at_byte[i];
    return result;
}
