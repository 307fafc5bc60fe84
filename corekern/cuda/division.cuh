// x / scale for FP8, to the bit that IEEE division in float32 gives wherever it can change a code.
//
// `__fdiv_rn` is a dozen instructions with a branch for each element. One scale serves many elements, though,
// and given its reciprocal a quotient costs five:
//
//     q0 = x r                        r = 1 / scale rounded; q0 is within 2 units in the last place
//     q1 = q0 - (q0 scale - x) r      within 0.5 + 2^-22 of a unit: one of the two nearest floats
//     q2 = q1 - (q1 scale - x) r      correctly rounded: the remainder is exact for such a q1, and r is a
//                                     correctly rounded reciprocal (Markstein, IBM J. Res. Dev. 34, 1990)
//
// (The remainder is taken with this sign because x - q0 scale would turn a quotient of -0 into +0.)
//
// That needs a normal r (scale <= 2^126) and remainders that do not underflow. For scale >= 2^-85 a remainder
// is a multiple of 2^(-85-23) 2^(-18-23) = 2^-149 or more whenever the quotient is at least 2^-18, and a
// smaller quotient rounds to zero in both formats (E5M2 ends at 2^-16, and 2^-17 is a tie that goes to zero).
// Scales outside [2^-85, 2^126] are brought inside by a power of two that x is multiplied by as well: what
// that overflows or underflows in x has a quotient far beyond both formats. Quotients from 2^20 up overflow
// both formats too, so there q0 will do, which keeps infinities and NaN away from the remainders.
//
// Budget on an H200 (132 SMs, 1.76 GHz, 128 lanes an SM, 4.07 TB/s of copying): float32 -> FP8 moves 5 bytes
// and may spend 36 instructions an element; float16 -> FP8 moves 3 and may spend 21. The latter spends about
// 11: 1 to widen, 6 to divide, 2 to choose, 1 to convert and pack, 1 for NaN and addresses.
#pragma once
#include "quad.cuh"

struct Divisor {
    float scale;       // within [2^-85, 2^126]: the caller's scale times `factor`
    float reciprocal;  // of that, rounded
    float factor;      // a power of two
    float given;       // the caller's scale
};

__device__ __forceinline__ Divisor divisor_of(float scale) {
    Divisor divisor;
    divisor.factor = scale < 0x1p-85f ? 0x1p64f : scale > 0x1p126f ? 0x1p-8f : 1.0f;
    divisor.scale = __fmul_rn(scale, divisor.factor);
    divisor.reciprocal = __frcp_rn(divisor.scale);
    divisor.given = scale;
    return divisor;
}

__device__ __forceinline__ float divide(float x, const Divisor& divisor) {
    x = __fmul_rn(x, divisor.factor);
    const float first = __fmul_rn(x, divisor.reciprocal);
    float q = __fmaf_rn(-__fmaf_rn(divisor.scale, first, -x), divisor.reciprocal, first);
    q = __fmaf_rn(-__fmaf_rn(divisor.scale, q, -x), divisor.reciprocal, q);
    return fabsf(first) < 0x1p20f ? q : first;
}

// The same in float64, where every float32 scale is far from the ends of the exponent's range, then rounded
// to the odd one of the two neighbouring floats when inexact: rounding that once more, to any format at least
// two bits narrower, is the same as rounding the float64 quotient itself.
__device__ __forceinline__ float divide(double x, double scale, double reciprocal) {
    const double first = __dmul_rn(x, reciprocal);
    double q = __fma_rn(-__fma_rn(scale, first, -x), reciprocal, first);
    q = __fma_rn(-__fma_rn(scale, q, -x), reciprocal, q);
    const double y = fabs(first) < 0x1p20 ? q : first;
    const float toward_zero = __double2float_rz(y);
    const unsigned inexact = static_cast<double>(toward_zero) != y;
    return __uint_as_float(__float_as_uint(toward_zero) | inexact);
}

// The four quotients. float64 is divided in float64.
template <class T>
__device__ __forceinline__ void divide(const Quad<T>& x, const Divisor& divisor, float (&y)[4]) {
    if constexpr (same_type<T, float64>) {
        const double scale = divisor.given, reciprocal = __drcp_rn(scale);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            y[i] = divide(__hiloint2double(x.word[2 * i + 1], x.word[2 * i]), scale, reciprocal);
    } else {
        unpack(x, y);
        if (divisor.given != 1.0f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = divide(y[i], divisor);
        }
    }
}
