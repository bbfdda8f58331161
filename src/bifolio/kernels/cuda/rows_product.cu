// A few rows times a matrix in bf16, by tensor cores, with the operations before and after:
//
//     out = act(norm(x) @ weight.T + bias) + residual          (each part optional)
//
// A group of CLUSTER thread blocks owns every gridDim.x / CLUSTER-th unit of UNIT rows of the weight (gated: half of them
// gates, half their up projections); each thread block multiplies SLICE of its columns. One warp copies them, CHUNK columns
// of a unit at a time, into a ring of STAGES places in shared memory, before the inputs are there: a kernel starts while its
// predecessors run, and its weights arrive meanwhile. Each of WARPS warps multiplies its own columns of every chunk by its
// part of x in registers. The sums of the warps are added in one order for each unit, by one warp after the other; those of
// the thread blocks of a group at the end.
//
// The weight is the left factor of the tensor cores. Column n of the right one is row n of x, in bf16; up to four rows of x
// in f32 take two columns each: n is row n rounded to bf16, n + 4 the remainder: products are those of f32.
//
// Constants: ROWS (of x at most: 4 or 8), DEPTH, SLICE, CHUNK, UNIT (8 or 16), STAGES, WARPS, CLUSTER (1 or 2), IS_NORMED (x is f32
// then), IS_SCALE_WIDE (weights of the norm are f32), ACTIVATION (of a gate; -1: none), HAS_BIAS, IS_BIAS_WIDE, HAS_RESIDUAL,
// IS_RESIDUAL_WIDE (f32), IS_OUT_WIDE, IS_FIRST (the next kernel starts when the inputs are there).
constexpr bool IS_GATED = ACTIVATION >= 0;
constexpr bool IS_SPLIT = IS_NORMED && ROWS <= 4;     // x takes two columns
constexpr int OUTPUTS = IS_GATED ? UNIT / 2 : UNIT;   // of a unit
constexpr int CHUNKS = SLICE / CHUNK;
constexpr int PARTS = CHUNK / (WARPS * 32);           // of a warp's columns of a chunk, 32 each
constexpr int PITCH = CHUNK * 2;                      // copies are fast to places of 128 bytes
constexpr int COPIES = CHUNK < DEPTH ? UNIT : IS_GATED ? 2 : 1;  // of a chunk: whole rows follow each other
constexpr int PLACE_BYTES = UNIT * PITCH;
constexpr int THREADS = WARPS * 32;
constexpr int SUMS = UNIT * ROWS;                     // of a unit
constexpr int PER_LANE = (OUTPUTS * ROWS + 31) / 32;  // outputs of a unit for each lane of a warp
static_assert(SLICE % CHUNK == 0 && CHUNK % (WARPS * 32) == 0 && SLICE * CLUSTER == DEPTH, "columns are divided evenly");
static_assert(CLUSTER == 1 || (CLUSTER == 2 && !IS_NORMED), "a thread block knows the squares of its own columns alone");

__device__ __forceinline__ float number(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float number_at(const void *source, bool is_wide, u64 place) {
    return is_wide ? ((const float *)source)[place] : number(((const u16 *)source)[place]);
}

__device__ __forceinline__ void widen(uint4 all, float (&v)[8]) {
    v[0] = low(all.x), v[1] = high(all.x), v[2] = low(all.y), v[3] = high(all.y);
    v[4] = low(all.z), v[5] = high(all.z), v[6] = low(all.w), v[7] = high(all.w);
}

__device__ __forceinline__ void widen(float4 first, float4 last, float (&v)[8]) {
    v[0] = first.x, v[1] = first.y, v[2] = first.z, v[3] = first.w;
    v[4] = last.x, v[5] = last.y, v[6] = last.z, v[7] = last.w;
}

// The part of x of a lane: 8 columns of every 32 of its warp, of the row of x that its column of the right factor holds.
struct Fragments {
    static constexpr int COUNT = CHUNKS * PARTS, BATCH = 8;  // loads of a batch are in flight together
    uint4 x[COUNT];

    __device__ __forceinline__ static int column(int p) { return (p * WARPS + threadIdx.x / 32) * 32 + threadIdx.x % 4 * 8; }

    __device__ __forceinline__ static u32 pair_of(float first, float second, bool is_remainder) {
        u32 rounded = round_pair(first, second);
        return is_remainder ? round_pair(first - low(rounded), second - high(rounded)) : rounded;
    }

    // Returns this lane's sum of squares, if there is a norm.
    __device__ __forceinline__ float read(const void *source, const void *scales, int slice, int num_rows) {
        int place = threadIdx.x % 32 / 4;
        bool is_remainder = IS_SPLIT && place >= 4;
        int row = is_remainder ? place - 4 : place;
        bool exists = row < num_rows;
        u64 start = (u64)(exists ? row : 0) * DEPTH;
        float square = 0.0f;
#pragma unroll
        for (int first = 0; first < COUNT; first += BATCH) {
            float4 wide[BATCH][2], wide_factors[IS_SCALE_WIDE ? BATCH : 1][2];
            uint4 narrow[BATCH];  // x, or weights of the norm
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (first + i >= COUNT) continue;
                int own = slice * SLICE + (first + i) / PARTS * CHUNK + column((first + i) % PARTS);
                if (IS_NORMED) {
                    const float4 *from = (const float4 *)((const float *)source + start + own);
                    wide[i][0] = from[0], wide[i][1] = from[1];
                    const float4 *factors = (const float4 *)((const float *)scales + own);
                    if (IS_SCALE_WIDE) wide_factors[i][0] = factors[0], wide_factors[i][1] = factors[1];
                    else narrow[i] = *(const uint4 *)((const u16 *)scales + own);
                } else {
                    narrow[i] = *(const uint4 *)((const u16 *)source + start + own);
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (first + i >= COUNT) continue;
                uint4 found = narrow[i];
                if (IS_NORMED) {
                    float v[8], factors[8];
                    widen(wide[i][0], wide[i][1], v);
                    if (IS_SCALE_WIDE) widen(wide_factors[i][0], wide_factors[i][1], factors);
                    else widen(narrow[i], factors);
#pragma unroll
                    for (int j = 0; j < 8; ++j) square = fmaf(v[j], v[j], square), v[j] *= factors[j];
                    found = uint4{pair_of(v[0], v[1], is_remainder), pair_of(v[2], v[3], is_remainder),
                                  pair_of(v[4], v[5], is_remainder), pair_of(v[6], v[7], is_remainder)};
                }
                x[first + i] = exists ? found : uint4{0, 0, 0, 0};
            }
        }
        return exists ? square : 0.0f;
    }

    // Adds the products of chunk C of a unit, which lies at `place`.
    __device__ __forceinline__ void multiply(int c, u32 place, float (&sums)[4][4]) const {
        int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            u32 address = place + row * PITCH + column(p) * 2;
            uint4 upper = shared_load(address), lower{0, 0, 0, 0};
            if (UNIT == 16) lower = shared_load(address + 8 * PITCH);
            u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
            multiply_add(sums[p % 2 * 2], first, x[c * PARTS + p].x, x[c * PARTS + p].y);
            multiply_add(sums[p % 2 * 2 + 1], second, x[c * PARTS + p].z, x[c * PARTS + p].w);
        }
    }

    // Writes the sums of a warp to parts[(row of the weight * ROWS + row of x) * WARPS].
    __device__ __forceinline__ static void write(const float (&sums)[4][4], float *parts) {
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
            if (IS_SPLIT) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 2);
        }
        int row = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (first + i < ROWS) {
                parts[(row * ROWS + first + i) * WARPS] = sum[i];
                if (UNIT == 16) parts[((row + 8) * ROWS + first + i) * WARPS] = sum[i + 2];
            }
    }
};

#if CLUSTER > 1
#define IN_GROUPS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_GROUPS
#endif

extern "C" __global__ void IN_GROUPS __launch_bounds__(THREADS + 32) rows_product(
    const void *x, const u8 *weight, const void *scales, const void *bias, const void *residual, void *out, int outputs,
    int units, int num_rows, float eps) {
    if (!IS_FIRST) launch_dependents();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, groups = gridDim.x / CLUSTER, group = blockIdx.x / CLUSTER;
    int slice = blockIdx.x % CLUSTER, count = (units - group + groups - 1) / groups;
    u32 ring = shared_address(memory), full = ring + STAGES * PLACE_BYTES, empty = full + STAGES * 8;
    float *squares = (float *)(memory + STAGES * PLACE_BYTES + STAGES * 16);  // [WARPS, 8]
    float *parts = squares + WARPS * 8;                                     // [2, SUMS, WARPS], of units in turns
    float *own = parts + 2 * SUMS * WARPS, *others = own + count * SUMS;       // [count, SUMS] of a group of two

    // By all lanes of the last warp.
    auto fetch = [&](int i) {
        u32 place = ring + i % STAGES * PLACE_BYTES, barrier = full + i % STAGES * 8;
        int first = lane * (UNIT / COPIES);
        u64 row = (u64)(group + i / CHUNKS * groups) * OUTPUTS + (first < OUTPUTS ? first : outputs + first - OUTPUTS);
        if (lane == 0) expect_bytes(barrier, UNIT * CHUNK * 2);
        __syncwarp();
        const u8 *source = weight + (row * DEPTH + slice * SLICE + i % CHUNKS * CHUNK) * 2;
        if (lane < COPIES) copy_bulk(place + first * PITCH, source, UNIT / COPIES * PITCH, barrier);
    };
    if (warp == WARPS) {
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) start_barrier(full + i * 8, 1), start_barrier(empty + i * 8, WARPS);
            fence_barriers();
        }
        __syncwarp();
        for (int i = 0; i < STAGES && i < count * CHUNKS; ++i) fetch(i);
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();
    if (warp == WARPS) {
        for (int i = STAGES; i < count * CHUNKS; ++i) {
            wait_barrier(empty + i % STAGES * 8, (i / STAGES - 1) & 1);
            fetch(i);
        }
        if (CLUSTER > 1) cluster_wait(), cluster_arrive(), cluster_wait();
        return;
    }

    Fragments part;
    wait_inputs();
    if (IS_FIRST) launch_dependents();
    float square = part.read(x, scales, slice, num_rows);
    if (IS_NORMED) {
        square += __shfl_xor_sync(0xFFFFFFFFu, square, 1);
        square += __shfl_xor_sync(0xFFFFFFFFu, square, 2);
        if (lane % 4 == 0) squares[warp * 8 + lane / 4] = square;
    }
    auto exists = [&](int item) { return item < OUTPUTS * num_rows; };  // of the outputs of a unit, row of x by row of x
    auto place_of = [&](int unit, int item) {  // of an output, in `out` and `residual`
        return (u64)(item / OUTPUTS) * outputs + (u64)(group + unit * groups) * OUTPUTS + item % OUTPUTS;
    };
    auto finish = [&](int unit, int item, float result, float up, float added) {
        int row = item / OUTPUTS, output = (group + unit * groups) * OUTPUTS + item % OUTPUTS;
        if (IS_NORMED) {
            float all = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) all += squares[w * 8 + row];
            float factor = rsqrtf(all / DEPTH + eps);
            result *= factor, up *= factor;
        }
        if (HAS_BIAS) result += number_at(bias, IS_BIAS_WIDE, output);
        if (IS_GATED) {
            if (HAS_BIAS) up += number_at(bias, IS_BIAS_WIDE, outputs + output);
            result = gated(result, up, ACTIVATION);
        }
        if (HAS_RESIDUAL) result += added;
        if (IS_OUT_WIDE) ((float *)out)[place_of(unit, item)] = result;
        else ((u16 *)out)[place_of(unit, item)] = round_pair(result, 0.0f);
    };
    if (CLUSTER > 1) cluster_wait();  // the other thread block runs: it can be written to
    for (int unit = 0; unit < count; ++unit) {
        bool finishes = warp == unit % WARPS;
        float added[PER_LANE] = {};
        if (CLUSTER == 1 && HAS_RESIDUAL && finishes)
#pragma unroll
            for (int k = 0; k < PER_LANE; ++k)
                if (exists(lane + k * 32)) added[k] = number_at(residual, IS_RESIDUAL_WIDE, place_of(unit, lane + k * 32));
        float sums[4][4] = {};  // independent sums
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int i = unit * CHUNKS + c;
            wait_barrier(full + i % STAGES * 8, (i / STAGES) & 1);
            part.multiply(c, ring + i % STAGES * PLACE_BYTES, sums);
            __syncwarp();
            if (lane == 0) arrive(empty + i % STAGES * 8);
        }
        float *sent = parts + unit % 2 * SUMS * WARPS;
        Fragments::write(sums, sent + warp);
        sync_threads<THREADS>();
        if (!finishes) continue;
        auto total = [&](int place) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += sent[place * WARPS + w];
            return sum;
        };
        if (CLUSTER > 1) {
            for (int place = lane; place < SUMS; place += 32) {
                if (unit % CLUSTER == slice) own[unit * SUMS + place] = total(place);
                else peer_store(others + unit * SUMS + place, 1 - slice, total(place));
            }
            continue;
        }
#pragma unroll
        for (int k = 0; k < PER_LANE; ++k) {
            int item = lane + k * 32, place = item % OUTPUTS * ROWS + item / OUTPUTS;
            if (exists(item)) finish(unit, item, total(place), IS_GATED ? total(place + OUTPUTS * ROWS) : 0.0f, added[k]);
        }
    }
    if (CLUSTER == 1) return;
    cluster_arrive(), cluster_wait();
    sync_threads<THREADS>();
    for (int each = threadIdx.x; each < count * OUTPUTS * ROWS; each += THREADS) {
        int unit = each / (OUTPUTS * ROWS), item = each % (OUTPUTS * ROWS), place = item % OUTPUTS * ROWS + item / OUTPUTS;
        if (unit % CLUSTER != slice || !exists(item)) continue;
        const float *mine = own + unit * SUMS + place, *theirs = others + unit * SUMS + place;
        float added = HAS_RESIDUAL ? number_at(residual, IS_RESIDUAL_WIDE, place_of(unit, item)) : 0.0f;
        float up = IS_GATED ? mine[OUTPUTS * ROWS] + theirs[OUTPUTS * ROWS] : 0.0f;
        finish(unit, item, mine[0] + theirs[0], up, added);
    }
}
