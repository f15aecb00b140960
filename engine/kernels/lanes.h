/* Vectors of float32, and rows of float32 or bfloat16 that are read into them and rounded back as torch rounds. */
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
enum { FLOAT32 = 0, BFLOAT16 = 1 };
#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE void *at(const int dtype, const void *base, int64_t index) {
    return (char *)base + index * (dtype == FLOAT32 ? 4 : 2);
}

INLINE floats load(const int dtype, const void *base, int64_t index) {
    if (dtype == FLOAT32) return *(const floats *)at(dtype, base, index);
#ifdef __AVX512F__
    /* In one piece: gcc 12 makes two loads and a join of the conversion below. */
    return (floats)(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at(dtype, base, index))), 16));
#endif
    return (floats)(__builtin_convertvector(*(const halves *)at(dtype, base, index), words) << 16);
}

/* As torch rounds to bfloat16: to the nearest, ties to even, one pattern for NaN. Low bits are zero. */
INLINE words rounded_bits(floats value) {
    const words bits = (words)value, nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    const words is_nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
    return (nearest & ~is_nan) | (is_nan & 0x7fc00000u);
}

INLINE halves rounded_halves(floats value) {
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    /* The instruction takes denormal numbers for zeros, and keeps what is in a NaN. */
    enum { QUIET_NAN = 0x01, DENORMAL = 0x20, SIGNALING_NAN = 0x80 };
    if (__builtin_expect(!_mm512_fpclass_ps_mask((__m512)value, QUIET_NAN | DENORMAL | SIGNALING_NAN), 1))
        return (halves)_mm512_cvtneps_pbh((__m512)value);
#endif
    return __builtin_convertvector(rounded_bits(value) >> 16, halves);
}

INLINE floats rounded(const int dtype, floats value) {
    if (dtype == FLOAT32) return value;
#if defined(__AVX512BF16__) && defined(__AVX512DQ__)
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)rounded_halves(value)), 16);
#endif
    return (floats)rounded_bits(value);
}

INLINE void store(const int dtype, void *base, int64_t index, floats value) {
    void *to = at(dtype, base, index);
    if (dtype == FLOAT32)
        *(floats *)to = value;
    else
        *(halves *)to = rounded_halves(value);
}
