// Attention of a few query rows over a paged FP8 cache, on Hopper's warpgroup products, with FP32 state.
//
// A block owns one segment of tokens of one request, one KV head and up to LANES (row, query head) pairs, the
// lanes. Both products put the KV side on A, converted from FP8 in registers, and the lanes on B:
//
//   S^T[token, lane] = K Q^T        two score warpgroups, alternate tiles of 64 tokens
//   O^T[dim, lane]   = V^T P^T      one or two value warpgroups, each half of head_dim, every tile
//   K, V tiles                      the first warp of each score warpgroup, a ring of STAGES buffers
//
// Registers hold a tile's scores and its tokens' sums and maxima (score warpgroups), and the numerator (value warpgroups).
// Shared memory holds the rings, Q, the reference of each lane, and for each score warpgroup P^T of one tile as float16 high
// halves and residuals.
//
// Barriers: full, of each K and V buffer; full and empty, of each score warpgroup's P; settled, when a tile's reference is
// final and the next tile may take it on; and a vote inside each score warpgroup, whether a tile moves it. P of a tile being
// empty again means that nothing reads that tile any more: its score warpgroup, which must wait for that anyway, then fetches
// the tile STAGES later into the same buffers. So no warpgroup is set apart for copies, and the registers are shared by four.
//
// All tiles' probabilities are relative to one running reference a lane, which the score warpgroups pass on from tile to
// tile and which moves only when a score exceeds it by SLACK: most tiles cost one vote, and neither a maximum nor a rescaled
// numerator. At the end each block writes its FP32 partial, and the blocks of the row group combine them in order.
//
// What bounds it, on an H200 at q8, 6 heads, head_dim 256 (cold caches, 128 blocks): 33 clocks a token and SM, where the
// products take 20 at the tensor cores' peak, issue slots about 20, and reading the cache 27 at full bandwidth; what is
// left is latency. Around the tiles lie about 11 us: 1.2 to know
// the lengths, 0.9 to look up pages, 0.8 for the first bytes, 1.6 and 1.9 for the first two tiles, 0.8 to store a
// partial, 1.3 until all have, and 2.5 to combine.
//
// Of a tile's 2136 clocks the value warpgroups are at work for 1650 and the score warpgroups, which have two tiles' time,
// nearly always: their chain of conversions, products, vote, exponentials and splits is what to shorten next. Without the
// residual's products the kernel takes 49.4 us for 262,144 tokens instead of 52.8.
//
// Tried and lost: a maximum of every tile and weights for every tile (46 clocks a token); q asked for after the first
// copies (it queues behind them: 3 us); maps of the smaller copies not prefetched (4 us in the blocks that cross a page);
// arrivals counted back to zero (0.7 us); converting the next 64 dims of K while products run (no gain); clusters that
// combine in distributed shared memory (only 15 clusters of eight such blocks fit on the card).
#include "grouped_combine.cuh"
#include "wgmma.cuh"

constexpr int STAGES = 5;

constexpr int SCORE_GROUPS = 2;
constexpr int VALUE_GROUPS = D >= 128 ? 2 : 1;
constexpr int BLOCKS = D / 64 / VALUE_GROUPS;  // m64 blocks of a value warpgroup
constexpr int SCORE_WARPS = 4 * SCORE_GROUPS;
constexpr int VALUE_WARPS = 4 * VALUE_GROUPS;
constexpr int THREADS = 128 * (SCORE_GROUPS + VALUE_GROUPS);

// A row of a buffer is up to 128 bytes of one token; longer tokens take several halves, one after the other. The
// 16-byte chunks of a row are permuted as the bulk copies' 128-byte (64-byte) swizzle does.
constexpr int ROW = D < 128 ? D : 128;
constexpr int HALVES = D / ROW;
constexpr int HALF = TILE * ROW;
constexpr int TILE_BYTES = TILE * D;
constexpr int SUB = 16;  // tokens of the smaller copies

// Q^T: [16 dims][half of k][lane][8 k]. P^T: [8 tokens][8 lanes' matrix][token][lane], high halves, then residuals.
constexpr int Q_BYTES = 2 * N * D;
constexpr int P_HALF = 2 * N * TILE;
constexpr int P_BYTES = 2 * P_HALF;
constexpr int MATRIX = 128;
constexpr int GROUP_STRIDE = N / 8 * MATRIX;

constexpr int AT_K = 0;
constexpr int AT_V = AT_K + STAGES * TILE_BYTES;
constexpr int AT_Q = AT_V + STAGES * TILE_BYTES;
constexpr int AT_P = AT_Q + Q_BYTES;
constexpr int AT_REFERENCE = AT_P + SCORE_GROUPS * P_BYTES;          // [lane]
constexpr int AT_PAST = AT_REFERENCE + N * 4;                        // [group][lane]
constexpr int AT_PEAK = AT_PAST + SCORE_GROUPS * N * 4;              // [group][lane], as ordered integers
constexpr int AT_PEAKS = AT_PEAK + SCORE_GROUPS * N * 4;            // [score warp][lane]
constexpr int AT_SUMS = AT_PEAKS + SCORE_WARPS * N * 4;             // [score warp][lane]
constexpr int AT_FACTOR = AT_SUMS + SCORE_WARPS * N * 4;            // [lane], LEGACY's
constexpr int AT_SCALE = AT_FACTOR + N * 4;                          // [lane]
constexpr int AT_LENGTH = AT_SCALE + N * 4;                         // [lane]
constexpr int AT_SEEN = AT_LENGTH + N * 4;                          // [stage], a bit a token
constexpr int AT_BARRIERS = AT_SEEN + STAGES * 8;
constexpr int FULL_K = AT_BARRIERS, FULL_V = FULL_K + STAGES * 8, FULL_P = FULL_V + STAGES * 8,
              EMPTY_P = FULL_P + SCORE_GROUPS * 8, SETTLED = EMPTY_P + SCORE_GROUPS * 8;
constexpr int AT_MOVED = SETTLED + SCORE_GROUPS * 8;                 // [group], the last of its tiles that moved the reference
constexpr int AT_LAST = AT_MOVED + SCORE_GROUPS * 8;
constexpr int AT_WORK = AT_LAST + 16;
constexpr int SHARED_BYTES = AT_WORK + 64;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "the launcher asks for SHARED_LIMIT bytes");

// The reference moves only when a score exceeds it by more than this: 2^SLACK times P_SCALE is what float16 can hold.
constexpr float SLACK = 4.0f;
// LEGACY is what kernels without FP32 state do, to compare: probabilities rounded to float16, one chain over head_dim, one
// accumulator over all tiles, normalised float16 partials.
constexpr int P_PARTS = LEGACY ? 1 : 2;
constexpr float SCALE = LEGACY ? 1.0f : P_SCALE;

// Registers: 512 threads are launched with 128 each; the value warpgroups need more of them.
#if HEAD_DIM == 256 && LANES > 32
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 120
#define VALUE_REGISTERS 136
#endif
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// Tells the compiler that a value is the same in every thread of a warp: loops on it stay in the uniform registers, where
// the matrix descriptors must be.
__device__ __forceinline__ int uniform(int value) { return __reduce_max_sync(0xFFFFFFFF, value); }

// The thread's number, read anew: what depends on it then takes no registers through the loops before.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Order-preserving and its own inverse: floats to integers, NaN with a clear sign above all.
__device__ __forceinline__ int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

__device__ __forceinline__ unsigned swizzled(int token, int chunk) {
    constexpr int in_row = ROW / 16;
    const int turn = ROW == 128 ? token & 7 : (token >> 1) & 3;
    return chunk / in_row * HALF + token * ROW + ((chunk % in_row) ^ turn) * 16;
}

// Four codes to two pairs of float16.
__device__ __forceinline__ void to_f16x2(unsigned codes, unsigned& low, unsigned& high) {
    if constexpr (same_type<Format, fp8_e4m3>) {
        // Halves named in PTX: a shift in C++ stays a shift.
        asm("{ .reg .b16 l, h;"
            "  mov.b32 {l, h}, %2;"
            "  cvt.rn.f16x2.e4m3x2 %0, l;"
            "  cvt.rn.f16x2.e4m3x2 %1, h; }"
            : "=r"(low), "=r"(high) : "r"(codes));
    } else {
        // As PTX, so that the compiler leaves it before the products that use it.
        asm volatile("prmt.b32 %0, %1, 0, 0x1404;" : "=r"(low) : "r"(codes));
        asm volatile("prmt.b32 %0, %1, 0, 0x3424;" : "=r"(high) : "r"(codes));
    }
}

// 0x80 in each byte whose code is NaN (or, in E5M2, infinite).
__device__ __forceinline__ unsigned non_finite(unsigned codes) {
    constexpr unsigned all = same_type<Format, fp8_e4m3> ? 0x7F7F7F7F : 0x7C7C7C7C;
    constexpr unsigned one = same_type<Format, fp8_e4m3> ? 0x01010101 : 0x04040404;
    return ((codes & all) + one) & 0x80808080;
}

// What such a code, the low byte, stands for.
__device__ __forceinline__ float non_finite_value(unsigned code) {
    const bool infinite = same_type<Format, fp8_e5m2> && (code & 0x7F) == 0x7C;
    return __uint_as_float((infinite ? 0x7F800000 : 0x7FC00000) | (code & 0x80) << 24);
}

// Reduces each of COUNT pairs over the eight threads with the same t. Halves are exchanged where the count is even, so that
// each thread ends with a share of the pairs: `first` is the first of them.
template <class Op, int COUNT, int MASK = 16, int SIZE>
__device__ __forceinline__ void reduce_pairs(float (&v)[SIZE], int& first, Op op) {
    constexpr bool halve = COUNT % 2 == 0;
    constexpr int kept = halve ? COUNT / 2 : COUNT;
    const bool upper = halve && (threadIdx.x & MASK);
#pragma unroll
    for (int i = 0; i < 2 * kept; ++i) {
        const float send = halve ? (upper ? v[i] : v[i + 2 * kept < SIZE ? i + 2 * kept : 0]) : v[i];
        const float keep = halve ? (upper ? v[i + 2 * kept < SIZE ? i + 2 * kept : 0] : v[i]) : v[i];
        v[i] = op(keep, __shfl_xor_sync(0xFFFFFFFF, send, MASK));
    }
    if (upper) first += kept;
    if constexpr (MASK > 4) reduce_pairs<Op, kept, MASK / 2>(v, first, op);
}
constexpr int pairs_left(int count) {
    for (int i = 0; i < 3; ++i) count = count % 2 == 0 ? count / 2 : count;
    return count;
}
constexpr int PAIRS = N / 8;
constexpr int PAIRS_LEFT = pairs_left(PAIRS);
// The bits of a thread's number that do not change what it ends with.
constexpr int same_results(int count) {
    int bits = 0;
    for (int mask = 16; mask >= 4; mask /= 2) {
        if (count % 2)
            bits |= mask;
        else
            count /= 2;
    }
    return bits;
}
constexpr int SAME_RESULTS = same_results(PAIRS);

struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Total {
    __device__ float operator()(float a, float b) const { return a + b; }
};

// Where two tokens of a tile lie, looked up by one thread; the page is as the table has it.
struct Places {
    int page[2], slot[2];
};

// With tensor maps thread i < 4 looks up the tile's token 16 i; else all threads two tokens each.
__device__ __forceinline__ Places find_tile(const Params& p, const Work& work, int tile, int in_warp) {
    Places places;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (i == 1 && MAPS) break;
        const unsigned token = work.begin + tile * TILE + (MAPS ? SUB * (in_warp % 4) : 32 * i + in_warp);
        const int entry = __umulhi(2 * token, p.page_magic) >> p.page_shift;
        places.slot[i] = token - entry * p.page_size;
        places.page[i] = -1;
        if (token < static_cast<unsigned>(work.longest))
            places.page[i] = p.block_table[work.request * p.table_row + entry * p.table_column];
    }
    return places;
}

// K and V of a tile by tensor map, one warp: one box when the tile lies in one page, else boxes of 16 tokens, which never
// cross a page. A page that is not there is outside the map: zeros.
__device__ __forceinline__ void fetch_boxes(const Params& p, const Work& work, unsigned base, int tile, Places places,
                                            int in_warp) {
    places.page[0] = page_in(p, places.page[0]);
    const int stage = tile % STAGES;
    const int first_page = __shfl_sync(0xFFFFFFFF, places.page[0], 0), first_slot = __shfl_sync(0xFFFFFFFF, places.slot[0], 0);
    const bool whole = first_slot + TILE <= p.page_size;
    unsigned present = __ballot_sync(0xFFFFFFFF, places.page[0] >= 0);
    if (whole) present = present & 1 ? 0xF : 0;
    const unsigned full_k = base + FULL_K + stage * 8, full_v = base + FULL_V + stage * 8;
    if (in_warp == 0) {
        store_shared(base + AT_SEEN + stage * 8, (present & 1 ? 0xFFFF : 0) | (present & 2 ? 0xFFFF0000 : 0));
        store_shared(base + AT_SEEN + stage * 8 + 4, (present & 4 ? 0xFFFF : 0) | (present & 8 ? 0xFFFF0000 : 0));
        mbarrier_arrive_expect(full_k, TILE_BYTES);
        mbarrier_arrive_expect(full_v, TILE_BYTES);
        if (whole) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                copy_box(base + AT_K + stage * TILE_BYTES + half * HALF, p.k_tile, half * ROW, first_slot, first_page, work.kv_head, full_k);
#pragma unroll
            for (int half = 0; half < HALVES; ++half)
                copy_box(base + AT_V + stage * TILE_BYTES + half * HALF, p.v_tile, half * ROW, first_slot, first_page, work.kv_head, full_v);
        }
    }
    __syncwarp();
    if (!whole && in_warp < TILE / SUB) {
        const unsigned to = base + stage * TILE_BYTES + in_warp * SUB * ROW;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            copy_box(to + AT_K + half * HALF, p.k_sub, half * ROW, places.slot[0], places.page[0], work.kv_head, full_k);
            copy_box(to + AT_V + half * HALF, p.v_sub, half * ROW, places.slot[0], places.page[0], work.kv_head, full_v);
        }
    }
    __syncwarp();
}

// The same for any page size and alignment, in accesses of p.granule bytes.
__device__ __forceinline__ void fetch_chunks(const Params& p, int kv_head, unsigned base, int tile, Places places, int in_warp) {
    constexpr int in_token = D / 16, tokens_at_once = 32 / in_token;
    const int mine = in_warp / in_token, chunk = in_warp % in_token;
    const int stage = tile % STAGES;
#pragma unroll
    for (int i = 0; i < 2; ++i) places.page[i] = page_in(p, places.page[i]);
    const unsigned seen_low = __ballot_sync(0xFFFFFFFF, places.page[0] >= 0), seen_high = __ballot_sync(0xFFFFFFFF, places.page[1] >= 0);
    if (in_warp == 0) {
        store_shared(base + AT_SEEN + stage * 8, seen_low);
        store_shared(base + AT_SEEN + stage * 8 + 4, seen_high);
    }
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const unsigned full = base + (which ? FULL_V : FULL_K) + stage * 8;
        const unsigned to = base + (which ? AT_V : AT_K) + stage * TILE_BYTES;
        const unsigned char* pages = (which ? p.v + kv_head * p.v_head : p.k + kv_head * p.k_head) + chunk * 16;
        const long long page_stride = which ? p.v_page : p.k_page, token_stride = which ? p.v_token : p.k_token;
#pragma unroll 1
        for (int first = 0; first < TILE; first += tokens_at_once) {
            const int token = first + mine;
            const int low_page = __shfl_sync(0xFFFFFFFF, places.page[0], token & 31), high_page = __shfl_sync(0xFFFFFFFF, places.page[1], token & 31);
            const int low_slot = __shfl_sync(0xFFFFFFFF, places.slot[0], token & 31), high_slot = __shfl_sync(0xFFFFFFFF, places.slot[1], token & 31);
            const int slot = token < 32 ? low_slot : high_slot, page = token < 32 ? low_page : high_page;
            const bool present = page >= 0;
            const unsigned char* from = pages + (present ? page * page_stride + slot * token_stride : 0);
            const unsigned at = to + swizzled(token, chunk);
            if (p.granule == 16) {
                copy_16(at, from, present);
                continue;
            }
            unsigned word[4] = {0, 0, 0, 0};
            if (present) {
                if (p.granule == 8) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint2 v = reinterpret_cast<const uint2*>(from)[i];
                        word[2 * i] = v.x, word[2 * i + 1] = v.y;
                    }
                } else if (p.granule == 4) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) word[i] = reinterpret_cast<const unsigned*>(from)[i];
                } else {
#pragma unroll
                    for (int i = 0; i < 16; ++i) word[i / 4] |= static_cast<unsigned>(from[i]) << (8 * (i % 4));
                }
            }
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
        }
        // 32 arrivals for the copies and one for what this warp's first thread stored.
        if (p.granule == 16)
            mbarrier_arrive_copies(full);
        else
            mbarrier_arrive(full);
        if (in_warp == 0) mbarrier_arrive(full);
    }
    __syncwarp();
}

__device__ __forceinline__ void fetch_tile(const Params& p, const Work& work, unsigned base, int tile, const Places& places, int in_warp) {
    if constexpr (MAPS)
        fetch_boxes(p, work, base, tile, places, in_warp);
    else
        fetch_chunks(p, work.kv_head, base, tile, places, in_warp);
}

// S^T of every other tile, and P. The probabilities of all tiles are relative to one reference a lane, which the score
// warpgroups pass from tile to tile. Most tiles leave it as it is: then a tile costs one vote and no maximum.
__device__ __forceinline__ void score_warpgroup(const Params& p, const Work& work, unsigned base, int group) {
    const int thread = threadIdx.x & 127, warp = thread / 32, in_warp = thread % 32;
    const int t = in_warp % 4;
    // ldmatrix: matrices are tokens 0-7 and 8-15 of a chunk, then of the next chunk.
    // Chunk c of a row is the address of chunk 0 or 1 with the bits of c turned over: rows are as long as they are aligned.
    const unsigned k_row = swizzled(16 * warp + (in_warp & 15), in_warp >> 4);
    auto k_chunks = [&](unsigned k_at, int c) {
        constexpr int in_row = ROW / 16;
        return ((k_at + k_row) ^ (c % in_row * 16)) + c / in_row * HALF;
    };
    const unsigned p_at = base + AT_P + group * P_BYTES;
    const unsigned p_row = p_at + (in_warp >= 16 ? P_HALF : 0) + (2 * warp + ((in_warp >> 3) & 1)) * GROUP_STRIDE +
                           (in_warp & 7) * 16;
    const int tiles = uniform(work.tiles), unmasked = uniform(work.unmasked);
    const int warp_in_group = uniform(warp);
    int fetched = -1;
    // Of this thread's tokens, relative to the reference, and of its unscaled scores.
    float sums[2 * PAIRS], peaks[2 * PAIRS];
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) sums[i] = 0.0f, peaks[i] = -INFINITE;

    // What was summed so far, relative to the reference that a tile moved.
    auto follow = [&](int tile) {
        if (load_shared(base + AT_MOVED + tile % SCORE_GROUPS * 4) != tile) return;
        const unsigned past = base + AT_PAST + tile % SCORE_GROUPS * N * 4 + 2 * (thread_anew() % 4) * 4;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            const float2 factor = load_shared_pair(past + 8 * j * 4);
            sums[2 * j] *= factor.x, sums[2 * j + 1] *= factor.y;
        }
    };

#pragma unroll 1
    for (int tile = group; tile < tiles; tile += SCORE_GROUPS) {
        const int stage = tile % STAGES;
        const unsigned k_at = base + AT_K + stage * TILE_BYTES;
        mbarrier_wait(base + FULL_K + stage * 8, (tile / STAGES) & 1);

        // Two chains over half of head_dim each, and one addition: its rounding is the only one outside the tensor core.
        constexpr int STEPS = D / 64, CHAIN = LEGACY ? STEPS : (STEPS + 1) / 2;
        float s[4 * PAIRS], rest[4 * PAIRS];
        unsigned raw[2][4];
        load_matrices(raw[0], k_chunks(k_at, 0));
        load_matrices(raw[1], k_chunks(k_at, 2));
#pragma unroll
        for (int c = 0; c < STEPS; ++c) {
            unsigned a[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    to_f16x2(raw[i / 2][2 * (i % 2) + half], a[i][half], a[i][2 + half]);
                }
            }
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                wgmma_f16<0>(c < CHAIN ? s : rest, a[i], wgmma_operand(base + AT_Q + (4 * c + i) * (32 * N), 16 * N, MATRIX),
                             i > 0 || c % CHAIN != 0);
            wgmma_commit();
            if (c + 1 < STEPS) {
                load_matrices(raw[0], k_chunks(k_at, 4 * (c + 1)));
                load_matrices(raw[1], k_chunks(k_at, 4 * (c + 1) + 2));
            }
            // A warp has time while its products run, and none after: the others wait for it at the next ones. So the tile
            // that takes the place of the last but one is fetched here, if nothing reads that any more.
            if (c + 1 == STEPS && warp_in_group == 0 && tile >= SCORE_GROUPS && tile - SCORE_GROUPS + STAGES < tiles) {
                const bool empty = mbarrier_test(base + EMPTY_P + group * 8, ((tile / SCORE_GROUPS) & 1) ^ 1);
                if (__all_sync(0xFFFFFFFF, empty)) {
                    const int in_warp = thread_anew() % 32, later = tile - SCORE_GROUPS + STAGES;
                    fetch_tile(p, work, base, later, find_tile(p, work, later, in_warp), in_warp);
                    fetched = tile;
                }
            }
            wgmma_wait<0>();
        }
        wgmma_settle(s);
        if constexpr (CHAIN < STEPS) {
            wgmma_settle(rest);
#pragma unroll
            for (int i = 0; i < 4 * PAIRS; ++i) s[i] = __fadd_rn(s[i], rest[i]);
        }

        const unsigned seen_low = load_shared(base + AT_SEEN + stage * 8);
        const unsigned seen_high = load_shared(base + AT_SEEN + stage * 8 + 4);
        if (tile >= unmasked || (seen_low & seen_high) != 0xFFFFFFFF) {
            const int anew = thread_anew(), warp = anew % 128 / 32, g = anew % 32 / 4, t = anew % 4;
            const int begin = work.begin + tile * TILE;
            const unsigned seen = warp < 2 ? seen_low : seen_high;
            const int token = begin + 16 * warp + g;
            const bool seen_0 = seen >> (16 * (warp & 1) + g) & 1, seen_1 = seen >> (16 * (warp & 1) + g + 8) & 1;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 lengths = load_shared_pair(base + AT_LENGTH + (8 * j + 2 * t) * 4);
                const int length[2] = {__float_as_int(lengths.x), __float_as_int(lengths.y)};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if (!seen_0 || token >= length[e]) s[4 * j + e] = -INFINITE;
                    if (!seen_1 || token + 8 >= length[e]) s[4 * j + 2 + e] = -INFINITE;
                }
            }
        }
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) peaks[2 * j + e] = fmaxf(peaks[2 * j + e], fmaxf(s[4 * j + e], s[4 * j + 2 + e]));

        if (tile > 0) {
            mbarrier_wait(base + SETTLED + (tile - 1) % SCORE_GROUPS * 8, ((tile - 1) / SCORE_GROUPS) & 1);
            follow(tile - 1);
        }
        float x[4 * PAIRS];
        auto relate = [&]() {
            bool over = false;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 reference = load_shared_pair(base + AT_REFERENCE + (8 * j + 2 * t) * 4);
                const float2 scale = load_shared_pair(base + AT_SCALE + (8 * j + 2 * t) * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[4 * j + i] = __fmaf_rn(s[4 * j + i], i % 2 ? scale.y : scale.x, i % 2 ? -reference.y : -reference.x);
                    over |= x[4 * j + i] > SLACK;
                }
            }
            return over;
        };
        if (barrier_any(1 + group, 128, relate())) {
            // The tile's maximum of each lane: in the warp, then over the warps.
            const int thread = thread_anew() % 128, t = thread % 4;
            float peak[2 * PAIRS];
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                peak[2 * j] = fmaxf(s[4 * j], s[4 * j + 2]);
                peak[2 * j + 1] = fmaxf(s[4 * j + 1], s[4 * j + 3]);
            }
            int first = 0;
            reduce_pairs<Larger, PAIRS>(peak, first, Larger());
            const unsigned to = base + AT_PEAK + (group * N + 8 * first + 2 * t) * 4;
            if ((threadIdx.x & SAME_RESULTS) == 0)
#pragma unroll
            for (int i = 0; i < PAIRS_LEFT; ++i) {
                max_shared(to + i * 32, ordered(__float_as_int(peak[2 * i])));
                max_shared(to + i * 32 + 4, ordered(__float_as_int(peak[2 * i + 1])));
            }
            // What the value warpgroups still need of the tile before last is in the same place.
            mbarrier_wait(base + EMPTY_P + group * 8, ((tile / SCORE_GROUPS) & 1) ^ 1);
            barrier_sync(1 + group, 128);
            if (thread < N) {
                const float old = load_shared_float(base + AT_REFERENCE + thread * 4);
                const float highest = __int_as_float(ordered(load_shared(base + AT_PEAK + (group * N + thread) * 4))) *
                                      load_shared_float(base + AT_SCALE + thread * 4);
                const float now = highest - old > SLACK ? highest : old;
                store_shared(base + AT_PEAK + (group * N + thread) * 4, ordered(__float_as_int(-INFINITE)));
                store_shared(base + AT_REFERENCE + thread * 4, __float_as_uint(now));
                store_shared(base + AT_PAST + (group * N + thread) * 4, __float_as_uint(now == old ? 1.0f : exp2_approx(old - now)));
            }
            if (thread == 0) store_shared(base + AT_MOVED + group * 4, tile);
            barrier_sync(1 + group, 128);
            follow(tile);
            relate();
            // All have read the reference before another tile may move it.
            barrier_sync(1 + group, 128);
        }
        __syncwarp();
        if (thread == 0) mbarrier_arrive(base + SETTLED + group * 8);

        unsigned high[PAIRS][2], residual[PAIRS][2];
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            float probability[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) probability[i] = SCALE * exp2_approx(x[4 * j + i]);
            sums[2 * j] += probability[0] + probability[2];
            sums[2 * j + 1] += probability[1] + probability[3];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float x = probability[2 * i], y = probability[2 * i + 1];
                high[j][i] = cvt_f16x2(y, x);
                residual[j][i] =
                    cvt_f16x2(__fsub_rn(y, cvt_f32_f16(high[j][i] >> 16)), __fsub_rn(x, cvt_f32_f16(high[j][i])));
            }
        }
        mbarrier_wait(base + EMPTY_P + group * 8, ((tile / SCORE_GROUPS) & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
            if constexpr (LEGACY)
                store_two_matrices(p_row + j * MATRIX, high[j][0], high[j][1]);
            else
                store_matrices(p_row + j * MATRIX, high[j][0], high[j][1], residual[j][0], residual[j][1]);
        fence_proxy_async();
        __syncwarp();
        if (in_warp == 0) mbarrier_arrive(base + FULL_P + group * 8);
        // Page ids come from the L1 cache but for the first of each 32.
        const int later = tile - SCORE_GROUPS + STAGES;
        if (warp_in_group == 0 && tile >= SCORE_GROUPS && later < tiles && fetched != tile) {
            const int in_warp = thread_anew() % 32;
            fetch_tile(p, work, base, later, find_tile(p, work, later, in_warp), in_warp);
        }
    }

    // The last tile was another warpgroup's.
    if ((tiles - 1) % SCORE_GROUPS != group && tiles > group) {
        mbarrier_wait(base + SETTLED + (tiles - 1) % SCORE_GROUPS * 8, ((tiles - 1) / SCORE_GROUPS) & 1);
        follow(tiles - 1);
    }
    int first = 0, first_again = 0;
    reduce_pairs<Total, PAIRS>(sums, first, Total());
    reduce_pairs<Larger, PAIRS>(peaks, first_again, Larger());
    const unsigned to = ((4 * group + warp) * N + 8 * first + 2 * t) * 4;
#pragma unroll
    for (int i = 0; i < PAIRS_LEFT; ++i) {
        store_shared_pair(base + AT_SUMS + to + i * 32, sums[2 * i], sums[2 * i + 1]);
        store_shared_pair(base + AT_PEAKS + to + i * 32, peaks[2 * i], peaks[2 * i + 1]);
    }
}

// Writes a value warp's part of the block's numerator without the factor of P.
__device__ __forceinline__ void store_partial(const Params& p, const Work& work, unsigned base, const float (&numerator)[BLOCKS][4 * PAIRS]) {
    const int anew = thread_anew(), in_warp = anew % 32, warp = anew / 32 - SCORE_WARPS;
    const int g = in_warp / 4, t = in_warp % 4, chunk = warp * BLOCKS;
    const long long partial = partial_of(work, blockIdx.x);
    // Eight threads store 64 contiguous bytes.
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const long long at = (partial + 8 * j + 2 * t + e) * D + 16 * (chunk + b) + 2 * g;
                const float f = LEGACY ? load_shared_float(base + AT_FACTOR + (8 * j + 2 * t + e) * 4) : 1.0f / SCALE;
                store_two(p, at, numerator[b][4 * j + e] * f, numerator[b][4 * j + 2 + e] * f);
            }
    }
}

// The lanes' references, sums and maxima, when the score warpgroups are done.
__device__ __forceinline__ void store_lanes(const Params& p, const Work& work, unsigned base, int thread) {
    if (thread >= N) return;
    const int lane = thread;
    const long long partial = partial_of(work, blockIdx.x);
    float peak = -INFINITE, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < SCORE_WARPS; ++w) {
        peak = fmaxf(peak, load_shared_float(base + AT_PEAKS + (w * N + lane) * 4));
        sum += load_shared_float(base + AT_SUMS + (w * N + lane) * 4);
    }
    State state = {{}, load_shared_float(base + AT_REFERENCE + lane * 4), sum * (1.0f / SCALE), peak * load_shared_float(base + AT_SCALE + lane * 4)};
    if (load_shared(base + AT_LENGTH + lane * 4) == 0x7FFFFFFF) state = {{}, NOTHING, 0.0f, -INFINITE};
    if (LEGACY) store_shared(base + AT_FACTOR + lane * 4, __float_as_uint(factor_of(state) * (1.0f / SCALE)));
    store_totals(p, partial + lane, state);
}

// O^T: this warpgroup's dims of every tile.
__device__ __forceinline__ void value_warpgroup(const Work& work, unsigned base, int group, float (&numerator)[BLOCKS][4 * PAIRS]) {
    const int thread = threadIdx.x & 127, warp = thread / 32, in_warp = thread % 32;
    // This warp's 16-byte chunks of a token: one a block. A row of the product is an even dim (g) or an odd one (g + 8).
    const int chunk = (4 * group + warp) * BLOCKS;
    // ldmatrix: matrices are tokens 0-7 and 8-15, then of the next chunk, or, when there is one chunk, tokens 16-31.
    const unsigned v_row = swizzled((in_warp & 15) + (BLOCKS == 1 ? (in_warp & 16) : 0), chunk + (BLOCKS == 2 ? in_warp >> 4 : 0));
    const int tiles = uniform(work.tiles), unmasked = uniform(work.unmasked);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i) numerator[b][i] = 0.0f;

    // Units of one run and one block, each from fresh accumulators. Two are in flight while the third is converted.
    constexpr int UNITS = 2 * BLOCKS;
    float fresh[2][4 * PAIRS];
    unsigned raw[2][4];   // a run's codes: [k16 step][token half, of each block]
    unsigned a[3][2][4];  // [unit % 3][k16 step]
    bool bad = false;
    auto load_run = [&](int tile, int run, bool& bad) {
        const unsigned v_at = base + AT_V + tile % STAGES * TILE_BYTES;
        if constexpr (BLOCKS == 2) {
#pragma unroll
            for (int k = 0; k < 2; ++k) load_matrices_transposed(raw[k], v_at + v_row + (RUN * run + 16 * k) * ROW);
        } else {
            load_matrices_transposed(raw[0], v_at + v_row + RUN * run * ROW);
        }
        // 0 x NaN is NaN: what some lane does not see must be finite, and so must infinities, whose residual is 0. Lanes that
        // do see it are put right below.
        if (same_type<Format, fp8_e5m2> || tile >= unmasked) {
#pragma unroll
            for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned marks = non_finite(raw[k][i]);
                    bad |= marks != 0;
                    raw[k][i] &= ~((marks >> 7) * 0xFF);
                }
        }
    };
    auto convert = [&](int unit, int to) {
        const int b = unit % BLOCKS;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // (even dim, odd dim) of one token, then of the next -> both tokens of one dim.
                const unsigned codes = BLOCKS == 2 ? raw[k][2 * b + half] : raw[0][2 * k + half];
                to_f16x2(__byte_perm(codes, 0, 0x3120), a[to][k][2 * half], a[to][k][2 * half + 1]);
            }
        }
    };
    auto add = [&](int unit) {
        if (LEGACY) return;
        wgmma_settle(fresh[unit % 2]);
#pragma unroll
        for (int i = 0; i < 4 * PAIRS; ++i) numerator[unit % BLOCKS][i] = __fadd_rn(numerator[unit % BLOCKS][i], fresh[unit % 2][i]);
    };

    mbarrier_wait(base + FULL_V, 0);
    load_run(0, 0, bad);
    convert(0, 0);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int source = tile % SCORE_GROUPS;
        const unsigned p_at = base + AT_P + source * P_BYTES;
        mbarrier_wait(base + FULL_P + source * 8, (tile / SCORE_GROUPS) & 1);
        __syncwarp();
        if (tile > 0 && load_shared(base + AT_MOVED + source * 4) == tile) {
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const float2 past = load_shared_pair(base + AT_PAST + (source * N + 8 * j + 2 * (thread_anew() % 4)) * 4);
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                    for (int i = 0; i < 4; ++i) numerator[b][4 * j + i] *= i % 2 ? past.y : past.x;
            }
        }

        bool bad_next = false;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const int run = unit / BLOCKS;
            wgmma_fence();
#pragma unroll
            for (int part = P_PARTS - 1; part >= 0; --part)
#pragma unroll
                for (int k = 0; k < 2; ++k)
                    wgmma_f16<1>(LEGACY ? numerator[unit % BLOCKS] : fresh[unit % 2], a[unit % 3][k], wgmma_operand(p_at + part * P_HALF + (4 * run + 2 * k) * GROUP_STRIDE, GROUP_STRIDE, MATRIX),
                                 LEGACY || part < P_PARTS - 1 || k == 1);
            wgmma_commit();
            if (unit + 1 < UNITS) {
                if (unit + 1 == BLOCKS) load_run(tile, 1, bad);
                convert(unit + 1, (unit + 1) % 3);
            } else if (tile + 1 < tiles) {
                mbarrier_wait(base + FULL_V + (tile + 1) % STAGES * 8, ((tile + 1) / STAGES) & 1);
                load_run(tile + 1, 0, bad_next);
            }
            if (unit > 0) {
                wgmma_wait<1>();
                add(unit - 1);
            }
        }
        wgmma_wait<0>();
        add(UNITS - 1);
        if constexpr (LEGACY) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) wgmma_settle(numerator[b]);
        }
        convert(0, 0);

        if ((same_type<Format, fp8_e5m2> || tile >= unmasked) && __any_sync(0xFFFFFFFF, bad)) {
            const unsigned v_at = base + AT_V + tile % STAGES * TILE_BYTES;
            const int anew = thread_anew(), g = anew % 32 / 4, t = anew % 4;
            const int chunk = (anew / 32 - SCORE_WARPS) * BLOCKS;
#pragma unroll 1
            for (int token = 0; token < TILE; ++token) {
                if (!(load_shared(base + AT_SEEN + tile % STAGES * 8 + token / 32 * 4) >> (token % 32) & 1)) continue;
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b) {
                    unsigned short codes;
                    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(v_at + swizzled(token, chunk + b) + 2 * g) : "memory");
                    const unsigned marks = non_finite(codes);
                    if (marks & 0x8080) {
#pragma unroll
                        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                            for (int e = 0; e < 2; ++e) {
                                const int length = load_shared(base + AT_LENGTH + (8 * j + 2 * t + e) * 4);
                                if (work.begin + tile * TILE + token < length) {
                                    if (marks & 0x80) numerator[b][4 * j + e] += non_finite_value(codes);
                                    if (marks & 0x8000) numerator[b][4 * j + 2 + e] += non_finite_value(codes >> 8);
                                }
                            }
                    }
                }
            }
        }
        bad = bad_next;
        __syncwarp();
        if (thread_anew() % 32 == 0) mbarrier_arrive(base + EMPTY_P + source * 8);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
grouped_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(shared_address(shared));
    const int thread = threadIdx.x, in_warp = thread % 32;
    const int role = uniform(thread / 128);
    if (MAPS && thread == 0) {
        prefetch_map(p.k_tile);
        prefetch_map(p.v_tile);
        prefetch_map(p.k_sub);
        prefetch_map(p.v_sub);
    }
    prefetch_early(p, thread);
    if (thread == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(base + FULL_K + i * 8, MAPS ? 1 : 33);
            mbarrier_init(base + FULL_V + i * 8, MAPS ? 1 : 33);
        }
        for (int i = 0; i < SCORE_GROUPS; ++i) {
            mbarrier_init(base + FULL_P + i * 8, 4);
            mbarrier_init(base + EMPTY_P + i * 8, VALUE_WARPS);
            mbarrier_init(base + SETTLED + i * 8, 1);
            store_shared(base + AT_MOVED + i * 4, 0xFFFFFFFF);
        }
        mbarrier_init_fence();
        fence_proxy_async();
    }
    if (thread < N) store_shared(base + AT_REFERENCE + thread * 4, __float_as_uint(NOTHING));
    if (thread < SCORE_GROUPS * N) store_shared(base + AT_PEAK + thread * 4, ordered(__float_as_int(-INFINITE)));
    wait_for_earlier_kernels();

    const Early early = load_early(p, thread);
    // One request's queries are asked for before anything is known, as if it owned all rows from the first.
    Queries<THREADS> queries;
    if (p.requests == 1) queries = load_queries<THREADS>(p, 0, p.rows, thread);
    Work work;
    if (!find_work(p, early, work, thread, THREADS)) return;
    if (p.requests != 1 || work.first_row != 0)
        queries = load_queries<THREADS>(p, work.first_row, work.rows, thread);
    __syncthreads();
    if (role < SCORE_GROUPS && thread % 128 < 32) {
        // All are looked up before the first is copied.
        constexpr int first = (STAGES + SCORE_GROUPS - 1) / SCORE_GROUPS;
        Places places[first];
#pragma unroll
        for (int i = 0; i < first; ++i) places[i] = find_tile(p, work, role + i * SCORE_GROUPS, in_warp);
#pragma unroll
        for (int i = 0; i < first; ++i) {
            const int tile = role + i * SCORE_GROUPS;
            if (tile < min(work.tiles, STAGES)) fetch_tile(p, work, base, tile, places[i], in_warp);
        }
    }
    store_queries<THREADS>(p, work, queries, {base + AT_Q, base + AT_LENGTH, base + AT_SCALE}, thread);
    // Read again from shared memory where it is needed: in registers it would be in the loops' way.
    Work& kept = *reinterpret_cast<Work*>(shared + AT_WORK);
    if (thread == 0) kept = work;
    fence_proxy_async();
    __syncthreads();

    if (kept.tiles == 0) {
        // Nothing but to combine.
    } else if (role < SCORE_GROUPS) {
#ifdef SCORE_REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 " TEXT(SCORE_REGISTERS) ";");
#endif
        score_warpgroup(p, kept, base, role);
        barrier_sync(3, 128 * SCORE_GROUPS);
        store_lanes(p, kept, base, threadIdx.x);
        if (LEGACY) barrier_arrive(4, THREADS);
    } else {
#ifdef VALUE_REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 " TEXT(VALUE_REGISTERS) ";");
#endif
        float numerator[BLOCKS][4 * PAIRS];
        value_warpgroup(kept, base, role - SCORE_GROUPS, numerator);
        if (LEGACY) barrier_sync(4, THREADS);
        store_partial(p, kept, base, numerator);
    }
    combine<THREADS>(p, kept, reinterpret_cast<State*>(__cvta_shared_to_generic(base + AT_K)), base + AT_LAST, thread_anew());
}
