// A row times a matrix in bf16, or in FP8 (E4M3) with a scale for each row, with the operations before and after:
//
//     out = act(norm(x) @ weight.T + bias + changes of an adapter) + residual          (each part optional)
//
// A thread block owns every gridDim.x-th unit of UNIT rows (gated: half of them gates, half their up projections). One
// warp copies units into a ring of STAGES units in shared memory by bulk copies, before the inputs are there: a kernel
// starts while its predecessors run, and its weights arrive meanwhile. Each of WARPS warps multiplies its own columns of
// every row by its part of x in registers; the sums of the warps are added at the end, always in the same order.
//
// Experts that a token chose, CHOICES of them: gated products write the hidden values of all of them, times their shares of
// the sum; the others multiply these values, whose segments belong to one expert each, by rows of all of their matrices. The
// weights of the second product arrive while the first one runs, since the choice is complete when a first product starts.
//
// Constants: DEPTH, UNIT, STAGES, WARPS, BY_TENSOR (by tensor cores: UNIT is 8 or 16), IS_NORMED (x is f32 then if BY_TENSOR),
// IS_SCALE_WIDE (weights of the norm are f32), ACTIVATION (of a gate; -1: none), IS_X_WIDE, HAS_BIAS, IS_BIAS_WIDE,
// HAS_RESIDUAL, IS_RESIDUAL_WIDE (f32), IS_OUT_WIDE, IS_FP8, IS_FIRST (the next kernel starts when the inputs are there),
// CHOICES (0: no experts), THIN_WIDTH, THIN_PARTS, AIDES (`row_changes.cu`).
constexpr bool IS_GATED = ACTIVATION >= 0;
constexpr bool IS_UP = CHOICES > 0 && IS_GATED, IS_DOWN = CHOICES > 0 && !IS_GATED;  // of experts
constexpr int OUTPUTS = IS_GATED ? UNIT / 2 : UNIT;             // of a unit
constexpr int SEGMENT = IS_DOWN ? DEPTH / CHOICES : DEPTH;      // columns of a matrix
constexpr int BYTES = IS_FP8 ? 1 : 2;                            // of a weight
constexpr int ROW_BYTES = SEGMENT * BYTES;
constexpr int PITCH = BY_TENSOR && DEPTH % 64 == 0 ? ROW_BYTES + 64 : ROW_BYTES;  // fragments of two rows: all banks
constexpr int UNIT_BYTES = UNIT * PITCH * (DEPTH / SEGMENT);
constexpr int THREADS = WARPS * 32, ALL_THREADS = THREADS + (IS_ADAPTED ? AIDE_THREADS : 0);  // that add the results

__device__ __forceinline__ float number(u16 bits) { return __uint_as_float((u32)bits << 16); }

template <int N> struct Values {
    float v[N];

    template <bool IS_WIDE> __device__ __forceinline__ void read(const void *source, int column) {
#pragma unroll
        for (int i = 0; i < N; i += 4)
            if (IS_WIDE) {
                float4 four = *(const float4 *)((const float *)source + column + i);
                v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
            } else {
                uint2 four = *(const uint2 *)((const u16 *)source + column + i);
                v[i] = low(four.x), v[i + 1] = high(four.x), v[i + 2] = low(four.y), v[i + 3] = high(four.y);
            }
    }

    // Multiplies by the weights of the norm; returns the sum of the squares before.
    __device__ __forceinline__ float scale(const Values &factors) {
        float square = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) square = fmaf(v[i], v[i], square), v[i] *= factors.v[i];
        return square;
    }
};

// The part of x of a lane that multiplies and adds: VECTOR columns of each span of its warp.
struct Lanes {
    static constexpr int VECTOR = DEPTH % (WARPS * 256) == 0 ? 8 : 4, SPAN = 32 * VECTOR;
    static constexpr int PARTS = (DEPTH + WARPS * SPAN - 1) / (WARPS * SPAN);
    Values<VECTOR> x[PARTS], factors[IS_NORMED ? PARTS : 1];

    __device__ __forceinline__ static int column(int p) {
        return (p * WARPS + threadIdx.x / 32) * SPAN + threadIdx.x % 32 * VECTOR;
    }
    __device__ __forceinline__ static bool exists(int p) { return DEPTH % (WARPS * SPAN) == 0 || column(p) < DEPTH; }
    __device__ __forceinline__ static u32 place(int p) {  // in a unit
        return column(p) / SEGMENT * (UNIT * PITCH) + column(p) % SEGMENT * BYTES;
    }

    __device__ __forceinline__ void read_factors(const void *source) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            if (exists(p)) factors[p].read<IS_SCALE_WIDE>(source, column(p));
    }

    // Returns this lane's sum of squares, if there is a norm.
    __device__ __forceinline__ float read(const void *source) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            x[p] = Values<VECTOR>{};
            if (exists(p)) x[p].read<IS_X_WIDE>(source, column(p));
        }
        float square = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            if (IS_NORMED && exists(p)) square += x[p].scale(factors[p]);
        return square;
    }

    __device__ __forceinline__ static float multiply_row(const Values<VECTOR> &x, u32 address, float sum) {
        u32 words[VECTOR / 2];
        if (IS_FP8) {
            uint2 found{0, 0};
            if (VECTOR == 8) found = shared_pair(address);
            else found.x = shared_word(address);
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) {
                float2 two = fp8_pair((i < 4 ? found.x : found.y) >> (i % 4 * 8));
                sum = fmaf(two.y, x.v[i + 1], fmaf(two.x, x.v[i], sum));
            }
            return sum;
        }
        if (VECTOR == 8) {
            uint4 found = shared_load(address);
            words[0] = found.x, words[1] = found.y, words[VECTOR / 2 - 2] = found.z, words[VECTOR / 2 - 1] = found.w;
        } else {
            uint2 found = shared_pair(address);
            words[0] = found.x, words[1] = found.y;
        }
#pragma unroll
        for (int i = 0; i < VECTOR / 2; ++i)
            sum = fmaf(high(words[i]), x.v[2 * i + 1], fmaf(low(words[i]), x.v[2 * i], sum));
        return sum;
    }

    // Adds the products of a unit at `slot` over the lanes, and writes them to sums[row * WARPS].
    __device__ __forceinline__ void multiply(u32 slot, float *sums) const {
        float sum[UNIT] = {};
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            if (exists(p))
#pragma unroll
                for (int r = 0; r < UNIT; ++r) sum[r] = multiply_row(x[p], slot + place(p) + r * PITCH, sum[r]);
        // Each exchange halves the rows of a lane.
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = UNIT, mask = 16; n > 1; n /= 2, mask /= 2)
#pragma unroll
            for (int i = 0; i < n / 2; ++i) {
                float kept = lane & mask ? sum[i + n / 2] : sum[i], sent = lane & mask ? sum[i] : sum[i + n / 2];
                sum[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, mask);
            }
#pragma unroll
        for (int mask = 16 / UNIT; mask > 0; mask /= 2) sum[0] += __shfl_xor_sync(0xFFFFFFFFu, sum[0], mask);
        if (lane % (32 / UNIT) == 0) sums[lane / (32 / UNIT) * WARPS] = sum[0];
    }
};

// The part of x of a lane that feeds tensor cores: 8 columns of every chunk of 32 of its warp, twice two fragments. Column 0
// of the right factor is x rounded to bf16, column 1 the remainder, so that products are those of x in f32.
struct Fragments {
    static constexpr int PARTS = (DEPTH + WARPS * 32 - 1) / (WARPS * 32);
    static_assert(PARTS > 0, "an array has at least one element, also where this struct is not used");
    uint4 x[PARTS];
    Values<8> factors[IS_NORMED ? PARTS : 1];

    __device__ __forceinline__ static int column(int p) {
        return (p * WARPS + threadIdx.x / 32) * 32 + threadIdx.x % 4 * 8;
    }
    __device__ __forceinline__ static bool exists(int p) { return DEPTH % (WARPS * 32) == 0 || column(p) < DEPTH; }
    __device__ __forceinline__ static bool feeds() { return threadIdx.x % 32 < (IS_X_WIDE ? 8 : 4); }

    __device__ __forceinline__ void read_factors(const void *source) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            if (feeds() && exists(p)) factors[p].read<IS_SCALE_WIDE>(source, column(p));
    }

    __device__ __forceinline__ static u32 pair_of(float first, float second) {
        u32 rounded = round_pair(first, second);
        return threadIdx.x % 32 < 4 ? rounded : round_pair(first - low(rounded), second - high(rounded));
    }

    __device__ __forceinline__ float read(const void *source) {
        float square = 0.0f;
        if (IS_X_WIDE) {
            Values<8> wide[PARTS];
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                wide[p] = Values<8>{};
                if (feeds() && exists(p)) wide[p].read<true>(source, column(p));
            }
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (IS_NORMED && feeds() && exists(p)) square += wide[p].scale(factors[p]);
                const float *v = wide[p].v;
                x[p] = uint4{pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7])};
            }
        } else {
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                x[p] = uint4{0, 0, 0, 0};
                if (feeds() && exists(p)) x[p] = *(const uint4 *)((const u16 *)source + column(p));
            }
        }
        return threadIdx.x % 32 < 4 ? square : 0.0f;
    }

    __device__ __forceinline__ void multiply(u32 slot, float *sums) const {
        float c[4][4] = {};  // independent sums
        int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (DEPTH % (WARPS * 32) && (p * WARPS + threadIdx.x / 32) * 32 >= DEPTH) continue;
            u32 address = slot + row * PITCH + column(p) * 2;
            uint4 upper = shared_load(address), lower{0, 0, 0, 0};
            if (UNIT == 16) lower = shared_load(address + 8 * PITCH);
            u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
            multiply_add(c[p % 2 * 2], first, x[p].x, x[p].y);
            multiply_add(c[p % 2 * 2 + 1], second, x[p].z, x[p].w);
        }
        if (threadIdx.x % 4) return;
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
        sums[row * WARPS] = sum[0] + sum[1];
        if (UNIT == 16) sums[(row + 8) * WARPS] = sum[2] + sum[3];
    }
};

template <bool CONDITION, class A, class B> struct Either {
    typedef A type;
};
template <class A, class B> struct Either<false, A, B> {
    typedef B type;
};

extern "C" __global__ void __launch_bounds__(ALL_THREADS + 32) row_product(
    const void *x, const u8 *weight, const void *scales, const void *bias, const void *residual, const int *experts,
    const float *shares, void *out, int outputs, int units, float eps, const float *row_scales,
    const u16 *base, const long long *table, const int *groups, const int *starts, float *thin_sums, int *arrivals,
    int first_entry, int num_entries, int helpers) {
    if (!IS_FIRST) launch_dependents();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = (units - (int)blockIdx.x + gridDim.x - 1) / gridDim.x;
    u32 ring = shared_address(memory), full = ring + STAGES * UNIT_BYTES, empty = full + STAGES * 8;
    float *squares = (float *)(memory + STAGES * UNIT_BYTES + STAGES * 16), *sums = squares + WARPS;  // [count, UNIT, WARPS]
    float *changes = sums + count * UNIT * WARPS, *biases = changes + count * UNIT;  // [count, UNIT]

    // By all lanes of the last warp. Units of padded rows are copied row by row, others at once (gated: in two copies).
    int chosen = 0, per_expert = outputs / OUTPUTS;  // expert of choice `lane`; units of an expert
    auto copy = [](u32 target, const u8 *source, u32 bytes, u32 barrier) {
        if (CHOICES) copy_passing(target, source, bytes, barrier);
        else copy_bulk(target, source, bytes, barrier);
    };
    auto fetch = [&](int i) {
        u32 slot = ring + i % STAGES * UNIT_BYTES, barrier = full + i % STAGES * 8;
        int unit = blockIdx.x + i * gridDim.x;
        if (lane == 0) expect_bytes(barrier, UNIT * DEPTH * BYTES);
        __syncwarp();
        if (IS_DOWN) {
            const u8 *rows = weight + ((u64)chosen * outputs + unit * UNIT) * ROW_BYTES;
            if (lane < CHOICES) copy(slot + lane * UNIT * PITCH, rows, UNIT * ROW_BYTES, barrier);
            return;
        }
        u64 row = (u64)unit * OUTPUTS;
        if (IS_UP) row += (u64)outputs * (2 * __shfl_sync(0xFFFFFFFFu, chosen, unit / per_expert) - unit / per_expert);
        const u8 *source = weight + row * ROW_BYTES;
        constexpr int COPIES = PITCH == ROW_BYTES ? (IS_GATED ? 2 : 1) : UNIT, ROWS = UNIT / COPIES;
        u64 first = lane * ROWS < OUTPUTS ? lane * ROWS : (u64)outputs + lane * ROWS - OUTPUTS;
        if (lane < COPIES) copy(slot + lane * ROWS * PITCH, source + first * ROW_BYTES, ROWS * ROW_BYTES, barrier);
    };
    if (warp == WARPS) {
        if (lane == 0) {
#pragma unroll
            for (int i = 0; i < STAGES; ++i) start_barrier(full + i * 8, 1), start_barrier(empty + i * 8, WARPS);
            fence_barriers();
        }
        __syncwarp();
        if (IS_DOWN && lane < CHOICES) chosen = experts[lane];
        for (int i = 0; !IS_UP && i < STAGES && i < count; ++i) fetch(i);
    }
    __syncthreads();
    if (warp == WARPS) {
        if (IS_UP) {
            wait_inputs();
            if (lane < CHOICES) chosen = experts[lane];
            for (int i = 0; i < STAGES && i < count; ++i) fetch(i);
        }
        for (int i = STAGES; i < count; ++i) {
            wait_barrier(empty + i % STAGES * 8, (i / STAGES - 1) & 1);
            fetch(i);
        }
        return;
    }
    if (IS_ADAPTED && warp > WARPS) {
        find_changes(
            x, scales, base, table, groups, starts, thin_sums, arrivals, first_entry, num_entries, helpers, count,
            biases + count * UNIT, changes, biases);
        sync_threads<ALL_THREADS>();
        return;
    }

    Either<BY_TENSOR, Fragments, Lanes>::type part;
    if (IS_NORMED) part.read_factors(scales);
    int own = threadIdx.x, own_output = (blockIdx.x + own / OUTPUTS * gridDim.x) * OUTPUTS + own % OUTPUTS;
    float own_scale = 1.0f, up_scale = 1.0f;
    if (IS_FP8 && own < count * OUTPUTS) {
        own_scale = row_scales[own_output];
        if (IS_GATED) up_scale = row_scales[outputs + own_output];
    }
    wait_inputs();
    if (IS_FIRST) launch_dependents();
    float square = part.read(x), added = 0.0f;
    auto residual_of = [&](int place) {
        return IS_RESIDUAL_WIDE ? ((const float *)residual)[place] : number(((const u16 *)residual)[place]);
    };
    if (HAS_RESIDUAL && own < count * OUTPUTS) added = residual_of(own_output);
    if (IS_NORMED) {
#pragma unroll
        for (int mask = BY_TENSOR ? 2 : 16; mask > 0; mask /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, mask);
        if (lane == 0) squares[warp] = square;
    }
    for (int i = 0; i < count; ++i) {
        wait_barrier(full + i % STAGES * 8, (i / STAGES) & 1);
        part.multiply(ring + i % STAGES * UNIT_BYTES, sums + i * UNIT * WARPS + warp);
        if (count > STAGES) {
            __syncwarp();
            if (lane == 0) arrive(empty + i % STAGES * 8);
        }
    }
    sync_threads<ALL_THREADS>();
    float factor = 1.0f;
    if (IS_NORMED) {
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) all += squares[w];
        factor = rsqrtf(all / DEPTH + eps);
    }
    auto bias_of = [&](int place) {
        return IS_BIAS_WIDE ? ((const float *)bias)[place] : number(((const u16 *)bias)[place]);
    };
    for (; own < count * OUTPUTS; own += THREADS) {
        int output = (blockIdx.x + own / OUTPUTS * gridDim.x) * OUTPUTS + own % OUTPUTS;
        const float *from = sums + (own / OUTPUTS * UNIT + own % OUTPUTS) * WARPS;
        float result = 0.0f, up = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) result += from[w];
        result *= factor;
        if (IS_FP8) result *= own == threadIdx.x ? own_scale : row_scales[output];
        int change = own / OUTPUTS * UNIT + own % OUTPUTS;
        if (IS_ADAPTED) result += changes[change] * factor + biases[change];
        if (HAS_BIAS) result += bias_of(output);
        if (IS_GATED) {
#pragma unroll
            for (int w = 0; w < WARPS; ++w) up += from[OUTPUTS * WARPS + w];
            up *= factor;
            if (IS_FP8) up *= own == threadIdx.x ? up_scale : row_scales[outputs + output];
            if (IS_ADAPTED) up += changes[change + OUTPUTS] * factor + biases[change + OUTPUTS];
            if (HAS_BIAS) up += bias_of(outputs + output);
            result = gated(result, up, ACTIVATION);
            if (IS_UP) result *= shares[(blockIdx.x + own / OUTPUTS * gridDim.x) / per_expert];
        }
        if (HAS_RESIDUAL) result += own == threadIdx.x ? added : residual_of(output);
        if (IS_OUT_WIDE) ((float *)out)[output] = result;
        else ((u16 *)out)[output] = round_pair(result, 0.0f);
    }
}
