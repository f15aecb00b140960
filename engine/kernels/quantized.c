/* Linear layers with quantised weights: y[m, n] = sum over k of x[m, k] * w[n, k] (+ bias[n]).
 *
 * Weights of 8 bits have one scale for each output, weights of 4 bits one for each output and BLOCK inputs. They are
 * stored as in linear.c, in the order in which they are read: groups of outputs, one linear stream.
 *
 * If the processor multiplies bytes (AVX512_VNNI: four products of an unsigned and a signed byte into 32 bits, and
 * exact), a row of x becomes fixed point with one scale: 16 bits as a high and a low byte, both signed, or 8 bits. Two
 * such instructions do for 64 weights of 8 bits what two of bfloat16 do for as many, and half the bytes are read. The
 * weights are stored with an offset that makes them unsigned; its contribution is the same for all outputs of a row,
 * and is subtracted in integers. Elsewhere weights are widened to float32 and x is unchanged (8 bits: same grid).
 *
 * The same row gives the same bits alone and in any batch: integer sums do not depend on the order, and the sums over
 * blocks of 4 bits are one chain in ascending order.
 */
#include <math.h>
#include <stdlib.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#include "lanes.h"

#define UNROLL _Pragma("GCC unroll 32")
#define SPLAT(value) ((value) - (floats){}) /* a scalar in every lane */
#ifdef __AVX512VNNI__
enum { INTEGERS = 1 };
#else
enum { INTEGERS = 0 };
#endif
#ifdef __AVX512F__
enum { PANELS = 4 };
#else
enum { PANELS = 2 }; /* 16 registers hold five rows of them, as in linear.c */
#endif
enum { GROUP = PANELS * LANES, BLOCK = 32, MOST_ROWS = 6 };
enum { BLOCK_WORDS = BLOCK * GROUP / 8, SCALE_WORDS = GROUP / 2 };
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

struct quantized {
    const uint32_t *weights; /* 8 bits: [groups][units of 4 inputs][GROUP] words, a byte for each input;
                              * 4 bits: [groups][blocks] of GROUP bfloat16 scales and [4][GROUP] words of 8 inputs,
                              * the low half of byte i being input i, the high half input i + 4 */
    const float *scales;     /* of 8 bits: [groups * GROUP] */
    const float *bias;       /* [groups * GROUP], or NULL */
    int64_t outputs, inputs, dtype, bits, activation_bits;
};

struct row { /* of x, made ready; followed by what it is multiplied with, in `width` places */
    float scale;
    int32_t high_sum, low_sum, unused[13];
};

/* Instruction set that the library was compiled for. */
const char *quantized_path(void) {
#if defined(__AVX512VNNI__)
    return "avx512_vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "avx2";
#else
    return "";
#endif
}

/* Outputs stored together. */
int64_t quantized_group(void) { return GROUP; }

/* Stored value of a zero weight. */
int64_t quantized_offset(int64_t bits) { return bits == 4 ? 8 : INTEGERS ? 128 : 0; }

static int64_t width_of(const struct quantized *layer) { return (layer->inputs + 63) / 64 * 64; }

/* Fixed point: high bytes, low bytes, and per block the correction for the offset of 4-bit weights. Else float32. */
static int64_t row_bytes(const struct quantized *layer) {
    const int64_t width = width_of(layer);
    return sizeof(struct row) + (INTEGERS ? 2 * width + width / BLOCK * 4 : 4 * width);
}

INLINE floats magnitude(floats value) { return (floats)((words)value & 0x7fffffffu); }

/* LANES values of a row; zero where there are none. */
INLINE floats load_some(const int dtype, const void *x, int64_t from, int64_t inputs) {
    if (inputs - from >= LANES) return load(dtype, x, from);
    float some[LANES] = {0};
    for (int64_t i = 0; from + i < inputs; i++) {
        uint32_t bits = 0;
        memcpy((char *)&bits + (dtype == FLOAT32 ? 0 : 2), at(dtype, x, from + i), dtype == FLOAT32 ? 4 : 2);
        memcpy(some + i, &bits, 4);
    }
    return *(floats *)some;
}

/* The largest magnitude of a row; not finite if any value is not finite. */
INLINE float largest(const int dtype, const void *x, int64_t inputs) {
    words most = {0}; /* magnitudes are in the order of their bits, infinity and what is no number above all */
    for (int64_t k = 0; k < inputs; k += LANES) {
        const words here = (words)magnitude(load_some(dtype, x, k, inputs));
        const words is_more = (words)(here > most);
        most = (here & is_more) | (most & ~is_more);
    }
    uint32_t result = 0;
    for (int i = 0; i < LANES; i++) result = most[i] > result ? most[i] : result;
    float value;
    memcpy(&value, &result, 4);
    return value;
}

/* To the nearest integer, ties to even, for magnitudes below 2^22. */
INLINE integers nearest(floats value) { return (integers)(value + 12582912.0f) - 0x4b400000; }

INLINE int32_t total(integers values) {
    int32_t result = 0;
    UNROLL for (int i = 0; i < LANES; i++) result += values[i];
    return result;
}

/* One row of x: 32639 is the most whose high byte is below 128 after the low one was made signed. */
INLINE void ready(const int dtype, const struct quantized *layer, const void *x, struct row *row) {
    const int64_t width = width_of(layer), inputs = layer->inputs;
    const int wide = layer->activation_bits == 16;
    if (!INTEGERS && wide) {
        float *to = (float *)(row + 1);
        row->scale = 1.0f;
        for (int64_t k = 0; k < width; k += LANES) *(floats *)(to + k) = load_some(dtype, x, k, inputs);
        return;
    }
    const float most = largest(dtype, x, inputs), levels = wide ? 32639.0f : 127.0f;
    /* Smaller numbers have no inverse; larger ones are not finite. */
    const float inverse = most > 1e-30f && most < INFINITY ? levels / most : 0.0f;
    row->scale = most < INFINITY ? (inverse > 0.0f ? most / levels : 0.0f) : NAN;
    if (!INTEGERS) {
        float *to = (float *)(row + 1);
        for (int64_t k = 0; k < width; k += LANES)
            *(floats *)(to + k) =
                __builtin_convertvector(nearest(load_some(dtype, x, k, inputs) * inverse), floats);
        return;
    }
    int8_t *high = (int8_t *)(row + 1), *low = high + width;
    int32_t *offsets = (int32_t *)(low + width);
    integers high_sum = {0}, low_sum = {0};
    for (int64_t block = 0; block < width; block += BLOCK) {
        integers sum = {0};
        UNROLL for (int64_t k = block; k < block + BLOCK; k += LANES) {
            integers value = {0};
            if (inverse > 0.0f && k < inputs) value = nearest(load_some(dtype, x, k, inputs) * inverse);
            const integers top = wide ? (integers)((value + 128) >> 8) : (integers)value;
            sum += value;
            high_sum += top;
            *(bytes *)(high + k) = __builtin_convertvector(top, bytes);
            if (wide) {
                const integers rest = value - (top << 8);
                low_sum += rest;
                *(bytes *)(low + k) = __builtin_convertvector(rest, bytes);
            }
        }
        offsets[block / BLOCK] = -8 * total(sum);
    }
    row->high_sum = total(high_sum);
    row->low_sum = total(low_sum);
}

INLINE const struct row *next_row(const struct row *row, int64_t stride) {
    return (const struct row *)((const char *)row + stride);
}

/* Sums of a row and some outputs, scaled and rounded, to y. `scales` NULL: the row's alone. */
INLINE void finish(const struct quantized *layer, const float row_scale, floats *sums, int64_t first, void *y) {
    const int64_t left = layer->outputs - first;
    floats room[PANELS];
    UNROLL for (int p = 0; p < PANELS; p++) {
        const int64_t n = first + p * LANES;
        floats value = sums[p] * row_scale;
        if (layer->scales) value *= *(const floats *)(layer->scales + n);
        if (layer->bias) value += *(const floats *)(layer->bias + n);
        if (left >= GROUP)
            store((int)layer->dtype, y, n, value);
        else
            room[p] = value;
    }
    if (left >= GROUP) return;
    for (int64_t n = 0; n < left; n++) {
        const float value = ((const float *)room)[n];
        if (layer->dtype == FLOAT32) {
            ((float *)y)[first + n] = value;
        } else {
            const words bits = rounded_bits(SPLAT(value));
            ((uint16_t *)y)[first + n] = (uint16_t)(bits[0] >> 16);
        }
    }
}

#ifdef __AVX512VNNI__
#define DOT(sum, weights, values) \
    ((integers)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(weights), _mm512_set1_epi32(values)))

/* A group of 8 bits times some rows. The constants unroll all inner loops, so that the sums stay in registers. */
INLINE void tile8(const int wide, const int rows, const struct quantized *layer, const struct row *row, int64_t stride,
                  const uint32_t *w, floats (*sums)[PANELS]) {
    const int64_t units = (layer->inputs + 3) / 4, width = width_of(layer);
    integers high[MOST_ROWS][PANELS], low[MOST_ROWS][PANELS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < PANELS; p++) high[m][p] = low[m][p] = (integers){0};
    for (int64_t u = 0; u < units; u++, w += GROUP) {
        words unit[PANELS];
        UNROLL for (int p = 0; p < PANELS; p++) unit[p] = *(const words *)(w + p * LANES);
        UNROLL for (int m = 0; m < rows; m++) {
            const char *values = (const char *)row + m * stride + sizeof(struct row) + 4 * u;
            const int top = *(const int32_t *)values;
            UNROLL for (int p = 0; p < PANELS; p++) high[m][p] = DOT(high[m][p], unit[p], top);
            if (wide) {
                const int rest = *(const int32_t *)(values + width);
                UNROLL for (int p = 0; p < PANELS; p++) low[m][p] = DOT(low[m][p], unit[p], rest);
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++, row = next_row(row, stride))
        UNROLL for (int p = 0; p < PANELS; p++) {
            /* Overflow of the sums cancels: the difference is below 2^31 up to 131,000 inputs. */
            const words offset = (words){} + 128u * (uint32_t)row->high_sum;
            floats sum = __builtin_convertvector((integers)((words)high[m][p] - offset), floats);
            if (wide) {
                const words rest = (words){} + 128u * (uint32_t)row->low_sum;
                sum = sum * 256.0f + __builtin_convertvector((integers)((words)low[m][p] - rest), floats);
            }
            sums[m][p] = sum;
        }
}

/* A group of 4 bits times some rows. In a block no sum of 32 products of 16 and 4 bits leaves 32 bits. */
INLINE void tile4(const int rows, const struct quantized *layer, const struct row *row, int64_t stride,
                  const uint32_t *w, floats (*sums)[PANELS]) {
    const int64_t blocks = (layer->inputs + BLOCK - 1) / BLOCK, width = width_of(layer);
    const char *first = (const char *)(row + 1);
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < PANELS; p++) sums[m][p] = (floats){};
    for (int64_t b = 0; b < blocks; b++, w += SCALE_WORDS + BLOCK_WORDS) {
        integers high[MOST_ROWS][PANELS], low[MOST_ROWS][PANELS];
        UNROLL for (int m = 0; m < rows; m++) {
            const int32_t *offsets = (const int32_t *)(first + m * stride + 2 * width);
            UNROLL for (int p = 0; p < PANELS; p++) {
                high[m][p] = (integers){0};
                low[m][p] = (integers){} + offsets[b];
            }
        }
        /* Not unrolled: the compiler would fetch a block's values of x early, and has no registers for that. */
        _Pragma("GCC unroll 1") for (int v = 0; v < BLOCK / 8; v++)
            UNROLL for (int half = 0; half < 2; half++) {
                words unit[PANELS];
                UNROLL for (int p = 0; p < PANELS; p++) {
                    const words eight = *(const words *)(w + SCALE_WORDS + (v * PANELS + p) * LANES);
                    unit[p] = (half ? eight >> 4 : eight) & 0x0f0f0f0fu;
                }
                UNROLL for (int m = 0; m < rows; m++) {
                    const char *values = first + m * stride + BLOCK * b + 8 * v + 4 * half;
                    const int top = *(const int32_t *)values, rest = *(const int32_t *)(values + width);
                    UNROLL for (int p = 0; p < PANELS; p++) high[m][p] = DOT(high[m][p], unit[p], top);
                    UNROLL for (int p = 0; p < PANELS; p++) low[m][p] = DOT(low[m][p], unit[p], rest);
                }
            }
        UNROLL for (int p = 0; p < PANELS; p++) {
            const floats scale = load(BFLOAT16, w, p * LANES);
            UNROLL for (int m = 0; m < rows; m++)
                sums[m][p] += __builtin_convertvector((high[m][p] << 8) + low[m][p], floats) * scale;
        }
    }
}
enum { MOST_8_WIDE = 3, MOST_8 = 6, MOST_4 = 3 };
#else
/* Byte number `byte` of every word, with its sign. */
INLINE floats widened(words unit, const int byte) {
    return __builtin_convertvector((integers)(unit << (24 - 8 * byte)) >> 24, floats);
}

INLINE void tile8(const int wide, const int rows, const struct quantized *layer, const struct row *row, int64_t stride,
                  const uint32_t *w, floats (*sums)[PANELS]) {
    (void)wide;
    const int64_t units = (layer->inputs + 3) / 4;
    floats sum[MOST_ROWS][PANELS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < PANELS; p++) sum[m][p] = (floats){};
    for (int64_t u = 0; u < units; u++, w += GROUP)
        UNROLL for (int byte = 0; byte < 4; byte++) {
            floats weight[PANELS];
            UNROLL for (int p = 0; p < PANELS; p++) weight[p] = widened(*(const words *)(w + p * LANES), byte);
            UNROLL for (int m = 0; m < rows; m++) {
                const floats x = SPLAT(((const float *)((const char *)(row + 1) + m * stride))[4 * u + byte]);
                UNROLL for (int p = 0; p < PANELS; p++) sum[m][p] += weight[p] * x;
            }
        }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < PANELS; p++) sums[m][p] = sum[m][p];
}

INLINE void tile4(const int rows, const struct quantized *layer, const struct row *row, int64_t stride,
                  const uint32_t *w, floats (*sums)[PANELS]) {
    const int64_t blocks = (layer->inputs + BLOCK - 1) / BLOCK;
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int p = 0; p < PANELS; p++) sums[m][p] = (floats){};
    for (int64_t b = 0; b < blocks; b++, w += SCALE_WORDS + BLOCK_WORDS) {
        floats sum[MOST_ROWS][PANELS];
        UNROLL for (int m = 0; m < rows; m++)
            UNROLL for (int p = 0; p < PANELS; p++) sum[m][p] = (floats){};
        _Pragma("GCC unroll 1") for (int v = 0; v < BLOCK / 8; v++)
            UNROLL for (int i = 0; i < 8; i++) {
                floats weight[PANELS];
                UNROLL for (int p = 0; p < PANELS; p++) {
                    const words eight = *(const words *)(w + SCALE_WORDS + (v * PANELS + p) * LANES);
                    const integers number = (integers)((eight >> (i < 4 ? 8 * i : 8 * (i - 4) + 4)) & 15u) - 8;
                    weight[p] = __builtin_convertvector(number, floats);
                }
                UNROLL for (int m = 0; m < rows; m++) {
                    const float *x = (const float *)((const char *)(row + 1) + m * stride);
                    const floats value = SPLAT(x[BLOCK * b + 8 * v + i]);
                    UNROLL for (int p = 0; p < PANELS; p++) sum[m][p] += weight[p] * value;
                }
            }
        UNROLL for (int p = 0; p < PANELS; p++) {
            const floats scale = load(BFLOAT16, w, p * LANES);
            UNROLL for (int m = 0; m < rows; m++) sums[m][p] += sum[m][p] * scale;
        }
    }
}
enum { MOST_8_WIDE = 5, MOST_8 = 5, MOST_4 = 5 };
#endif

/* One group times at most MOST_ROWS rows; returns the number of rows. */
static int64_t group_rows(const struct quantized *layer, int64_t rows, const struct row *row, int64_t stride,
                          const uint32_t *w, floats (*sums)[PANELS]) {
    const int wide = layer->activation_bits == 16;
    const int64_t most = layer->bits == 4 ? MOST_4 : wide ? MOST_8_WIDE : MOST_8;
    const int64_t count = rows < most ? rows : most;
#define ROWS4(ROWS) case ROWS: tile4(ROWS, layer, row, stride, w, sums); return ROWS;
#define ROWS8(WIDE, ROWS) case ROWS: tile8(WIDE, ROWS, layer, row, stride, w, sums); return ROWS;
    if (layer->bits == 4)
        switch (count) { ROWS4(1) ROWS4(2) ROWS4(3) ROWS4(4) ROWS4(5) }
    else if (wide)
        switch (count) { ROWS8(1, 1) ROWS8(1, 2) ROWS8(1, 3) ROWS8(1, 4) ROWS8(1, 5) }
    else
        switch (count) { ROWS8(0, 1) ROWS8(0, 2) ROWS8(0, 3) ROWS8(0, 4) ROWS8(0, 5) ROWS8(0, 6) }
    return count;
}

struct task {
    const struct quantized *layer;
    const struct row *x;
    char *y;
    int64_t rows, chunk, next_group;
};

static void groups(struct task *task, int64_t from, int64_t to) {
    const struct quantized *layer = task->layer;
    const int64_t stride = row_bytes(layer), y_stride = layer->outputs * (layer->dtype == FLOAT32 ? 4 : 2);
    const int64_t group_words = layer->bits == 4 ? (layer->inputs + BLOCK - 1) / BLOCK * (SCALE_WORDS + BLOCK_WORDS)
                                                 : (layer->inputs + 3) / 4 * GROUP;
    floats sums[MOST_ROWS][PANELS];
    for (int64_t g = from; g < to; g++)
        for (int64_t m = 0, done; m < task->rows; m += done) {
            const struct row *row = (const struct row *)((const char *)task->x + m * stride);
            done = group_rows(layer, task->rows - m, row, stride, layer->weights + g * group_words, sums);
            for (int64_t i = 0; i < done; i++, row = next_row(row, stride))
                finish(layer, row->scale, sums[i], g * GROUP, task->y + (m + i) * y_stride);
        }
}

static void work(void *argument) {
    struct task *task = argument;
    const int64_t all = (task->layer->outputs + GROUP - 1) / GROUP;
    for (;;) {
        const int64_t from = __atomic_fetch_add(&task->next_group, task->chunk, __ATOMIC_RELAXED);
        if (from >= all) break;
        groups(task, from, from + task->chunk < all ? from + task->chunk : all);
    }
}

/* x [rows, inputs] and y [rows, outputs], contiguous. `parallel` is GOMP_parallel of torch's OpenMP, so that the
 * process has one pool of threads; NULL for the calling thread alone. */
void quantized_run(const struct quantized *layer, const void *x, void *y, int64_t rows, int64_t threads,
                   void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    const int64_t all = (layer->outputs + GROUP - 1) / GROUP, stride = row_bytes(layer);
    if (rows == 0) return;
    struct row *room = aligned_alloc(64, (size_t)((rows * stride + 63) / 64 * 64));
    if (!room) abort(); /* a result that was not computed must not be used */
    for (int64_t m = 0; m < rows; m++) {
        const void *from = at((int)layer->dtype, x, m * layer->inputs);
        struct row *to = (struct row *)((char *)room + m * stride);
        if (layer->dtype == FLOAT32)
            ready(FLOAT32, layer, from, to);
        else
            ready(BFLOAT16, layer, from, to);
    }
    struct task task = {layer, room, y, rows, all, 0};
    if (parallel) {
        task.chunk = all / (4 * threads) ? all / (4 * threads) : 1;
        parallel(work, &task, (unsigned)threads, 0);
    } else {
        work(&task);
    }
    free(room);
}
