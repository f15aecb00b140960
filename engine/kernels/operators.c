/* Small operators of a transformer layer, each in one pass, rounded where transformers' Llama rounds.
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

/* The end of a row that is no whole vector is worked on in a vector filled with zeros. */
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

/* y = round(round(h / sqrt(mean(h * h) + epsilon)) * weight), h = x, or h = sum = round(x + update). */
INLINE void rms_norm_rows(const int dtype, const int adds, const void *x, const void *update, const void *weight,
                          void *sum, void *y, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row * width;
        floats squares[2] = {{0}, {0}};
        for (int64_t i = 0; i < width; i += LANES) {
            floats value = load_some(dtype, x, first + i, width - i);
            if (adds) {
                value = rounded(dtype, value + load_some(dtype, update, first + i, width - i));
                store_some(dtype, sum, first + i, width - i, value);
            }
            squares[i / LANES % 2] += value * value;
        }
        const float scale = 1.0f / sqrtf(total(squares[0] + squares[1]) / (float)width + epsilon);
        const void *from = adds ? sum : x;
        for (int64_t i = 0; i < width; i += LANES) {
            const floats value = rounded(dtype, load_some(dtype, from, first + i, width - i) * scale);
            store_some(dtype, y, first + i, width - i, value * load_some(dtype, weight, i, width - i));
        }
    }
}

void rms_norm(const void *x, const void *weight, void *y, int64_t rows, int64_t width, float epsilon, int64_t dtype) {
    if (dtype == FLOAT32)
        rms_norm_rows(FLOAT32, 0, x, x, weight, y, y, rows, width, epsilon);
    else
        rms_norm_rows(BFLOAT16, 0, x, x, weight, y, y, rows, width, epsilon);
}

void add_rms_norm(const void *x, const void *update, const void *weight, void *sum, void *y, int64_t rows,
                  int64_t width, float epsilon, int64_t dtype) {
    if (dtype == FLOAT32)
        rms_norm_rows(FLOAT32, 1, x, update, weight, sum, y, rows, width, epsilon);
    else
        rms_norm_rows(BFLOAT16, 1, x, update, weight, sum, y, rows, width, epsilon);
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

INLINE void silu_multiply_rows(const int dtype, const void *gate_up, void *y, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < width; i += LANES) {
            const floats gate = load_some(dtype, gate_up, 2 * row * width + i, width - i);
            const floats up = load_some(dtype, gate_up, (2 * row + 1) * width + i, width - i);
            const floats silu = rounded(dtype, gate / (exponential(-gate) + 1.0f));
            store_some(dtype, y, row * width + i, width - i, silu * up);
        }
}

/* gate_up [rows, 2, width] -> y [rows, width] = round(round(silu(gate)) * up) */
void silu_multiply(const void *gate_up, void *y, int64_t rows, int64_t width, int64_t dtype) {
    if (dtype == FLOAT32)
        silu_multiply_rows(FLOAT32, gate_up, y, rows, width);
    else
        silu_multiply_rows(BFLOAT16, gate_up, y, rows, width);
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
