// As much of CUDA as the kernels use, for a C++ compiler: threads run one after another on one CPU thread.
//
// A block's threads are coroutines; each runs to its next barrier, and when all have arrived all go on. So
// indices, bounds, barriers and bits can be checked where there is no GPU; races and speed cannot.
//
// Arithmetic is IEEE, as the device's is, but for NaN: every NaN that a device operation makes is 0x7FFFFFFF,
// its operand's sign lost, and so it is here.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)
#define __grid_constant__

struct dim3 { unsigned x; };
static dim3 threadIdx, blockIdx;

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <class To, class From> static inline To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
static inline double __hiloint2double(int high, int low) {
    return bits_of<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low));
}
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned select) {
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (select >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

static inline float device_nan(float x) { return x == x ? x : __uint_as_float(0x7FFFFFFF); }
static inline double device_nan(double x) { return x == x ? x : bits_of<double>(0x7FF8000000000000ull); }
static inline float __fadd_rn(float a, float b) { return device_nan(a + b); }
static inline float __fmul_rn(float a, float b) { return device_nan(a * b); }
static inline float __fdiv_rn(float a, float b) { return device_nan(a / b); }
static inline float __frcp_rn(float a) { return device_nan(1.0f / a); }
static inline float __fmaf_rn(float a, float b, float c) { return device_nan(std::fma(a, b, c)); }
static inline double __dmul_rn(double a, double b) { return device_nan(a * b); }
static inline double __drcp_rn(double a) { return device_nan(1.0 / a); }
static inline double __fma_rn(double a, double b, double c) { return device_nan(std::fma(a, b, c)); }
static inline float __double2float_rz(double x) {
    const float nearest = static_cast<float>(x);
    return device_nan(std::fabs(static_cast<double>(nearest)) > std::fabs(x) ? std::nextafter(nearest, 0.0f) : nearest);
}

static inline int atomicExch(int* at, int value) { return std::exchange(*at, value); }

// Coroutines, one a thread of a block, made once and used for every block. ucontext only gives each its
// stack; setjmp then switches without the system call that swapcontext makes.
constexpr size_t STACK = 64 << 10;
static ucontext_t first_entry[THREADS];
static jmp_buf scheduler, resume[THREADS];
static bool finished[THREADS];
static void (*thread_body)();

static void leave() {
    if (_setjmp(resume[threadIdx.x]) == 0) _longjmp(scheduler, 1);
}

static inline void __syncthreads() { leave(); }

static void run_thread() {
    leave();  // once made, wait for the first block
    for (;;) {
        thread_body();
        finished[threadIdx.x] = true;
        leave();
    }
}

static void make_coroutines() {
    static std::vector<char> stacks(THREADS * STACK);
    for (unsigned t = 0; t < THREADS; ++t) {
        getcontext(&first_entry[t]);
        first_entry[t].uc_stack.ss_sp = &stacks[t * STACK];
        first_entry[t].uc_stack.ss_size = STACK;
        makecontext(&first_entry[t], run_thread, 0);
        threadIdx.x = t;
        if (_setjmp(scheduler) == 0) setcontext(&first_entry[t]);
    }
}

static void run_block(void (*body)()) {
    static const bool made = (make_coroutines(), true);
    (void)made;
    thread_body = body;
    for (unsigned t = 0; t < THREADS; ++t) finished[t] = false;
    // Volatile: what changes between a setjmp and the return to it must be in memory.
    static volatile unsigned next, running;
    do {
        running = 0;
        for (next = 0; next < THREADS; next = next + 1) {
            if (finished[next]) continue;
            threadIdx.x = next;
            if (_setjmp(scheduler) == 0) _longjmp(resume[next], 1);
            running = running + !finished[next];
        }
    } while (running);
}

// Runs `kernel` over a grid; `parameters` are pointers to the arguments, as for cuLaunchKernel.
template <class... A> struct Call {
    static inline void (*kernel)(A...);
    static inline void** parameters;

    template <size_t... I> static void with(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_reference_t<A>*>(parameters[I])...);
    }
    static void body() { with(std::index_sequence_for<A...>{}); }
};

template <class... A> static void run(void (*kernel)(A...), unsigned blocks, void** parameters) {
    Call<A...>::kernel = kernel;
    Call<A...>::parameters = parameters;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
#if HAS_BARRIERS
        run_block(Call<A...>::body);
#else
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x) Call<A...>::body();
#endif
    }
}
