// Decode attention of few sequences with short contexts: a cluster of CLUSTER thread blocks divides the context of a set of
// query heads among its warps. IS_FUSED: norms and rotation of queries and keys, and the write of the newest key and value,
// happen here too.
//
// Keys and values are read before the inputs are there: all but the newest token were written by earlier steps. A lane
// holds 8 dimensions, LANES lanes (a team) a token, and each team sums its own tokens. The teams of a thread block are
// merged in shared memory; then each thread block sends its sums to the thread blocks of the cluster, each of which merges
// a part of the output.
//
// Constants: DIM, GROUP (query heads of a set), SETS (for each key head), BLOCK_SIZE, WARPS, ROUNDS (tokens of a team in
// registers), CLUSTER, IS_FUSED, HAS_NORM, IS_NORM_WIDE (its weights are f32), ROTARY (leading dimensions of a head that are
// rotated, 0: none).
constexpr int LANES = DIM / 8, TEAMS = 32 / LANES * WARPS, THREADS = WARPS * 32;
constexpr int OUTPUTS = GROUP * DIM, OWN = OUTPUTS / CLUSTER;  // of a set, of a thread block
constexpr int HALF = ROTARY > 0 ? ROTARY / 2 : DIM;
constexpr float NOTHING = -1e30f;                              // score of no token


struct Eight {
    float v[8];

    __device__ __forceinline__ Eight() {}
    __device__ __forceinline__ explicit Eight(uint4 w) {
        v[0] = low(w.x), v[1] = high(w.x), v[2] = low(w.y), v[3] = high(w.y);
        v[4] = low(w.z), v[5] = high(w.z), v[6] = low(w.w), v[7] = high(w.w);
    }
    __device__ __forceinline__ explicit Eight(const float *from) {
        float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
    __device__ __forceinline__ uint4 packed() const {
        return uint4{round_pair(v[0], v[1]), round_pair(v[2], v[3]), round_pair(v[4], v[5]), round_pair(v[6], v[7])};
    }
};

template <int WIDTH> __device__ __forceinline__ float sum_over(float x) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    return x;
}

// Norm and rotation of a head; a lane has its own dimensions and those that they are rotated with.
struct Turn {
    Eight weight, other_weight, cosine, sine;

    __device__ __forceinline__ static Eight read_weights(const void *norm, int dim) {
        if (IS_NORM_WIDE) return Eight((const float *)norm + dim);
        return Eight(*(const uint4 *)((const u16 *)norm + dim));
    }
    __device__ __forceinline__ void read_norm(const void *norm, int dim, int other) {
        if (HAS_NORM) weight = read_weights(norm, dim), other_weight = read_weights(norm, other);
    }
    // `dim`: the first dimension of this lane.
    __device__ __forceinline__ Eight turned(uint4 own, uint4 partner, int dim, float eps) const {
        Eight x(own), other(partner);
        if (HAS_NORM) {
            float square = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) square = fmaf(x.v[i], x.v[i], square);
            float factor = rsqrtf(sum_over<LANES>(square) / DIM + eps);
#pragma unroll
            for (int i = 0; i < 8; ++i) x.v[i] *= factor * weight.v[i], other.v[i] *= factor * other_weight.v[i];
        }
        if (dim < ROTARY)
#pragma unroll
            for (int i = 0; i < 8; ++i) x.v[i] = x.v[i] * cosine.v[i] + (dim < HALF ? -other.v[i] : other.v[i]) * sine.v[i];
        return x;
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) row_attention(
    const u16 *query,  // [s, heads, DIM]; IS_FUSED: and keys and values, none of them turned
    u8 *keys, u8 *values, const int *tables, const int *table_rows, const int *lengths, const void *query_norm,
    const void *key_norm, const float *cosines, const float *sines, u16 *out, int query_stride, int table_stride, float scale,
    float eps) {
    launch_dependents();
    cluster_arrive();  // the others may store into this thread block's memory
    __shared__ float team_high[GROUP][TEAMS], team_total[GROUP][TEAMS], team_factor[GROUP][TEAMS];
    __shared__ float block_high[GROUP], block_total[GROUP];
    __shared__ float peer_high[CLUSTER][GROUP], peer_total[CLUSTER][GROUP], peer_mixed[CLUSTER][OWN];
    float(*team_mixed)[OUTPUTS] = (float(*)[OUTPUTS])memory;  // [TEAMS, OUTPUTS]
    int sequence = blockIdx.z, set = blockIdx.y, sets = gridDim.y, rank = cluster_rank(), kv_heads = sets / SETS;
    int team = threadIdx.x / LANES, dim = threadIdx.x % LANES * 8;
    int other = dim < HALF ? dim + HALF : dim - HALF;  // rotated with
    if (dim >= ROTARY) other = dim;
    int length = lengths[sequence], share = (length + CLUSTER - 1) / CLUSTER, newest = length - 1;
    int begin = min(rank * share, length), end = min(begin + share, length);
    const int *table = tables + (u64)table_rows[sequence] * table_stride;

    auto place_of = [&](int token) {  // bytes from the start of the keys, or of the values
        u64 block = table[token / BLOCK_SIZE];
        return (((block * kv_heads + set / SETS) * BLOCK_SIZE + token % BLOCK_SIZE) * DIM + dim) * 2;
    };
    uint4 k[ROUNDS], v[ROUNDS];
    auto read = [&](int start) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            int token = start + r * TEAMS + team;
            k[r] = v[r] = uint4{0, 0, 0, 0};
            if (token < end && token != newest) {
                u64 place = place_of(token);
                k[r] = *(const uint4 *)(keys + place), v[r] = *(const uint4 *)(values + place);
            }
        }
    };
    read(begin);
    Turn query_turn, key_turn;
    if (IS_FUSED) {
        query_turn.read_norm(query_norm, dim, other), key_turn.read_norm(key_norm, dim, other);
        if (dim < ROTARY) {
            u64 angle = (u64)sequence * HALF + dim % HALF;
            query_turn.cosine = key_turn.cosine = Eight(cosines + angle);
            query_turn.sine = key_turn.sine = Eight(sines + angle);
        }
    }
    bool owns_newest = newest >= begin && newest < end && (newest - begin) % TEAMS == team;
    u64 newest_place = newest >= 0 ? place_of(newest) : 0;

    wait_inputs();
    const u16 *row = query + (u64)sequence * query_stride;
    uint4 raw[GROUP + 1], raw_other[GROUP + 1], newest_key{}, newest_value{};
#pragma unroll
    for (int g = 0; g < GROUP + IS_FUSED; ++g) {  // the last one is the key
        const u16 *head = row + (g < GROUP ? set * GROUP + g : sets * GROUP + set / SETS) * DIM;
        raw[g] = *(const uint4 *)(head + dim);
        if (IS_FUSED && ROTARY > 0) raw_other[g] = *(const uint4 *)(head + other);
        else raw_other[g] = uint4{0, 0, 0, 0};
    }
    if (IS_FUSED) newest_value = *(const uint4 *)(row + (sets * GROUP + kv_heads + set / SETS) * DIM + dim);
    else if (owns_newest) newest_key = *(uint4 *)(keys + newest_place), newest_value = *(uint4 *)(values + newest_place);
    Eight q[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        q[g] = IS_FUSED ? query_turn.turned(raw[g], raw_other[g], dim, eps) : Eight(raw[g]);
#pragma unroll
        for (int i = 0; i < 8; ++i) q[g].v[i] *= scale;
    }
    if (IS_FUSED) {
        newest_key = key_turn.turned(raw[GROUP], raw_other[GROUP], dim, eps).packed();
        if (owns_newest && set % SETS == 0)
            *(uint4 *)(keys + newest_place) = newest_key, *(uint4 *)(values + newest_place) = newest_value;
    }

    float highest[GROUP], total[GROUP];
    Eight mixed[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        highest[g] = NOTHING, total[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) mixed[g].v[i] = 0.0f;
    }
    for (int start = begin; start < end; start += TEAMS * ROUNDS) {
        if (start > begin) read(start);
        float score[ROUNDS][GROUP];
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            int token = start + r * TEAMS + team;
            if (token == newest) k[r] = newest_key, v[r] = newest_value;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) score[r][g] = NOTHING;
            if (start + r * TEAMS >= end) continue;  // the same for all threads
            Eight key(k[r]);
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) sum = fmaf(key.v[i], q[g].v[i], sum);
                sum = sum_over<LANES>(sum);
                if (token < end) score[r][g] = sum;
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            float before = highest[g];
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) highest[g] = fmaxf(highest[g], score[r][g]);
            float factor = exp2_of(before - highest[g]);
            total[g] *= factor;
#pragma unroll
            for (int i = 0; i < 8; ++i) mixed[g].v[i] *= factor;
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            if (start + r * TEAMS >= end) continue;
            Eight value(v[r]);
            bool exists = start + r * TEAMS + team < end;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                float weight = exists ? exp2_of(score[r][g] - highest[g]) : 0.0f;
                total[g] += weight;
#pragma unroll
                for (int i = 0; i < 8; ++i) mixed[g].v[i] = fmaf(weight, value.v[i], mixed[g].v[i]);
            }
        }
    }

    // Teams of the thread block.
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
        if (dim == 0) team_high[g][team] = highest[g], team_total[g][team] = total[g];
        float4 *target = (float4 *)&team_mixed[team][g * DIM + dim];
        target[0] = float4{mixed[g].v[0], mixed[g].v[1], mixed[g].v[2], mixed[g].v[3]};
        target[1] = float4{mixed[g].v[4], mixed[g].v[5], mixed[g].v[6], mixed[g].v[7]};
    }
    __syncthreads();
    {
        int g = threadIdx.x / TEAMS % GROUP, t = threadIdx.x % TEAMS;
        float most = team_high[g][t], own = most;
#pragma unroll
        for (int mask = TEAMS / 2; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, mask));
        float factor = exp2_of(own - most), weights = sum_over<TEAMS>(factor * team_total[g][t]);
        if (threadIdx.x < GROUP * TEAMS) {
            team_factor[g][t] = factor;
            if (t == 0) block_high[g] = most, block_total[g] = weights;
        }
    }
    cluster_wait();
    __syncthreads();
    for (int output = threadIdx.x; output < OUTPUTS; output += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) sum = fmaf(team_factor[output / DIM][t], team_mixed[t][output], sum);
        peer_store(&peer_mixed[rank][output % OWN], output / OWN, sum);
    }
    for (int i = threadIdx.x; i < CLUSTER * GROUP; i += THREADS) {
        int g = i % GROUP;
        peer_store(&peer_high[rank][g], i / GROUP, block_high[g]);
        peer_store(&peer_total[rank][g], i / GROUP, block_total[g]);
    }
    // Thread blocks of the cluster.
    cluster_arrive();
    cluster_wait();
    for (int own = threadIdx.x; own < OWN; own += THREADS) {
        int output = rank * OWN + own, g = output / DIM;
        float most = NOTHING, sum = 0.0f, weights = 0.0f;
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) most = fmaxf(most, peer_high[r][g]);
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) {
            float factor = exp2_of(peer_high[r][g] - most);
            sum = fmaf(factor, peer_mixed[r][own], sum), weights = fmaf(factor, peer_total[r][g], weights);
        }
        out[((u64)sequence * sets + set) * OUTPUTS + output] = round_pair(weights > 0.0f ? sum / weights : 0.0f, 0.0f);
    }
}
