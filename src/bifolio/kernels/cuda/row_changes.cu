// The changes of an adapter to the row of `row_product.cu`, by AIDES more warps of each thread block:
//
//     thin = x @ down.T, change = thin @ up.T + bias          of each part of the product; x is not yet divided by its norm
//
// All rows of the product need all thin values. Those are few: the first thread blocks (`helpers`) multiply chunks of CHUNK
// columns, and every thread block waits for them, while its other warps multiply their weights, and adds the chunks in one
// order. Thread blocks start in the order of their numbers, and the helpers are at most half of them: of two such kernels on
// two streams, one has all its helpers on multiprocessors, so that it ends.
//
// Constants: THIN_WIDTH (largest rank, a multiple of 16; 0: no adapters), THIN_PARTS, AIDES; those of `row_product.cu`.
constexpr int CHUNK = 256, CHUNKS = (DEPTH + CHUNK - 1) / CHUNK, THIN = THIN_PARTS * THIN_WIDTH;
constexpr int PART_THIN = THIN_WIDTH > 0 ? THIN_WIDTH : 1;
constexpr int AIDE_THREADS = AIDES * 32, AHEAD = 4;  // chunks of a warp in flight
constexpr bool IS_ADAPTED = THIN_WIDTH > 0;
constexpr long long NO_BIAS = -(1ll << 62);  // as `kernels.triton.adapter_changes.NO_BIAS`

// An adapter's row of the table: places of `down`, `up` and the bias in `base`, and the rank, of each part.
struct Entries {
    const long long *of_part;  // null: the row has no adapter

    __device__ __forceinline__ int rank(int part) const { return of_part ? (int)of_part[part * 4 + 3] : 0; }
};

__device__ __forceinline__ float sum_of_products(uint4 weights, const float *x) {
    float sum = low(weights.x) * x[0];
    sum = fmaf(high(weights.x), x[1], sum);
    sum = fmaf(low(weights.y), x[2], sum), sum = fmaf(high(weights.y), x[3], sum);
    sum = fmaf(low(weights.z), x[4], sum), sum = fmaf(high(weights.z), x[5], sum);
    return fmaf(high(weights.w), x[7], fmaf(low(weights.w), x[6], sum));
}

template <bool IS_WIDE> __device__ __forceinline__ void read_eight(const void *source, int column, float *values) {
    if (IS_WIDE) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            float4 four = *(const float4 *)((const float *)source + column + i);
            values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
        }
        return;
    }
    uint4 found = *(const uint4 *)((const u16 *)source + column);
    u32 words[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) values[2 * i] = low(words[i]), values[2 * i + 1] = high(words[i]);
}

// The chunks of thin values of a warp: `unit` counts chunks of all thin values. A lane holds 8 columns of each.
struct ThinUnits {
    uint4 weights[AHEAD];
    int columns[AHEAD];  // -1: this lane has none

    __device__ __forceinline__ void read(int first, int stride, int units, const u16 *base, const Entries &entries) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            int unit = first + i * stride, place = unit / CHUNKS, part = place / PART_THIN, rank = place % PART_THIN;
            columns[i] = -1;
            if (unit >= units || rank >= entries.rank(part)) continue;
            int column = unit % CHUNKS * CHUNK + threadIdx.x % 32 * 8;
            if (column >= DEPTH) continue;
            columns[i] = column;
            weights[i] = *(const uint4 *)(base + entries.of_part[part * 4] + (long long)rank * DEPTH + column);
        }
    }

    __device__ __forceinline__ void multiply(int first, int stride, int units, const void *x, const void *scales, float *sums) const {
        float sum[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            sum[i] = 0.0f;
            if (columns[i] < 0) continue;
            float values[8], factors[8];
            read_eight<IS_X_WIDE>(x, columns[i], values);
            if (IS_NORMED) {
                read_eight<IS_SCALE_WIDE>(scales, columns[i], factors);
#pragma unroll
                for (int k = 0; k < 8; ++k) values[k] *= factors[k];
            }
            sum[i] = sum_of_products(weights[i], values);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2)
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], mask);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
            if (threadIdx.x % 32 == 0 && first + i * stride < units) sums[first + i * stride] = sum[i];
    }
};

// By the aides: the changes of the `count` units of rows of this thread block, and the biases of the adapter.
__device__ __forceinline__ void find_changes(
    const void *x, const void *scales, const u16 *base, const long long *table, const int *groups, const int *starts,
    float *sums, int *arrivals, int first_entry, int num_entries, int helpers, int count, float *thin, float *changes,
    float *biases) {
    constexpr int GATES = ACTIVATION >= 0 ? UNIT / 2 : UNIT;
    int own = threadIdx.x - (WARPS + 1) * 32;
    Entries entries{groups[1] > 0 ? table + ((long long)groups[0] * num_entries + first_entry) * 4 : nullptr};
    auto place_of = [&](int i, int &part) {  // of row i in its part
        int unit = blockIdx.x + i / UNIT * gridDim.x, row = i % UNIT;
        part = 0;
        if (ACTIVATION >= 0) {
            part = row / GATES;
            return unit * GATES + row % GATES;
        }
        int output = unit * UNIT + row, start = 0;
#pragma unroll
        for (int p = 1; p < THIN_PARTS; ++p)
            if (output >= starts[p]) part = p, start = starts[p];
        return output - start;
    };
    auto up_of = [&](int part, int output) {
        return base + entries.of_part[part * 4 + 1] + (long long)output * entries.rank(part);
    };

    int stride = helpers * AIDES, first = blockIdx.x * AIDES + own / 32, part;
    int units = (int)blockIdx.x < helpers ? THIN * CHUNKS : 0;
    ThinUnits ahead;
    ahead.read(first, stride, units, base, entries);
    for (int i = own; i < count * UNIT; i += AIDE_THREADS) {
        int output = place_of(i, part);
        if (entries.rank(part)) prefetch(up_of(part, output));
    }
    wait_inputs();
    for (int begin = first; begin < units; begin += AHEAD * stride) {
        if (begin > first) ahead.read(begin, stride, units, base, entries);
        ahead.multiply(begin, stride, units, x, scales, sums);
    }
    sync_others<AIDE_THREADS>();
    if (own == 0) {
        if ((int)blockIdx.x < helpers) add_arrival(arrivals);
        wait_arrivals(arrivals, helpers);
        if (add_departure(arrivals) == helpers + (int)gridDim.x - 1) *arrivals = 0;  // all have seen the others
    }
    sync_others<AIDE_THREADS>();
    for (int place = own; place < THIN; place += AIDE_THREADS) {
        float sum = 0.0f;
        if (place % PART_THIN < entries.rank(place / PART_THIN))
#pragma unroll 16
            for (int chunk = 0; chunk < CHUNKS; ++chunk) sum += fresh_load(sums + place * CHUNKS + chunk);
        thin[place] = sum;
    }
    sync_others<AIDE_THREADS>();
    for (int i = own; i < count * UNIT; i += AIDE_THREADS) {
        int output = place_of(i, part), rank = entries.rank(part);
        float sum = 0.0f, added = 0.0f;
        if (rank) {
            const u16 *up = up_of(part, output);
#pragma unroll 2
            for (int r = 0; r < rank; r += 8) sum += sum_of_products(*(const uint4 *)(up + r), thin + part * THIN_WIDTH + r);
            long long bias = entries.of_part[part * 4 + 2];
            if (bias != NO_BIAS) added = low(*(base + bias + output));
        }
        changes[i] = sum, biases[i] = added;
    }
}
