/* Attention of one new token of each sequence over its key-value cache: rotate, store, compare, weigh, in one call.
 *
 * Scores, weights and sums are float32; what is stored is rounded where transformers' Llama rounds. Query heads that
 * share a key head are worked on together, so that keys and values are read from memory once.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { MOST_WIDTH = 512, COLUMNS = 4 };

struct attention { /* strides in elements */
    const void *cosines, *sines; /* [capacity, width] */
    const int64_t *padding;      /* [batch] filled positions at the left; null: none */
    float *scores;               /* room for 4 (capacity + LANES) */
    int64_t batch, kv_heads, group, width;
    int64_t heads_stride, values_stride; /* of the new queries and keys, and values, from sequence to sequence */
    int64_t cache_batch_stride, cache_head_stride;
    int64_t position, dtype;
    float scale;
};

INLINE float element(const int dtype, const void *base, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A product that must be rounded before it is added: the compiler may not make one operation of the two. */
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

/* a and b, each of groups of 2 h lanes, to one of the same: the first half of each group sums a's, the second b's. */
#if defined(__AVX512F__)
#define FOLD_8(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + \
                      __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD_4(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + \
                      __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#define FOLD_2(a, b) (__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + \
                      __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#define FOLD_1(a, b) (__builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + \
                      __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
#define FOLD_4(a, b) (__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + \
                      __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define FOLD_2(a, b) (__builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + \
                      __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define FOLD_1(a, b) (__builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + \
                      __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
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

/* One head [width] turned by its angles, in float32 but rounded as if stored. Writes up to LANES beyond `to`. */
INLINE void turn(const int dtype, const void *head, const void *cosines, const void *sines, int64_t width, float *to) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i += LANES) { /* the first halves, then the second, which end what these write beyond */
        const floats first = load_some(dtype, head, i, half - i), second = load_some(dtype, head, i + half, half - i);
        *(floats *)(to + i) = rounded(dtype, product(dtype, first, load_some(dtype, cosines, i, half - i)) -
                                                 product(dtype, second, load_some(dtype, sines, i, half - i)));
    }
    for (int64_t i = half; i < width; i += LANES) {
        const floats first = load_some(dtype, head, i - half, width - i), second = load_some(dtype, head, i, width - i);
        *(floats *)(to + i) = rounded(dtype, product(dtype, second, load_some(dtype, cosines, i, width - i)) +
                                                 product(dtype, first, load_some(dtype, sines, i, width - i)));
    }
}

/* `heads` queries [heads, width] over `count` keys and values [count, width]; weights lie in scores [count, heads]. */
INLINE void attend(const int dtype, const int heads, const float *queries, const void *keys, const void *values,
                   int64_t count, int64_t width, float scale, float *scores, void *out) {
    const int places = LANES / heads; /* positions of a block: each lane is one pair of position and head */
    floats largest = (floats){0} - INFINITY;
    for (int64_t first = 0; first < count; first += places) {
        floats sums[LANES];
        for (int i = 0; i < LANES; i++) sums[i] = (floats){0};
        for (int64_t i = 0; i < width; i += LANES)
            for (int p = 0; p < places; p++) {
                const int64_t position = first + p < count ? first + p : count - 1;
                const floats key = load(dtype, keys, position * width + i);
                for (int h = 0; h < heads; h++) sums[p * heads + h] += key * *(const floats *)(queries + h * width + i);
            }
        floats score = totals(sums) * scale;
        if (first + places > count)
            for (int i = (int)(count - first) * heads; i < LANES; i++) score[i] = -INFINITY;
        *(floats *)(scores + first * heads) = score;
        const words more = (words)(score > largest);
        largest = (floats)(((words)score & more) | ((words)largest & ~more));
    }
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
    for (int64_t column = 0; column < width; column += COLUMNS * LANES) {
        const int vectors = width - column < COLUMNS * LANES ? (int)((width - column) / LANES) : COLUMNS;
        floats mixed[4][COLUMNS];
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < COLUMNS; c++) mixed[h][c] = (floats){0};
        if (vectors == COLUMNS)
            for (int64_t p = 0; p < count; p++)
                for (int c = 0; c < COLUMNS; c++) {
                    const floats value = load(dtype, values, p * width + column + c * LANES);
                    for (int h = 0; h < heads; h++) mixed[h][c] += value * scores[p * heads + h];
                }
        else
            for (int64_t p = 0; p < count; p++)
                for (int c = 0; c < vectors; c++) {
                    const floats value = load(dtype, values, p * width + column + c * LANES);
                    for (int h = 0; h < heads; h++) mixed[h][c] += value * scores[p * heads + h];
                }
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < vectors; c++)
                store(dtype, out, h * width + column + c * LANES, mixed[h][c] * shares[h]);
    }
}

INLINE void attend_all(const int dtype, const struct attention *a, const void *heads, const void *values, void *key_cache,
                       void *value_cache, void *out, int64_t start) {
    const int64_t width = a->width, queries = a->kv_heads * a->group;
    float turned[4 * MOST_WIDTH + LANES];
    for (int64_t b = 0; b < a->batch; b++) {
        const int64_t filling = a->padding ? a->padding[b] : 0, angle = a->position - filling;
        const void *cosines = at(dtype, a->cosines, angle * width), *sines = at(dtype, a->sines, angle * width);
        const void *new_heads = at(dtype, heads, b * a->heads_stride);
        const int64_t first = start > filling ? start : filling, count = a->position + 1 - first;
        for (int64_t k = 0; k < a->kv_heads; k++) {
            const int64_t head = b * a->cache_batch_stride + k * a->cache_head_stride;
            void *keys = at(dtype, key_cache, head), *old_values = at(dtype, value_cache, head);
            turn(dtype, at(dtype, new_heads, (queries + k) * width), cosines, sines, width, turned);
            for (int64_t i = 0; i < width; i += LANES)
                store(dtype, keys, a->position * width + i, *(const floats *)(turned + i));
            memcpy(at(dtype, old_values, a->position * width), at(dtype, values, b * a->values_stride + k * width),
                   width * (dtype == FLOAT32 ? 4 : 2));
            const void *seen = at(dtype, keys, first * width), *seen_values = at(dtype, old_values, first * width);
            for (int64_t g = 0; g < a->group;) {
                const int64_t query = k * a->group + g, left = a->group - g;
                const int together = left >= 4 ? 4 : left >= 2 ? 2 : 1;
                void *to = at(dtype, out, (b * queries + query) * width);
                for (int h = 0; h < together; h++)
                    turn(dtype, at(dtype, new_heads, (query + h) * width), cosines, sines, width, turned + h * width);
                if (together == 4)
                    attend(dtype, 4, turned, seen, seen_values, count, width, a->scale, a->scores, to);
                else if (together == 2)
                    attend(dtype, 2, turned, seen, seen_values, count, width, a->scale, a->scores, to);
                else
                    attend(dtype, 1, turned, seen, seen_values, count, width, a->scale, a->scores, to);
                g += together;
            }
        }
    }
}

/* heads [batch, queries + keys, width] not turned yet; values [batch, kv_heads, width]; out [batch, queries, width] */
void attention_step(const struct attention *a, const void *heads, const void *values, void *key_cache,
                    void *value_cache, void *out, int64_t start) {
    if (a->dtype == FLOAT32)
        attend_all(FLOAT32, a, heads, values, key_cache, value_cache, out, start);
    else
        attend_all(BFLOAT16, a, heads, values, key_cache, value_cache, out, start);
}

/* Head widths are multiples of this, and at most attention_most_width. */
int64_t attention_lanes(void) { return LANES; }
int64_t attention_most_width(void) { return MOST_WIDTH; }
