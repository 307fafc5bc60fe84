// New tokens into a paged cache: cache[slot] = round(x / scale) for K and for V.
//
// Data flow: a block owns tokens_per_block (<= THREADS) consecutive tokens, both K and V. Thread t first looks
// up the place of token t; then all threads walk the slot mapping behind the block's first token, marking
// tokens that a later one replaces; then all threads share the block's (token, head, vector) items, reading
// K and V before converting either. Shared memory holds the tokens' places and a hash table of their slots.
// Barriers: table cleared | table filled | table used to mark | marks read.
//
// When several tokens name one slot the last of them is kept, in every run, although blocks run in any
// order: every token but the last is never written. Finding them costs a read of the slot mapping a block,
// linear in tokens for each of at most about a thousand blocks, and a look into a table in shared memory.
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

// Strides in elements.
struct Side {
    const Value* source;
    Format* cache;
    long long token_stride, head_stride;
    long long page_stride, slot_stride, cache_head_stride;
    Divisor divisor;
};

struct Write {
    Side k, v;
    const void* slot_mapping;
    long long slot_mapping_stride;
    long long slots;  // pages x page_size: what a slot must be below
    long long page_size;
    long long tokens;
    int slots_are_int64;
    int heads;
    int head_dim;
    int tokens_per_block;
};

// The slot of a token, or -1 where the token has none: negative, or beyond the cache.
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

template <int WIDTH>
__device__ __forceinline__ void convert(const Side& side, const Quad<Value> (&x)[WIDTH], Quad<Format> (&out)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        float y[4];
        if constexpr (is_fp8<Format>) {
            divide(x[i], side.divisor, y);
        } else {
            // Nothing to do leaves every bit alone, NaN's payload too.
            if constexpr (same_type<Value, Format>) {
                if (side.divisor.given == 1.0f) {
                    out[i] = x[i];
                    continue;
                }
            }
            // The short division is exact over FP8's range only.
            unpack(x[i], y);
            if (side.divisor.given != 1.0f) {
#pragma unroll
                for (int j = 0; j < 4; ++j) y[j] = __fdiv_rn(y[j], side.divisor.given);
            }
        }
        out[i] = pack<Format>(y, x[i]);
    }
}

template <bool VECTORS> __device__ __forceinline__ void write_tokens(const Write& write) {
    __shared__ int first_in_bucket[TABLE];
    __shared__ int next_in_bucket[THREADS];
    __shared__ long long slot[THREADS];
    __shared__ int skipped[THREADS];

    const int thread = threadIdx.x;
    const long long first_token = static_cast<long long>(blockIdx.x) * write.tokens_per_block;
    const long long left = write.tokens - first_token;
    const int tokens = left < write.tokens_per_block ? static_cast<int>(left) : write.tokens_per_block;

    for (int i = thread; i < TABLE; i += THREADS) first_in_bucket[i] = -1;
    if (thread < tokens) {
        slot[thread] = slot_of(write, first_token + thread);
        skipped[thread] = slot[thread] < 0;
    }
    __syncthreads();
    if (thread < tokens && slot[thread] >= 0)
        next_in_bucket[thread] = atomicExch(&first_in_bucket[bucket_of(slot[thread])], thread);
    __syncthreads();
    for (long long token = first_token + 1 + thread; token < write.tokens; token += THREADS) {
        const long long later = slot_of(write, token);
        if (later < 0) continue;
        for (int i = first_in_bucket[bucket_of(later)]; i >= 0; i = next_in_bucket[i])
            if (slot[i] == later && first_token + i < token) skipped[i] = 1;
    }
    __syncthreads();

    constexpr int width = VECTORS ? VECTOR : 1;
    const int items_in_head = write.head_dim / width;
    const int items_in_token = write.heads * items_in_head;
#pragma unroll 1
    for (int item = thread; item < tokens * items_in_token; item += THREADS) {
        const int i = item / items_in_token;
        if (skipped[i]) continue;
        const int in_token = item - i * items_in_token;
        const int head = in_token / items_in_head;
        const int column = (in_token - head * items_in_head) * width;
        const long long token = first_token + i;
        // 32-bit division where it will do: it is the common case and several times cheaper.
        const long long page = write.slots >> 32 == 0
                                   ? static_cast<unsigned>(slot[i]) / static_cast<unsigned>(write.page_size)
                                   : slot[i] / write.page_size;
        const long long in_page = slot[i] - page * write.page_size;

        const Side &k = write.k, &v = write.v;
        const Value* k_from = k.source + token * k.token_stride + head * k.head_stride + column;
        const Value* v_from = v.source + token * v.token_stride + head * v.head_stride + column;
        Format* k_to = k.cache + page * k.page_stride + in_page * k.slot_stride + head * k.cache_head_stride + column;
        Format* v_to = v.cache + page * v.page_stride + in_page * v.slot_stride + head * v.cache_head_stride + column;
        if constexpr (VECTORS) {
            Quad<Value> k_in[QUADS], v_in[QUADS];
            Quad<Format> k_out[QUADS], v_out[QUADS];
            load(k_from, k_in);
            load(v_from, v_in);
            convert(k, k_in, k_out);
            convert(v, v_in, v_out);
            store(k_to, k_out);
            store(v_to, v_out);
        } else {
            Quad<Value> k_in[1] = {load_one(k_from)}, v_in[1] = {load_one(v_from)};
            Quad<Format> k_out[1], v_out[1];
            convert(k, k_in, k_out);
            convert(v, v_in, v_out);
            store_one(k_to, k_out[0]);
            store_one(v_to, v_out[0]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_write_vector(Write write) {
    write_tokens<true>(write);
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_write_any(Write write) {
    write_tokens<false>(write);
}
