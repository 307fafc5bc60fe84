// One request's tokens out of a paged cache: out[token] = round(code x scale) for K and for V, zero rows after.
//
// Data flow: a block owns tokens_per_block consecutive output rows, both K and V; its threads share the rows'
// (token, K or V, head, vector) items. A thread reads the page id, then its part of the row. There is no shared
// memory and no barrier; page ids come from the L1 cache.
//
// Rows from `length` on, rows beyond the block table and rows whose page id is outside the cache are zero:
// the cache is not read for them.
//
//   cache_gather_vector  rows of both caches and outputs aligned for whole vectors
//   cache_gather_any     any alignment, element by element
#include "quad.cuh"

using Value = VALUE;
using Format = FORMAT;

constexpr int QUADS = sizeof(Value) == 4 ? 1 : 2;
constexpr int VECTOR = 4 * QUADS;

// K or V; strides in elements.
struct Side {
    const Format* cache;
    Value* out;
    long long page_stride, slot_stride, head_stride;
    long long token_stride, out_head_stride;
    float scale;
    int unused;
};

struct Gather {
    Side sides[2];  // K, V
    const int* block_table;
    long long table_stride;
    long long table_width;
    long long pages;
    int page_size;
    int length;
    int rows;  // length and padding
    int heads;
    int head_dim;
    int tokens_per_block;
};

template <class To, class From>
__device__ __forceinline__ Quad<To> convert(const Quad<From>& codes, float scale) {
    // Nothing to do leaves every bit alone, NaN's payload too.
    if constexpr (same_type<To, From>)
        if (scale == 1.0f) return codes;
    float value[4];
    unpack(codes, value);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __fmul_rn(value[i], scale);
    return pack<To>(value, codes);
}

template <bool VECTORS> __device__ __forceinline__ void gather_rows(const Gather& gather) {
    constexpr int width = VECTORS ? VECTOR : 1;
    const int items_in_head = gather.head_dim / width;
    const int items_in_side = gather.heads * items_in_head;
    const long long first_row = static_cast<long long>(blockIdx.x) * gather.tokens_per_block;
    const long long left = gather.rows - first_row;
    const int rows = left < gather.tokens_per_block ? static_cast<int>(left) : gather.tokens_per_block;

#pragma unroll 1
    for (int item = threadIdx.x; item < rows * 2 * items_in_side; item += THREADS) {
        const int row_and_side = item / items_in_side;
        const int in_side = item - row_and_side * items_in_side;
        const int head = in_side / items_in_head;
        const int column = (in_side - head * items_in_head) * width;
        const int row = static_cast<int>(first_row) + (row_and_side >> 1);

        const int block = row / gather.page_size;
        const int in_page = row - block * gather.page_size;
        long long page = -1;
        if (row < gather.length && block < gather.table_width)
            page = gather.block_table[block * gather.table_stride];

        const Side& side = gather.sides[row_and_side & 1];
        Value* to = side.out + row * side.token_stride + head * side.out_head_stride + column;
        constexpr int quads = VECTORS ? QUADS : 1;
        Quad<Value> out[quads] = {};
        if (page >= 0 && page < gather.pages) {
            const Format* from = side.cache + page * side.page_stride + in_page * side.slot_stride +
                                 head * side.head_stride + column;
            Quad<Format> codes[quads];
            if constexpr (VECTORS)
                load(from, codes);
            else
                codes[0] = load_one(from);
#pragma unroll
            for (int i = 0; i < quads; ++i) out[i] = convert<Value>(codes[i], side.scale);
        }
        if constexpr (VECTORS)
            store(to, out);
        else
            store_one(to, out[0]);
    }
}

// __grid_constant__ lets a thread choose its side by index without copying the arguments to local memory.
extern "C" __global__ void __launch_bounds__(THREADS) cache_gather_vector(const __grid_constant__ Gather gather) {
    gather_rows<true>(gather);
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_gather_any(const __grid_constant__ Gather gather) {
    gather_rows<false>(gather);
}
