// Attention of a few query rows over a paged cache: what every schedule of it shares. The parameters, who does what,
// and the queries in shared memory.
//
// A block owns one segment of tokens of one request, one KV head and up to LANES (row, query head) pairs, the lanes.
// Segments depend on the request's longest row alone: see segments_of.
#pragma once
#include "mbarrier.cuh"
#include "ptx.cuh"
#include "shared.cuh"

using Value = VALUE;    // of q
using Format = FORMAT;  // of the cache

constexpr int D = HEAD_DIM;
constexpr int N = LANES;
constexpr int TILE = 64;
constexpr int RUN = 32;  // tokens from one set of fresh accumulators
constexpr int MAX_SEGMENTS = SEGMENTS;
constexpr int FOLD = 8;  // segments folded first
constexpr int MAX_FOLDS = MAX_SEGMENTS / FOLD;
constexpr int COUNTERS = 1 + MAX_FOLDS;
// The reference of a state where nothing was seen yet: finite, so that what is unseen stays a probability of 0.
constexpr float NOTHING = -3.402823466e38f;
constexpr int MIN_TILES = 2;  // of a segment
constexpr float P_SCALE = 2048.0f;  // of probabilities, before they are split into two float16
// Queries of a bfloat16 cache are bfloat16, a float16 in two parts: its 11 bits are 8 and 3.
constexpr int Q_PARTS = same_type<Format, bfloat16> && same_type<Value, float16> ? 2 : 1;

// Strides in elements of the array; the caches' in bytes. The same struct as in corekern/cuda/grouped.py.
struct Params {
    TensorMap k_tile, v_tile, k_sub, v_sub;
    const unsigned char *k, *v;
    const unsigned short* q;
    const int *block_table, *row_lengths, *query_start_loc;
    void* out;
    float *state_numerator, *state_maximum, *state_sum;  // or null
    float* numerators;                                   // partials: of segments, then of folds
    float4* totals;                                      // of each lane: reference, sum, peak
    int* arrivals;                                       // COUNTERS of each row group: zero between launches
    unsigned* gatherings;                                // of each row group, when together: (arrivals ever, before this launch)
    long long k_page, k_token, k_head, v_page, v_token, v_head;
    long long q_row, q_head, out_row, out_head, out_dim, table_row, table_column, length_stride, start_stride;
    long long num_pages;
    int page_size, table_width, rows, requests, group, q_heads;
    unsigned page_magic, page_shift;  // token / page_size = 2 token * page_magic >> 32 + page_shift, for any token
    int kv_heads, group_magic;  // i / group = i * group_magic >> 16, for the lanes of a request
    int covered;                // rows of a request that the lane blocks have room for
    int granule, together;  // granule: bytes a cache access may take when there are no maps
    int q_aligned, out_type, zero_q, negate_q;
    float scale, v_scale;  // softmax_scale * k_scale * log2(e), not negative
};

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define INFINITE __int_as_float(0x7F800000)

__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

struct Segments {
    int tiles;           // in all
    int tiles_each;      // in a segment, the last may have fewer
    int count;
};

// At most MAX_SEGMENTS segments of whole tiles, whatever else is in the batch.
__device__ __forceinline__ Segments segments_of(int longest) {
    Segments s;
    s.tiles = (longest + TILE - 1) / TILE;
    s.tiles_each = max(MIN_TILES, (s.tiles + MAX_SEGMENTS - 1) / MAX_SEGMENTS);
    s.count = (s.tiles + s.tiles_each - 1) / s.tiles_each;
    return s;
}

// What a block knows of its work.
struct Work {
    int request, kv_head, lane_block;
    int first_row, rows;  // of the request
    int longest;          // tokens the request's longest row sees
    int shortest;         // and the shortest that sees any, of this block's lanes
    int begin;            // first token
    int tiles;
    int segments;         // of the row group
    unsigned gathered;    // blocks of the row group that arrived in earlier launches
    int unmasked;         // tiles all of whose tokens are visible to every lane, but for missing pages
};

__device__ __forceinline__ int row_group_of(const Work& work) { return work.request * gridDim.y + blockIdx.y; }

// The first lane of a segment's partial.
__device__ __forceinline__ long long partial_of(const Work& work, int segment) {
    return (static_cast<long long>(row_group_of(work)) * (MAX_SEGMENTS + MAX_FOLDS) + segment) * N;
}

// Rows that no block computes: of nobody, of requests that see nothing, and beyond the lane blocks launched.
__device__ __forceinline__ void fill_rows(const Params& p, int first, int past, int kv_head, float value, int thread, int threads) {
    const int heads = p.group, items = (past - first) * heads * D;
#pragma unroll 1
    for (int item = thread; item < items; item += threads) {
        const int row = first + item / (heads * D), head = kv_head * heads + item / D % heads, dim = item % D;
        if (p.out) {
            const long long at = row * p.out_row + head * p.out_head + dim * p.out_dim;
            if (p.out_type == 2)
                static_cast<float*>(p.out)[at] = value;
            else
                static_cast<unsigned short*>(p.out)[at] = value == value ? 0 : 0x7FFF;
        }
        if (p.state_numerator) {
            const long long at = static_cast<long long>(row) * p.q_heads + head;
            p.state_numerator[at * D + dim] = value;
            if (dim == 0) {
                p.state_maximum[at] = value == value ? -INFINITE : value;
                p.state_sum[at] = value;
            }
        }
    }
}

// Until the kernels before this one are done, where it was launched to start before they are; and lets the next one start.
// What a kernel computes may be touched only after this.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if TARGET_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Cold, each of the trips to memory that follow one another takes most of a microsecond. So what is certain or likely to
// be wanted is on its way to the L2 cache before anything is known; each block asks for a part of the block table and of q.
__device__ __forceinline__ void prefetch_early(const Params& p, int thread) {
    if (thread == 0) {
        prefetch_l2(p.query_start_loc + blockIdx.z * p.start_stride);
        prefetch_l2(p.row_lengths);
        if (blockIdx.x * 32 < p.table_width && p.table_column == 1)
            prefetch_l2(p.block_table + blockIdx.z * p.table_row + blockIdx.x * 32);
    }
    const int row_head = blockIdx.x * 32 + thread;
    if (p.requests == 1 && thread < 32 && row_head < p.rows * p.q_heads) {
        const int row = row_head / p.q_heads;
        const unsigned short* from = p.q + row * p.q_row + (row_head - row * p.q_heads) * p.q_head;
#pragma unroll
        for (int i = 0; i < D; i += 64) prefetch_l2(from + i);
    }
}

// What a block reads first.
struct Early {
    int first_row, past_row;
    int length;  // of one request's row `in_warp`, whatever query_start_loc says
    unsigned gathered;
};

__device__ __forceinline__ Early load_early(const Params& p, int thread) {
    Early early;
    early.first_row = p.query_start_loc[blockIdx.z * p.start_stride];
    early.past_row = p.query_start_loc[(blockIdx.z + 1) * p.start_stride];
    early.length = 0;
    early.gathered = p.together ? p.gatherings[2 * (blockIdx.z * gridDim.y + blockIdx.y) + 1] : 0;
    if (p.requests == 1 && thread % 32 < p.rows) early.length = p.row_lengths[thread % 32 * p.length_stride];
    return early;
}

__device__ __forceinline__ int largest_in_warp(int x) {
#if TARGET_ARCH >= 800
    return __reduce_max_sync(0xFFFFFFFF, x);
#else
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFF, x, mask));
    return x;
#endif
}

// What this block does; false when that is nothing. Called by all threads, it also fills the rows that no block computes.
__device__ __forceinline__ bool find_work(const Params& p, const Early& early, Work& work, int thread, int threads) {
    const int in_warp = thread % 32;
    work.request = blockIdx.z;
    work.kv_head = blockIdx.y;
    work.lane_block = 0;
#pragma unroll 1
    for (; work.kv_head >= p.kv_heads; work.kv_head -= p.kv_heads) ++work.lane_block;
    // What is not as documented touches nothing: rows outside q.
    work.first_row = min(max(early.first_row, 0), p.rows);
    work.rows = min(max(early.past_row - work.first_row, 0), p.rows - work.first_row);
    const long long capacity = static_cast<long long>(p.table_width) * p.page_size;
    const int cap = capacity < 0x7FFFFFFF ? static_cast<int>(capacity) : 0x7FFFFFFF;
    int longest = 0, shortest = 0x7FFFFFFF;
#pragma unroll 1
    for (int row = in_warp; row < work.rows; row += 32) {
        const bool known = p.requests == 1 && work.first_row == 0 && row < 32;
        const int length = min(known ? early.length : p.row_lengths[(work.first_row + row) * p.length_stride], cap);
        longest = max(longest, length);
        const bool mine = (row + 1) * p.group > work.lane_block * N && row * p.group < (work.lane_block + 1) * N;
        if (mine && length > 0) shortest = min(shortest, length);
    }
    work.longest = largest_in_warp(longest);
    work.shortest = -largest_in_warp(-shortest);

    const Segments segments = segments_of(work.longest);
    if (work.lane_block == 0) {
        if (blockIdx.x == 0 && work.rows > p.covered)
            fill_rows(p, work.first_row + p.covered, work.first_row + work.rows, work.kv_head, __uint_as_float(0x7FC00000), thread, threads);
        // A request that sees nothing, and after the last the rows of nobody.
        const bool nothing = segments.count == 0, last = work.request == p.requests - 1;
        if (nothing || last) {
            const int first = work.first_row + (nothing ? 0 : work.rows), past = last ? p.rows : work.first_row + work.rows;
#pragma unroll 1
            for (int row = first + blockIdx.x; row < past; row += gridDim.x)
                fill_rows(p, row, row + 1, work.kv_head, 0.0f, thread, threads);
        }
    }
    if (segments.count == 0 || work.lane_block * N >= work.rows * p.group) return false;
    // A block without tokens helps to combine, where all are there to.
    if (blockIdx.x >= segments.count && !p.together) return false;
    const int first_tile = blockIdx.x * segments.tiles_each;
    work.begin = first_tile * TILE;
    work.tiles = min(max(segments.tiles - first_tile, 0), segments.tiles_each);
    work.segments = segments.count;
    work.gathered = early.gathered;
    work.unmasked = max(work.shortest - work.begin, 0) / TILE;
    return true;
}

// What one thread fetches of q, eight elements an item, and the lengths of the lanes that it begins.
template <int THREADS> struct Queries {
    static constexpr int items = (N * D / 8 + THREADS - 1) / THREADS;
    unsigned word[items][4];
    int length[items];
};

// Asks for q and the lengths; nothing waits for them yet.
template <int THREADS>
__device__ __forceinline__ Queries<THREADS> load_queries(const Params& p, int first_row, int rows, int thread) {
    constexpr int parts = D / 8;
    int kv_head = blockIdx.y, lane_block = 0;
#pragma unroll 1
    for (; kv_head >= p.kv_heads; kv_head -= p.kv_heads) ++lane_block;
    Queries<THREADS> queries;
#pragma unroll
    for (int i = 0; i < queries.items; ++i) {
        const int item = thread + i * THREADS, lane = item / parts, part = item % parts;
        const int pair = lane_block * N + lane;
        const int row = pair * p.group_magic >> 16, head = pair - row * p.group;
        const bool real = lane < N && row < rows;
        unsigned(&word)[4] = queries.word[i];
        word[0] = word[1] = word[2] = word[3] = 0;
        queries.length[i] = 0;
        if (real && part == 0) queries.length[i] = p.row_lengths[(first_row + row) * p.length_stride];
        if (!real || p.zero_q) continue;
        const unsigned short* from = p.q + (first_row + row) * p.q_row + (kv_head * p.group + head) * p.q_head + part * 8;
        if (p.q_aligned) {
            const uint4 v = *reinterpret_cast<const uint4*>(from);
            word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
        } else {
#pragma unroll 1
            for (int k = 0; k < 4; ++k) {
                const unsigned pair = from[2 * k] | static_cast<unsigned>(from[2 * k + 1]) << 16;
                word[0] = word[1], word[1] = word[2], word[2] = word[3], word[3] = pair;
            }
        }
    }
    return queries;
}

// Addresses in shared memory: Q^T as [part][16 dims][half of k][lane][8 k], and a length and a scale for each lane.
struct QueryPlaces {
    unsigned q, lengths, scales;
};

// What was loaded to Q^T in shared memory, as float16 (bfloat16 for a bfloat16 cache), and each lane's scale and length.
//
// A bfloat16 row is brought into float16's range by a power of two, which its lane's scale takes back: float16 then holds
// each of its elements exactly down to 2^-31 of the largest.
template <int THREADS>
__device__ __forceinline__ void store_queries(const Params& p, const Work& work, Queries<THREADS>& queries, const QueryPlaces& at, int thread) {
    constexpr int parts = D / 8;
#pragma unroll
    for (int i = 0; i < queries.items; ++i) {
        const int item = thread + i * THREADS, lane = item / parts, part = item % parts;
        if (N * parts % THREADS != 0 && lane >= N) break;
        const bool real = (work.lane_block * N + lane) * p.group_magic >> 16 < work.rows;
        unsigned(&word)[4] = queries.word[i];
        if (!real) word[0] = word[1] = word[2] = word[3] = 0;
        float scale = p.zero_q ? 1.0f : p.scale;
        if constexpr (same_type<Value, bfloat16> && !same_type<Format, bfloat16>) {
            unsigned largest = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k)
                largest = max(largest, max(word[k] & 0x7FFF, (word[k] >> 16) & 0x7FFF));
#pragma unroll
            for (int mask = parts / 2; mask > 0; mask /= 2)
                largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, mask));
            int exponent = static_cast<int>(largest >> 7) - 127;
            if (largest == 0 || exponent == 128) exponent = 14;
            exponent = max(exponent, -100);
            const float factor = __uint_as_float((127 + 14 - exponent) << 23);
            // In two steps, since the whole factor may leave float's range.
            scale = scale * __uint_as_float((127 + exponent / 2) << 23) *
                    __uint_as_float((127 + exponent - exponent / 2 - 14) << 23);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                word[k] = cvt_f16x2(__uint_as_float(word[k] & 0xFFFF0000) * factor, __uint_as_float(word[k] << 16) * factor);
        }
        if (p.negate_q) {
#pragma unroll
            for (int k = 0; k < 4; ++k) word[k] ^= 0x80008000;
        }
        unsigned low[4];
        if constexpr (Q_PARTS == 2) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float x = cvt_f32_f16(word[k]), y = cvt_f32_f16(word[k] >> 16);
                word[k] = cvt_bf16x2(y, x);
                low[k] = cvt_bf16x2(__fsub_rn(y, __uint_as_float(word[k] & 0xFFFF0000)), __fsub_rn(x, __uint_as_float(word[k] << 16)));
            }
        }
#pragma unroll
        for (int k = 0; k < Q_PARTS; ++k) {
            const unsigned(&w)[4] = k == 0 ? word : low;
            const unsigned dims = at.q + k * (2 * N * D) + part / 2 * (32 * N) + lane * 16;
            if constexpr (is_fp8<Format>) {
                // Dim 4t + r of a chunk is element 2t + r % 2 of half r / 2 of k: what a thread has after it converts 4 codes.
                const unsigned to = dims + part % 2 * 8;
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(w[0]), "r"(w[2]) : "memory");
                asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + 16 * N), "r"(w[1]), "r"(w[3]) : "memory");
            } else {
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(dims + part % 2 * (16 * N)), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                             "r"(w[3]) : "memory");
            }
        }
        if (part == 0) {
            // Lanes that see nothing compute along, so that no tile is masked for their sake; their sum is dropped.
            const int length = real && queries.length[i] > 0 ? min(queries.length[i], 0x7FFFFFFE) : 0x7FFFFFFF;
            store_shared(at.lengths + lane * 4, length);
            store_shared(at.scales + lane * 4, __float_as_uint(scale));
        }
    }
}

// A page that is not there is -1: its tokens are unseen.
__device__ __forceinline__ int page_in(const Params& p, int page) { return page >= 0 && page < p.num_pages ? page : -1; }
