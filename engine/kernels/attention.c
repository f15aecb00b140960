/* Decode attention of one new token of each sequence over its key-value cache: rotation, cache update, scores and
 * weighted sum in one call. Or over constant keys and values, those of a source: then nothing is stored.
 *
 * Scores, weights and sums are float32; what is stored is rounded where transformers' Llama rounds. Query heads that
 * share a key head are processed together, so that keys and values are read from memory once.
 */
#include "attend.h"

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

/* One key head of one sequence, and the queries that share it. */
INLINE void attend_head(const int dtype, const struct attention *a, const void *heads, const void *values,
                        void *key_cache, void *value_cache, void *out, int64_t window, int64_t b, int64_t k,
                        float *scores) {
    const int64_t width = a->width, stored = a->stored, queries = a->kv_heads * a->group;
    const int64_t filling = a->padding ? a->padding[b] : 0, end = a->position + 1;
    const int64_t start = window && end > window ? end - window : 0;
    const int64_t first = start > filling ? start : filling;
    const void *cosines = NULL, *sines = NULL;
    if (a->cosines) {
        cosines = at(dtype, a->cosines, (a->position - filling) * width);
        sines = at(dtype, a->sines, (a->position - filling) * width);
    }
    const void *new_heads = at(dtype, heads, b * a->heads_stride);
    const int64_t head = b * a->cache_batch_stride + k * a->cache_head_stride;
    void *keys = at(dtype, key_cache, head), *old_values = at(dtype, value_cache, head);
    if (!a->fixed)
        keep(dtype, at(dtype, new_heads, (queries + k) * width), at(dtype, values, b * a->values_stride + k * width),
             cosines, sines, width, stored, at(dtype, keys, a->position * stored),
             at(dtype, old_values, a->position * stored));
    const struct rows seen = {keys, NULL, 0, 0}, seen_values = {old_values, NULL, 0, 0};
    const int64_t query = k * a->group, bias_stride = a->capacity + LANES;
    const float *bias = a->bias ? a->bias + query * bias_stride + a->capacity - (end - first) : NULL;
    attend_group(dtype, at(dtype, new_heads, query * width), a->group, cosines, sines, &seen, &seen_values, first, end,
                 width, stored, a->scale, bias, bias_stride, scores, at(dtype, out, (b * queries + query) * width));
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
