/* Decode attention of one new token of each sequence over its key-value cache: rotation, cache update, scores and
 * weighted sum in one call. Or over constant keys and values, those of a source: then nothing is stored.
 *
 * Scores, weights and sums are float32; what is stored is rounded where transformers' Llama rounds. Query heads that
 * share a key head are processed together, so that keys and values are read from memory once.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { MOST_WIDTH = 512, COLUMNS = 4 };

struct attention { /* strides in elements */
    const void *cosines, *sines; /* [capacity, width]; null: nothing turns */
    const int64_t *padding;      /* [batch] filled positions at the left; null: none */
    const float *bias;           /* [queries, capacity + LANES] by distance, the farthest first; null: none */
    float *scores;               /* room for 4 (capacity + LANES) for each thread */
    int64_t batch, kv_heads, group;
    int64_t width, stored; /* of a head, and of the rows of the cache, whose ends are zeros: whole vectors */
    int64_t capacity;
    int64_t heads_stride, values_stride; /* of the new queries and keys, and values, from sequence to sequence */
    int64_t cache_batch_stride, cache_head_stride;
    int64_t position; /* of the new token, or the last of a source */
    int64_t dtype, fixed, threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of torch's OpenMP; null: none */
    float scale;
};

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

/* Add pairs of a and b, each of groups of 2 h lanes: the first half of each group holds sums of a, the second of b. */
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

/* `heads` queries [heads, stored] over `count` keys and values [count, stored]; weights are in scores [count, heads].
 * bias: of the first query, and `bias_stride` further of the next; null: none. */
INLINE void attend(const int dtype, const int heads, const float *queries, const void *keys, const void *values,
                   int64_t count, int64_t width, int64_t stored, float scale, const float *bias, int64_t bias_stride,
                   float *scores, void *out) {
    const int places = LANES / heads; /* positions of a block: each lane is one pair of position and head */
    floats largest = (floats){0} - INFINITY;
    for (int64_t first = 0; first < count; first += places) {
        floats sums[LANES];
        for (int i = 0; i < LANES; i++) sums[i] = (floats){0};
        for (int64_t i = 0; i < stored; i += LANES)
            for (int p = 0; p < places; p++) {
                const int64_t position = first + p < count ? first + p : count - 1;
                const floats key = load(dtype, keys, position * stored + i);
                for (int h = 0; h < heads; h++)
                    sums[p * heads + h] += key * *(const floats *)(queries + h * stored + i);
            }
        floats score = totals(sums) * scale;
        if (bias && heads == 1)
            score += *(const floats *)(bias + first);
        else if (bias)
            for (int i = 0; i < LANES; i++) score[i] += bias[i % heads * bias_stride + first + i / heads];
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
    for (int64_t column = 0; column < stored; column += COLUMNS * LANES) {
        const int vectors = stored - column < COLUMNS * LANES ? (int)((stored - column) / LANES) : COLUMNS;
        floats mixed[4][COLUMNS];
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < COLUMNS; c++) mixed[h][c] = (floats){0};
        if (vectors == COLUMNS)
            for (int64_t p = 0; p < count; p++)
                for (int c = 0; c < COLUMNS; c++) {
                    const floats value = load(dtype, values, p * stored + column + c * LANES);
                    for (int h = 0; h < heads; h++) mixed[h][c] += value * scores[p * heads + h];
                }
        else
            for (int64_t p = 0; p < count; p++)
                for (int c = 0; c < vectors; c++) {
                    const floats value = load(dtype, values, p * stored + column + c * LANES);
                    for (int h = 0; h < heads; h++) mixed[h][c] += value * scores[p * heads + h];
                }
        for (int h = 0; h < heads; h++)
            for (int c = 0; c < vectors; c++)
                store_some(dtype, out, h * width + column + c * LANES, width - column - c * LANES,
                           mixed[h][c] * shares[h]);
    }
}

/* One key head of one sequence, and the queries that share it. */
INLINE void attend_head(const int dtype, const struct attention *a, const void *heads, const void *values,
                        void *key_cache, void *value_cache, void *out, int64_t window, int64_t b, int64_t k,
                        float *scores) {
    const int64_t width = a->width, stored = a->stored, queries = a->kv_heads * a->group;
    const int64_t filling = a->padding ? a->padding[b] : 0, end = a->position + 1;
    const int64_t start = window && end > window ? end - window : 0;
    const int64_t first = start > filling ? start : filling, count = end - first;
    const void *cosines = NULL, *sines = NULL;
    if (a->cosines) {
        cosines = at(dtype, a->cosines, (a->position - filling) * width);
        sines = at(dtype, a->sines, (a->position - filling) * width);
    }
    const void *new_heads = at(dtype, heads, b * a->heads_stride);
    const int64_t head = b * a->cache_batch_stride + k * a->cache_head_stride;
    void *keys = at(dtype, key_cache, head), *old_values = at(dtype, value_cache, head);
    float turned[4 * MOST_WIDTH + LANES];
    if (!a->fixed) {
        turn(dtype, at(dtype, new_heads, (queries + k) * width), cosines, sines, width, stored, turned);
        for (int64_t i = 0; i < stored; i += LANES)
            store(dtype, keys, a->position * stored + i, *(const floats *)(turned + i));
        memcpy(at(dtype, old_values, a->position * stored), at(dtype, values, b * a->values_stride + k * width),
               width * (dtype == FLOAT32 ? 4 : 2));
    }
    const void *seen = at(dtype, keys, first * stored), *seen_values = at(dtype, old_values, first * stored);
    const int64_t bias_stride = a->capacity + LANES;
    for (int64_t g = 0; g < a->group;) {
        const int64_t query = k * a->group + g, left = a->group - g;
        const int together = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        void *to = at(dtype, out, (b * queries + query) * width);
        const float *bias = a->bias ? a->bias + query * bias_stride + a->capacity - count : NULL;
        for (int h = 0; h < together; h++)
            turn(dtype, at(dtype, new_heads, (query + h) * width), cosines, sines, width, stored, turned + h * stored);
        if (together == 4)
            attend(dtype, 4, turned, seen, seen_values, count, width, stored, a->scale, bias, bias_stride,
                   scores, to);
        else if (together == 2)
            attend(dtype, 2, turned, seen, seen_values, count, width, stored, a->scale, bias, bias_stride,
                   scores, to);
        else
            attend(dtype, 1, turned, seen, seen_values, count, width, stored, a->scale, bias, bias_stride,
                   scores, to);
        g += together;
    }
}

struct task {
    const struct attention *attention;
    const void *heads, *values;
    void *key_cache, *value_cache, *out;
    int64_t window, next_head, next_scores;
};

/* Process number `next` of all key heads of all sequences. */
static void attend_one(const struct task *t, int64_t next, float *scores) {
    const struct attention *a = t->attention;
    const int64_t b = next / a->kv_heads, k = next % a->kv_heads;
    if (a->dtype == FLOAT32)
        attend_head(FLOAT32, a, t->heads, t->values, t->key_cache, t->value_cache, t->out, t->window, b, k, scores);
    else
        attend_head(BFLOAT16, a, t->heads, t->values, t->key_cache, t->value_cache, t->out, t->window, b, k, scores);
}

static void work(void *argument) {
    struct task *t = argument;
    const struct attention *a = t->attention;
    const int64_t room = __atomic_fetch_add(&t->next_scores, 1, __ATOMIC_RELAXED);
    float *scores = a->scores + room * 4 * (a->capacity + LANES);
    for (;;) {
        const int64_t next = __atomic_fetch_add(&t->next_head, 1, __ATOMIC_RELAXED);
        if (next >= a->batch * a->kv_heads) return;
        attend_one(t, next, scores);
    }
}

/* Elements of keys below which waking threads costs more than they save. */
enum { LEAST_SHARED = 1 << 16 };

/* heads [batch, queries + keys, width] before rotation; values [batch, kv_heads, width]; out [batch, queries, width].
 * window: attended positions of a query, its own included; 0: all. */
void attention_step(const struct attention *a, const void *heads, const void *values, void *key_cache,
                    void *value_cache, void *out, int64_t window) {
    struct task task = {a, heads, values, key_cache, value_cache, out, window, 0, 0};
    if (a->parallel && a->batch * a->kv_heads * a->width * (a->position + 1) >= LEAST_SHARED)
        a->parallel(work, &task, (unsigned)a->threads, 0);
    else
        for (int64_t next = 0; next < a->batch * a->kv_heads; next++) attend_one(&task, next, a->scores);
}

/* Rows of the cache are multiples of this, and at most attention_most_width. */
int64_t attention_lanes(void) { return LANES; }
int64_t attention_most_width(void) { return MOST_WIDTH; }
