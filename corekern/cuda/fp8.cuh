// Four floats to four FP8 codes and back: the conversion instructions where there are any, and the same bits
// from integer arithmetic elsewhere.
//
// Neither direction looks after NaN's sign (the instructions lose it, so nothing here tries): quad.cuh does,
// in a branch that data without NaN never takes.
#pragma once
#include "formats.cuh"
#include "ptx.cuh"

template <class Format> struct Fp8;

template <> struct Fp8<fp8_e4m3> {
    static constexpr int mantissa = 3;
    static constexpr int bias = 7;
    static constexpr unsigned max_bits = 0x43E00000;  // 448 as a float
    // What overflows, when overflow is not to saturate: 464 is halfway to 480 and rounds to the even 448.
    static __device__ __forceinline__ bool overflows(float y) { return fabsf(y) > 464.0f; }
    static constexpr unsigned overflow = 0x7F;  // there is no infinity
};

template <> struct Fp8<fp8_e5m2> {
    static constexpr int mantissa = 2;
    static constexpr int bias = 15;
    static constexpr unsigned max_bits = 0x47600000;  // 57344 as a float
    // 61440 is halfway to 65536 and rounds to the even 65536: out of range.
    static __device__ __forceinline__ bool overflows(float y) { return fabsf(y) >= 61440.0f; }
    static constexpr unsigned overflow = 0x7C;  // infinity
};

// One code, saturating, by integer arithmetic: round to nearest even at the mantissa's last place, or, below
// the smallest normal, by adding the power of two whose last place is the smallest subnormal.
template <class Format> __device__ __forceinline__ unsigned round_to_fp8(float y) {
    using F = Fp8<Format>;
    constexpr int shift = 23 - F::mantissa;
    constexpr unsigned smallest_normal = (127 + 1 - F::bias) << 23;
    constexpr unsigned aligner = (127 + 1 - F::bias - F::mantissa + 23) << 23;
    const unsigned bits = __float_as_uint(y);
    unsigned magnitude = bits & 0x7FFFFFFF;
    magnitude = magnitude < F::max_bits ? magnitude : F::max_bits;
    const unsigned odd = (magnitude >> shift) & 1;
    const unsigned normal =
        ((magnitude + (1u << (shift - 1)) - 1 + odd) >> shift) - ((127u - F::bias) << F::mantissa);
    const unsigned subnormal =
        __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(aligner))) - aligner;
    return (magnitude < smallest_normal ? subnormal : normal) | ((bits >> 24) & 0x80);
}

template <class Format> __device__ __forceinline__ unsigned saturate_to_fp8(const float (&y)[4]) {
#if HAS_FP8_CONVERSION
    if constexpr (same_type<Format, fp8_e4m3>)
        return cvt_e4m3x4(y);
    else
        return cvt_e5m2x4(y);
#else
    return round_to_fp8<Format>(y[0]) | round_to_fp8<Format>(y[1]) << 8 |
           round_to_fp8<Format>(y[2]) << 16 | round_to_fp8<Format>(y[3]) << 24;
#endif
}

// y[i] goes to byte i. Infinities and finite overflow saturate, or become NaN (E4M3) or infinity (E5M2).
template <class Format>
__device__ __forceinline__ unsigned four_to_fp8(const float (&y)[4], bool nan_on_overflow) {
    unsigned codes = saturate_to_fp8<Format>(y);
    if (nan_on_overflow) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (Fp8<Format>::overflows(y[i]))
                codes = (codes & ~(0x7Fu << 8 * i)) | Fp8<Format>::overflow << 8 * i;
    }
    return codes;
}

// Byte i goes to value[i], exactly; a NaN code becomes some NaN.
template <class Format>
__device__ __forceinline__ void four_from_fp8(unsigned codes, float (&value)[4]) {
    if constexpr (same_type<Format, fp8_e5m2>) {
        // An E5M2 code is the high byte of the float16 of the same value.
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = cvt_f32_f16((codes >> 8 * i & 0xFF) << 8);
    } else {
#if HAS_FP8_CONVERSION
        const unsigned low = cvt_f16x2_e4m3x2(codes), high = cvt_f16x2_e4m3x2(codes >> 16);
        value[0] = cvt_f32_f16(low);
        value[1] = cvt_f32_f16(low >> 16);
        value[2] = cvt_f32_f16(high);
        value[3] = cvt_f32_f16(high >> 16);
#else
        // The code's exponent and mantissa, moved into a float's, give value x 2^-120 exactly, subnormals
        // included (the biases differ by 120; subnormal floats are not flushed).
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned top = codes << (24 - 8 * i);
            const unsigned bits = (top & 0x80000000) | (top >> 4 & 0x07F00000);
            const float exact = __fmul_rn(__uint_as_float(bits), 0x1p120f);
            value[i] = (bits & 0x07F00000) == 0x07F00000 ? __uint_as_float(quiet_nan<float32>) : exact;
        }
#endif
    }
}
