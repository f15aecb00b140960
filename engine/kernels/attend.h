/* Attention of one new token over keys and values of earlier ones, as attention.c and paged.c need it: rotation, scores,
 * softmax and weighted sum in float32; what is stored is rounded where transformers' Llama rounds.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { MOST_WIDTH = 512, COLUMNS = 4 };

INLINE float element(const int dtype, const void *base, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A product that must be rounded before it is added: the compiler must not fuse the two. */
INLINE floats product(const int dtype, floats a, floats b) {
    floats value = a * b;
    __asm__("" : "+x"(value));
    return rounded(dtype, value);
}

/* exp(x) for x <= 0: x = n * ln 2 + r with |r| <= ln 2 / 2, then the power series of exp(r). */
INLINE floats exponential(floats x) {
    const words below = (words)(x < -87.0f);
    const floats shift = x * 0 + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    x = (floats)((words)x & ~below);
    const floats n = x * 1.44269504f + shift - shift;
    const floats r = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts, the first with 15 bits */
    floats sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    sum *= (floats)((__builtin_convertvector(n, integers) + 127) << 23);
    return (floats)((words)sum & ~below);
}

/* Lanes of a and, numbered from LANES on, of b. gcc has had clang's builtin since version 12. */
#if defined(__clang__) || __GNUC__ >= 12
#define CHOSEN(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define CHOSEN(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

/* Add pairs of a and b, each of groups of 2 h lanes: the first half of each group holds sums of a, the second of b. */
#if defined(__AVX512F__)
#define FOLD_8(a, b) (CHOSEN(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
                      CHOSEN(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD_4(a, b) (CHOSEN(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + \
                      CHOSEN(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define FOLD_2(a, b) (CHOSEN(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
                      CHOSEN(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD_1(a, b) (CHOSEN(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + \
                      CHOSEN(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
#define FOLD_4(a, b) (CHOSEN(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + \
                      CHOSEN(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOLD_2(a, b) (CHOSEN(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + \
                      CHOSEN(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define FOLD_1(a, b) (CHOSEN(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + \
                      CHOSEN(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#endif

/* Lane i of the result is the sum of the lanes of sums[i]. */
INLINE floats totals(floats *sums) {
#if defined(__AVX512F__)
    for (int i = 0; i < 8; i++) sums[i] = FOLD_8(sums[i], sums[i + 8]);
#endif
    for (int i = 0; i < 4; i++) sums[i] = FOLD_4(sums[i], sums[i + 4]);
    for (int i = 0; i < 2; i++) sums[i] = FOLD_2(sums[i], sums[i + 2]);
    return FOLD_1(sums[0], sums[1]);
}

/* Up to LANES elements, the rest zeros. */
INLINE floats load_some(const int dtype, const void *base, int64_t index, int64_t count) {
    floats value = {0};
    if (count >= LANES) return load(dtype, base, index);
    for (int64_t i = 0; i < count; i++) value[i] = element(dtype, base, index + i);
    return value;
}

INLINE void store_some(const int dtype, void *base, int64_t index, int64_t count, floats value) {
    char whole[LANES * 4] __attribute__((aligned(64)));
    if (count >= LANES) {
        store(dtype, base, index, value);
    } else {
        store(dtype, whole, 0, value);
        memcpy(at(dtype, base, index), whole, count * (dtype == FLOAT32 ? 4 : 2));
    }
}

/* Rotate one head [width] by its angles, in float32 but rounded as if stored, then zeros up to `stored`. Writes up to
 * LANES beyond that. */
INLINE void turn(const int dtype, const void *head, const void *cosines, const void *sines, int64_t width,
                 int64_t stored, float *to) {
    const int64_t half = width / 2;
    if (!cosines) {
        for (int64_t i = 0; i < width; i += LANES) *(floats *)(to + i) = load_some(dtype, head, i, width - i);
        return;
    }
    /* The first halves, then the second, which overwrite the excess of the first. */
    for (int64_t i = 0; i < half; i += LANES) {
        const floats first = load_some(dtype, head, i, half - i), second = load_some(dtype, head, i + half, half - i);
        *(floats *)(to + i) = rounded(dtype, product(dtype, first, load_some(dtype, cosines, i, half - i)) -
                                                 product(dtype, second, load_some(dtype, sines, i, half - i)));
    }
    for (int64_t i = half; i < width; i += LANES) {
        const floats first = load_some(dtype, head, i - half, width - i), second = load_some(dtype, head, i, width - i);
        *(floats *)(to + i) = rounded(dtype, product(dtype, second, load_some(dtype, cosines, i, width - i)) +
                                                 product(dtype, first, load_some(dtype, sines, i, width - i)));
    }
    for (int64_t i = width; i < stored; i++) to[i] = 0;
}

/* Rows of keys or values of one head. `block` of them lie together; block number i begins at table[i] * stride elements.
 * Without a table all rows lie together. */
struct rows {
    const void *base;
    const int32_t *table;
    int64_t block, stride;
};

/* The end of the rows that lie together from `first` on, at most `end`. */
INLINE int64_t together_until(const struct rows *rows, int64_t first, int64_t end) {
    if (!rows->table) return end;
    const int64_t next = (first / rows->block + 1) * rows->block;
    return next < end ? next : end;
}

INLINE const void *row_at(const int dtype, const struct rows *rows, int64_t position, int64_t stored) {
    if (!rows->table) return at(dtype, rows->base, position * stored);
    const int64_t block = rows->table[position / rows->block];
    return at(dtype, rows->base, block * rows->stride + position % rows->block * stored);
}

/* Ask for a row soon needed, into the second cache: the first is too small for the values of a long sequence. The
 * processor's own prefetching starts anew in every block and every head. */
INLINE void ask_for(const int dtype, const void *row, int64_t stored) {
    const int64_t bytes = stored * (dtype == FLOAT32 ? 4 : 2);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)row + i, 0, 2);
}

/* Add the values of the rows `first` to `end`, times their weights, to `mixed`. */
INLINE void mix(const int dtype, const int heads, const int vectors, const struct rows *values, int64_t first,
                int64_t end, int64_t stored, int64_t column, const float *scores, floats mixed[4][COLUMNS]) {
    for (int64_t from = first; from < end;) {
        const int64_t until = together_until(values, from, end);
        const void *rows = row_at(dtype, values, from, stored);
        const float *weights = scores + (from - first) * heads;
        for (int64_t p = 0; p < until - from; p++)
            for (int c = 0; c < vectors; c++) {
                const floats value = load(dtype, rows, p * stored + column + c * LANES);
                for (int h = 0; h < heads; h++) mixed[h][c] += value * weights[p * heads + h];
            }
        from = until;
    }
}

/* `heads` queries [heads, stored] over the rows `first` to `end`; weights are in scores [end - first, heads].
 * bias: of the first query, and `bias_stride` further of the next; null: none. */
INLINE void attend(const int dtype, const int heads, const float *queries, const struct rows *keys,
                   const struct rows *values, int64_t first, int64_t end, int64_t width, int64_t stored, float scale,
                   const float *bias, int64_t bias_stride, float *scores, void *out) {
    const int places = LANES / heads; /* positions of a block: each lane is one pair of position and head */
    const int64_t count = end - first;
    floats largest = (floats){0} - INFINITY;
    for (int64_t from = first; from < end;) {
        const int64_t until = together_until(keys, from, end);
        const void *rows = row_at(dtype, keys, from, stored);
        const void *value_rows = row_at(dtype, values, from, stored);
        const void *next_rows = keys->table && until < end ? row_at(dtype, keys, until, stored) : NULL;
        for (int64_t next = 0; next < until - from; next += places) {
            for (int p = 0; p < places; p++) {
                ask_for(dtype, at(dtype, value_rows, (next + p) * stored), stored);
                if (next_rows) ask_for(dtype, at(dtype, next_rows, (next + p) * stored), stored);
            }
            floats sums[LANES];
            for (int i = 0; i < LANES; i++) sums[i] = (floats){0};
            for (int64_t i = 0; i < stored; i += LANES)
                for (int p = 0; p < places; p++) {
                    const int64_t row = next + p < until - from ? next + p : until - from - 1;
                    const floats key = load(dtype, rows, row * stored + i);
                    for (int h = 0; h < heads; h++)
                        sums[p * heads + h] += key * *(const floats *)(queries + h * stored + i);
                }
            floats score = totals(sums) * scale;
            const int64_t place = from - first + next; /* among all rows */
            if (bias && heads == 1)
                score += *(const floats *)(bias + place);
            else if (bias)
                for (int i = 0; i < LANES; i++) score[i] += bias[i % heads * bias_stride + place + i / heads];
            if (next + places > until - from)
                for (int i = (int)(until - from - next) * heads; i < LANES; i++) score[i] = -INFINITY;
            *(floats *)(scores + place * heads) = score;
            const words more = (words)(score > largest);
            largest = (floats)(((words)score & more) | ((words)largest & ~more));
        }
        from = until;
    }
    for (int64_t i = count * heads; i % LANES; i++) scores[i] = -INFINITY;
    for (int h = 0; h < heads; h++) {
        float most = largest[h];
        for (int i = h; i < LANES; i += heads) most = largest[i] > most ? largest[i] : most;
        for (int i = h; i < LANES; i += heads) largest[i] = most;
    }
    floats sum = {0};
    for (int64_t i = 0; i < count * heads; i += LANES) {
        const floats weight = exponential(*(const floats *)(scores + i) - largest);
        *(floats *)(scores + i) = weight;
        sum += weight;
    }
    float shares[4];
    for (int h = 0; h < heads; h++) {
        float whole = 0;
        for (int i = h; i < LANES; i += heads) whole += sum[i];
        shares[h] = 1.0f / whole;
    }
    for (int64_t column = 0; column < stored; column += COLUMNS * LANES) {
        const int vectors = stored - column < COLUMNS * LANES ? (int)((stored - column) / LANES) : COLUMNS;
        floats mixed[4][COLUMNS];
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < COLUMNS; c++) mixed[h][c] = (floats){0};
        if (vectors == COLUMNS)
            mix(dtype, heads, COLUMNS, values, first, end, stored, column, scores, mixed);
        else
            mix(dtype, heads, vectors, values, first, end, stored, column, scores, mixed);
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < vectors; c++)
                store_some(dtype, out, h * width + column + c * LANES, width - column - c * LANES,
                           mixed[h][c] * shares[h]);
    }
}


/* The `group` query heads that share one key head: new_heads [group, width] before rotation, by the angles `cosines` and
 * `sines` [width] of their position; out [group, width]. */
INLINE void attend_group(const int dtype, const void *new_heads, int64_t group, const void *cosines, const void *sines,
                         const struct rows *keys, const struct rows *values, int64_t first, int64_t end, int64_t width,
                         int64_t stored, float scale, const float *bias, int64_t bias_stride, float *scores,
                         void *out) {
    float turned[4 * MOST_WIDTH + LANES];
    for (int64_t g = 0; g < group;) {
        const int64_t left = group - g;
        const int together = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        void *to = at(dtype, out, g * width);
        const float *own = bias ? bias + g * bias_stride : NULL;
        for (int h = 0; h < together; h++)
            turn(dtype, at(dtype, new_heads, (g + h) * width), cosines, sines, width, stored, turned + h * stored);
        if (together == 4)
            attend(dtype, 4, turned, keys, values, first, end, width, stored, scale, own, bias_stride, scores, to);
        else if (together == 2)
            attend(dtype, 2, turned, keys, values, first, end, width, stored, scale, own, bias_stride, scores, to);
        else
            attend(dtype, 1, turned, keys, values, first, end, width, stored, scale, own, bias_stride, scores, to);
        g += together;
    }
}

/* Write a new key, rotated, and a new value [width] to their rows. */
INLINE void keep(const int dtype, const void *new_key, const void *new_value, const void *cosines, const void *sines,
                 int64_t width, int64_t stored, void *key, void *value) {
    float turned[MOST_WIDTH + LANES];
    turn(dtype, new_key, cosines, sines, width, stored, turned);
    for (int64_t i = 0; i < stored; i += LANES) store(dtype, key, i, *(const floats *)(turned + i));
    memcpy(value, new_value, width * (dtype == FLOAT32 ? 4 : 2));
}
