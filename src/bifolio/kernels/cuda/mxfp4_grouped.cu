// Products of up to 64 tokens of one expert. Four warps multiply groups of 64 rows by wgmma (mma.sync where it is missing):
// weights are unpacked into registers, tokens lie in shared memory. A thread block has WARPGROUPS times four warps, each four
// of them GROUPS groups, and all use the same tokens.
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 112640  // shared memory for stages of weights and tokens
#endif
#ifndef RESIDENT
#define RESIDENT 2  // thread blocks on a multiprocessor
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(WITHOUT_WGMMA)
#define HAS_WGMMA
#endif

constexpr int THREADS = WARPGROUPS * 128, BLOCK_GROUPS = WARPGROUPS * GROUPS, ROWS = BLOCK_GROUPS * 64;
constexpr int MAX_BLOCKS = 8;  // of 8 tokens

struct Product {
    const u8 *weights, *x;
    const float *bias, *shares;
    const int *pairs, *tile_expert, *tile_begin, *tile_end;
    void *out;
    int num_experts, tiles, chunks, depth, outputs, top_k, activation, has_bias, is_wide;
};

#ifdef HAS_WGMMA
__device__ __forceinline__ void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define SUMS(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define S1 SUMS(0)
#define S2 S1, SUMS(1)
#define S3 S2, SUMS(2)
#define S4 S3, SUMS(3)
#define S5 S4, SUMS(4)
#define S6 S5, SUMS(5)
#define S7 S6, SUMS(6)
#define S8 S7, SUMS(7)
#define D1 "%0, %1, %2, %3"
#define D2 D1 ", %4, %5, %6, %7"
#define D3 D2 ", %8, %9, %10, %11"
#define D4 D3 ", %12, %13, %14, %15"
#define D5 D4 ", %16, %17, %18, %19"
#define D6 D5 ", %20, %21, %22, %23"
#define D7 D6 ", %24, %25, %26, %27"
#define D8 D7 ", %28, %29, %30, %31"
#define WGMMA(NB, N, A0, A1, A2, A3, B, P)                                                                                 \
    if constexpr (BLOCKS == NB)                                                                                         \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D##NB "}, {%" #A0 ", %" #A1 ", %" #A2  \
                     ", %" #A3 "}, %" #B ", p, 1, 1, 0;\n}"                                                                \
                     : S##NB : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))

// c += a b: 64 rows of weights in the registers of four warps, BLOCKS * 8 tokens described by b in shared memory.
template <int BLOCKS> __device__ __forceinline__ void multiply_group(float (&c)[BLOCKS][4], const u32 (&a)[4], u64 b, int adds) {
    WGMMA(1, 8, 4, 5, 6, 7, 8, 9);
    WGMMA(2, 16, 8, 9, 10, 11, 12, 13);
    WGMMA(3, 24, 12, 13, 14, 15, 16, 17);
    WGMMA(4, 32, 16, 17, 18, 19, 20, 21);
    WGMMA(5, 40, 20, 21, 22, 23, 24, 25);
    WGMMA(6, 48, 24, 25, 26, 27, 28, 29);
    WGMMA(7, 56, 28, 29, 30, 31, 32, 33);
    WGMMA(8, 64, 32, 33, 34, 35, 36, 37);
}

// Rows of 128 bytes in groups of 8, their 16-byte pieces swizzled: piece p of row r lies at place p ^ r % 8.
__device__ __forceinline__ u64 describe(u32 address) {
    return (u64)1 << 62 | (u64)(1024 / 16) << 32 | (u64)1 << 16 | (address & 0x3FFFF) >> 4;
}
__device__ __forceinline__ void publish_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#else
template <int PENDING> __device__ __forceinline__ void wait_for_products() {}
__device__ __forceinline__ void publish_copies() {}
#endif

// One tile of NB * 8 tokens: stages of weights and tokens in shared memory, sums in registers.
template <bool FIRST, int NB> struct Group {
    static constexpr int X = NB * 1024, WEIGHTS = 2 * BLOCK_GROUPS * GROUP;  // tokens of a chunk; weights of two
    static constexpr int STAGE = (2 * X + WEIGHTS + 1023) / 1024 * 1024;
    static constexpr int STAGES = STAGE_BYTES / STAGE < 8 ? STAGE_BYTES / STAGE : 8, DISTANCE = STAGES - 1;
    static constexpr int PASS = THREADS / 8, LINES = (NB * 8 + PASS - 1) / PASS;  // rows of tokens: at once, of a thread
    static constexpr u32 MISSING = 0xFFFFFFFFu;
    float sums[GROUPS][NB][4];
    const u8 *codes[GROUPS], *scales;  // next pair of chunks, of this lane
    u32 lines[LINES];  // offset of each row in pieces of 16 bytes
    int warp, lane;

    __device__ __forceinline__ Group() : warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    // Place of this warp's chunk of its group 0 in a stage.
    __device__ __forceinline__ u32 own(u32 stage) const { return stage + 2 * X + warp / 4 * (2 * GROUPS * GROUP) + warp % 4 * CHUNK; }

    __device__ __forceinline__ void copy_weights(u32 stage, int chunk, const Product &p) {
        u32 target = own(stage), next_bytes = chunk + 1 < p.chunks ? 16 : 0;
        if (chunk >= p.chunks) return;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            copy_async(target + i * 2 * GROUP + lane * 16, codes[i], 16);
            copy_async(target + i * 2 * GROUP + GROUP + lane * 16, codes[i] + GROUP, next_bytes);
            codes[i] += 2 * GROUP;
        }
        if (lane < 4 * GROUPS)
            copy_async(target + lane / 2 * GROUP + CODES + lane % 2 * 16, scales, lane / 2 % 2 ? next_bytes : 16);
        scales += 2 * GROUP;
    }

    __device__ __forceinline__ void copy_tokens(u32 stage, int chunk, const Product &p) {
        int piece = threadIdx.x % 8, line = threadIdx.x / 8;
        u32 place = line * 128 + (piece ^ line % 8) * 16;
        if (chunk >= p.chunks) return;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            int at = (chunk + c) * 8 + piece;
            bool exists = at * 8 < p.depth;
            const u8 *source = p.x + (u64)(exists ? at : 0) * 16;
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                if (NB * 8 % PASS == 0 || i * PASS + line < NB * 8) {
                    bool is_row = lines[i] != MISSING;
                    copy_async(stage + c * X + i * PASS * 128 + place, source + (u64)(is_row ? lines[i] : 0) * 16,
                               exists && is_row ? 16 : 0);
                }
        }
    }

    // Products of 32 columns. `adds` is 0 for the first ones, which define the sums.
    __device__ __forceinline__ void multiply_fragments(const u32 (&a)[GROUPS][2][4], u32 x, int half, int adds) {
#ifdef HAS_WGMMA
        u64 tokens = describe(x) + half * 4;
        start_products();
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            multiply_group<NB>(sums[i], a[i][0], tokens, adds);
            multiply_group<NB>(sums[i], a[i][1], tokens + 2, 1);
        }
        commit_products();
#else
#pragma unroll
        for (int n = 0; n < NB; ++n) {
            uint4 tokens = load_matrices(x + (n * 8 + lane % 8) * 128 + ((half * 4 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                if (!adds) sums[i][n][0] = sums[i][n][1] = sums[i][n][2] = sums[i][n][3] = 0.0f;
                multiply_add(sums[i][n], a[i][0], tokens.x, tokens.y);
                multiply_add(sums[i][n], a[i][1], tokens.z, tokens.w);
            }
        }
#endif
    }

    // The products of two chunks. Two sets of fragments: one is unpacked while the other is multiplied.
    __device__ __forceinline__ void multiply(u32 stage, int chunk) {
        u32 source = own(stage);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            uint4 words[GROUPS];
            u32 scales[GROUPS];
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                words[i] = shared_load(source + (i * 2 + c) * GROUP + lane * 16);
                scales[i] = shared_word(source + (i * 2 + c) * GROUP + CODES + lane / 4 * 4);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 a[GROUPS][2][4];
                wait_for_products<1>();
#pragma unroll
                for (int i = 0; i < GROUPS; ++i) {
                    u32 low = half ? scale_pair<2>(scales[i]) : scale_pair<0>(scales[i]);
                    u32 high = half ? scale_pair<3>(scales[i]) : scale_pair<1>(scales[i]);
                    unpack(half ? words[i].z : words[i].x, low, high, a[i][0]);
                    unpack(half ? words[i].w : words[i].y, low, high, a[i][1]);
                }
                multiply_fragments(a, stage + c * X, half, c || half || chunk);
            }
        }
    }

    // Sums of all warps in shared memory: f32[tokens][ROWS + 4]
    __device__ __forceinline__ void spill(float *parts) {
        float *target = parts + lane % 4 * 2 * (ROWS + 4) + warp / 4 * (GROUPS * 64) + warp % 4 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
            for (int n = 0; n < NB; ++n) {
                float *at = target + n * 8 * (ROWS + 4) + i * 64;
                at[0] = sums[i][n][0], at[ROWS + 4] = sums[i][n][1];
                at[8] = sums[i][n][2], at[ROWS + 12] = sums[i][n][3];
            }
    }

    __device__ __forceinline__ void write_hidden(const float *parts, int expert, int begin, int count, const Product &p) {
        constexpr int WIDTH = ROWS / 4;  // pairs of outputs
        int output = blockIdx.x * ROWS / 2 + threadIdx.x % WIDTH * 2;
        int row = threadIdx.x % WIDTH / 4 * 16 + threadIdx.x % WIDTH % 4 * 2;
        if (output >= p.outputs) return;
        float gate_bias[2] = {}, up_bias[2] = {};
        if (p.has_bias)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                gate_bias[i] = p.bias[(u64)expert * 2 * p.outputs + output + i];
                up_bias[i] = p.bias[((u64)expert * 2 + 1) * p.outputs + output + i];
            }
        for (int token = threadIdx.x / WIDTH; token < count; token += THREADS / WIDTH) {
            const float *from = parts + token * (ROWS + 4) + row;
            float values[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                values[i] = gated(from[i] + gate_bias[i], from[8 + i] + up_bias[i], p.activation);
            ((u32 *)p.out)[((u64)(begin + token) * p.outputs + output) / 2] = round_pair(values[0], values[1]);
        }
    }

    __device__ __forceinline__ void write_parts(const float *parts, int expert, int begin, int count, const Product &p) {
        for (int row = threadIdx.x; row < ROWS; row += THREADS) {
            int output = blockIdx.x * ROWS + row;
            if (output >= p.outputs) return;
            float bias = p.has_bias ? p.bias[(u64)expert * p.outputs + output] : 0.0f;
            for (int token = 0; token < count; ++token) {
                int pair = p.pairs[begin + token];
                float value = (parts[token * (ROWS + 4) + row] + bias) * p.shares[pair];
                u64 place = (u64)pair * p.outputs + output;
                if (p.is_wide) ((float *)p.out)[place] = value;
                else ((u16 *)p.out)[place] = round_pair(value, 0.0f);
            }
        }
    }

    __device__ __forceinline__ void run(int expert, int begin, int count, const Product &p) {
        u32 base = shared_address(memory);
        auto tile = [&](int i) {
            int group = min((int)blockIdx.x * BLOCK_GROUPS + warp / 4 * GROUPS + i, p.tiles / 4 - 1);
            return tile_of(p.weights, expert, group * 4 + warp % 4, p.tiles, p.chunks);
        };
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) codes[i] = tile(i) + lane * 16;
        scales = tile(lane / 4 % GROUPS) + lane / 2 % 2 * GROUP + CODES + lane % 2 * 16;
#pragma unroll
        for (int i = 0; i < DISTANCE; ++i) copy_weights(base + i * STAGE, i * 2, p);
        if (!FIRST) wait_for_inputs();
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            int place = i * PASS + threadIdx.x / 8;
            lines[i] = MISSING;
            if (place < count) lines[i] = (u32)(FIRST ? p.pairs[begin + place] / p.top_k : begin + place) * (u32)(p.depth / 8);
        }
#pragma unroll
        for (int i = 0; i < DISTANCE; ++i) copy_tokens(base + i * STAGE, i * 2, p), commit_copies();
        u32 stage = base, next = base + DISTANCE * STAGE;
        for (int chunk = 0; chunk < p.chunks; chunk += 2) {
            wait_for_products<0>();
            wait_for_copies<DISTANCE - 1>();
            publish_copies();
            __syncthreads();
            copy_weights(next, chunk + DISTANCE * 2, p);
            copy_tokens(next, chunk + DISTANCE * 2, p);
            commit_copies();
            multiply(stage, chunk);
            next = stage;
            stage = stage + STAGE == base + STAGES * STAGE ? base : stage + STAGE;
        }
        wait_for_products<0>();
        wait_for_copies<0>();
        __syncthreads();
        spill((float *)memory);
        __syncthreads();
        if (FIRST) write_hidden((const float *)memory, expert, begin, count, p);
        else write_parts((const float *)memory, expert, begin, count, p);
    }
};

template <bool FIRST, int NB>
__device__ __forceinline__ void run_group(int blocks, int expert, int begin, int count, const Product &p) {
    if constexpr (NB < MAX_BLOCKS) {
        if (blocks > NB) return run_group<FIRST, NB + 1>(blocks, expert, begin, count, p);
    }
    Group<FIRST, NB> group;
    group.run(expert, begin, count, p);
}

template <bool FIRST> __device__ __forceinline__ void grouped(const Product &p) {
    if (FIRST) wait_for_inputs();  // before the second product the order is known: two launches lie between
    int expert = p.tile_expert[blockIdx.y];
    if (expert >= p.num_experts) {
        if (!FIRST) wait_for_inputs();
        return;
    }
    int begin = p.tile_begin[blockIdx.y], count = p.tile_end[blockIdx.y] - begin;
    run_group<FIRST, 1>((count + 7) / 8, expert, begin, count, p);
}

#define PARAMETERS                                                                                                      \
    const u8 *weights, const u8 *x, const float *bias, const float *shares, const int *pairs, const int *tile_expert,   \
        const int *tile_begin, const int *tile_end, void *out, int num_experts, int tiles, int chunks, int depth,       \
        int outputs, int top_k, int activation, int has_bias, int is_wide
#define PRODUCT                                                                                                         \
    Product {                                                                                                           \
        weights, x, bias, shares, pairs, tile_expert, tile_begin, tile_end, out, num_experts, tiles, chunks, depth,     \
            outputs, top_k, activation, has_bias, is_wide                                                               \
    }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grouped_up(PARAMETERS) { grouped<true>(PRODUCT); }
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grouped_down(PARAMETERS) { grouped<false>(PRODUCT); }
