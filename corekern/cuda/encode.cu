// float16, bfloat16, float32 or float64 to FP8: codes = round(x / scale), one rounding.
//
// Data flow: in encode_flat a block owns THREADS x UNROLL consecutive items, and thread t takes items t,
// t + THREADS, ..., so that every access of a warp is one run of memory; it loads all of them before it
// converts the first. An item is 16 bytes of x (32 of float64), which become 4 or 8 codes. The other kernels
// give a thread one item, or one element. There is no shared memory, no barrier and no second tile.
//
// The wide side decides the vector: with 16-byte stores of codes instead, a thread would read 64 bytes apart
// from its neighbour and each load would touch four times as many sectors.
//
//   encode_flat  one axis, both arrays contiguous and aligned, one scale
//   encode_rows  up to 5 axes, rows contiguous and aligned; one scale, or one a row
//   encode_any   up to 5 axes of any strides, element by element; any scales
#include "division.cuh"
#include "quad.cuh"
#include "walk.cuh"

using Value = VALUE;
using Format = FORMAT;

constexpr int QUADS = sizeof(Value) >= 4 ? 1 : 2;
constexpr int VECTOR = 4 * QUADS;

__device__ __forceinline__ void encode_vector(const Quad<Value> (&x)[QUADS], const Divisor& divisor,
                                              bool nan_on_overflow, Format* codes) {
    Quad<Format> packed[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        float y[4];
        divide(x[i], divisor, y);
        packed[i] = pack<Format>(y, x[i], nan_on_overflow);
    }
    store(codes, packed);
}

__device__ __forceinline__ void encode_one(const Value* x, const Divisor& divisor, bool nan_on_overflow,
                                           Format* codes) {
    const Quad<Value> quad = load_one(x);
    float y[4];
    divide(quad, divisor, y);
    store_one(codes, pack<Format>(y, quad, nan_on_overflow));
}

extern "C" __global__ void __launch_bounds__(THREADS)
encode_flat(const Value* __restrict__ x, Format* __restrict__ codes, long long elements, Divisor divisor,
            int nan_on_overflow) {
    const long long first = (static_cast<long long>(blockIdx.x) * (THREADS * UNROLL) + threadIdx.x) * VECTOR;
    constexpr int step = THREADS * VECTOR;
    Quad<Value> loaded[UNROLL][QUADS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
        if (first + u * step + VECTOR <= elements) load(x + first + u * step, loaded[u]);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long place = first + u * step;
        if (place + VECTOR <= elements) encode_vector(loaded[u], divisor, nan_on_overflow, codes + place);
    }
    // What is left of the last vector: fewer elements than a block has threads.
    const long long rest = elements / VECTOR * VECTOR + threadIdx.x;
    if (blockIdx.x == 0 && rest < elements) encode_one(x + rest, divisor, nan_on_overflow, codes + rest);
}

extern "C" __global__ void __launch_bounds__(THREADS)
encode_rows(const Value* __restrict__ x, Format* __restrict__ codes, const float* __restrict__ scales,
            Walk walk, Divisor divisor, int nan_on_overflow) {
    const unsigned item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= walk.items) return;
    const Place place = place_of(walk, item, VECTOR);
    const Divisor by = scales ? divisor_of(scales[place.scale]) : divisor;
    if (place.column + VECTOR <= walk.row) {
        Quad<Value> loaded[QUADS];
        load(x + place.source, loaded);
        encode_vector(loaded, by, nan_on_overflow, codes + place.target);
    } else {
#pragma unroll 1
        for (long long i = 0; i < walk.row - place.column; ++i)
            encode_one(x + place.source + i, by, nan_on_overflow, codes + place.target + i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
encode_any(const Value* __restrict__ x, Format* __restrict__ codes, const float* __restrict__ scales,
           Walk walk, Divisor divisor, int nan_on_overflow) {
    const unsigned item = blockIdx.x * THREADS + threadIdx.x;
    if (item >= walk.items) return;
    const Place place = place_of(walk, item, 1);
    const Divisor by = scales ? divisor_of(scales[place.scale]) : divisor;
    encode_one(x + place.source, by, nan_on_overflow, codes + place.target);
}
