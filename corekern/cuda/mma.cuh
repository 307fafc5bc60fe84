// Products of a warp on tensor cores, C[16 rows, 8 columns] += A[16, 16] B[16, 8], with the instructions that each
// architecture has: m16n8k16 (sm_80), two m16n8k8 (sm_75), or m8n8k4 (sm_70), which makes two such products side by side.
//
// What differs is who holds what, and it stays in this file. In all of them a thread holds, of each 8 columns, two rows
// and two neighbouring columns: c[4 * j + 2 * r + e] is row row_of(r) and column column_of(j) + e. The order of the 16 k
// is free where A and B agree on it, so that loads from shared memory are whole words:
//
//   keys x queries            A: 16 tokens, k are dims.  Rows are loaded as they lie.
//   values x probabilities    A: 16 dims, k are tokens.  Loaded transposed (sm_75) or by columns (sm_70).
//
// sm_70: four groups of eight threads (lanes 4q to 4q + 3 and 16 above) make one 8 x 8 x 4 product each; two groups share
// the rows, two the columns, and rows are dealt out so that the 16-byte loads of eight threads do not collide.
#pragma once
#include "mma_ptx.cuh"

#define HAS_LDMATRIX (TARGET_ARCH >= 750)
constexpr int UNIT = HAS_LDMATRIX ? 1 : 2;      // products of 8 columns that one multiply makes
constexpr int A_WORDS = HAS_LDMATRIX ? 4 : 8;
constexpr int B_WORDS = HAS_LDMATRIX ? 2 : 8;

#if HAS_LDMATRIX
__device__ __forceinline__ int row_of(int r) { return lane_of_warp() / 4 + 8 * r; }
__device__ __forceinline__ int column_of(int j) { return 8 * j + 2 * (lane_of_warp() % 4); }
#else
__device__ __forceinline__ int row_half() { return lane_of_warp() >> 2 & 1; }
__device__ __forceinline__ int column_half() { return lane_of_warp() >> 3 & 1; }
__device__ __forceinline__ int upper() { return lane_of_warp() >> 4; }
__device__ __forceinline__ int row_of(int r) { return (lane_of_warp() & 1) + 2 * r + 4 * row_half() + 8 * upper(); }
__device__ __forceinline__ int column_of(int j) {
    return j / 2 * 16 + 8 * column_half() + j % 2 * 4 + (lane_of_warp() & 2);
}
#endif
// The threads of a warp that hold the same columns differ in these bits of their number.
constexpr int SAME_COLUMNS = HAS_LDMATRIX ? 4 + 8 + 16 : 1 + 4 + 16;

struct Left { unsigned word[A_WORDS]; };
struct Right { unsigned word[B_WORDS]; };  // of 8 * UNIT columns

// Adds to c[0] to c[4 * UNIT - 1]. TRANSPOSED: values x probabilities, else keys x queries.
template <class Operand, bool TRANSPOSED>
__device__ __forceinline__ void multiply(float* c, const Left& a, const Right& b) {
#if TARGET_ARCH >= 800
    mma_m16n8k16<Operand>(c, a.word, b.word);
#else
    static_assert(same_type<Operand, float16>, "bfloat16 products need sm_80");
#if TARGET_ARCH >= 750
    mma_m16n8k8(c, a.word, b.word[0]);
    mma_m16n8k8(c, a.word + 2, b.word[1]);
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) mma_m8n8k4<TRANSPOSED>(c, a.word + 2 * k, b.word + 2 * k);
#endif
#endif
}

// Four codes to two pairs of float16. Without the instruction, NaN of E4M3 becomes +-480: see non_finite.
template <class Format> __device__ __forceinline__ void to_f16x2(unsigned codes, unsigned& low, unsigned& high) {
    if constexpr (same_type<Format, fp8_e5m2>) {
        low = __byte_perm(codes, 0, 0x1404);
        high = __byte_perm(codes, 0, 0x3424);
    } else {
#if HAS_FP8_CONVERSION
        asm("{ .reg .b16 l, h;"
            "  mov.b32 {l, h}, %2;"
            "  cvt.rn.f16x2.e4m3x2 %0, l;"
            "  cvt.rn.f16x2.e4m3x2 %1, h; }"
            : "=r"(low), "=r"(high) : "r"(codes));
#else
        // Exponent and mantissa moved into a float16's give the value x 2^-8 exactly, subnormals included.
        const unsigned l = __byte_perm(codes, 0, 0x1404), h = __byte_perm(codes, 0, 0x3424);
        low = mul_f16x2((l & 0x80008000) | (l >> 1 & 0x3F803F80), 0x5C005C00);
        high = mul_f16x2((h & 0x80008000) | (h >> 1 & 0x3F803F80), 0x5C005C00);
#endif
    }
}

// The highest bit of each element of a word that is NaN or infinite.
template <class Format> __device__ __forceinline__ unsigned non_finite(unsigned word) {
    constexpr bool e4m3 = same_type<Format, fp8_e4m3>, e5m2 = same_type<Format, fp8_e5m2>, f16 = same_type<Format, float16>;
    constexpr unsigned exponent = e4m3 ? 0x7F7F7F7F : e5m2 ? 0x7C7C7C7C : f16 ? 0x7C007C00 : 0x7F807F80;
    constexpr unsigned one = e4m3 ? 0x01010101 : e5m2 ? 0x04040404 : f16 ? 0x04000400 : 0x00800080;
    return ((word & exponent) + one) & (is_fp8<Format> ? 0x80808080 : 0x80008000);
}

// A word without what is marked.
template <class Format> __device__ __forceinline__ unsigned without(unsigned word, unsigned marks) {
    return word & ~((marks >> (is_fp8<Format> ? 7 : 15)) * (is_fp8<Format> ? 0xFF : 0xFFFF));
}

// An element of a cache, in the low bits, that is NaN or infinite.
template <class Format> __device__ __forceinline__ float non_finite_value(unsigned bits) {
    constexpr int size = 8 * sizeof(Format);
    constexpr unsigned infinity =
        same_type<Format, fp8_e5m2> ? 0x7C : same_type<Format, float16> ? 0x7C00 : same_type<Format, bfloat16> ? 0x7F80 : 0;
    const bool infinite = infinity != 0 && (bits & ((1u << (size - 1)) - 1)) == infinity;
    return __uint_as_float((infinite ? 0x7F800000 : 0x7FC00000) | (bits >> (size - 1) & 1) << 31);
}

// A tile in shared memory: a token a row, its 16-byte chunks permuted so that eight tokens' loads do not collide.
template <class Format, int DIMS> __device__ __forceinline__ unsigned in_tile(int token, int chunk) {
    constexpr int row = DIMS * sizeof(Format);
    return token * row + ((chunk ^ (row < 128 ? token >> 1 & 3 : token & 7)) * 16);
}

// Keys: 16 tokens of a tile, 32 dims from 32 * part. `marks` gathers what is NaN where the conversion does not keep it:
// of the thread's tokens row_of(0) and row_of(1) (sm_75), or of one token, key_row() (sm_70).
constexpr bool MARKS_KEYS = !HAS_FP8_CONVERSION;
template <class Format, int DIMS>
__device__ __forceinline__ void load_keys(Left (&a)[2], unsigned tile, int first_token, int part, unsigned (&marks)[2]) {
    constexpr bool mark = MARKS_KEYS && same_type<Format, fp8_e4m3>;
#if HAS_LDMATRIX
    const int token = first_token + (lane_of_warp() & 15), next = lane_of_warp() >> 4;
    if constexpr (is_fp8<Format>) {
        unsigned m[4];
        load_matrices(m, tile + in_tile<Format, DIMS>(token, 2 * part + next));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (mark) marks[i % 2] |= non_finite<Format>(m[i]);
            to_f16x2<Format>(m[i], a[i / 2].word[i % 2], a[i / 2].word[2 + i % 2]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) load_matrices(a[k].word, tile + in_tile<Format, DIMS>(token, 4 * part + 2 * k + next));
    }
#else
    const int token = first_token + (lane_of_warp() & 3) + 4 * row_half() + 8 * upper();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        if constexpr (is_fp8<Format>) {
            unsigned codes[4];
            load_shared_4(codes, tile + in_tile<Format, DIMS>(token, 2 * part + k));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (mark) marks[0] |= non_finite<Format>(codes[i]);
                to_f16x2<Format>(codes[i], a[k].word[2 * i], a[k].word[2 * i + 1]);
            }
        } else {
            load_shared_4(a[k].word, tile + in_tile<Format, DIMS>(token, 4 * part + 2 * k));
            load_shared_4(a[k].word + 4, tile + in_tile<Format, DIMS>(token, 4 * part + 2 * k + 1));
        }
    }
#endif
}

// Whether the thread's rows row_of(0) and row_of(1) of the tile have a NaN that load_keys marked.
__device__ __forceinline__ void marked_rows(const unsigned (&marks)[2], bool (&bad)[2]) {
#if HAS_LDMATRIX
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const unsigned all = __ballot_sync(0xFFFFFFFF, marks[r] != 0);
        bad[r] = all >> (lane_of_warp() & 28) & 0xF;
    }
#else
    // The thread with lane & 3 = n marked token n of the four that its group of rows has.
    const unsigned all = __ballot_sync(0xFFFFFFFF, marks[0] != 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) bad[r] = all >> ((lane_of_warp() & 28) + (lane_of_warp() & 1) + 2 * r) & 1;
#endif
}

// Queries: 8 * UNIT * COUNT columns from 8 * j of 16 dims, of Q^T as store_queries lays it: [half of k][column][8 k].
template <class Format, int COLUMNS, int COUNT>
__device__ __forceinline__ void load_queries_right(Right (&b)[COUNT], unsigned dims, int j) {
#if HAS_LDMATRIX
    const int lane = lane_of_warp();
    const unsigned row = dims + (lane >> 3 & 1) * (16 * COLUMNS) + (j * 8 + (lane & 7)) * 16;
#pragma unroll
    for (int i = 0; i + 1 < COUNT; i += 2) {
        unsigned m[4];
        load_matrices(m, row + (i + (lane >> 4)) * 128);
        b[i].word[0] = m[0], b[i].word[1] = m[1], b[i + 1].word[0] = m[2], b[i + 1].word[1] = m[3];
    }
    if constexpr (COUNT % 2) load_two_matrices<false>(b[COUNT - 1].word, row + (COUNT - 1) * 128);
#else
    const unsigned at = dims + (j * 8 + 8 * column_half() + (lane_of_warp() & 3) + 4 * upper()) * 16;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        unsigned low[4], high[4];
        load_shared_4(low, at + i * 256);
        load_shared_4(high, at + i * 256 + 16 * COLUMNS);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            b[i].word[is_fp8<Format> ? 2 * k : k] = low[k];
            b[i].word[is_fp8<Format> ? 2 * k + 1 : 4 + k] = high[k];
        }
    }
#endif
}

// Values: 16 dims, from 16 * block, of 32 tokens of a tile. With CLEAN what is NaN or infinite becomes 0, and `bad` true.
// Row r of the thread is dim value_dim(r) of the 16.
template <class Format> __device__ __forceinline__ int value_dim(int r) {
    return HAS_LDMATRIX && is_fp8<Format> ? lane_of_warp() / 4 * 2 + r : row_of(r);
}
template <class Format, int DIMS>
__device__ __forceinline__ void load_values(Left (&a)[2], unsigned tile, int first_token, int block, bool clean, bool& bad) {
    auto cleaned = [&](unsigned word) {
        if (!clean) return word;
        const unsigned marks = non_finite<Format>(word);
        bad |= marks != 0;
        return without<Format>(word, marks);
    };
    const int lane = lane_of_warp();
#if HAS_LDMATRIX
    if constexpr (is_fp8<Format>) {
        // A 16-bit element of a matrix is two dims of one token: the even ones become rows 0 to 7, the odd ones 8 to 15.
        unsigned m[4];
        load_matrices_transposed(m, tile + in_tile<Format, DIMS>(first_token + lane, block));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to_f16x2<Format>(__byte_perm(cleaned(m[i]), 0, 0x3120), a[i / 2].word[i % 2 * 2], a[i / 2].word[i % 2 * 2 + 1]);
    } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            load_matrices_transposed(a[k].word, tile + in_tile<Format, DIMS>(first_token + 16 * k + (lane & 7) + 8 * (lane >> 4),
                                                                             2 * block + (lane >> 3 & 1)));
#pragma unroll
            for (int i = 0; i < 4; ++i) a[k].word[i] = cleaned(a[k].word[i]);
        }
    }
#else
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = first_token + 16 * k + 4 * i + (lane & 3);
            if constexpr (is_fp8<Format>) {
                const unsigned codes = load_shared(tile + in_tile<Format, DIMS>(token, block) + 4 * row_half() + 8 * upper());
                to_f16x2<Format>(cleaned(codes), a[k].word[2 * i], a[k].word[2 * i + 1]);
            } else {
                const float2 dims = load_shared_pair(tile + in_tile<Format, DIMS>(token, 2 * block + upper()) + 8 * row_half());
                a[k].word[2 * i] = cleaned(__float_as_uint(dims.x)), a[k].word[2 * i + 1] = cleaned(__float_as_uint(dims.y));
            }
        }
#endif
}

// Probabilities P^T: [8 tokens][8 columns][token][column], 16 bits each. Where two neighbouring columns of a token are:
template <int COLUMNS> __device__ __forceinline__ unsigned in_probabilities(int token, int column) {
    return (token / 8 * (COLUMNS / 8) + column / 8) * 128 + token % 8 * 16 + column % 8 * 2;
}
// 16 tokens from first_token, 8 * UNIT * COUNT columns from 8 * j.
template <int COLUMNS, int COUNT>
__device__ __forceinline__ void load_probabilities(Right (&b)[COUNT], unsigned p, int first_token, int j) {
    const int lane = lane_of_warp();
#if HAS_LDMATRIX
    const unsigned row = p + in_probabilities<COLUMNS>(first_token + (lane & 15), 8 * j);
#pragma unroll
    for (int i = 0; i + 1 < COUNT; i += 2) {
        unsigned m[4];
        load_matrices_transposed(m, row + (i + (lane >> 4)) * 128);
        b[i].word[0] = m[0], b[i].word[1] = m[1], b[i + 1].word[0] = m[2], b[i + 1].word[1] = m[3];
    }
    if constexpr (COUNT % 2) load_two_matrices<true>(b[COUNT - 1].word, row + (COUNT - 1) * 128);
#else
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float2 columns = load_shared_pair(
                p + in_probabilities<COLUMNS>(first_token + 4 * k + (lane & 3), 8 * (j + 2 * i + column_half()) + 4 * upper()));
            b[i].word[2 * k] = __float_as_uint(columns.x), b[i].word[2 * k + 1] = __float_as_uint(columns.y);
        }
#endif
}
