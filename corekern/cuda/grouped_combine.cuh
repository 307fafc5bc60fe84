// The end of grouped attention: the segments' partials of a row group to its output.
#pragma once
#include "grouped.cuh"

// Four neighbouring dims of one lane: division, rounding, and the state when it is asked for.
__device__ __forceinline__ void finish(const Params& p, const Work& work, int lane, int dim, float4 n, float sum, float maximum) {
    const int pair = work.lane_block * N + lane;
    const int row_in_request = pair / p.group, head = work.kv_head * p.group + pair - row_in_request * p.group;
    if (row_in_request >= work.rows) return;
    const long long row = work.first_row + row_in_request;
    const bool empty = sum == 0.0f;
    float x[4] = {n.x * p.v_scale, n.y * p.v_scale, n.z * p.v_scale, n.w * p.v_scale};
    if (p.state_numerator) {
        const long long at = row * p.q_heads + head;
#pragma unroll
        for (int i = 0; i < 4; ++i) p.state_numerator[at * D + dim + i] = empty ? 0.0f : x[i];
        if (dim == 0) {
            p.state_maximum[at] = maximum;
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

// States folded in order, relative to their largest maximum: four dims of one lane.
struct Folded {
    float4 numerator;
    float maximum, sum;
};

// Of at most COUNT states `count` are there. maximum(i) and state(i) load them, eight at once.
template <int COUNT, class Maximum, class State>
__device__ __forceinline__ Folded fold(int count, Maximum maximum, State state) {
    constexpr int batch = COUNT < 8 ? COUNT : 8;
    Folded all = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), -INFINITE, 0.0f};
    float maxima[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) maxima[i] = i < count ? maximum(i) : -INFINITE;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) all.maximum = fmaxf(all.maximum, maxima[i]);
    const float reference = all.maximum == -INFINITE ? 0.0f : all.maximum;
#pragma unroll
    for (int begin = 0; begin < COUNT; begin += batch) {
        if (begin >= count) break;
        float4 numerators[batch];
        float sums[batch];
#pragma unroll
        for (int i = 0; i < batch; ++i)
            if (begin + i < count) state(begin + i, numerators[i], sums[i]);
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            if (begin + i < count) {
                const float weight = exp2_approx(maxima[begin + i] - reference);
                all.sum = __fmaf_rn(weight, sums[i], all.sum);
                all.numerator.x = __fmaf_rn(weight, numerators[i].x, all.numerator.x);
                all.numerator.y = __fmaf_rn(weight, numerators[i].y, all.numerator.y);
                all.numerator.z = __fmaf_rn(weight, numerators[i].z, all.numerator.z);
                all.numerator.w = __fmaf_rn(weight, numerators[i].w, all.numerator.w);
            }
        }
    }
    return all;
}

constexpr int QUADS = D / 4;

// Folds partials in global memory: of consecutive segments, or of consecutive folds of them.
template <int COUNT>
__device__ __forceinline__ Folded fold_partials(const Params& p, long long partial, int item, int count) {
    const long long first = partial + item / QUADS;
    const float4* numerators = reinterpret_cast<const float4*>(p.numerators + first * D) + item % QUADS;
    if constexpr (COUNT <= 8) {
        // Everything is on its way before the first of it is used.
        float4 ahead[COUNT];
        float sums[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i < count) {
                ahead[i] = __ldcg(numerators + i * N * QUADS);
                sums[i] = __ldcg(p.sums + first + i * N);
            }
        }
        return fold<COUNT>(
            count, [&](int i) { return __ldcg(p.maxima + first + i * N); },
            [&](int i, float4& numerator, float& sum) { numerator = ahead[i], sum = sums[i]; });
    } else {
        return fold<COUNT>(
            count, [&](int i) { return __ldcg(p.maxima + first + i * N); },
            [&](int i, float4& numerator, float& sum) {
                numerator = __ldcg(numerators + i * N * QUADS), sum = __ldcg(p.sums + first + i * N);
            });
    }
}

// Combines the partials of a row group: FOLD neighbouring segments first, then these in order, one division, one rounding.
// The tree depends on the number of segments alone, and so do a row's bits.
//
// `together`: every block of the grid is resident (a cooperative launch), so each waits until all segments are
// there and takes a slice of the items. Else nobody waits: the last block of each FOLD segments folds
// those, and the last of these blocks the folds.
//
// Called by THREADS threads, numbered from 0, that have stored the block's partial; `scratch` has room for MAX_FOLDS * SLICE
// Folded, `last_at` is a word of shared memory.
constexpr int SLICE = 32;
template <int THREADS>
__device__ __forceinline__ void combine(const Params& p, const Work& work, Folded* folded, unsigned last_at, int thread) {
    const int segments = work.segments;
    constexpr int items = N * QUADS;
    const int folds = (segments + FOLD - 1) / FOLD;
    const long long first_partial = partial_of(work, 0);
    int* arrivals = p.arrivals + row_group_of(work) * COUNTERS;
    if (p.together) {
        barrier_sync(4, THREADS);
        if (thread == 0) {
            // What the others stored before the barrier is ordered by this fence too.
            __threadfence();
            atomicAdd(arrivals, 1);
            int arrived;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(arrivals) : "memory");
            } while (arrived < segments);
        }
        barrier_sync(4, THREADS);
        const int each = (items + segments - 1) / segments;
        const int past = min(items, static_cast<int>(blockIdx.x + 1) * each);
#pragma unroll 1
        for (int begin = blockIdx.x * each; begin < past; begin += SLICE) {
            const int count = min(SLICE, past - begin);
#pragma unroll 1
            for (int unit = thread; unit < count * folds; unit += THREADS) {
                const int f = unit / count, item = unit - f * count;
                folded[f * SLICE + item] =
                    fold_partials<FOLD>(p, first_partial + f * FOLD * N, begin + item, min(FOLD, segments - f * FOLD));
            }
            barrier_sync(4, THREADS);
            if (thread < count) {
                const Folded all = fold<MAX_FOLDS>(
                    folds, [&](int f) { return folded[f * SLICE + thread].maximum; },
                    [&](int f, float4& numerator, float& sum) {
                        numerator = folded[f * SLICE + thread].numerator;
                        sum = folded[f * SLICE + thread].sum;
                    });
                const int item = begin + thread;
                finish(p, work, item / QUADS, item % QUADS * 4, all.numerator, all.sum, all.maximum);
            }
            barrier_sync(4, THREADS);
        }
        if (thread == 0 && atomicAdd(arrivals + 1, 1) == segments - 1) arrivals[0] = arrivals[1] = 0;
        return;
    }

    // The folds' partials come after the segments'.
    const int f = blockIdx.x / FOLD, mine = min(FOLD, segments - f * FOLD);
    const long long fold_partial = first_partial + (MAX_SEGMENTS + f) * N;
    auto last_of = [&](int* counter, int count) {
        barrier_sync(4, THREADS);
        if (thread == 0) {
            __threadfence();
            const bool last = atomicAdd(counter, 1) == count - 1;
            // Ready for the next launch.
            if (last) *counter = 0;
            __threadfence();
            store_shared(last_at, last);
        }
        barrier_sync(4, THREADS);
        return load_shared(last_at) != 0;
    };
    if (!last_of(arrivals + 1 + f, mine)) return;
#pragma unroll 1
    for (int item = thread; item < items; item += THREADS) {
        const Folded part = fold_partials<FOLD>(p, first_partial + f * FOLD * N, item, mine);
        const int lane = item / QUADS, dim = item % QUADS * 4;
        __stcg(reinterpret_cast<float4*>(p.numerators + (fold_partial + lane) * D + dim), part.numerator);
        if (dim == 0) {
            __stcg(p.maxima + fold_partial + lane, part.maximum);
            __stcg(p.sums + fold_partial + lane, part.sum);
        }
    }
    if (!last_of(arrivals, folds)) return;
#pragma unroll 1
    for (int item = thread; item < items; item += THREADS) {
        const Folded all = fold_partials<MAX_FOLDS>(p, first_partial + MAX_SEGMENTS * N, item, folds);
        finish(p, work, item / QUADS, item % QUADS * 4, all.numerator, all.sum, all.maximum);
    }
}
