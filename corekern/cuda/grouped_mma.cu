// Attention of a few query rows over a paged cache, on the tensor cores of any architecture, with FP32 state.
//
// A block owns one segment of tokens of one request, one KV head and up to LANES (row, query head) pairs, the lanes. It goes
// through its tokens in steps of STEP, and both products put the KV side on A and the lanes on B:
//
//   S^T[token, lane] = K Q^T     each warp 16 tokens and some of the lanes
//   O^T[dim, lane]   = V^T P^T   each warp D / WARPS dims and all lanes; its numerators are its long-lived registers
//   K, V                         all threads, STAGES buffers each
//
// Shared memory holds the buffers, Q, P^T of one step in PARTS 16-bit parts, and the lanes' reference.
//
// Two barriers a step. Before the first, K of the step has arrived and nobody reads the V before it any more, so V of the step
// STAGES - 1 later is asked for; then scores and P. Before the second V has arrived and P is there, and it votes on whether
// some score exceeds the reference too far (which takes two barriers more, and is rare after the first step); K of the step STAGES
// later is asked for; then the values.
//
// Latency: with asynchronous copies (sm_80 and later) up to STAGES steps are on their way. Without them (sm_70, sm_75) there is one
// buffer each, and loads wait in registers: V's while the scores are computed, K's while the values are, a step's time each, which is
// several times the latency of memory. Products that depend on one another are apart: EACH chains of scores a warp, or
// 2 BLOCKS chains of values, and eight warps, two on each scheduler, take turns. What one block does not hide a second
// one does where it fits: see grouped_mma.py, which chooses STEP, STAGES and RESIDENT, the blocks an SM.
//
// Head_dim 256, 48 lanes, E4M3 (float16 cache), none of which spills; from NVRTC 12.9:
//
//             STEP      STAGES    registers    KiB of shared memory
//   sm_70     64 (32)   1 (1)     240 (207)     70  (64)
//   sm_75     32 (32)   1 (1)     200 (208)     48  (64)
//   sm_80     64 (32)   3 (4)     204 (202)    135 (160)
//   sm_86     32 (32)   4 (2)     196 (204)     96  (96)
//   sm_89     32 (32)   4 (2)     191 (204)     96  (96)
//   sm_90     64 (64)   4 (2)     200 (219)    168 (167)
//   sm_100    64 (64)   4 (2)     224 (232)    168 (167)
//   sm_120    32 (32)   4 (2)     198 (214)     96  (96)
//
// Precision: tensor cores truncate what they add, so head_dim is summed in chains of 64 from fresh accumulators, and these in FP32.
// A probability is split into two float16 (22 bits, scaled by 2^11), or, for bfloat16 values, into three bfloat16 (24 bits,
// unscaled: they have a float's range), and every product is exact in FP32. 32 tokens are summed from fresh accumulators,
// then added to the numerator in FP32. With LEGACY: one chain, one part, no fresh accumulators, and normalised float16
// partials, as kernels without these repairs have it.
#include "grouped_combine.cuh"
#include "mma.cuh"

constexpr int WARPS = D >= 128 ? 8 : 4;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCKS = D / 16 / WARPS;  // of 16 dims of a warp
constexpr int PAIRS = N / 8;
static_assert(PAIRS % UNIT == 0, "sm_70 makes 16 lanes at once");

// Warps by 16 tokens, then by lanes: EACH groups of 8. The last may overlap the one before, and leaves that its part.
constexpr int TOKEN_WARPS = STEP / 16;
constexpr int LANE_WARPS = WARPS / TOKEN_WARPS;
constexpr int EACH = (PAIRS / UNIT + LANE_WARPS - 1) / LANE_WARPS * UNIT;

constexpr bool BF16 = same_type<Format, bfloat16>;
template <bool> struct OperandOf { using type = float16; };
template <> struct OperandOf<true> { using type = bfloat16; };
using Operand = OperandOf<BF16>::type;
constexpr int PARTS = LEGACY ? 1 : BF16 ? 3 : 2;
constexpr float SCALE = LEGACY || BF16 ? 1.0f : P_SCALE;
// Where 0 x infinity or a NaN that the conversion loses could make a wrong product, whatever is masked.
constexpr bool ALWAYS_CLEAN = !same_type<Format, fp8_e4m3> || !HAS_FP8_CONVERSION;
// The reference moves only when a score exceeds it by more than this: 2^SLACK times P_SCALE is what float16 can hold.
constexpr float SLACK = 4.0f;

constexpr int CHAIN = 64;  // dims of a product that is summed in the tensor core alone

constexpr int TOKEN_BYTES = D * sizeof(Format);
constexpr int SIDE = STEP * TOKEN_BYTES;
constexpr int Q_BYTES = 2 * N * D;
constexpr int P_BYTES = 2 * N * STEP;
constexpr int PLACES = STAGES + 1;  // steps whose tokens are looked up

constexpr int AT_K = 0;
constexpr int AT_V = AT_K + STAGES * SIDE;
constexpr int AT_Q = AT_V + STAGES * SIDE;
constexpr int AT_P = AT_Q + Q_PARTS * Q_BYTES;
constexpr int AT_PLACES = AT_P + PARTS * P_BYTES;          // [step % PLACES][token], page and slot
constexpr int AT_REFERENCE = AT_PLACES + PLACES * STEP * 8;  // [lane]
constexpr int AT_PAST = AT_REFERENCE + N * 4;              // [lane]
constexpr int AT_PEAK = AT_PAST + N * 4;                   // [lane], as ordered integers
constexpr int AT_SCALE = AT_PEAK + N * 4;                  // [lane]
constexpr int AT_LENGTH = AT_SCALE + N * 4;                // [lane]
constexpr int AT_SEEN = AT_LENGTH + N * 4;                 // [step % PLACES], a bit a token
constexpr int AT_LAST = SHARED_BYTES - 64 - 8, AT_WORK = SHARED_BYTES - 64;
constexpr int SHARED_USED = AT_SEEN + PLACES * 8 + 72;
constexpr int SCRATCH = MAX_FOLDS * SLICE * static_cast<int>(sizeof(State));
static_assert(SHARED_USED <= SHARED_BYTES && SCRATCH + 72 <= SHARED_BYTES, "the launcher asks for SHARED_BYTES");
// After the last step: each token warp's peaks and sums.
constexpr int AT_PEAKS = AT_P, AT_SUMS = AT_PEAKS + TOKEN_WARPS * N * 4;

// Order-preserving and its own inverse: floats to integers, NaN with a clear sign above all.
__device__ __forceinline__ int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// Looks up a token of a step for the copies to come; called by the first STEP threads. A page that is not there is -1.
struct Place {
    int page, slot;
};
__device__ __forceinline__ Place find_token(const Params& p, const Work& work, int step, int thread) {
    const unsigned token = work.begin + step * STEP + thread;
    const int entry = __umulhi(2 * token, p.page_magic) >> p.page_shift;
    Place place = {-1, static_cast<int>(token - entry * p.page_size)};
    if (token < static_cast<unsigned>(work.longest)) place.page = p.block_table[work.request * p.table_row + entry * p.table_column];
    return place;
}
__device__ __forceinline__ void keep_place(const Params& p, unsigned base, int step, Place place, int thread) {
    place.page = page_in(p, place.page);
    const unsigned seen = __ballot_sync(0xFFFFFFFF, place.page >= 0);
    store_shared_pair(base + AT_PLACES + (step % PLACES * STEP + thread) * 8, __int_as_float(place.page), __int_as_float(place.slot));
    if (thread % 32 == 0) store_shared(base + AT_SEEN + step % PLACES * 8 + thread / 32 * 4, seen);
}

// 16 bytes in loads of as many as they are aligned to.
__device__ __forceinline__ uint4 load_chunk(const unsigned char* from, int granule) {
    if (granule == 16) return __ldg(reinterpret_cast<const uint4*>(from));
    unsigned word[4] = {0, 0, 0, 0};
    if (granule >= 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = __ldg(reinterpret_cast<const unsigned*>(from) + i);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) word[i / 4] |= static_cast<unsigned>(__ldg(from + i)) << (8 * (i % 4));
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ __forceinline__ void store_chunk(unsigned to, uint4 word) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w) : "memory");
}

// One side, K or V, of one step: begin asks for it, end makes sure that this thread's part is on its way or in its place.
template <bool VALUES> struct Copy {
    static constexpr int chunks = TOKEN_BYTES / 16;
    static constexpr int tokens = THREADS / chunks;  // at once
    static constexpr int count = STEP / tokens;
#if !HAS_ASYNC_COPIES
    uint4 word[count];
#endif

    static __device__ __forceinline__ unsigned place_of(unsigned base, int step, int i) {
        return base + (VALUES ? AT_V : AT_K) + step % STAGES * SIDE + in_tile<Format, D>(threadIdx.x / chunks + i * tokens, threadIdx.x % chunks);
    }

    __device__ __forceinline__ void begin(const Params& p, const Work& work, unsigned base, int step, int steps) {
        if (step < steps) {
            const unsigned char* side = (VALUES ? p.v + work.kv_head * p.v_head : p.k + work.kv_head * p.k_head) + threadIdx.x % chunks * 16;
            const long long page_stride = VALUES ? p.v_page : p.k_page, token_stride = VALUES ? p.v_token : p.k_token;
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const float2 place = load_shared_pair(base + AT_PLACES + (step % PLACES * STEP + threadIdx.x / chunks + i * tokens) * 8);
                const int page = __float_as_int(place.x), slot = __float_as_int(place.y);
                const bool present = page >= 0;
                const unsigned char* from = side + (present ? page * page_stride + slot * token_stride : 0);
#if HAS_ASYNC_COPIES
                if (p.granule == 16)
                    copy_16(place_of(base, step, i), from, present);
                else
                    store_chunk(place_of(base, step, i), present ? load_chunk(from, p.granule) : make_uint4(0, 0, 0, 0));
#else
                word[i] = present ? load_chunk(from, p.granule) : make_uint4(0, 0, 0, 0);
#endif
            }
        }
#if HAS_ASYNC_COPIES
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    __device__ __forceinline__ void end(unsigned base, int step, int steps) {
#if !HAS_ASYNC_COPIES
        if (step >= steps) return;
#pragma unroll
        for (int i = 0; i < count; ++i) store_chunk(place_of(base, step, i), word[i]);
#endif
    }
};

// K and V are asked for in turn. At each of a step's barriers all but the last 2 STAGES - 2 must be there.
__device__ __forceinline__ void wait_for_copies() {
#if HAS_ASYNC_COPIES
    asm volatile("cp.async.wait_group %0;" ::"n"(2 * STAGES - 2) : "memory");
#endif
}

// x as PARTS numbers of 16 bits, the largest first; of two neighbouring lanes.
__device__ __forceinline__ void split(float x, float y, unsigned (&part)[PARTS]) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
        part[i] = BF16 ? cvt_bf16x2(y, x) : cvt_f16x2(y, x);
        if (i + 1 < PARTS) {
            x = __fsub_rn(x, BF16 ? __uint_as_float(part[i] << 16) : cvt_f32_f16(part[i]));
            y = __fsub_rn(y, BF16 ? __uint_as_float(part[i] & 0xFFFF0000) : cvt_f32_f16(part[i] >> 16));
        }
    }
}

// S^T of 16 tokens and EACH groups of lanes.
__device__ __forceinline__ void score(float (&s)[4 * EACH], unsigned base, unsigned k_at, int first_token, int first_pair) {
    unsigned marks[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4 * EACH; ++i) s[i] = 0.0f;
#pragma unroll 1
    for (int c = 0; c < D / CHAIN; ++c) {
        float chain[4 * EACH];
#pragma unroll
        for (int i = 0; i < 4 * EACH; ++i) chain[i] = LEGACY ? s[i] : 0.0f;
#pragma unroll
        for (int half = 0; half < CHAIN / 32; ++half) {
            Left a[2];
            load_keys<Format, D>(a, k_at, first_token, CHAIN / 32 * c + half, marks);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
#pragma unroll
                for (int part = Q_PARTS - 1; part >= 0; --part) {
                    Right b[EACH / UNIT];
                    load_queries_right<Format, N>(b, base + AT_Q + part * Q_BYTES + (CHAIN / 16 * c + 2 * half + k) * (32 * N), first_pair);
#pragma unroll
                    for (int i = 0; i < EACH / UNIT; ++i) multiply<Operand, false>(chain + 4 * UNIT * i, a[k], b[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * EACH; ++i) s[i] = LEGACY ? chain[i] : __fadd_rn(s[i], chain[i]);
    }
    if constexpr (MARKS_KEYS && same_type<Format, fp8_e4m3>) {
        if (__any_sync(0xFFFFFFFF, (marks[0] | marks[1]) != 0)) {
            bool bad[2];
            marked_rows(marks, bad);
#pragma unroll
            for (int i = 0; i < 4 * EACH; ++i)
                if (bad[i / 2 % 2]) s[i] = __uint_as_float(0x7FC00000);
        }
    }
}

template <int COUNT> struct Count { static constexpr int value = COUNT; };

// O^T of this warp's dims over a step; whether it left out a value that is NaN or infinite.
__device__ __forceinline__ bool add_values(float (&numerator)[BLOCKS][4 * PAIRS], unsigned base, unsigned v_at, int first_block, bool clean) {
    bool bad = false;
#pragma unroll 1
    for (int run = 0; run < STEP / RUN; ++run) {
        Left a[BLOCKS][2];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) load_values<Format, D>(a[b], v_at, RUN * run, first_block + b, clean, bad);
        auto add = [&](auto pairs, int j) {
            constexpr int count = decltype(pairs)::value;
            float fresh[BLOCKS][4 * count];
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int i = 0; i < 4 * count; ++i) fresh[b][i] = LEGACY ? numerator[b][4 * j + i] : 0.0f;
#pragma unroll
            for (int part = PARTS - 1; part >= 0; --part)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    Right p[count / UNIT];
                    load_probabilities<N>(p, base + AT_P + part * P_BYTES, RUN * run + 16 * k, j);
#pragma unroll
                    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                        for (int i = 0; i < count / UNIT; ++i) multiply<Operand, true>(fresh[b] + 4 * UNIT * i, a[b][k], p[i]);
                }
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int i = 0; i < 4 * count; ++i)
                    numerator[b][4 * j + i] = LEGACY ? fresh[b][i] : __fadd_rn(numerator[b][4 * j + i], fresh[b][i]);
        };
#pragma unroll
        for (int j = 0; j + 1 < PAIRS; j += 2) add(Count<2>(), j);
        if constexpr (PAIRS % 2) add(Count<UNIT>(), PAIRS - UNIT);
    }
    return bad;
}

// What add_values left out, for the lanes that see it.
__device__ __forceinline__ void add_non_finite(float (&numerator)[BLOCKS][4 * PAIRS], unsigned base, unsigned v_at, int first_block, int begin,
                                               unsigned seen_at) {
#pragma unroll 1
    for (int token = 0; token < STEP; ++token) {
        if (!(load_shared(seen_at + token / 32 * 4) >> (token % 32) & 1)) continue;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int byte = (16 * (first_block + b) + value_dim<Format>(r)) * sizeof(Format);
                const unsigned word = load_shared(v_at + in_tile<Format, D>(token, byte / 16) + byte % 16 / 4 * 4);
                const unsigned bits = word >> (8 * (byte % 4)) & (is_fp8<Format> ? 0xFF : 0xFFFF);
                if (!non_finite<Format>(bits)) continue;
                const float value = non_finite_value<Format>(bits);
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (begin + token < static_cast<int>(load_shared(base + AT_LENGTH + (column_of(j) + e) * 4)))
                            numerator[b][4 * j + 2 * r + e] += value;
            }
    }
}

// Over the threads with the same columns.
template <class Op> __device__ __forceinline__ float reduce_rows(float x, Op op) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2)
        if (SAME_COLUMNS & bit) x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, bit));
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
grouped_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = shared_address(shared);
    const int thread = threadIdx.x, warp = thread / 32;
    prefetch_early(p, thread);
    if (thread < N) {
        store_shared(base + AT_REFERENCE + thread * 4, __float_as_uint(NOTHING));
        store_shared(base + AT_PEAK + thread * 4, ordered(__float_as_int(-INFINITE)));
    }
    wait_for_earlier_kernels();
    Work work;
    if (!find_work(p, load_early(p, thread), work, thread, THREADS)) return;
    // Read again from shared memory where it is needed: it takes no registers through the loop.
    Work& kept = *reinterpret_cast<Work*>(shared + AT_WORK);
    if (thread == 0) kept = work;
    const int steps = work.tiles * (TILE / STEP), unmasked = work.unmasked * (TILE / STEP);

    if (thread < STEP) {
#pragma unroll
        for (int step = 0; step < STAGES; ++step) keep_place(p, base, step, find_token(p, work, step, thread), thread);
    }
    __syncthreads();
    Copy<false> keys;
    Copy<true> values;
#pragma unroll
    for (int step = 0; step < STAGES; ++step) {
        keys.begin(p, kept, base, step, steps);
        keys.end(base, step, steps);
        if (step + 1 == STAGES) break;
        values.begin(p, kept, base, step, steps);
        values.end(base, step, steps);
    }
    {
        Queries<THREADS> queries = load_queries<THREADS>(p, work.first_row, work.rows, thread);
        store_queries<THREADS>(p, work, queries, {base + AT_Q, base + AT_LENGTH, base + AT_SCALE}, thread);
    }

    const int first_token = warp % TOKEN_WARPS * 16, lane_part = warp / TOKEN_WARPS;
    const bool scores = lane_part * EACH < PAIRS;
    const int first_pair = min(lane_part * EACH, PAIRS - EACH), skipped = lane_part * EACH - first_pair;
    float numerator[BLOCKS][4 * PAIRS];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i) numerator[b][i] = 0.0f;
    // Of this thread's tokens, relative to the reference, and of its unscaled scores.
    float sums[2 * EACH], peaks[2 * EACH];
#pragma unroll
    for (int i = 0; i < 2 * EACH; ++i) sums[i] = 0.0f, peaks[i] = -INFINITE;

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const unsigned k_at = base + AT_K + step % STAGES * SIDE, v_at = base + AT_V + step % STAGES * SIDE;
        const unsigned seen_at = base + AT_SEEN + step % PLACES * 8;
        const int begin = kept.begin + step * STEP;
        wait_for_copies();
        __syncthreads();
        Place next;
        if (thread < STEP) next = find_token(p, kept, step + STAGES, thread);
        values.begin(p, kept, base, step + STAGES - 1, steps);

        float s[4 * EACH], fresh[2 * EACH];
        bool over = false;
        // P of this warp's part, and its sums.
        auto relate = [&]() {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                if (j < skipped) continue;
                const int column = 8 * first_pair + column_of(j);
                const float2 reference = load_shared_pair(base + AT_REFERENCE + column * 4);
                const float2 scale = load_shared_pair(base + AT_SCALE + column * 4);
                fresh[2 * j] = fresh[2 * j + 1] = 0.0f;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const float x = __fmaf_rn(s[4 * j + 2 * r], scale.x, -reference.x);
                    const float y = __fmaf_rn(s[4 * j + 2 * r + 1], scale.y, -reference.y);
                    over |= x > SLACK || y > SLACK;
                    const float p_x = SCALE * exp2_approx(x), p_y = SCALE * exp2_approx(y);
                    fresh[2 * j] += p_x, fresh[2 * j + 1] += p_y;
                    unsigned part[PARTS];
                    split(p_x, p_y, part);
#pragma unroll
                    for (int i = 0; i < PARTS; ++i)
                        store_shared(base + AT_P + i * P_BYTES + in_probabilities<N>(first_token + row_of(r), column), part[i]);
                }
            }
        };
        if (scores) {
            score(s, base, k_at, first_token, first_pair);
            const unsigned seen = load_shared(seen_at + first_token / 32 * 4) >> first_token % 32;
            if (step >= unmasked || (seen & 0xFFFF) != 0xFFFF) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    const float2 lengths = load_shared_pair(base + AT_LENGTH + (8 * first_pair + column_of(j)) * 4);
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int token = begin + first_token + row_of(r);
                        const bool present = seen >> row_of(r) & 1;
                        if (!present || token >= __float_as_int(lengths.x)) s[4 * j + 2 * r] = -INFINITE;
                        if (!present || token >= __float_as_int(lengths.y)) s[4 * j + 2 * r + 1] = -INFINITE;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2 * EACH; ++i)
                peaks[i] = fmaxf(peaks[i], fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]));
        }
        // Once, or again relative to a reference that had to move.
#pragma unroll 1
        for (int turn = 0;; ++turn) {
            over = false;
            if (scores) relate();
            if (turn == 0) {
                values.end(base, step + STAGES - 1, steps);
                if (thread < STEP) keep_place(p, base, step + STAGES, next, thread);
                wait_for_copies();
            }
            if (!__syncthreads_or(over) || turn == 1) break;
            if (scores) {
#pragma unroll
                for (int i = 0; i < 2 * EACH; ++i) {
                    const float peak = reduce_rows(fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]), [](float a, float b) { return fmaxf(a, b); });
                    if ((lane_of_warp() & SAME_COLUMNS) == 0)
                        max_shared(base + AT_PEAK + (8 * first_pair + column_of(i / 2) + i % 2) * 4, ordered(__float_as_int(peak)));
                }
            }
            __syncthreads();
            if (thread < N) {
                const float old = load_shared_float(base + AT_REFERENCE + thread * 4);
                const float highest = __int_as_float(ordered(load_shared(base + AT_PEAK + thread * 4))) * load_shared_float(base + AT_SCALE + thread * 4);
                const float now = highest - old > SLACK ? highest : old;
                store_shared(base + AT_REFERENCE + thread * 4, __float_as_uint(now));
                store_shared(base + AT_PAST + thread * 4, __float_as_uint(now == old ? 1.0f : exp2_approx(old - now)));
                store_shared(base + AT_PEAK + thread * 4, ordered(__float_as_int(-INFINITE)));
            }
            __syncthreads();
            if (scores) {
#pragma unroll
                for (int j = 0; j < EACH; ++j) {
                    const float2 past = load_shared_pair(base + AT_PAST + (8 * first_pair + column_of(j)) * 4);
                    sums[2 * j] *= past.x, sums[2 * j + 1] *= past.y;
                }
            }
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 past = load_shared_pair(base + AT_PAST + column_of(j) * 4);
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                    for (int i = 0; i < 4; ++i) numerator[b][4 * j + i] *= i % 2 ? past.y : past.x;
            }
        }
        if (scores) {
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                if (j < skipped) continue;
                sums[2 * j] += fresh[2 * j], sums[2 * j + 1] += fresh[2 * j + 1];
            }
        }

        keys.begin(p, kept, base, step + STAGES, steps);
        const bool clean = ALWAYS_CLEAN || step >= unmasked;
        const bool bad = add_values(numerator, base, v_at, warp * BLOCKS, clean);
        if (clean && __any_sync(0xFFFFFFFF, bad)) add_non_finite(numerator, base, v_at, warp * BLOCKS, begin, seen_at);
        keys.end(base, step + STAGES, steps);
    }

    // A block without tokens has no partial: it is here to help combine.
    if (steps > 0) {
        // Each lane's peak and sum: in the warp, then over the token warps in order.
        __syncthreads();
        if (scores) {
#pragma unroll
            for (int i = 0; i < 2 * EACH; ++i) {
                const float peak = reduce_rows(peaks[i], [](float a, float b) { return fmaxf(a, b); });
                const float sum = reduce_rows(sums[i], [](float a, float b) { return a + b; });
                const int at = (warp % TOKEN_WARPS * N + 8 * first_pair + column_of(i / 2) + i % 2) * 4;
                if ((lane_of_warp() & SAME_COLUMNS) == 0 && i / 2 >= skipped) {
                    store_shared(base + AT_PEAKS + at, __float_as_uint(peak));
                    store_shared(base + AT_SUMS + at, __float_as_uint(sum));
                }
            }
        }
        __syncthreads();
        const long long partial = partial_of(kept, blockIdx.x);
        if (thread < N) {
            float peak = -INFINITE, sum = 0.0f;
#pragma unroll
            for (int w = 0; w < TOKEN_WARPS; ++w) {
                peak = fmaxf(peak, load_shared_float(base + AT_PEAKS + (w * N + thread) * 4));
                sum += load_shared_float(base + AT_SUMS + (w * N + thread) * 4);
            }
            const bool idle = load_shared(base + AT_LENGTH + thread * 4) == 0x7FFFFFFF;
            State lane = {{}, load_shared_float(base + AT_REFERENCE + thread * 4), sum * (1.0f / SCALE), peak * load_shared_float(base + AT_SCALE + thread * 4)};
            if (idle) lane.reference = NOTHING, lane.sum = 0.0f, lane.peak = -INFINITE;
            // What a numerator is multiplied by as it is stored.
            store_shared(base + AT_PAST + thread * 4, __float_as_uint(factor_of(lane) * (1.0f / SCALE)));
            store_totals(p, partial + thread, lane);
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const float2 factor = load_shared_pair(base + AT_PAST + column_of(j) * 4);
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const long long at = (partial + column_of(j) + e) * D + 16 * (warp * BLOCKS + b);
                    const float f = e ? factor.y : factor.x;
#pragma unroll
                    for (int r = 0; r < 2; ++r) store_numerator(p, at + value_dim<Format>(r), numerator[b][4 * j + 2 * r + e] * f);
                }
        }
    }
    combine<THREADS>(p, kept, reinterpret_cast<State*>(shared), base + AT_LAST, thread);
}
