// Products of few tokens: each pair of a token and an expert alone. A warp reads one tile (16 rows), several warps divide
// its columns, and the result of every one of the 8 columns of an instruction is the same.
//
// Codes are multiplied as numbers over 2 ** 126, by tokens times 2 ** 100 so that products are no subnormal numbers; sums
// of 32 columns are multiplied by their scale.
#ifndef AHEAD
#define AHEAD 4  // pairs of chunks that a warp has in flight
#endif
constexpr u32 LIFT = 0x71807180u;  // 2 ** 100, a pair of bf16

// The scale in byte BYTE, in f32, times 2 ** 26.
template <int BYTE> __device__ __forceinline__ float scale_of(u32 scales) {
    return __uint_as_float(__byte_perm(scales, 0, 0x4440 + BYTE) * 0x800000u - (100u << 23));
}

// Pairs of chunks of one warp in flight in shared memory: number `split` of its tile, then every `splits`-th. A second
// chunk that does not exist is zero.
struct Ring {
    const u8 *source;
    u32 first, step;
    int lane, chunk, chunks, stride;

    __device__ __forceinline__ Ring(const u8 *tile, u32 memory, int split, int splits, int chunks)
        : source(tile + (u64)split * 2 * GROUP), first(memory), step(splits * 2 * GROUP), lane(threadIdx.x % 32),
          chunk(split * 2), chunks(chunks), stride(splits * 2) {}

    __device__ __forceinline__ void fill(u32 slot) {
        u32 bytes = chunk < chunks ? 16 : 0, next_bytes = chunk + 1 < chunks ? 16 : 0;
        copy_async(slot + lane * 16, source + lane * 16, bytes);
        copy_async(slot + CHUNK + lane * 16, source + GROUP + lane * 16, next_bytes);
        if (lane < 4)
            copy_async(slot + lane / 2 * CHUNK + CODES + lane % 2 * 16, source + lane / 2 * GROUP + CODES + lane % 2 * 16,
                       lane < 2 ? bytes : next_bytes);
        commit_copies();
        source += step, chunk += stride;
    }

    __device__ __forceinline__ void start() {
#pragma unroll
        for (int i = 0; i < AHEAD - 1; ++i) fill(first + i * 2 * CHUNK);
    }

    // Adds the products of 32 columns: words 2 h and 2 h + 1 of a chunk.
    __device__ __forceinline__ static void add(float (&sums)[2], u32 word, u32 next, uint4 x, float scale, float second) {
        float products[4] = {};
        u32 a[4];
        unpack_codes(word, a), multiply_add(products, a, x.x, x.y);
        unpack_codes(next, a), multiply_add(products, a, x.z, x.w);
        sums[0] += products[0] * scale, sums[1] += products[2] * second;
    }

    // Products of rows g and g + 8 with a token whose chunks lie at `x`.
    __device__ __forceinline__ void multiply(float (&sums)[2], u32 x, int split) {
        float parts[2][2] = {};
        x += split * 256 + lane / 8 * 16;
        u32 slot = first, last = first + (AHEAD - 1) * 2 * CHUNK, end = first + AHEAD * 2 * CHUNK;
#pragma unroll 2
        for (int i = split * 2; i < chunks; i += stride) {
            wait_for_copies<AHEAD - 2>();
            __syncwarp();
            fill(last);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                uint4 words = shared_load(slot + c * CHUNK + lane * 16);
                u32 scales = shared_word(slot + c * CHUNK + CODES + lane / 4 * 4);
                uint4 low = load_matrices(x + c * 128), high = load_matrices(x + c * 128 + 64);
                add(parts[0], words.x, words.y, low, scale_of<0>(scales), scale_of<1>(scales));
                add(parts[1], words.z, words.w, high, scale_of<2>(scales), scale_of<3>(scales));
            }
            x += stride * 128;
            last = slot;
            slot = slot + 2 * CHUNK == end ? first : slot + 2 * CHUNK;
        }
        sums[0] = parts[0][0] + parts[1][0], sums[1] = parts[0][1] + parts[1][1];
    }
};

// Copies rows of `depth` bf16, times 2 ** 100, to shared memory; each is padded with zeros to pairs of chunks. Every
// thread has four loads in flight.
__device__ __forceinline__ void stage_rows(u8 *target, const u8 *source, int rows, int depth, int chunks) {
    int pieces = (chunks + 1) / 2 * 16, used = depth / 8, all = rows * pieces;
    for (int first = threadIdx.x; first < all; first += 4 * blockDim.x) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int piece = first + i * blockDim.x, row = piece / pieces, at = piece - row * pieces;
            v[i] = uint4{0, 0, 0, 0};
            if (row < rows && at < used) v[i] = ((const uint4 *)source)[row * used + at];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first + i * blockDim.x < all)
                ((uint4 *)target)[first + i * blockDim.x] = uint4{multiply_pair(v[i].x, LIFT), multiply_pair(v[i].y, LIFT),
                                                                  multiply_pair(v[i].z, LIFT), multiply_pair(v[i].w, LIFT)};
    }
}

// Sums of a warp for its 16 rows.
__device__ __forceinline__ void keep(float *parts, float first, float second) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane % 4 == 0) parts[warp * 16 + lane / 4] = first, parts[warp * 16 + 8 + lane / 4] = second;
}

// act(gate x) * (up x) of pair blockIdx.y. Warps: tile, split.
extern "C" __global__ void __launch_bounds__(256) few_up(
    const u8 *weights, const u8 *x, const float *bias, const int *experts, u16 *hidden, int tiles, int chunks, int depth,
    int outputs, int top_k, int splits, int activation, int has_bias, int is_early) {
    int warp = threadIdx.x / 32, pair = blockIdx.y, num_warps = blockDim.x / 32;
    int per_block = num_warps / splits, split = warp % splits;
    int tile = min(blockIdx.x * per_block + warp / splits, tiles - 1);
    int output = blockIdx.x * per_block * 8 + threadIdx.x, row = (chunks + 1) / 2 * 256;  // bytes of a token
    bool writes = threadIdx.x < per_block * 8 && output < outputs;
    u32 rings = shared_address(memory) + row;
    if (!is_early) wait_for_inputs();
    int expert = experts[pair];
    Ring ring(tile_of(weights, expert, tile, tiles, chunks), rings + warp * AHEAD * 2 * CHUNK, split, splits, chunks);
    ring.start();
    float gate = 0.0f, up = 0.0f;
    if (writes && has_bias) {
        gate = bias[(u64)expert * 2 * outputs + output];
        up = bias[((u64)expert * 2 + 1) * outputs + output];
    }
    if (is_early) wait_for_inputs();
    stage_rows(memory, x + (u64)(pair / top_k) * depth * 2, 1, depth, chunks);
    __syncthreads();
    float sums[2], *parts = (float *)(memory + row + num_warps * AHEAD * 2 * CHUNK);
    ring.multiply(sums, shared_address(memory), split);
    keep(parts, sums[0], sums[1]);
    __syncthreads();
    if (!writes) return;
    for (int i = 0; i < splits; ++i) {
        const float *from = parts + (threadIdx.x / 8 * splits + i) * 16 + threadIdx.x % 8;
        gate += from[0], up += from[8];
    }
    hidden[(u64)pair * outputs + output] = round_pair(gated(gate, up, activation), 0.0f);
}

// 16 outputs of the weighted sum of the experts of token blockIdx.y. Warps: choice, split.
extern "C" __global__ void __launch_bounds__(512, 2) few_down(
    const u8 *weights, const u8 *hidden, const float *bias, const int *experts, const float *shares,
    const float *residual, void *out, int tiles, int chunks, int depth, int outputs, int top_k, int splits, int has_bias,
    int has_residual, int is_wide) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, choice = warp / splits, split = warp % splits;
    int pair = blockIdx.y * top_k, row = (chunks + 1) / 2 * 256;  // bytes of a token
    int own = blockIdx.x * 16 + lane / 4, output = blockIdx.x * 16 + threadIdx.x;
    u64 place = (u64)blockIdx.y * outputs + output;
    bool writes = threadIdx.x < 16 && output < outputs;
    u32 rings = shared_address(memory) + top_k * row;
    int expert = experts[pair + choice];  // of the routing, more than one launch before
    Ring ring(tile_of(weights, expert, blockIdx.x, tiles, chunks), rings + warp * AHEAD * 2 * CHUNK, split, splits, chunks);
    ring.start();
    float share = shares[pair + choice], first = 0.0f, second = 0.0f;
    if (has_bias && split == 0) {
        if (own < outputs) first = bias[(u64)expert * outputs + own];
        if (own + 8 < outputs) second = bias[(u64)expert * outputs + own + 8];
    }
    wait_for_inputs();
    float total = writes && has_residual ? residual[place] : 0.0f;
    stage_rows(memory, hidden + (u64)pair * depth * 2, top_k, depth, chunks);
    __syncthreads();
    float sums[2], *parts = (float *)(memory + top_k * row + blockDim.x / 32 * AHEAD * 2 * CHUNK);
    ring.multiply(sums, shared_address(memory) + choice * row, split);
    keep(parts, (sums[0] + first) * share, (sums[1] + second) * share);
    __syncthreads();
    if (!writes) return;
    float sum = 0.0f;
    for (int i = 0; i < blockDim.x / 32; ++i) sum += parts[i * 16 + threadIdx.x];
    total += sum;
    if (is_wide) ((float *)out)[place] = total;
    else ((u16 *)out)[place] = round_pair(total, 0.0f);
}
