// The instructions of mma.cuh: products of a warp, and loads of their operands from shared memory.
#pragma once
#include "ptx.cuh"
#include "shared.cuh"

// Read anew: what is computed from it then takes no registers outside the loop where it is needed.
__device__ __forceinline__ int lane_of_warp() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

__device__ __forceinline__ unsigned mul_f16x2(unsigned x, unsigned y) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
    return x;
}

__device__ __forceinline__ void load_shared_4(unsigned* word, unsigned address) {
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "r"(address) : "memory");
}

// Two matrices, as load_matrices; threads 0 to 15 give the addresses.
template <bool TRANSPOSED> __device__ __forceinline__ void load_two_matrices(unsigned (&m)[2], unsigned row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(row) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(row) : "memory");
}

#if TARGET_ARCH >= 800
template <class Operand> __device__ __forceinline__ void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b) {
    if constexpr (same_type<Operand, bfloat16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#elif TARGET_ARCH >= 750
__device__ __forceinline__ void mma_m16n8k8(float* c, const unsigned* a, unsigned b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
#else
// Rows of A and columns of B, or, TRANSPOSED, columns of A and rows of B.
template <bool TRANSPOSED> __device__ __forceinline__ void mma_m8n8k4(float* c, const unsigned* a, const unsigned* b) {
    if constexpr (TRANSPOSED)
        asm volatile("mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
                     "{%0,%1,%2,%3,%4,%5,%6,%7};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
                     "{%0,%1,%2,%3,%4,%5,%6,%7};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
#endif
