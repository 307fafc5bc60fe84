// The element types, by the names that corekern.formats gives them, and the architecture compiled for.
#pragma once

// The tests set TARGET_ARCH themselves when they compile these headers for the CPU.
#ifndef TARGET_ARCH
#define TARGET_ARCH __CUDA_ARCH__
#endif

// Decoding and rounding go through subnormal floats: see fp8.cuh and division.cuh.
#if __CUDA_FTZ || defined(__CUDA_PREC_DIV) && !__CUDA_PREC_DIV
#error "compile without -ftz=true, -prec-div=false and --use_fast_math"
#endif

struct fp8_e4m3 { unsigned char bits; };
struct fp8_e5m2 { unsigned char bits; };
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using float32 = float;
using float64 = double;

template <class A, class B> constexpr bool same_type = false;
template <class A> constexpr bool same_type<A, A> = true;

template <class T> constexpr bool is_fp8 = sizeof(T) == 1;

// The quiet NaN that stands for every NaN of a format, without its sign. These are the bits that ml_dtypes
// and NumPy give; the conversion instructions have others (0x7FFF for float16) and lose the sign.
template <class T> constexpr unsigned quiet_nan = 0x7FC00000;
template <> constexpr unsigned quiet_nan<fp8_e4m3> = 0x7F;
template <> constexpr unsigned quiet_nan<fp8_e5m2> = 0x7E;
template <> constexpr unsigned quiet_nan<float16> = 0x7E00;
template <> constexpr unsigned quiet_nan<bfloat16> = 0x7FC0;
