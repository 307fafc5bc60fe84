// Warpgroup matrix products (sm_90a): D[64, N] += A[64, 16] B[16, N] in float16 with FP32 accumulators.
//
// A comes from registers. Warp w of the group holds rows 16w to 16w + 15; thread 4g + t of it holds, of rows g
// (a[0], a[2]) and g + 8 (a[1], a[3]), the k pairs 2t (a[0], a[1]) and 2t + 8 (a[2], a[3]). Of D it holds
// d[4j + 2i + e] = D[row g + 8i, column 8j + 2t + e].
//
// B is read from shared memory as 8 x 8 matrices of 128 contiguous bytes, without swizzle.
#pragma once
#include "formats.cuh"

// Orders register and shared-memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING committed groups are unfinished.
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The compiler may not move reads of d to before this: it does not know that a wait is what completes them.
template <int COUNT> __device__ __forceinline__ void wgmma_settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Where B lies; strides in bytes, from one 8 x 8 matrix to the next along k, and along n.
__device__ __forceinline__ unsigned long long wgmma_operand(unsigned address, unsigned k_stride, unsigned n_stride) {
    return static_cast<unsigned long long>((address & 0x3FFFF) >> 4) |
           static_cast<unsigned long long>(k_stride >> 4) << 16 | static_cast<unsigned long long>(n_stride >> 4) << 32;
}

#define WGMMA_D4 "%0,%1,%2,%3"
#define WGMMA_D8 WGMMA_D4 ",%4,%5,%6,%7"
#define WGMMA_D12 WGMMA_D8 ",%8,%9,%10,%11"
#define WGMMA_D16 WGMMA_D12 ",%12,%13,%14,%15"
#define WGMMA_D24 WGMMA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WGMMA_D32 WGMMA_D24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_F4 WGMMA_4(0)
#define WGMMA_F8 WGMMA_F4, WGMMA_4(4)
#define WGMMA_F12 WGMMA_F8, WGMMA_4(8)
#define WGMMA_F16 WGMMA_F12, WGMMA_4(12)
#define WGMMA_F24 WGMMA_F16, WGMMA_4(16), WGMMA_4(20)
#define WGMMA_F32 WGMMA_F24, WGMMA_4(24), WGMMA_4(28)

// d = (keep ? d : 0) + a b. B_TRANSPOSED: the 8 x 8 matrices of b have n contiguous, else k.
template <int B_TRANSPOSED, int COUNT>
__device__ __forceinline__ void wgmma_f16(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int keep) {
#define WGMMA_BODY(n, D, F, A, B, S, T)                                                               \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, " S ", 0;"                                     \
                 " wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" D "}, {" A "}, " B        \
                 ", keep, 1, 1, " T "; }"                                                             \
                 : F                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(B_TRANSPOSED)   \
                 : "memory")
    if constexpr (COUNT == 4)
        WGMMA_BODY("8", WGMMA_D4, WGMMA_F4, "%4,%5,%6,%7", "%8", "%9", "%10");
    else if constexpr (COUNT == 8)
        WGMMA_BODY("16", WGMMA_D8, WGMMA_F8, "%8,%9,%10,%11", "%12", "%13", "%14");
    else if constexpr (COUNT == 12)
        WGMMA_BODY("24", WGMMA_D12, WGMMA_F12, "%12,%13,%14,%15", "%16", "%17", "%18");
    else if constexpr (COUNT == 16)
        WGMMA_BODY("32", WGMMA_D16, WGMMA_F16, "%16,%17,%18,%19", "%20", "%21", "%22");
    else if constexpr (COUNT == 24)
        WGMMA_BODY("48", WGMMA_D24, WGMMA_F24, "%24,%25,%26,%27", "%28", "%29", "%30");
    else if constexpr (COUNT == 32)
        WGMMA_BODY("64", WGMMA_D32, WGMMA_F32, "%32,%33,%34,%35", "%36", "%37", "%38");
    else
        static_assert(COUNT < 0, "no product of this width");
#undef WGMMA_BODY
}
