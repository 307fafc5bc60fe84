// One request's tokens out of a paged cache: out[token] = round(code x scale) for K and for V, zero rows after.
//
// Data flow: a block owns tokens_per_block consecutive output rows, both K and V; its threads share the rows'
// (token, head, vector) items. A thread reads the page id, then K and V, before converting either. There is
// no shared memory and no barrier; page ids come from the L1 cache.
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

// Strides in elements.
struct Side {
    const Format* cache;
    Value* out;
    long long page_stride, slot_stride, head_stride;
    long long token_stride, out_head_stride;
    float scale;
    int unused;
};

struct Gather {
    Side k, v;
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

template <int WIDTH>
__device__ __forceinline__ void convert(const Side& side, const Quad<Format> (&codes)[WIDTH],
                                        Quad<Value> (&out)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
        // Nothing to do leaves every bit alone, NaN's payload too.
        if constexpr (same_type<Value, Format>) {
            if (side.scale == 1.0f) {
                out[i] = codes[i];
                continue;
            }
        }
        float value[4];
        unpack(codes[i], value);
#pragma unroll
        for (int j = 0; j < 4; ++j) value[j] = __fmul_rn(value[j], side.scale);
        out[i] = pack<Value>(value, codes[i]);
    }
}

template <bool VECTORS> __device__ __forceinline__ void gather_rows(const Gather& gather) {
    constexpr int width = VECTORS ? VECTOR : 1;
    const int items_in_head = gather.head_dim / width;
    const int items_in_row = gather.heads * items_in_head;
    const long long first_row = static_cast<long long>(blockIdx.x) * gather.tokens_per_block;
    const long long left = gather.rows - first_row;
    const int rows = left < gather.tokens_per_block ? static_cast<int>(left) : gather.tokens_per_block;

#pragma unroll 1
    for (int item = threadIdx.x; item < rows * items_in_row; item += THREADS) {
        const int i = item / items_in_row;
        const int in_row = item - i * items_in_row;
        const int head = in_row / items_in_head;
        const int column = (in_row - head * items_in_head) * width;
        const int row = static_cast<int>(first_row) + i;

        const int block = row / gather.page_size;
        const int in_page = row - block * gather.page_size;
        long long page = -1;
        if (row < gather.length && block < gather.table_width)
            page = gather.block_table[block * gather.table_stride];
        const bool present = page >= 0 && page < gather.pages;

        const Side &k = gather.k, &v = gather.v;
        const long long k_at = page * k.page_stride + in_page * k.slot_stride + head * k.head_stride + column;
        const long long v_at = page * v.page_stride + in_page * v.slot_stride + head * v.head_stride + column;
        Value* k_to = k.out + row * k.token_stride + head * k.out_head_stride + column;
        Value* v_to = v.out + row * v.token_stride + head * v.out_head_stride + column;
        constexpr int quads = VECTORS ? QUADS : 1;
        Quad<Format> k_in[quads], v_in[quads];
        Quad<Value> k_out[quads] = {}, v_out[quads] = {};
        if (present) {
            if constexpr (VECTORS) {
                load(k.cache + k_at, k_in);
                load(v.cache + v_at, v_in);
            } else {
                k_in[0] = load_one(k.cache + k_at);
                v_in[0] = load_one(v.cache + v_at);
            }
            convert(k, k_in, k_out);
            convert(v, v_in, v_out);
        }
        if constexpr (VECTORS) {
            store(k_to, k_out);
            store(v_to, v_out);
        } else {
            store_one(k_to, k_out[0]);
            store_one(v_to, v_out[0]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_gather_vector(Gather gather) {
    gather_rows<true>(gather);
}

extern "C" __global__ void __launch_bounds__(THREADS) cache_gather_any(Gather gather) {
    gather_rows<false>(gather);
}
