// Shared memory by its 32-bit addresses: vectors, 8 x 8 matrices of 16-bit elements, and copies that arrive later.
#pragma once
#include "formats.cuh"

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// What ordinary stores wrote is visible to matrix products and bulk copies after this and a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ unsigned load_shared(unsigned address) {
    unsigned value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ float load_shared_float(unsigned address) { return __uint_as_float(load_shared(address)); }

__device__ __forceinline__ float2 load_shared_pair(unsigned address) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
    return pair;
}

__device__ __forceinline__ void store_shared(unsigned address, unsigned value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_pair(unsigned address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void max_shared(unsigned address, int value) {
    asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Thread 8i + r gives the address of row r (16 bytes) of matrix i; thread 4g + t receives, in m[i], bytes 4t to
// 4t + 3 of row g.
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// The same of the transposed matrices: m[i] holds the 16-bit elements (row 2t, column g) and (row 2t + 1, column g).
__device__ __forceinline__ void load_matrices_transposed(unsigned (&m)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// Thread 4g + t stores m[i] as bytes 4t to 4t + 3 of row g of matrix i.
__device__ __forceinline__ void store_matrices(unsigned row, unsigned m0, unsigned m1, unsigned m2, unsigned m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m0), "r"(m1), "r"(m2),
                 "r"(m3) : "memory");
}

// The same of two matrices; threads 8i + r of the lower half give the rows.
__device__ __forceinline__ void store_two_matrices(unsigned row, unsigned m0, unsigned m1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(row), "r"(m0), "r"(m1) : "memory");
}

// Threads of one warpgroup, or of several, without the rest of the block.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// The same, and whether any of them brings true.
__device__ __forceinline__ bool barrier_any(int barrier, int threads, bool mine) {
    unsigned any;
    asm volatile("{ .reg .pred mine, any;"
                 "  setp.ne.b32 mine, %3, 0;"
                 "  barrier.cta.red.or.pred any, %1, %2, mine;"
                 "  selp.b32 %0, 1, 0, any; }" : "=r"(any) : "r"(barrier), "r"(threads), "r"(static_cast<int>(mine)) : "memory");
    return any;
}

#define HAS_ASYNC_COPIES (TARGET_ARCH >= 800)
// 16 bytes from global to shared memory, or zeros when there is nothing to read.
__device__ __forceinline__ void copy_16(unsigned to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}

// Arrives at a barrier that others wait at.
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
