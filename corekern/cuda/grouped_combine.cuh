// The end of grouped attention: the segments' partials of a row group to its output.
#pragma once
#include "grouped.cuh"

// Part of a row group's state: four neighbouring dims of one lane. The numerator and the sum are relative to the reference,
// which is NOTHING where nothing was seen; the peak is the true maximum.
struct State {
    float4 numerator;
    float reference, sum, peak;
};

// The state of the tokens of both, of which `next` come later.
__device__ __forceinline__ void merge(State& all, const State& next) {
    const float reference = fmaxf(all.reference, next.reference);
    const float before = exp2_approx(all.reference - reference), after = exp2_approx(next.reference - reference);
    all.reference = reference;
    all.peak = fmaxf(all.peak, next.peak);
    all.sum = __fmaf_rn(before, all.sum, __fmul_rn(after, next.sum));
    all.numerator.x = __fmaf_rn(before, all.numerator.x, __fmul_rn(after, next.numerator.x));
    all.numerator.y = __fmaf_rn(before, all.numerator.y, __fmul_rn(after, next.numerator.y));
    all.numerator.z = __fmaf_rn(before, all.numerator.z, __fmul_rn(after, next.numerator.z));
    all.numerator.w = __fmaf_rn(before, all.numerator.w, __fmul_rn(after, next.numerator.w));
}

// Merges load(0) to load(count - 1) in order; eight are on their way before the first is used.
template <class Load> __device__ __forceinline__ State merge_all(int count, Load load) {
    State all = load(0);
#pragma unroll 1
    for (int begin = 1; begin < count; begin += 7) {
        State next[7];
#pragma unroll
        for (int i = 0; i < 7; ++i)
            if (begin + i < count) next[i] = load(begin + i);
#pragma unroll
        for (int i = 0; i < 7; ++i)
            if (begin + i < count) merge(all, next[i]);
    }
    return all;
}

// Adds and returns what was there. What this block stored before its last barrier is seen by who reads the sum, and what others
// stored before they added is seen after it.
template <class T> __device__ __forceinline__ T count_arrival(T* counter) {
    T before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

constexpr int QUADS = D / 4;

// LEGACY states are normalised, as kernels without FP32 state have them: the float16 quotient of numerator and sum, and their
// reference is the logarithm of the sum (and so is their peak).
#ifndef LEGACY
#define LEGACY 0
#endif

// What numerators are multiplied by as they are stored.
__device__ __forceinline__ float factor_of(const State& state) {
    return LEGACY ? (state.sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, state.sum)) : 1.0f;
}
__device__ __forceinline__ void store_totals(const Params& p, long long lane, const State& state) {
    float4 totals = make_float4(state.reference, state.sum, state.peak, 0.0f);
    if (LEGACY && state.sum != 0.0f) {
        float logarithm;
        asm("lg2.approx.f32 %0, %1;" : "=f"(logarithm) : "f"(state.sum));
        totals = make_float4(state.reference + logarithm, 1.0f, state.reference + logarithm, 0.0f);
    }
    __stcg(p.totals + lane, totals);
}
__device__ __forceinline__ void store_numerator(const Params& p, long long at, float x) {
    if (LEGACY)
        __stcg(reinterpret_cast<unsigned short*>(p.numerators) + at, static_cast<unsigned short>(cvt_f16(x)));
    else
        __stcg(p.numerators + at, x);
}

// Two neighbouring dims, of which the first is even.
__device__ __forceinline__ void store_two(const Params& p, long long at, float x, float y) {
    if (LEGACY)
        __stcg(reinterpret_cast<unsigned*>(reinterpret_cast<unsigned short*>(p.numerators) + at), cvt_f16x2(y, x));
    else
        __stcg(reinterpret_cast<float2*>(p.numerators + at), make_float2(x, y));
}

// One state of a lane and four dims among the partials in global memory, those of segments or those of folds.
__device__ __forceinline__ State load_state(const Params& p, long long partial, int item) {
    const long long at = partial + item / QUADS;
    const float4 totals = __ldcg(p.totals + at);
    float4 numerator;
    if (LEGACY) {
        const uint2 halves = __ldcg(reinterpret_cast<const uint2*>(reinterpret_cast<const unsigned short*>(p.numerators) + at * D) + item % QUADS);
        numerator = make_float4(cvt_f32_f16(halves.x), cvt_f32_f16(halves.x >> 16), cvt_f32_f16(halves.y), cvt_f32_f16(halves.y >> 16));
    } else {
        numerator = __ldcg(reinterpret_cast<const float4*>(p.numerators + at * D) + item % QUADS);
    }
    return {numerator, totals.x, totals.y, totals.z};
}
__device__ __forceinline__ void store_state(const Params& p, long long partial, int item, const State& state) {
    const long long at = partial + item / QUADS;
    if (LEGACY) {
        const float factor = factor_of(state), x[4] = {state.numerator.x, state.numerator.y, state.numerator.z, state.numerator.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) store_numerator(p, at * D + item % QUADS * 4 + i, x[i] * factor);
    } else {
        __stcg(reinterpret_cast<float4*>(p.numerators + at * D) + item % QUADS, state.numerator);
    }
    if (item % QUADS == 0) store_totals(p, at, state);
}

// Division, rounding, and the state when it is asked for.
__device__ __forceinline__ void finish(const Params& p, const Work& work, int item, const State& all) {
    const int lane = item / QUADS, dim = item % QUADS * 4;
    const int pair = work.lane_block * N + lane;
    const int row_in_request = pair * p.group_magic >> 16, head = work.kv_head * p.group + pair - row_in_request * p.group;
    if (row_in_request >= work.rows) return;
    const long long row = work.first_row + row_in_request;
    const bool empty = all.sum == 0.0f;
    // Relative to the true maximum, as a state that leaves the kernel is, so that its division gives the same bits.
    const float factor = empty ? 0.0f : exp2_approx(all.reference - all.peak), sum = all.sum * factor;
    float x[4] = {all.numerator.x, all.numerator.y, all.numerator.z, all.numerator.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = empty ? 0.0f : x[i] * factor * p.v_scale;
    if (p.state_numerator) {
        const long long at = row * p.q_heads + head;
#pragma unroll
        for (int i = 0; i < 4; ++i) p.state_numerator[at * D + dim + i] = x[i];
        if (dim == 0) {
            p.state_maximum[at] = empty ? -INFINITE : all.peak;
            p.state_sum[at] = sum;
        }
    }
    if (!p.out) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = empty ? 0.0f : __fdiv_rn(x[i], sum);
    const long long at = row * p.out_row + head * p.out_head + dim * p.out_dim;
    if (p.out_type == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) static_cast<float*>(p.out)[at + i * p.out_dim] = x[i];
        return;
    }
    const unsigned low = p.out_type == 0 ? cvt_f16x2(x[1], x[0]) : cvt_bf16x2(x[1], x[0]);
    const unsigned high = p.out_type == 0 ? cvt_f16x2(x[3], x[2]) : cvt_bf16x2(x[3], x[2]);
    unsigned short* to = static_cast<unsigned short*>(p.out) + at;
    if (p.out_dim == 1 && reinterpret_cast<unsigned long long>(to) % 8 == 0) {
        *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
    } else {
        to[0] = low, to[p.out_dim] = low >> 16, to[2 * p.out_dim] = high, to[3 * p.out_dim] = high >> 16;
    }
}

// Combines the partials of a row group: FOLD neighbouring segments first, then these in order, one division, one rounding.
// The tree depends on the number of segments alone, and so do a row's bits.
//
// `together`: every block of the grid is resident (a cooperative launch), so each waits until all segments are
// there and takes a slice of the items, those without a segment too. Else nobody waits: the last block of each FOLD segments folds
// those, and the last of these blocks the folds.
//
// Called by all THREADS threads of the block, some of which have stored its partial; `scratch` has room for
// MAX_FOLDS * SLICE states, `last_at` is a word of shared memory.
constexpr int SLICE = 48;
template <int THREADS>
__device__ __forceinline__ void combine(const Params& p, const Work& work, State* scratch, unsigned last_at, int thread) {
    const int segments = work.segments;
    constexpr int items = N * QUADS;
    const int folds = (segments + FOLD - 1) / FOLD;
    const long long first_partial = partial_of(work, 0);
    auto fold_segments = [&](int f, int item) {
        return merge_all(min(FOLD, segments - f * FOLD),
                         [&](int i) { return load_state(p, first_partial + (f * FOLD + i) * N, item); });
    };
    if (p.together) {
        __syncthreads();
        if (thread == 0) {
            unsigned* gathering = p.gatherings + 2 * row_group_of(work);
            const unsigned all = work.gathered + gridDim.x;
            unsigned arrived = count_arrival(gathering) + 1;
            // All have read where this launch began, so the next one may begin here.
            if (arrived == all) gathering[1] = all;
            while (static_cast<int>(arrived - all) < 0)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(gathering) : "memory");
        }
        __syncthreads();
        const int each = (items + gridDim.x - 1) / gridDim.x;
        const int past = min(items, static_cast<int>(blockIdx.x + 1) * each);
#pragma unroll 1
        for (int begin = blockIdx.x * each; begin < past; begin += SLICE) {
            const int count = min(SLICE, past - begin);
#pragma unroll 1
            for (int unit = thread; unit < count * folds; unit += THREADS) {
                const int f = unit / count, item = unit - f * count;
                scratch[f * SLICE + item] = fold_segments(f, begin + item);
            }
            __syncthreads();
            if (thread < count)
                finish(p, work, begin + thread, merge_all(folds, [&](int f) { return scratch[f * SLICE + thread]; }));
            __syncthreads();
        }
        return;
    }

    int* arrivals = p.arrivals + row_group_of(work) * COUNTERS;
    // The folds' partials come after the segments'.
    const int f = blockIdx.x / FOLD, mine = min(FOLD, segments - f * FOLD);
    const long long fold_partial = first_partial + (MAX_SEGMENTS + f) * N;
    auto last_of = [&](int* counter, int count) {
        __syncthreads();
        if (thread == 0) {
            const bool last = count_arrival(counter) == count - 1;
            // Ready for the next launch.
            if (last) *counter = 0;
            store_shared(last_at, last);
        }
        __syncthreads();
        return load_shared(last_at) != 0;
    };
    if (!last_of(arrivals + 1 + f, mine)) return;
#pragma unroll 1
    for (int item = thread; item < items; item += THREADS) store_state(p, fold_partial, item, fold_segments(f, item));
    if (!last_of(arrivals, folds)) return;
#pragma unroll 1
    for (int item = thread; item < items; item += THREADS)
        finish(p, work, item, merge_all(folds, [&](int i) { return load_state(p, first_partial + (MAX_SEGMENTS + i) * N, item); }));
}
