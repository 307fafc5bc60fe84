// Conversion instructions that have no spelling in C++. Written as PTX so that no CUDA header is needed.
#pragma once
#include "formats.cuh"

// e4m3 and e5m2 conversions: sm_89 and later. Assemblers before CUDA 12.1 know them for sm_90 only.
#if TARGET_ARCH >= 900
#define HAS_FP8_CONVERSION 1
#elif TARGET_ARCH >= 890 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
#define HAS_FP8_CONVERSION 1
#else
#define HAS_FP8_CONVERSION 0
#endif

// Two floats to two 16-bit floats in one instruction, and any rounding to bfloat16: sm_80 and later.
#define HAS_PAIR_CONVERSION (TARGET_ARCH >= 800)

#if HAS_FP8_CONVERSION
// Four floats to a word of codes, y[0] lowest. One asm for both pairs lets the second instruction merge the
// first's result instead of a mask and a byte permutation after it.
__device__ __forceinline__ unsigned cvt_e4m3x4(const float (&y)[4]) {
    unsigned codes;
    asm("{ .reg .b16 low, high;"
        "  cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;"
        "  cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
        "  mov.b32 %0, {low, high}; }"
        : "=r"(codes) : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
    return codes;
}

__device__ __forceinline__ unsigned cvt_e5m2x4(const float (&y)[4]) {
    unsigned codes;
    asm("{ .reg .b16 low, high;"
        "  cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;"
        "  cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;"
        "  mov.b32 %0, {low, high}; }"
        : "=r"(codes) : "f"(y[0]), "f"(y[1]), "f"(y[2]), "f"(y[3]));
    return codes;
}

// The low 16 bits of `codes` are two E4M3 codes; the result is two float16.
__device__ __forceinline__ unsigned cvt_f16x2_e4m3x2(unsigned codes) {
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<unsigned short>(codes)));
    return pair;
}
#endif

__device__ __forceinline__ unsigned cvt_f16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#if HAS_PAIR_CONVERSION
__device__ __forceinline__ unsigned cvt_f16x2(float high, float low) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ unsigned cvt_bf16x2(float high, float low) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#else
__device__ __forceinline__ unsigned cvt_f16x2(float high, float low) { return cvt_f16(high) << 16 | cvt_f16(low); }

// A NaN stays one.
__device__ __forceinline__ unsigned cvt_bf16x2(float high, float low) {
    const unsigned h = __float_as_uint(high), l = __float_as_uint(low);
    const unsigned upper = high == high ? h + 0x7FFF + (h >> 16 & 1) : 0x7FC00000;
    const unsigned lower = low == low ? l + 0x7FFF + (l >> 16 & 1) : 0x7FC00000;
    return (upper & 0xFFFF0000) | lower >> 16;
}
#endif

__device__ __forceinline__ float cvt_f32_f16(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
}
