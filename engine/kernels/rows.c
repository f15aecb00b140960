/* Embedding look-up and token selection: the operators of a decode step before its first layer and after its head.
 *
 * Built with -ffp-contract=off: a product that is rounded must not be fused with the sum after it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "lanes.h"

INLINE float element(const int dtype, const void *base, int64_t index) {
    if (dtype == FLOAT32) return ((const float *)base)[index];
    const uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void store_element(const int dtype, void *base, int64_t index, float value) {
    if (dtype == FLOAT32)
        ((float *)base)[index] = value;
    else
        ((uint16_t *)base)[index] = (uint16_t)(rounded_bits((floats){value})[0] >> 16);
}

enum { SUM, PRODUCT };

/* y[i] = a[from + i] + b[i], or a[from + i] * factor */
INLINE void combine(const int dtype, const int what, const void *a, int64_t from, const void *b, int64_t b_from,
                    float factor, void *y, int64_t to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const floats value = load(dtype, a, from + i);
        store(dtype, y, to + i, what == SUM ? value + load(dtype, b, b_from + i) : value * factor);
    }
    for (; i < count; i++) {
        const float value = element(dtype, a, from + i);
        store_element(dtype, y, to + i, what == SUM ? value + element(dtype, b, b_from + i) : value * factor);
    }
}

INLINE void multiply(int64_t dtype, const void *a, int64_t from, float factor, void *y, int64_t to, int64_t count) {
    if (dtype == FLOAT32)
        combine(FLOAT32, PRODUCT, a, from, a, from, factor, y, to, count);
    else
        combine(BFLOAT16, PRODUCT, a, from, a, from, factor, y, to, count);
}

INLINE void sum(int64_t dtype, const void *a, int64_t from, const void *b, int64_t b_from, void *y, int64_t count) {
    if (dtype == FLOAT32)
        combine(FLOAT32, SUM, a, from, b, b_from, 1, y, b_from, count);
    else
        combine(BFLOAT16, SUM, a, from, b, b_from, 1, y, b_from, count);
}

/* The id of a word that was chosen among logits whose largest is no finite number. It is embedded as word 0, so that
 * all ranks of a measurement end their pass alike; the pass is then found to be invalid. */
#define NO_WORD ((int64_t)INT32_MIN)

/* y [count, width] = table[ids - first] * scale; the table has `rows`. An id outside gives a row of zeros if it
 * belongs to another rank (`shared`), else an error: 1. */
int embed_rows(const int64_t *ids, const void *table, void *y, int64_t count, int64_t width, int64_t rows,
               int64_t first, int64_t shared, float scale, int64_t dtype) {
    const int64_t bytes = width * (dtype == FLOAT32 ? 4 : 2);
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = (ids[i] == NO_WORD ? 0 : ids[i]) - first;
        char *to = (char *)y + i * bytes;
        if (row < 0 || row >= rows) {
            if (!shared) return 1;
            memset(to, 0, bytes);
        } else if (scale == 1.0f) {
            memcpy(to, (const char *)table + row * bytes, bytes);
        } else {
            multiply(dtype, table, row * width, scale, y, i * width, width);
        }
    }
    return 0;
}

/* y [count, width] = hidden + table[ids]; returns 1 if an id is outside the table. */
int add_rows(const void *hidden, const int64_t *ids, const void *table, void *y, int64_t count, int64_t width,
             int64_t rows, int64_t dtype) {
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= rows) return 1;
        sum(dtype, table, ids[i] * width, hidden, i * width, y, width);
    }
    return 0;
}

void add(const void *a, const void *b, void *y, int64_t count, int64_t dtype) { sum(dtype, a, 0, b, 0, y, count); }

INLINE floats larger(floats a, floats b) { /* b where one of them is no number */
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const words more = (words)(a > b);
    return (floats)(((words)a & more) | ((words)b & ~more));
#endif
}

INLINE int some(words lanes) { /* all bits of a lane are the same */
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)lanes) != 0;
#else
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= lanes[lane];
    return any != 0;
#endif
}

enum { CHAINS = 4 };

/* The first of the largest of a row; NaN counts as the largest. Its value first, then its index: several independent
 * chains of comparisons. */
INLINE int64_t largest(const int dtype, const void *logits, int64_t from, int64_t words_count, float *value) {
    floats most[CHAINS];
    words strange[CHAINS];
    int64_t i = 0;
    for (int chain = 0; chain < CHAINS; chain++) most[chain] = (floats){0} - INFINITY, strange[chain] = (words){0};
    for (; i + CHAINS * LANES <= words_count; i += CHAINS * LANES)
        for (int chain = 0; chain < CHAINS; chain++) {
            const floats here = load(dtype, logits, from + i + chain * LANES);
            most[chain] = larger(here, most[chain]);
            strange[chain] |= (words)(here != here);
        }
    float best = -INFINITY;
    int is_strange = some(strange[0] | strange[1] | strange[2] | strange[3]);
    for (int chain = 0; chain < CHAINS; chain++)
        for (int lane = 0; lane < LANES; lane++) best = most[chain][lane] > best ? most[chain][lane] : best;
    for (; i < words_count; i++) {
        const float here = element(dtype, logits, from + i);
        is_strange |= here != here;
        best = here > best ? here : best;
    }
    const floats wanted = best - (floats){0};
    for (i = 0; !is_strange && i + LANES <= words_count; i += LANES)
        if (some((words)(load(dtype, logits, from + i) == wanted))) break;
    for (;; i++) {
        *value = element(dtype, logits, from + i);
        if (is_strange ? *value != *value : *value == best) return i;
    }
}

INLINE int64_t largest_of(int64_t dtype, const void *logits, int64_t from, int64_t words_count, float *value) {
    return dtype == FLOAT32 ? largest(FLOAT32, logits, from, words_count, value)
                            : largest(BFLOAT16, logits, from, words_count, value);
}

/* logits [rows, words] -> places [rows]; NO_WORD where the largest is not finite */
void argmax_rows(const void *logits, int64_t *places, int64_t rows, int64_t words_count, int64_t dtype) {
    for (int64_t row = 0; row < rows; row++) {
        float value;
        const int64_t place = largest_of(dtype, logits, row * words_count, words_count, &value);
        places[row] = isfinite(value) ? place : NO_WORD;
    }
}

/* logits [rows, words] -> found [2, rows]: the largest value, and its word, of which this rank's first is `first`.
 * Both are exact in float64, so ranks send one message instead of two. */
void best_words(const void *logits, double *found, int64_t rows, int64_t words_count, int64_t first, int64_t dtype) {
    for (int64_t row = 0; row < rows; row++) {
        float value;
        found[rows + row] = (double)(first + largest_of(dtype, logits, row * words_count, words_count, &value));
        found[row] = value;
    }
}

/* Results of `ranks` [ranks, 2, rows] -> chosen [rows]: the word of the first rank with the largest value; NO_WORD where
 * that is not finite. */
void choose_words(const double *found, int64_t *chosen, int64_t ranks, int64_t rows) {
    for (int64_t row = 0; row < rows; row++) {
        double best = found[row];
        int64_t of = 0;
        for (int64_t rank = 1; rank < ranks; rank++) {
            const double value = found[rank * 2 * rows + row];
            if (best == best && (value > best || value != value)) best = value, of = rank;
        }
        chosen[row] = isfinite(best) ? (int64_t)found[(of * 2 + 1) * rows + row] : NO_WORD;
    }
}

/* The class of weights in which the sum of the largest ones reaches `share`; before: the sum of all classes above it.
 *
 * weights [count], not negative; the class of one is its bits above `lowest`, 0 where they are below, without the last
 * `shift`. sums [classes] is written over. Sums are in the order of the words, then from the largest class down. */
int64_t edge_class(const float *weights, double *sums, double *before, int64_t count, int64_t classes, int64_t lowest,
                   int64_t shift, double share) {
    memset(sums, 0, classes * sizeof(double));
    for (int64_t i = 0; i < count; i++) {
        int32_t bits;
        memcpy(&bits, weights + i, 4);
        sums[(bits > lowest ? bits - lowest : 0) >> shift] += weights[i];
    }
    double sum = 0;
    for (int64_t class = classes - 1;; class--) {
        *before = sum;
        sum += sums[class];
        if (sum >= share || class == 0) return class;
    }
}
