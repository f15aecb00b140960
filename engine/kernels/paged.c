/* Attention of new tokens of many sequences over a paged key-value cache: rotation, cache update, scores and weighted
 * sum. A token is a row of its own, whether it continues an answer or belongs to a prompt, so that its bits depend
 * neither on the other sequences nor on how a prompt was cut.
 *
 * A block holds the keys (or values) of `block` positions of one sequence: [kv_heads, block, stored].
 */
#include "attend.h"

struct paged { /* strides in elements */
    const void *cosines, *sines; /* [positions, width]; null: nothing turns */
    const int32_t *tables;       /* [sequences, table_stride] numbers of blocks */
    const int32_t *sequences;    /* [tokens] row of `tables` */
    const int32_t *positions;    /* [tokens] in the sequence */
    float *scores;               /* score_stride for each thread */
    int64_t tokens, kv_heads, group;
    int64_t width, stored; /* of a head, and of the rows of the cache, whose ends are zeros: whole vectors */
    int64_t block, block_stride, table_stride, score_stride;
    int64_t heads_stride, values_stride; /* of the new queries and keys, and values, from token to token */
    int64_t dtype, threads;
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel of torch's OpenMP; null: none */
    float scale;
};

struct task {
    const struct paged *paged;
    const void *heads, *values;
    void *key_blocks, *value_blocks, *out;
    int64_t window, next_part, next_scores;
};

INLINE const void *angles(const int dtype, const void *table, const struct paged *a, int64_t token) {
    return table ? at(dtype, table, a->positions[token] * a->width) : NULL;
}

/* Keep the keys and values of one token. */
INLINE void keep_token(const int dtype, const struct task *t, int64_t token) {
    const struct paged *a = t->paged;
    const int64_t queries = a->kv_heads * a->group, position = a->positions[token];
    const int64_t block = a->tables[a->sequences[token] * a->table_stride + position / a->block];
    for (int64_t k = 0; k < a->kv_heads; k++) {
        const int64_t row = block * a->block_stride + (k * a->block + position % a->block) * a->stored;
        keep(dtype, at(dtype, t->heads, token * a->heads_stride + (queries + k) * a->width),
             at(dtype, t->values, token * a->values_stride + k * a->width), angles(dtype, a->cosines, a, token),
             angles(dtype, a->sines, a, token), a->width, a->stored, at(dtype, t->key_blocks, row),
             at(dtype, t->value_blocks, row));
    }
}

/* One key head of one token, and the queries that share it. */
INLINE void attend_token(const int dtype, const struct task *t, int64_t token, int64_t k, float *scores) {
    const struct paged *a = t->paged;
    const int64_t queries = a->kv_heads * a->group, end = (int64_t)a->positions[token] + 1;
    const int64_t first = t->window && end > t->window ? end - t->window : 0;
    const int32_t *table = a->tables + a->sequences[token] * a->table_stride;
    const int64_t head = k * a->block * a->stored, query = k * a->group;
    const struct rows keys = {at(dtype, t->key_blocks, head), table, a->block, a->block_stride};
    const struct rows values = {at(dtype, t->value_blocks, head), table, a->block, a->block_stride};
    attend_group(dtype, at(dtype, t->heads, token * a->heads_stride + query * a->width), a->group,
                 angles(dtype, a->cosines, a, token), angles(dtype, a->sines, a, token), &keys, &values, first, end,
                 a->width, a->stored, a->scale, NULL, 0, scores, at(dtype, t->out, (token * queries + query) * a->width));
}

static void attend_parts(void *argument) {
    struct task *t = argument;
    const struct paged *a = t->paged;
    float *scores = a->scores + __atomic_fetch_add(&t->next_scores, 1, __ATOMIC_RELAXED) * a->score_stride;
    for (;;) {
        const int64_t next = __atomic_fetch_add(&t->next_part, 1, __ATOMIC_RELAXED);
        if (next >= a->tokens * a->kv_heads) return;
        if (a->dtype == FLOAT32)
            attend_token(FLOAT32, t, next / a->kv_heads, next % a->kv_heads, scores);
        else
            attend_token(BFLOAT16, t, next / a->kv_heads, next % a->kv_heads, scores);
    }
}

/* Parts of tokens and key heads below which waking threads costs more than it saves. */
enum { LEAST_SHARED = 16 };

/* heads [tokens, queries + keys, width] before rotation; values [tokens, kv_heads, width]; out [tokens, queries, width].
 * All keys and values are kept before any are attended to: a prompt's tokens see each other.
 * window: attended positions of a query, its own included; 0: all. */
void paged_attention(const struct paged *a, const void *heads, const void *values, void *key_blocks,
                     void *value_blocks, void *out, int64_t window) {
    struct task task = {a, heads, values, key_blocks, value_blocks, out, window, 0, 0};
    for (int64_t token = 0; token < a->tokens; token++) {
        if (a->dtype == FLOAT32)
            keep_token(FLOAT32, &task, token);
        else
            keep_token(BFLOAT16, &task, token);
    }
    if (a->parallel && a->tokens * a->kv_heads >= LEAST_SHARED)
        a->parallel(attend_parts, &task, (unsigned)a->threads, 0);
    else
        attend_parts(&task);
}

/* Rows of the cache are multiples of this, and at most paged_most_width. */
int64_t paged_lanes(void) { return LANES; }
int64_t paged_most_width(void) { return MOST_WIDTH; }
