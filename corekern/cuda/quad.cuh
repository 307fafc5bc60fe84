// Four neighbouring elements of any type, as the words they take in memory: how they are loaded and stored,
// what floats they stand for, and how floats are rounded to them.
//
// Every kernel works on whole quads, one element of a strided array included (a quad whose other three
// elements are zero), so that the aligned, strided and misaligned paths cannot differ in a bit.
#pragma once
#include "formats.cuh"
#include "fp8.cuh"
#include "ptx.cuh"

template <class T> struct Quad {
    unsigned word[sizeof(T)];
};

// Word `i` of a run of quads.
template <class T, int QUADS>
__device__ __forceinline__ unsigned& word_of(Quad<T> (&quad)[QUADS], int i) {
    constexpr int words = sizeof(T);
    return quad[i / words].word[i % words];
}

// QUADS neighbouring quads, in accesses of up to 16 bytes; the address must be a multiple of the access.
template <class T, int QUADS>
__device__ __forceinline__ void load(const T* from, Quad<T> (&quad)[QUADS]) {
    constexpr int words = QUADS * sizeof(T);
    if constexpr (words == 1) {
        word_of(quad, 0) = *reinterpret_cast<const unsigned*>(from);
    } else if constexpr (words == 2) {
        const uint2 w = *reinterpret_cast<const uint2*>(from);
        word_of(quad, 0) = w.x, word_of(quad, 1) = w.y;
    } else {
        static_assert(words % 4 == 0, "no access has this width");
#pragma unroll
        for (int i = 0; i < words; i += 4) {
            const uint4 w = reinterpret_cast<const uint4*>(from)[i / 4];
            word_of(quad, i) = w.x, word_of(quad, i + 1) = w.y;
            word_of(quad, i + 2) = w.z, word_of(quad, i + 3) = w.w;
        }
    }
}

template <class T, int QUADS>
__device__ __forceinline__ void store(T* to, Quad<T> (&quad)[QUADS]) {
    constexpr int words = QUADS * sizeof(T);
    if constexpr (words == 1) {
        *reinterpret_cast<unsigned*>(to) = word_of(quad, 0);
    } else if constexpr (words == 2) {
        *reinterpret_cast<uint2*>(to) = make_uint2(word_of(quad, 0), word_of(quad, 1));
    } else {
        static_assert(words % 4 == 0, "no access has this width");
#pragma unroll
        for (int i = 0; i < words; i += 4)
            reinterpret_cast<uint4*>(to)[i / 4] = make_uint4(
                word_of(quad, i), word_of(quad, i + 1), word_of(quad, i + 2), word_of(quad, i + 3));
    }
}

// Whether the address of an element is no multiple of its size. Such views are legal (a byte buffer cut
// anywhere), but the device refuses the access: their elements travel byte by byte.
template <class T> __device__ __forceinline__ bool lies_askew(const T* element) {
    return reinterpret_cast<unsigned long long>(element) % sizeof(T) != 0;
}

// One element, as the first of a quad.
template <class T> __device__ __forceinline__ Quad<T> load_one(const T* from) {
    Quad<T> quad = {};
    if (lies_askew(from)) {
        const unsigned char* bytes = reinterpret_cast<const unsigned char*>(from);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) quad.word[i / 4] |= bytes[i] << i % 4 * 8;
    } else if constexpr (sizeof(T) == 1) {
        quad.word[0] = *reinterpret_cast<const unsigned char*>(from);
    } else if constexpr (sizeof(T) == 2) {
        quad.word[0] = *reinterpret_cast<const unsigned short*>(from);
    } else if constexpr (sizeof(T) == 4) {
        quad.word[0] = *reinterpret_cast<const unsigned*>(from);
    } else {
        const uint2 w = *reinterpret_cast<const uint2*>(from);
        quad.word[0] = w.x, quad.word[1] = w.y;
    }
    return quad;
}

template <class T> __device__ __forceinline__ void store_one(T* to, const Quad<T>& quad) {
    if (lies_askew(to)) {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(to);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)); ++i)
            bytes[i] = static_cast<unsigned char>(quad.word[i / 4] >> i % 4 * 8);
    } else if constexpr (sizeof(T) == 1) {
        *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(quad.word[0]);
    } else if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(quad.word[0]);
    } else {
        *reinterpret_cast<unsigned*>(to) = quad.word[0];
    }
}

template <class T> __device__ __forceinline__ bool is_negative(const Quad<T>& quad, int i) {
    constexpr int bits = 8 * sizeof(T);
    const int last_bit = i * bits + bits - 1;
    return quad.word[last_bit / 32] >> last_bit % 32 & 1;
}

// The values as floats: exact (float64 is not for this; see division.cuh).
template <class T> __device__ __forceinline__ void unpack(const Quad<T>& quad, float (&value)[4]) {
    static_assert(sizeof(T) <= 4, "float64 does not fit a float");
    if constexpr (is_fp8<T>) {
        four_from_fp8<T>(quad.word[0], value);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (same_type<T, float16>)
                value[i] = cvt_f32_f16(quad.word[i / 2] >> i % 2 * 16);
            else if constexpr (same_type<T, bfloat16>)
                value[i] = __uint_as_float(i % 2 ? quad.word[i / 2] & 0xFFFF0000 : quad.word[i / 2] << 16);
            else
                value[i] = __uint_as_float(quad.word[i]);
        }
    }
}

// Round to nearest even by integer arithmetic; NaN is the caller's concern.
__device__ __forceinline__ unsigned round_to_bf16(float value) {
    const unsigned bits = __float_as_uint(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// `value` rounded once to T. Where it is NaN, T's quiet NaN with the sign of the element of `source` it was
// computed from: arithmetic and conversion instructions keep neither.
template <class T, class Source>
__device__ __forceinline__ Quad<T> pack(const float (&value)[4], const Quad<Source>& source,
                                        bool nan_on_overflow = false) {
    Quad<T> quad;
    if constexpr (is_fp8<T>) {
        quad.word[0] = four_to_fp8<T>(value, nan_on_overflow);
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
#if HAS_PAIR_CONVERSION
            if constexpr (same_type<T, float16>)
                quad.word[i / 2] = cvt_f16x2(value[i + 1], value[i]);
            else
                quad.word[i / 2] = cvt_bf16x2(value[i + 1], value[i]);
#else
            if constexpr (same_type<T, float16>)
                quad.word[i / 2] = cvt_f16(value[i]) | cvt_f16(value[i + 1]) << 16;
            else
                quad.word[i / 2] = round_to_bf16(value[i]) | round_to_bf16(value[i + 1]) << 16;
#endif
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) quad.word[i] = __float_as_uint(value[i]);
    }

    if (value[0] != value[0] || value[1] != value[1] || value[2] != value[2] || value[3] != value[3]) {
        constexpr int bits = 8 * sizeof(T), in_word = 32 / bits;
        constexpr unsigned ones = 0xFFFFFFFFu >> (32 - bits);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (value[i] == value[i]) continue;
            const unsigned nan = quiet_nan<T> | static_cast<unsigned>(is_negative(source, i)) << (bits - 1);
            const int place = i % in_word * bits;
            quad.word[i / in_word] = (quad.word[i / in_word] & ~(ones << place)) | nan << place;
        }
    }
    return quad;
}
