// The instructions of mma_ptx.cuh and the loads of shared.cuh for a C++ compiler, one thread of a warp after another, as the PTX
// manual lays out their operands.
//
// What one thread gets depends on all. So a function is run for all threads three times: each thread's addresses are recorded;
// matrices are loaded from what was recorded, and so are operands right; products are made of these. Addresses must not
// depend on what was loaded.
#pragma once
#include "emulate.cuh"
#include "ptx_emulated.cuh"

static unsigned char* shared_memory;
static int current_lane;
static int pass;  // 0, 1 and 2
static int calls[32];
struct Recorded {
    unsigned address;
    unsigned a[4], b[2];
};
static std::vector<Recorded> recorded[32];

static Recorded& record() {
    const int call = calls[current_lane]++;
    if (pass == 0) recorded[current_lane].emplace_back();
    return recorded[current_lane][call];
}
static const Recorded& other(int lane) { return recorded[lane][calls[current_lane] - 1]; }

template <class Body> static void run_warp(Body body) {
    for (auto& lane : recorded) lane.clear();
    for (pass = 0; pass < 3; ++pass)
        for (current_lane = 0; current_lane < 32; ++current_lane) {
            calls[current_lane] = 0;
            body(current_lane);
        }
}

static int lane_of_warp() { return current_lane; }
static unsigned __ballot_sync(unsigned, bool mine) {
    record().address = mine;
    unsigned all = 0;
    for (int lane = 0; pass && lane < 32; ++lane) all |= other(lane).address << lane;
    return all;
}

static unsigned load_shared(unsigned address) {
    unsigned word;
    std::memcpy(&word, shared_memory + address, 4);
    return word;
}
struct float2 { float x, y; };
static float2 load_shared_pair(unsigned address) {
    return {__uint_as_float(load_shared(address)), __uint_as_float(load_shared(address + 4))};
}
static void load_shared_4(unsigned* word, unsigned address) { std::memcpy(word, shared_memory + address, 16); }

template <bool TRANSPOSED, int COUNT> static void emulated_ldmatrix(unsigned (&m)[COUNT], unsigned row) {
    record().address = row;
    for (int i = 0; i < COUNT; ++i) {
        unsigned short pair[2] = {0, 0};
        for (int e = 0; pass && e < 2; ++e) {
            const int g = current_lane / 4, t = 2 * (current_lane % 4) + e;
            const int r = TRANSPOSED ? t : g, c = TRANSPOSED ? g : t;
            std::memcpy(&pair[e], shared_memory + other(8 * i + r).address + 2 * c, 2);
        }
        m[i] = pair[0] | pair[1] << 16;
    }
}
static void load_matrices(unsigned (&m)[4], unsigned row) { emulated_ldmatrix<false>(m, row); }
static void load_matrices_transposed(unsigned (&m)[4], unsigned row) { emulated_ldmatrix<true>(m, row); }
template <bool TRANSPOSED> static void load_two_matrices(unsigned (&m)[2], unsigned row) { emulated_ldmatrix<TRANSPOSED>(m, row); }

template <class Operand> static float element(const unsigned* words, int i) {
    const unsigned bits = words[i / 2] >> (16 * (i % 2)) & 0xFFFF;
    return same_type<Operand, bfloat16> ? __uint_as_float(bits << 16) : cvt_f32_f16(bits);
}
static unsigned mul_f16x2(unsigned x, unsigned y) {
    return cvt_f16x2(cvt_f32_f16(x >> 16) * cvt_f32_f16(y >> 16), cvt_f32_f16(x) * cvt_f32_f16(y));
}

static void keep_operands(const unsigned* a, int a_words, const unsigned* b, int b_words) {
    Recorded& mine = record();
    std::memcpy(mine.a, a, 4 * a_words);
    std::memcpy(mine.b, b, 4 * b_words);
}

// m16n8k16, and m16n8k8, which has the first half of its operands.
template <class Operand, int K> static void emulated_m16n8(float* c, const unsigned* a, const unsigned* b) {
    keep_operands(a, K / 4, b, K / 8);
    for (int i = 0; pass && i < 4; ++i) {
        const int row = current_lane / 4 + 8 * (i / 2), column = 2 * (current_lane % 4) + i % 2;
        for (int k = 0; k < K; ++k) {
            const int t = k % 8 / 2;
            c[i] += element<Operand>(other(row % 8 * 4 + t).a, (k / 8 * 2 + row / 8) * 2 + k % 2) *
                    element<Operand>(other(column * 4 + t).b, k / 8 * 2 + k % 2);
        }
    }
}
template <class Operand> static void mma_m16n8k16(float* c, const unsigned* a, const unsigned* b) { emulated_m16n8<Operand, 16>(c, a, b); }
static void mma_m16n8k8(float* c, const unsigned* a, unsigned b) { emulated_m16n8<float16, 8>(c, a, &b); }

// Four products, each of threads 4q to 4q + 3 and 16 above.
template <bool TRANSPOSED> static void mma_m8n8k4(float* c, const unsigned* a, const unsigned* b) {
    keep_operands(a, 2, b, 2);
    const int quad = current_lane % 16 / 4 * 4;
    for (int i = 0; pass && i < 8; ++i) {
        const int row = (current_lane & 1) + (i & 2) + (current_lane >= 16 ? 4 : 0), column = (i & 4) + (current_lane & 2) + (i & 1);
        for (int k = 0; k < 4; ++k) {
            // A by rows: a thread has a row. By columns: half of a column.
            const int a_lane = quad + (TRANSPOSED ? k : row % 4) + (row / 4 ? 16 : 0), a_element = TRANSPOSED ? row % 4 : k;
            const int b_lane = quad + (TRANSPOSED ? k : column % 4) + (column / 4 ? 16 : 0), b_element = TRANSPOSED ? column % 4 : k;
            c[i] += element<float16>(other(a_lane).a, a_element) * element<float16>(other(b_lane).b, b_element);
        }
    }
}
