/* Small operators of a transformer layer, each in one pass, rounded where transformers rounds.
 *
 * Built with -ffp-contract=off: a product that transformers rounds must not be fused with the sum after it.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "lanes.h"

/* The incomplete vector at the end of a row is padded with zeros. */
INLINE floats load_some(const int dtype, const void *base, int64_t index, int64_t count) {
    char whole[LANES * 4] __attribute__((aligned(64))) = {0};
    if (count >= LANES) return load(dtype, base, index);
    memcpy(whole, at(dtype, base, index), count * (dtype == FLOAT32 ? 4 : 2));
    return load(dtype, whole, 0);
}

INLINE void store_some(const int dtype, void *base, int64_t index, int64_t count, floats value) {
    char whole[LANES * 4] __attribute__((aligned(64)));
    if (count >= LANES) {
        store(dtype, base, index, value);
        return;
    }
    store(dtype, whole, 0, value);
    memcpy(at(dtype, base, index), whole, count * (dtype == FLOAT32 ? 4 : 2));
}

INLINE float total(floats value) {
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) value[i] += value[i + half];
    return value[0];
}

/* A vector of x, or of sum = round(x + update). */
INLINE floats summed(const int dtype, const int adds, const void *x, const void *update, void *sum, int64_t index,
                     int64_t count) {
    const floats value = load_some(dtype, x, index, count);
    if (!adds) return value;
    const floats both = rounded(dtype, value + load_some(dtype, update, index, count));
    store_some(dtype, sum, index, count, both);
    return both;
}

/* h = x, or h = sum = round(x + update). y = round(round(h / sqrt(mean(h * h) + epsilon)) * weight), or, with a wide
 * weight, which is always in float32, without the inner rounding. */
INLINE void rms_norm_rows(const int dtype, const int adds, const int wide, const void *x, const void *update,
                          const void *weight, void *sum, void *y, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * width;
        floats even = {0}, odd = {0};
        for (int64_t i = 0; i < width; i += 2 * LANES) {
            const floats value = summed(dtype, adds, x, update, sum, first + i, width - i);
            even += value * value;
            if (i + LANES >= width) break;
            const floats next = summed(dtype, adds, x, update, sum, first + i + LANES, width - i - LANES);
            odd += next * next;
        }
        const float scale = 1.0f / sqrtf(total(even + odd) / (float)width + epsilon);
        const void *from = adds ? sum : x;
        for (int64_t i = 0; i < width; i += LANES) {
            floats value = load_some(dtype, from, first + i, width - i) * scale;
            if (!wide) value = rounded(dtype, value);
            value *= load_some(wide ? FLOAT32 : dtype, weight, i, width - i);
            store_some(dtype, y, first + i, width - i, value);
        }
    }
}

void rms_norm(const void *x, const void *weight, void *y, int64_t rows, int64_t width, float epsilon, int64_t dtype,
              int64_t wide) {
    if (dtype == FLOAT32)
        rms_norm_rows(FLOAT32, 0, 0, x, x, weight, y, y, rows, width, epsilon);
    else if (wide)
        rms_norm_rows(BFLOAT16, 0, 1, x, x, weight, y, y, rows, width, epsilon);
    else
        rms_norm_rows(BFLOAT16, 0, 0, x, x, weight, y, y, rows, width, epsilon);
}

void add_rms_norm(const void *x, const void *update, const void *weight, void *sum, void *y, int64_t rows,
                  int64_t width, float epsilon, int64_t dtype, int64_t wide) {
    if (dtype == FLOAT32)
        rms_norm_rows(FLOAT32, 1, 0, x, update, weight, sum, y, rows, width, epsilon);
    else if (wide)
        rms_norm_rows(BFLOAT16, 1, 1, x, update, weight, sum, y, rows, width, epsilon);
    else
        rms_norm_rows(BFLOAT16, 1, 0, x, update, weight, sum, y, rows, width, epsilon);
}

/* Of each token's heads, `stride` elements from token to token, the first `queries` by one weight [width] and the next
 * `keys` by the other: y [tokens, queries + keys, width]. */
void rms_norm_heads(const void *x, const void *query_weight, const void *key_weight, void *y, int64_t tokens,
                    int64_t stride, int64_t queries, int64_t keys, int64_t width, float epsilon, int64_t dtype) {
    const int64_t size = dtype == FLOAT32 ? 4 : 2;
    for (int64_t token = 0; token < tokens; token++) {
        const char *from = (const char *)x + token * stride * size;
        char *to = (char *)y + token * (queries + keys) * width * size;
        const int64_t passed = queries * width * size;
        rms_norm(from, query_weight, to, queries, width, epsilon, dtype, 0);
        rms_norm(from + passed, key_weight, to + passed, keys, width, epsilon, dtype, 0);
    }
}

/* y = round((h - mean) / sqrt(variance + epsilon) * weight + bias), h = x, or h = sum = round(x + update). The sum may
 * alias y. */
INLINE void layer_norm_rows(const int dtype, const int adds, const void *x, const void *update, const void *weight,
                            const void *bias, void *sum, void *y, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * width;
        floats sums[2] = {{0}, {0}}, squares[2] = {{0}, {0}};
        for (int64_t i = 0; i < width; i += LANES)
            sums[i / LANES % 2] += summed(dtype, adds, x, update, sum, first + i, width - i);
        const float mean = total(sums[0] + sums[1]) / (float)width;
        const void *from = adds ? sum : x;
        for (int64_t i = 0; i < width; i += LANES) {
            floats away = load_some(dtype, from, first + i, width - i) - mean;
            for (int64_t lane = width - i; lane < LANES; lane++) away[lane] = 0;
            squares[i / LANES % 2] += away * away;
        }
        const float scale = 1.0f / sqrtf(total(squares[0] + squares[1]) / (float)width + epsilon);
        for (int64_t i = 0; i < width; i += LANES) {
            floats value = (load_some(dtype, from, first + i, width - i) - mean) * scale;
            value = value * load_some(dtype, weight, i, width - i);
            if (bias) value = value + load_some(dtype, bias, i, width - i);
            store_some(dtype, y, first + i, width - i, value);
        }
    }
}

void layer_norm(const void *x, const void *weight, const void *bias, void *y, int64_t rows, int64_t width,
                float epsilon, int64_t dtype) {
    if (dtype == FLOAT32)
        layer_norm_rows(FLOAT32, 0, x, x, weight, bias, y, y, rows, width, epsilon);
    else
        layer_norm_rows(BFLOAT16, 0, x, x, weight, bias, y, y, rows, width, epsilon);
}

void add_layer_norm(const void *x, const void *update, const void *weight, const void *bias, void *sum, void *y,
                    int64_t rows, int64_t width, float epsilon, int64_t dtype) {
    if (dtype == FLOAT32)
        layer_norm_rows(FLOAT32, 1, x, update, weight, bias, sum, y, rows, width, epsilon);
    else
        layer_norm_rows(BFLOAT16, 1, x, update, weight, bias, sum, y, rows, width, epsilon);
}

INLINE floats fused(floats a, floats b, floats c) { /* a * b + c */
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* exp(x): x = n * ln 2 + r with |r| <= ln 2 / 2, then the power series of exp(r), whose rest after r^7 is 6e-9. */
INLINE floats exponential(floats x) {
    const floats zero = {0}, lowest = zero - 87.0f, highest = zero + 89.0f; /* which gives infinity */
    const words below = (words)(x < lowest), above = (words)(x > highest);
    x = (floats)(((words)x & ~below & ~above) | ((words)lowest & below) | ((words)highest & above));
    const floats shift = zero + 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    const floats n = x * 1.44269504f + shift - shift;
    const floats r = x - n * 0.693145752f - n * 1.42860677e-6f; /* ln 2 in two parts, the first with 15 bits */
    const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    floats sum = zero + 1.0f / 5040;
    for (int i = 0; i < 7; i++) sum = fused(sum, r, zero + series[i]);
    return sum * (floats)((__builtin_convertvector(n, integers) + 127) << 23);
}

/* The normal distribution's share below x, (1 + erf(x / sqrt(2))) / 2. erf is the quotient of polynomials of Eigen and
 * XLA, at most 3e-7 off; beyond 3.83 it is 1 in float32. */
INLINE floats normal_share(floats x) {
    const floats zero = {0};
    const words sign = (words)x & 0x80000000u;
    floats z = (floats)((words)x & 0x7fffffffu) * 0.707106781f;
    const words far = (words)(z > 3.8325069f);
    z = (floats)(((words)z & ~far) | ((words)(zero + 3.8325069f) & far));
    const floats square = z * z;
    const float above[] = {3.40829101e-3f, 5.09556951e-2f, 1.85208322e-1f, 1.12837914f};
    const float below[] = {2.35479665e-5f, 1.01796253e-3f, 1.40704702e-2f, 1.10985052e-1f, 4.97469251e-1f, 1.0f};
    floats over = zero + 2.29050659e-4f, under = zero - 1.17916030e-7f;
    for (int i = 0; i < 4; i++) over = fused(over, square, zero + above[i]);
    for (int i = 0; i < 6; i++) under = fused(under, square, zero + below[i]);
    floats half_erf = z * over / under * 0.5f;
    half_erf = (floats)(((words)half_erf & ~far) | ((words)(zero + 0.5f) & far));
    return (floats)((words)half_erf ^ sign) + 0.5f;
}

/* torch's tanh form, 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE floats gelu_by_tanh(floats x) {
    const floats u = (x * x * x * 0.044715f + x) * 0.79788456f;
    return x / (exponential(u * -2.0f) + 1.0f);
}

/* The same operator by operator, each rounded, as in families that do not fuse it. */
INLINE floats gelu_in_steps(const int dtype, floats x) {
    const floats cube = rounded(dtype, rounded(dtype, x * x) * x);
    const floats inner = rounded(dtype, x + rounded(dtype, cube * 0.044715f));
    const floats u = rounded(dtype, inner * 0.79788456f);
    const floats tanh = rounded(dtype, 1.0f - 2.0f / (exponential(u * 2.0f) + 1.0f));
    return rounded(dtype, x * 0.5f) * rounded(dtype, tanh + 1.0f);
}

enum { SILU, GELU, GELU_TANH, GELU_NEW, RELU };

INLINE floats activated(const int dtype, const int kind, floats x) {
    if (kind == SILU) return x / (exponential(-x) + 1.0f);
    if (kind == GELU) return x * normal_share(x);
    if (kind == GELU_TANH || (dtype == FLOAT32 && kind == GELU_NEW)) return gelu_by_tanh(x);
    if (kind == GELU_NEW) return gelu_in_steps(dtype, x);
    const words below = (words)(x < 0.0f);
    return (floats)((words)x & ~below);
}

INLINE void activate_rows(const int dtype, const int kind, const int gated, const void *x, void *y, int64_t rows,
                          int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t from = (gated ? 2 : 1) * row * width + i;
            floats value = activated(dtype, kind, load_some(dtype, x, from, width - i));
            if (gated) value = rounded(dtype, value) * load_some(dtype, x, from + width, width - i);
            store_some(dtype, y, row * width + i, width - i, value);
        }
}

/* y [rows, width] = round(f(x)), or of x [rows, 2, width] round(round(f(x[:, 0])) * x[:, 1]). */
#define ACTIVATE(dtype, kind)                                 \
    if (gated)                                                \
        activate_rows(dtype, kind, 1, x, y, rows, width);     \
    else                                                      \
        activate_rows(dtype, kind, 0, x, y, rows, width);     \
    break
#define ACTIVATE_EACH(dtype)                                  \
    switch (kind) {                                           \
        case SILU: ACTIVATE(dtype, SILU);                     \
        case GELU: ACTIVATE(dtype, GELU);                     \
        case GELU_TANH: ACTIVATE(dtype, GELU_TANH);           \
        case GELU_NEW: ACTIVATE(dtype, GELU_NEW);             \
        default: ACTIVATE(dtype, RELU);                       \
    }

void activate(const void *x, void *y, int64_t rows, int64_t width, int64_t kind, int64_t gated, int64_t dtype) {
    if (dtype == FLOAT32)
        ACTIVATE_EACH(FLOAT32)
    else
        ACTIVATE_EACH(BFLOAT16)
}

/* y = round(x * factor), of `count` elements. */
void multiply(const void *x, void *y, int64_t count, float factor, int64_t dtype) {
    for (int64_t i = 0; i < count; i += LANES)
        if (dtype == FLOAT32)
            store_some(FLOAT32, y, i, count - i, load_some(FLOAT32, x, i, count - i) * factor);
        else
            store_some(BFLOAT16, y, i, count - i, load_some(BFLOAT16, x, i, count - i) * factor);
}

struct rotation { /* x [a, b, c, width]; strides in elements; the angles' sizes are those of x, or 1: repeated */
    const void *x, *cosines, *sines;
    void *y;
    int64_t sizes[3], width, strides[3], angle_strides[3];
};

INLINE void rotate_rows(const int dtype, const struct rotation r) {
    const int64_t half = r.width / 2;
    int64_t to = 0;
    for (int64_t a = 0; a < r.sizes[0]; a++)
        for (int64_t b = 0; b < r.sizes[1]; b++)
            for (int64_t c = 0; c < r.sizes[2]; c++, to += r.width) {
                const int64_t from = a * r.strides[0] + b * r.strides[1] + c * r.strides[2];
                const int64_t angle = a * r.angle_strides[0] + b * r.angle_strides[1] + c * r.angle_strides[2];
                for (int64_t i = 0; i < half; i += LANES) {
                    const int64_t n = half - i, j = i + half;
                    const floats first = load_some(dtype, r.x, from + i, n);
                    const floats second = load_some(dtype, r.x, from + j, n);
                    const floats first_cosine = rounded(dtype, first * load_some(dtype, r.cosines, angle + i, n));
                    const floats first_sine = rounded(dtype, second * load_some(dtype, r.sines, angle + i, n));
                    const floats second_cosine = rounded(dtype, second * load_some(dtype, r.cosines, angle + j, n));
                    const floats second_sine = rounded(dtype, first * load_some(dtype, r.sines, angle + j, n));
                    store_some(dtype, r.y, to + i, n, first_cosine - first_sine);
                    store_some(dtype, r.y, to + j, n, second_cosine + second_sine);
                }
            }
}

/* y [a, b, c, width] contiguous = round(round(x * cosines) + round(half-turned x * sines)) */
void rotate(const void *x, const void *cosines, const void *sines, void *y, int64_t a, int64_t b, int64_t c,
            int64_t width, int64_t a_stride, int64_t b_stride, int64_t c_stride, int64_t a_angles, int64_t b_angles,
            int64_t c_angles, int64_t a_angle, int64_t b_angle, int64_t c_angle, int64_t dtype) {
    const struct rotation rotation = {
        x, cosines, sines, y, {a, b, c}, width, {a_stride, b_stride, c_stride},
        {a_angles == 1 ? 0 : a_angle, b_angles == 1 ? 0 : b_angle, c_angles == 1 ? 0 : c_angle}};
    if (dtype == FLOAT32)
        rotate_rows(FLOAT32, rotation);
    else
        rotate_rows(BFLOAT16, rotation);
}
