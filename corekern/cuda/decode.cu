// FP8 to float16, bfloat16 or float32: out = round(code x scale), the product in float32.
//
// Data flow: as in encode.cu, the other way round. In decode_flat a block owns THREADS x UNROLL consecutive
// items; thread t takes items t, t + THREADS, ..., and loads all of them before it converts the first. An
// item is 4 or 8 codes, which become 16 bytes of output. The other kernels give a thread one item, or one
// element. There is no shared memory, no barrier and no second tile.
//
//   decode_flat  one axis, both arrays contiguous and aligned, one scale
//   decode_rows  up to 5 axes, rows contiguous and aligned; one scale, or one a row
//   decode_any   up to 5 axes of any strides, element by element; any scales
#include "quad.cuh"
#include "walk.cuh"

using Value = VALUE;
using Format = FORMAT;

constexpr int QUADS = sizeof(Value) == 4 ? 1 : 2;
constexpr int VECTOR = 4 * QUADS;

__device__ __forceinline__ Quad<Value> decode_quad(const Quad<Format>& codes, float scale) {
    float value[4];
    unpack(codes, value);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __fmul_rn(value[i], scale);
    return pack<Value>(value, codes);
}

__device__ __forceinline__ void decode_vector(const Quad<Format> (&codes)[QUADS], float scale, Value* out) {
    Quad<Value> decoded[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) decoded[i] = decode_quad(codes[i], scale);
    store(out, decoded);
}

__device__ __forceinline__ void decode_one(const Format* code, float scale, Value* out) {
    store_one(out, decode_quad(load_one(code), scale));
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_flat(const Format* __restrict__ codes, Value* __restrict__ out, long long elements, float scale) {
    const long long first = (static_cast<long long>(blockIdx.x) * (THREADS * UNROLL) + threadIdx.x) * VECTOR;
    constexpr int step = THREADS * VECTOR;
    Quad<Format> loaded[UNROLL][QUADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
        if (first + u * step + VECTOR <= elements) load(codes + first + u * step, loaded[u]);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long place = first + u * step;
        if (place + VECTOR <= elements) decode_vector(loaded[u], scale, out + place);
    }
    // What is left of the last vector: fewer elements than a block has threads.
    const long long rest = elements / VECTOR * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && rest < elements) decode_one(codes + rest, scale, out + rest);
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_rows(const Format* __restrict__ codes, Value* __restrict__ out, const float* __restrict__ scales,
            Walk walk, float scale) {
    const unsigned item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= walk.items) return;
    const Place place = place_of(walk, item, VECTOR);
    const float by = scales ? scales[place.scale] : scale;
    if (place.column + VECTOR <= walk.row) {
        Quad<Format> loaded[QUADS];
        load(codes + place.source, loaded);
        decode_vector(loaded, by, out + place.target);
    } else {
#pragma unroll 1
        for (long long i = 0; i < walk.row - place.column; ++i)
            decode_one(codes + place.source + i, by, out + place.target + i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
decode_any(const Format* __restrict__ codes, Value* __restrict__ out, const float* __restrict__ scales,
           Walk walk, float scale) {
    const unsigned item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= walk.items) return;
    const Place place = place_of(walk, item, 1);
    decode_one(codes + place.source, scales ? scales[place.scale] : scale, out + place.target);
}
