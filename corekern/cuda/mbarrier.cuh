// Barriers in shared memory that count arrivals, of threads and of bytes copied: how producers and consumers of a
// ring of buffers wait for one another.
//
// A barrier's phases alternate: waiting for parity p returns once the phase of that parity has completed, so the
// first wait of a consumer is for 0, and the first of a producer, who finds its buffers free, is for 1.
#pragma once
#include "formats.cuh"

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to bulk copies and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds to what the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives when this thread's copy_16 so far are done. Counts against the arrivals of mbarrier_init.
__device__ __forceinline__ void mbarrier_arrive_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, int parity) {
    asm volatile("{ .reg .pred done;"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                 " @!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Whether mbarrier_wait would return at once.
__device__ __forceinline__ bool mbarrier_test(unsigned barrier, int parity) {
    unsigned done;
    asm volatile("{ .reg .pred done;"
                 " mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;"
                 " selp.b32 %0, 1, 0, done; }" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// As cuTensorMapEncodeTiled fills it; see corekern/cuda/tensor_map.py.
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

// One box of a four-dimensional tensor map; the part of it outside the array is zeros.
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& map, int c0, int c1, int c2, int c3, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];"
                 ::"r"(to), "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
