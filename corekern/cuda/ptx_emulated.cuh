// The conversion instructions of ptx.cuh for a C++ compiler, from the formats' definitions: of all values of
// the narrow format take the nearest, and of two equally near the one with the even code.
//
// They share nothing with the arithmetic in fp8.cuh and quad.cuh, which tests compare them with.
#pragma once
#include "formats.cuh"

#define HAS_FP8_CONVERSION (TARGET_ARCH >= 890)
#define HAS_PAIR_CONVERSION (TARGET_ARCH >= 800)

// A small float's value: `code` without its sign, `mantissa` bits of fraction, `bias` of the exponent.
static inline double value_of(unsigned code, int mantissa, int bias) {
    const int exponent = code >> mantissa;
    const double fraction = code & ((1u << mantissa) - 1);
    return exponent ? std::ldexp(fraction + (1u << mantissa), exponent - bias - mantissa)
                    : std::ldexp(fraction, 1 - bias - mantissa);
}

// The code nearest to |y| among 0 ... last; beyond `last` stays there.
static inline unsigned nearest_code(double y, int mantissa, int bias, unsigned last) {
    unsigned below = 0, above = last;
    if (y >= value_of(last, mantissa, bias)) return last;
    while (above - below > 1) {
        const unsigned middle = (below + above) / 2;
        (value_of(middle, mantissa, bias) <= y ? below : above) = middle;
    }
    const double down = y - value_of(below, mantissa, bias), up = value_of(above, mantissa, bias) - y;
    return down < up || (down == up && below % 2 == 0) ? below : above;
}

static inline unsigned sign_of(float y, int bit) { return std::signbit(y) ? 1u << bit : 0; }

static inline unsigned one_e4m3(float y) {
    return y != y ? 0x7F : nearest_code(std::fabs(y), 3, 7, 0x7E) | sign_of(y, 7);
}
static inline unsigned one_e5m2(float y) {
    return y != y ? 0x7F : nearest_code(std::fabs(y), 2, 15, 0x7B) | sign_of(y, 7);
}
// The code after the largest finite one is infinity's, and as far from it as if it were a number.
static inline unsigned cvt_f16(float y) {
    return y != y ? 0x7FFF : nearest_code(std::fabs(y), 10, 15, 0x7C00) | sign_of(y, 15);
}
static inline unsigned one_bf16(float y) {
    return y != y ? 0x7FFF : nearest_code(std::fabs(y), 7, 127, 0x7F80) | sign_of(y, 15);
}
static inline float cvt_f32_f16(unsigned bits) {
    const unsigned code = bits & 0x7FFF;
    if (code > 0x7C00) return __uint_as_float(0x7FFFFFFF);
    const float value = code == 0x7C00 ? INFINITY : static_cast<float>(value_of(code, 10, 15));
    return bits & 0x8000 ? -value : value;
}

static inline unsigned cvt_e4m3x4(const float (&y)[4]) {
    return one_e4m3(y[0]) | one_e4m3(y[1]) << 8 | one_e4m3(y[2]) << 16 | one_e4m3(y[3]) << 24;
}
static inline unsigned cvt_e5m2x4(const float (&y)[4]) {
    return one_e5m2(y[0]) | one_e5m2(y[1]) << 8 | one_e5m2(y[2]) << 16 | one_e5m2(y[3]) << 24;
}
static inline unsigned cvt_f16x2(float high, float low) { return cvt_f16(high) << 16 | cvt_f16(low); }
static inline unsigned cvt_bf16x2(float high, float low) { return one_bf16(high) << 16 | one_bf16(low); }
static inline unsigned cvt_f16x2_e4m3x2(unsigned codes) {
    unsigned pair = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned code = codes >> 8 * i & 0x7F, sign = (codes >> 8 * i & 0x80) << 8;
        const unsigned bits = code == 0x7F ? 0x7FFF : cvt_f16(static_cast<float>(value_of(code, 3, 7))) | sign;
        pair |= bits << 16 * i;
    }
    return pair;
}
