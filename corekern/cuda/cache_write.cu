// New tokens into a paged cache: cache[slot] = round(x / scale) for K and for V.
//
// Data flow: a block owns tokens_per_block (<= THREADS) consecutive tokens, both K and V. Thread t first works
// out where token t goes; then all threads walk the slot mapping behind the block's first token, marking the
// tokens that a later one replaces; then all threads share the block's (token, K or V, head, vector) items.
// Shared memory holds the tokens' places and a hash table of their slots.
// Barriers: table cleared | table filled | marks made, after which shared memory is only read.
//
// When several tokens name one slot the last of them is kept, in every run, although blocks run in any
// order: the others are never written. Finding them costs each of at most about a thousand blocks one read of
// the slot mapping, and a look into a table in shared memory for every entry.
//
//   cache_write_vector  rows of K, V and both caches aligned for whole vectors
//   cache_write_any     any alignment, element by element
#include "division.cuh"
#include "quad.cuh"

using Value = VALUE;
using Format = FORMAT;

constexpr int QUADS = sizeof(Value) >= 4 ? 1 : 2;
constexpr int VECTOR = 4 * QUADS;

// A table half full at most keeps its chains short; a power of two, for the hash's shift.
constexpr int TABLE_BITS = 9;
constexpr int TABLE = 1 << TABLE_BITS;
static_assert(TABLE >= 2 * THREADS, "a block has up to THREADS tokens");

// K or V; strides in elements.
struct Side {
    const Value* source;
    Format* cache;
    long long token_stride, head_stride;
    long long page_stride, slot_stride, cache_head_stride;
    Divisor divisor;
};

struct Write {
    Side sides[2];  // K, V
    const void* slot_mapping;
    long long slot_mapping_stride;
    long long slots;  // pages x page_size: what a slot must be below
    long long page_size;
    long long tokens;
    int slots_are_int64;
    int used_sides;  // 2, or 1 where K and V have different dtypes and take a launch each
    int heads;
    int head_dim;
    int tokens_per_block;
    int unused;
};

// The slot of a token; negative where it has none, as it is beyond the cache.
__device__ __forceinline__ long long slot_of(const Write& write, long long token) {
    const long long at = token * write.slot_mapping_stride;
    const long long slot = write.slots_are_int64 ? static_cast<const long long*>(write.slot_mapping)[at]
                                                 : static_cast<const int*>(write.slot_mapping)[at];
    return slot < write.slots ? slot : -1;
}

// Multiplicative hash (Knuth, TAOCP 6.4): slots of one batch are often equal in their low bits, one page apart.
__device__ __forceinline__ int bucket_of(long long slot) {
    return static_cast<unsigned>(slot) * 2654435769u >> (32 - TABLE_BITS);
}

template <class To, class From>
__device__ __forceinline__ Quad<To> convert(const Quad<From>& x, const Divisor& divisor) {
    float y[4];
    if constexpr (is_fp8<To>) {
        divide(x, divisor, y);
    } else {
        // Nothing to do leaves every bit alone, NaN's payload too.
        if constexpr (same_type<To, From>)
            if (divisor.given == 1.0f) return x;
        // The short division is exact over FP8's range only.
        unpack(x, y);
        if (divisor.given != 1.0f) {
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = __fdiv_rn(y[i], divisor.given);
        }
    }
    return pack<To>(y, x);
}

template <bool VECTORS> __device__ __forceinline__ void write_tokens(const Write& write) {
    __shared__ int first_in_bucket[TABLE];
    __shared__ int next_in_bucket[THREADS];
    __shared__ long long slot[THREADS];
    __shared__ long long place[THREADS][2];  // of the token in each side's cache
    __shared__ int skipped[THREADS];

    const int thread = threadIdx.x;
    const long long first_token = static_cast<long long>(blockIdx.x) * write.tokens_per_block;
    const long long left = write.tokens - first_token;
    const int tokens = left < write.tokens_per_block ? static_cast<int>(left) : write.tokens_per_block;

    for (int i = thread; i < TABLE; i += THREADS) first_in_bucket[i] = -1;
    if (thread < tokens) {
        const long long mine = slot_of(write, first_token + thread);
        const long long page = mine / write.page_size, in_page = mine - page * write.page_size;
        slot[thread] = mine;
        skipped[thread] = mine < 0;
        for (int side = 0; side < write.used_sides; ++side)
            place[thread][side] = page * write.sides[side].page_stride + in_page * write.sides[side].slot_stride;
    }
    __syncthreads();
    if (thread < tokens && slot[thread] >= 0)
        next_in_bucket[thread] = atomicExch(&first_in_bucket[bucket_of(slot[thread])], thread);
    __syncthreads();
#pragma unroll 1
    for (long long token = first_token + 1 + thread; token < write.tokens; token += THREADS) {
        const long long later = slot_of(write, token);
        if (later < 0) continue;
        for (int i = first_in_bucket[bucket_of(later)]; i >= 0; i = next_in_bucket[i])
            if (slot[i] == later && first_token + i < token) skipped[i] = 1;
    }
    __syncthreads();

    constexpr int width = VECTORS ? VECTOR : 1;
    const int items_in_head = write.head_dim / width;
    const int items_in_side = write.heads * items_in_head;
    const int items = tokens * write.used_sides * items_in_side;
#pragma unroll 1
    for (int item = thread; item < items; item += THREADS) {
        const int row = item / items_in_side;  // token and side
        const int i = row >> (write.used_sides - 1), which = row & (write.used_sides - 1);
        if (skipped[i]) continue;
        const int in_side = item - row * items_in_side;
        const int head = in_side / items_in_head;
        const int column = (in_side - head * items_in_head) * width;

        const Side& side = write.sides[which];
        const Value* from = side.source + (first_token + i) * side.token_stride + head * side.head_stride + column;
        Format* to = side.cache + place[i][which] + head * side.cache_head_stride + column;
        if constexpr (VECTORS) {
            Quad<Value> x[QUADS];
            Quad<Format> out[QUADS];
            load(from, x);
#pragma unroll
            for (int j = 0; j < QUADS; ++j) out[j] = convert<Format>(x[j], side.divisor);
            store(to, out);
        } else {
            store_one(to, convert<Format>(load_one(from), side.divisor));
        }
    }
}

// __grid_constant__ lets a thread choose its side by index without copying the arguments to local memory.
extern "C" __global__ void __launch_bounds__(THREADS) cache_write_vector(const __grid_constant__ Write write) {
    write_tokens<true>(write);
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_write_any(const __grid_constant__ Write write) {
    write_tokens<false>(write);
}
