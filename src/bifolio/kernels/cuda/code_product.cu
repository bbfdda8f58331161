// Several rows times a matrix in codes with scales of groups of columns (layouts: `triton/row_layouts.py`), by tensor cores:
//
//     out = act(x @ weight.T + bias) + residual          (each part optional)
//
// Weights are the left factor. A thread block owns TILE rows of the weight (gated: 8 gates, then their 8 up projections, and
// so on) and ROWS rows of x; the thread blocks of a cluster divide the columns. Stages of COLUMNS columns are copied to shared
// memory, those of weights before the inputs are there. Of the warps, ACROSS divide the rows of the weight, the others the
// columns of a stage, 128 at a time. Sums are added at the end, always in the same order.
//
// Lane 4 g + t multiplies columns 32 t to 32 t + 31 of rows g and g + 8 of a tile: the columns of x that an instruction takes
// from a lane are those of its codes, so neither is moved between lanes. Bytes of codes become bf16 by one permutation:
//
//     0x43 and code   128 + code, of up to 7 bits        the number: that - (128 + ZERO), times scale, + offset
//
// Scales and offsets are rounded to bf16, as the numbers are. Parts of 16 bytes are placed so that neighbouring lanes read
// different banks.
//
// Constants: LOW, HIGH, GROUP, SCALES, ZERO (of the layout), ROWS, TILES (of 16 rows, of a warp), WARPS, ACROSS, STAGES,
// CLUSTER, ACTIVATION (of a gate; -1: none), IS_OUT_WIDE, IS_BIAS_WIDE, IS_RESIDUAL_WIDE.
constexpr bool IS_GATED = ACTIVATION >= 0;
constexpr int ALONG = WARPS / ACROSS, THREADS = WARPS * 32;
constexpr int TILE = 16 * TILES * ACROSS, OUTPUTS = IS_GATED ? TILE / 2 : TILE, COLUMNS = 128 * ALONG;
constexpr int GROUP_BYTES = SCALES == HALF_PAIRS ? 4 : SCALES == SIGNED_BYTES ? 1 : 2;
constexpr int FACTOR_BYTES = COLUMNS / GROUP * GROUP_BYTES, FACTOR_PART = FACTOR_BYTES < 16 ? FACTOR_BYTES : 16;
constexpr bool HAS_TOPS = SCALES == BYTE_PAIRS || SCALES == SIGNED_BYTES, HAS_OFFSETS = SCALES == HALF_PAIRS || SCALES == BYTE_PAIRS;
constexpr int TOP_BYTES = HAS_TOPS ? COLUMNS / 256 * 4 : 0;
constexpr int LOW_AT = ALONG * ROWS * 256, UPPER_AT = LOW_AT + ALONG * TILE * 16 * LOW;  // in a stage
constexpr int FACTORS_AT = UPPER_AT + ALONG * TILE * 16 * HIGH, OWN_TOPS_AT = FACTORS_AT + TILE * FACTOR_BYTES;
constexpr int STAGE_BYTES = OWN_TOPS_AT + TILE * TOP_BYTES;
constexpr int SUM_PITCH = TILE + 4;  // of the sums of a row of x
constexpr int HALVES_OF_GROUPS = GROUP == 16 ? 2 : 1;  // groups of 32 columns

struct Matrix {
    const u8 *rows;
    int depth, row_bytes, high_at, scales_at, tops_at, outputs, first;  // output of this thread block
};

// 32 columns of a row.
struct Line {
    u32 low[LOW], high[HIGH ? HIGH : 1], scale[HALVES_OF_GROUPS], offset[HALVES_OF_GROUPS];

    // Columns of lane t of 128, number `part` in a stage, of row `m` of the tile.
    __device__ __forceinline__ void read(u32 stage, int part, int m, int t) {
        u32 source = stage + LOW_AT + (part * TILE + m) * 16 * LOW;
        if (LOW == 2) {
            uint2 found = shared_pair(source + t * 8);
            low[0] = found.x, low[1] = found.y;
        } else {
#pragma unroll
            for (int i = 0; i < LOW / 4; ++i) {
                int place = LOW == 8 ? (2 * t + i) ^ (m & 1) : t;
                uint4 found = shared_load(source + place * 16);
                low[4 * i] = found.x, low[4 * i + 1] = found.y, low[4 * i + 2] = found.z, low[4 * i + 3] = found.w;
            }
        }
        source = stage + UPPER_AT + (part * TILE + m) * 16 * HIGH;
        if (HIGH == 1) high[0] = shared_word(source + t * 4);
        if (HIGH == 2) {
            uint2 found = shared_pair(source + t * 8);
            high[0] = found.x, high[HIGH - 1] = found.y;
        }
        float top = 1.0f, lowest = 0.0f;
        if (HAS_TOPS) {
            u32 pair = shared_word(stage + OWN_TOPS_AT + m * TOP_BYTES + part / 2 * 4);
            top = half_number(pair & 0xFFFFu);
            if (HAS_OFFSETS) lowest = -half_number(pair >> 16);
        }
#pragma unroll
        for (int i = 0; i < HALVES_OF_GROUPS; ++i) {
            u32 place = stage + FACTORS_AT + m * FACTOR_BYTES + ((part * 128 + t * 32) / GROUP + i) * GROUP_BYTES;
            float own = 0.0f, added = 0.0f;
            if (SCALES == HALVES) own = half_number(shared_half(place));
            if (SCALES == HALF_PAIRS) {
                u32 pair = shared_word(place);
                own = half_number(pair & 0xFFFFu), added = half_number(pair >> 16);
            }
            if (SCALES == BYTE_PAIRS) {
                u32 pair = shared_half(place);
                own = top * (float)(int)(pair & 255u), added = lowest * (float)(int)(pair >> 8);
            }
            if (SCALES == SIGNED_BYTES) own = top * (float)((int)(shared_byte(place) ^ 128u) - 128);
            scale[i] = round_pair(own, own), offset[i] = HAS_OFFSETS ? round_pair(added, added) : 0;
        }
    }

    // BITS bits of the columns 4 j to 4 j + 3 of a plane, from bit TO of each byte on.
    template <int BITS, int TO> __device__ __forceinline__ static u32 bits_of(const u32 *plane, int j) {
        u32 word = plane[j * BITS / 8];
        int from = BITS * j % 8;
        return (from > TO ? word >> (from - TO) : word << (TO - from)) & (((1u << BITS) - 1) * 0x01010101u << TO);
    }

    // The numbers of columns 4 j to 4 j + 3.
    __device__ __forceinline__ void numbers(int j, u32 &first, u32 &second) const {
        u32 codes, base = 0x43434343u, zero = 0x43004300u + ZERO * 0x00010001u, own = zero, next = zero;
        if (LOW == 8) {  // two's complement: seven bits, less 128 where the eighth is set
            u32 sign = low[j] & 0x80808080u;
            codes = low[j] & 0x7F7F7F7Fu, own = __byte_perm(sign, base, 0x4140), next = __byte_perm(sign, base, 0x4342);
        } else {
            codes = bits_of<LOW == 8 ? 4 : LOW, 0>(low, j);
            if (HIGH) codes |= bits_of<HIGH ? HIGH : 1, LOW == 8 ? 0 : LOW>(high, j);
        }
        first = subtract_pair(__byte_perm(codes, base, 0x4140), own);
        second = subtract_pair(__byte_perm(codes, base, 0x4342), next);
        int group = GROUP == 16 ? j / 4 : 0;
        if (HAS_OFFSETS) {
            first = multiply_add_pair(first, scale[group], offset[group]);
            second = multiply_add_pair(second, scale[group], offset[group]);
        } else {
            first = multiply_pair(first, scale[group]), second = multiply_pair(second, scale[group]);
        }
    }
};

// The place of part `c` of 16 (8 columns each) of row n of x.
__device__ __forceinline__ int placed(int c, int n) { return c ^ (c >> 3) ^ (n & 1) << 1; }

// Copies parts of BYTES bytes of rows of the tile to shared memory: PARTS of each row, from `from` on, up to `end`.
template <int BYTES, int PARTS, class Place>
__device__ __forceinline__ void copy_region(const Matrix &matrix, int from, int end, Place place) {
#pragma unroll
    for (int k = 0; k < (TILE * PARTS + THREADS - 1) / THREADS; ++k) {
        int i = k * THREADS + threadIdx.x;
        if (TILE * PARTS % THREADS && i >= TILE * PARTS) break;
        int m = i / PARTS, part = i % PARTS, output = matrix.first + (IS_GATED ? m / 16 * 8 + m % 8 : m);
        int row = IS_GATED && m & 8 ? output + matrix.outputs : output, at = from + part * BYTES;
        bool exists = output < matrix.outputs && at < end;
        copy_async<BYTES>(place(m, part), matrix.rows + (exists ? (u64)row * matrix.row_bytes + at : 0), exists ? BYTES : 0);
    }
}

__device__ __forceinline__ void copy_weights(u32 stage, const Matrix &matrix, int number) {
    copy_region<16, ALONG * LOW>(matrix, number * (COLUMNS * LOW / 8), matrix.high_at, [&](int m, int part) {
        int own = part % LOW;
        return stage + LOW_AT + (part / LOW * TILE + m) * 16 * LOW + (LOW == 8 ? own ^ (m & 1) : own) * 16;
    });
    if (HIGH) {
        constexpr int BITS = HIGH ? HIGH : 1;
        int from = matrix.high_at + number * (COLUMNS * HIGH / 8);
        copy_region<16, ALONG * BITS>(matrix, from, matrix.scales_at, [&](int m, int part) {
            return stage + UPPER_AT + (part / BITS * TILE + m) * 16 * BITS + part % BITS * 16;
        });
    }
    copy_region<FACTOR_PART, FACTOR_BYTES / FACTOR_PART>(
        matrix, matrix.scales_at + number * FACTOR_BYTES, matrix.tops_at,
        [&](int m, int part) { return stage + FACTORS_AT + m * FACTOR_BYTES + part * FACTOR_PART; });
    if (HAS_TOPS)
        copy_region<4, TOP_BYTES ? TOP_BYTES / 4 : 1>(
            matrix, matrix.tops_at + number * TOP_BYTES, matrix.row_bytes,
            [&](int m, int part) { return stage + OWN_TOPS_AT + m * TOP_BYTES + part * 4; });
}

// Copies `count` rows of x, `depth` columns long; zeros take the place of others.
__device__ __forceinline__ void copy_x(u32 stage, const u16 *x, int count, int stride, int depth, int number) {
#pragma unroll
    for (int k = 0; k < (ROWS * 16 * ALONG + THREADS - 1) / THREADS; ++k) {
        int i = k * THREADS + threadIdx.x;
        if (ROWS * 16 * ALONG % THREADS && i >= ROWS * 16 * ALONG) break;
        int n = i / (16 * ALONG), part = i % (16 * ALONG), column = number * COLUMNS + part * 8;
        bool exists = n < count && column < depth;
        copy_async<16>(stage + (part / 16 * ROWS + n) * 256 + placed(part % 16, n) * 16,
                       (const u8 *)(x + (exists ? (u64)n * stride + column : 0)), exists ? 16 : 0);
    }
}

// Adds the products of 128 columns, number `part` of a stage.
__device__ __forceinline__ void multiply(float (&sums)[TILES][ROWS / 8][4], u32 stage, int first, int part) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Line lines[TILES][2];
#pragma unroll
    for (int i = 0; i < TILES; ++i)
        lines[i][0].read(stage, part, first + 16 * i + g, t), lines[i][1].read(stage, part, first + 16 * i + g + 8, t);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        u32 a[TILES][2][4];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                lines[i][0].numbers(j + k, a[i][k][0], a[i][k][2]), lines[i][1].numbers(j + k, a[i][k][1], a[i][k][3]);
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n) {
            uint4 x = shared_load(stage + (part * ROWS + 8 * n + g) * 256 + placed(4 * t + j / 2, g) * 16);
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                multiply_add(sums[i][n], a[i][0], x.x, x.y), multiply_add(sums[i][n], a[i][1], x.z, x.w);
        }
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) code_product(
    const u16 *x, const u8 *weight, const void *bias, const void *residual, void *out, int num_rows, int outputs, int x_stride,
    int residual_stride, int out_stride, int depth, int row_bytes, int high_at, int scales_at, int tops_at, int has_bias,
    int has_residual) {
    int row_blocks = (num_rows + ROWS - 1) / ROWS, number = blockIdx.x / CLUSTER;  // neighbours share rows of the weight
    int first_row = number % row_blocks * ROWS;
    Matrix matrix{weight, depth, row_bytes, high_at, scales_at, tops_at, outputs, number / row_blocks * OUTPUTS};
    x += (u64)first_row * x_stride, num_rows = min(num_rows - first_row, ROWS);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = CLUSTER > 1 ? cluster_rank() : 0;
    int all = (depth + COLUMNS - 1) / COLUMNS, share = (all + CLUSTER - 1) / CLUSTER, begin = rank * share;
    int count = min(share, all - begin);
    u32 ring = shared_address(memory);
    float sums[TILES][ROWS / 8][4] = {};
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (i < count) copy_weights(ring + i * STAGE_BYTES, matrix, begin + i);
    commit_copies();
    wait_for_inputs();
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < count) copy_x(ring + i * STAGE_BYTES, x, num_rows, x_stride, depth, begin + i);
        commit_copies();
    }
    u32 stage = ring, target = ring + (STAGES - 1) * STAGE_BYTES, end = ring + STAGES * STAGE_BYTES;
    for (int i = 0; i < count; ++i) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (i + STAGES - 1 < count) {
            copy_weights(target, matrix, begin + i + STAGES - 1);
            copy_x(target, x, num_rows, x_stride, depth, begin + i + STAGES - 1);
        }
        commit_copies();
        multiply(sums, stage, warp % ACROSS * TILES * 16, warp / ACROSS);
        target = stage;
        stage = stage + STAGE_BYTES == end ? ring : stage + STAGE_BYTES;
    }
    wait_for_copies<0>();
    __syncthreads();
    float *parts = (float *)memory;  // [ALONG, ROWS, SUM_PITCH]
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int row = 8 * n + lane % 4 * 2 + k % 2, m = (warp % ACROSS * TILES + i) * 16 + lane / 4 + k / 2 * 8;
                parts[(warp / ACROSS * ROWS + row) * SUM_PITCH + m] = sums[i][n][k];
            }
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();
    else __syncthreads();
    auto total = [&](int row, int m) {
        float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < CLUSTER * ALONG; ++i) {
            const float *from = parts + (i % ALONG * ROWS + row) * SUM_PITCH + m;
            float4 own = CLUSTER > 1 ? peer_load(from, i / ALONG) : *(const float4 *)from;
            sum.x += own.x, sum.y += own.y, sum.z += own.z, sum.w += own.w;
        }
        return sum;
    };
    auto bias_of = [&](int place) {
        return IS_BIAS_WIDE ? ((const float *)bias)[place] : low(((const u16 *)bias)[place]);
    };
    for (int v = rank * THREADS + threadIdx.x; v < ROWS * OUTPUTS / 4; v += CLUSTER * THREADS) {
        int n = v / (OUTPUTS / 4), o = v % (OUTPUTS / 4) * 4, m = IS_GATED ? o / 8 * 16 + o % 8 : o;
        int row = first_row + n, output = matrix.first + o;
        if (n >= num_rows || output >= outputs) continue;
        float4 first = total(n, m), second = IS_GATED ? total(n, m + 8) : first;
        float results[4] = {first.x, first.y, first.z, first.w}, ups[4] = {second.x, second.y, second.z, second.w};
        u64 place = (u64)row * out_stride + output, added = (u64)row * residual_stride + output;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (output + i >= outputs) break;
            if (has_bias) results[i] += bias_of(output + i);
            if (IS_GATED) {
                if (has_bias) ups[i] += bias_of(outputs + output + i);
                results[i] = gated(results[i], ups[i], ACTIVATION);
            }
            if (has_residual)
                results[i] += IS_RESIDUAL_WIDE ? ((const float *)residual)[added + i] : low(((const u16 *)residual)[added + i]);
        }
        if (output + 3 < outputs && (out_stride | outputs) % 4 == 0) {
            if (IS_OUT_WIDE) *(float4 *)((float *)out + place) = float4{results[0], results[1], results[2], results[3]};
            else *(uint2 *)((u16 *)out + place) = uint2{round_pair(results[0], results[1]), round_pair(results[2], results[3])};
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (output + i >= outputs) break;
            if (IS_OUT_WIDE) ((float *)out)[place + i] = results[i];
            else ((u16 *)out)[place + i] = round_pair(results[i], 0.0f);
        }
    }
    if (CLUSTER > 1) cluster_arrive(), cluster_wait();  // the others read the sums of this thread block
}
