// A decode step of a gated delta net for few sequences: convolution, norms of queries and keys, scan, norm and gate.
//
// A cluster has the heads of one group, which share queries and keys; each head is divided among TILES thread blocks, which have
// TILE columns of its state in registers. State and window are read before the inputs are there: earlier steps wrote them. With
// the decay g, the change u of the token's key k, and its query q:
//
//     u = beta (v - g k^T S)        y = g q^T S + (q . k) u        S_new = g S + k u^T        out = norm(y) * silu(z)
//
// Every thread block computes queries and keys of the group itself. The window of these channels is written in its place after
// all thread blocks of the cluster have read it.
//
// Constants: KEYS, TILE, TILES, MEMBERS (heads of a group), CLUSTER = MEMBERS * TILES, WIDTH (taps), HAS_BIAS, IS_TILED (head h
// belongs to group h % groups instead of h / MEMBERS), WARPS.
constexpr int THREADS = WARPS * 32;
constexpr int PARTS = THREADS / TILE, PER_THREAD = KEYS / PARTS;  // parts of the keys, rows of the state of a thread
constexpr int CHANNELS = 2 * KEYS + TILE, ROUNDS = (CHANNELS + THREADS - 1) / THREADS;
constexpr int KEPT = WIDTH - 1;  // tokens of a window

__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }
__device__ __forceinline__ float number(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    return x;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) row_delta(
    const u16 *x,  // [s, stride]: q, k, v, z, beta, a
    float *windows, float *states, const int *reads, const int *writes, const float *conv_weight, const float *conv_bias,
    const float *decay, const float *bias, const float *norm, u16 *out, int stride, int channels, float query_scale,
    float length_eps, float eps, float rate_scale) {
    launch_dependents();
    __shared__ float mixed[CHANNELS];  // queries, keys, values
    __shared__ float key_sums[PARTS][TILE], query_sums[PARTS][TILE], squares[TILE], peer_square[TILES];
    int sequence = blockIdx.z, group = blockIdx.y, groups = gridDim.y, heads = groups * MEMBERS, rank = cluster_rank();
    int member = rank / TILES, tile = rank % TILES, head = IS_TILED ? group + member * groups : group * MEMBERS + member;
    int column = threadIdx.x % TILE, part = threadIdx.x / TILE, warp_lane = threadIdx.x % 32;
    u64 source = reads[sequence];
    int target = writes[sequence];

    auto state_of = [&](u64 number) {  // at this thread's first row
        return states + ((number * heads + head) * KEYS + part * PER_THREAD) * (TILE * TILES) + tile * TILE + column;
    };
    auto channel_of = [&](int i) {
        if (i < KEYS) return group * KEYS + i;
        if (i < 2 * KEYS) return (groups + group) * KEYS + i - KEYS;
        return 2 * groups * KEYS + (head * TILES + tile) * TILE + i - 2 * KEYS;
    };
    float state[PER_THREAD], window[ROUNDS][KEPT], taps[ROUNDS][WIDTH], begin[ROUNDS];
    const float *from = state_of(source);
#pragma unroll
    for (int r = 0; r < PER_THREAD; ++r) state[r] = from[r * TILE * TILES];
#pragma unroll
    for (int n = 0; n < ROUNDS; ++n) {
        int i = n * THREADS + threadIdx.x, channel = channel_of(min(i, CHANNELS - 1));
        begin[n] = HAS_BIAS ? conv_bias[channel] : 0.0f;
#pragma unroll
        for (int t = 0; t < KEPT; ++t) window[n][t] = windows[(source * KEPT + t) * channels + channel];
#pragma unroll
        for (int t = 0; t < WIDTH; ++t) taps[n][t] = conv_weight[channel * WIDTH + t];
    }
    cluster_arrive();  // this window has been read
    float own_decay = decay[head], own_bias = bias[head], scale = norm[tile * TILE + column];

    wait_inputs();
    const u16 *row = x + (u64)sequence * stride, *gates = row + channels + heads * TILE * TILES + head;
    float rate = rate_scale / (1.0f + __expf(-number(gates[0]))), step = number(gates[heads]) + own_bias;
    float gate = silu(number(row[channels + (head * TILES + tile) * TILE + column]));
    float newest[ROUNDS];
#pragma unroll
    for (int n = 0; n < ROUNDS; ++n) {
        int i = n * THREADS + threadIdx.x;
        newest[n] = number(row[channel_of(min(i, CHANNELS - 1))]);
        float y = begin[n];
#pragma unroll
        for (int t = 0; t < KEPT; ++t) y = fmaf(window[n][t], taps[n][t], y);
        y = fmaf(newest[n], taps[n][KEPT], y);
        if (i < CHANNELS) mixed[i] = silu(y);
    }
    step = step > 20.0f ? step : logf(1.0f + __expf(step));
    float factor = __expf(step * own_decay);
    __syncthreads();

    // Lengths of the query and the key, and their product: each warp for itself.
    float query_square = 0.0f, key_square = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = warp_lane; i < KEYS; i += 32) {
        float q = mixed[i], k = mixed[KEYS + i];
        query_square = fmaf(q, q, query_square), key_square = fmaf(k, k, key_square), product = fmaf(q, k, product);
    }
    float query_factor = query_scale * rsqrtf(warp_sum(query_square) + length_eps);
    float key_factor = rsqrtf(warp_sum(key_square) + length_eps);
    product = warp_sum(product) * query_factor * key_factor;
    float key_sum = 0.0f, query_sum = 0.0f;
#pragma unroll
    for (int r = 0; r < PER_THREAD; ++r) {
        float q = mixed[part * PER_THREAD + r], k = mixed[KEYS + part * PER_THREAD + r];
        query_sum = fmaf(state[r], q, query_sum), key_sum = fmaf(state[r], k, key_sum);
    }
    key_sums[part][column] = key_sum, query_sums[part][column] = query_sum;
    __syncthreads();
    key_sum = query_sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) key_sum += key_sums[p][column], query_sum += query_sums[p][column];
    float change = rate * (mixed[2 * KEYS + column] - factor * key_factor * key_sum);
    float y = fmaf(product, change, factor * query_factor * query_sum);
    if (part == 0) squares[column] = y * y;
    __syncthreads();
    cluster_wait();  // the others run, and have read their windows
    if (threadIdx.x < 32) {
        float square = 0.0f;
#pragma unroll
        for (int c = warp_lane; c < TILE; c += 32) square += squares[c];
        square = warp_sum(square);
        if (warp_lane < TILES) peer_store(&peer_square[tile], member * TILES + warp_lane, square);
    }
    cluster_arrive();
    if (target > 0) {
        float *to = state_of(target);
#pragma unroll
        for (int r = 0; r < PER_THREAD; ++r)
            to[r * TILE * TILES] = fmaf(key_factor * mixed[KEYS + part * PER_THREAD + r], change, factor * state[r]);
#pragma unroll
        for (int n = 0; n < ROUNDS; ++n) {
            int i = n * THREADS + threadIdx.x;
            if (i >= CHANNELS || (i < 2 * KEYS && rank)) continue;
            float *kept = windows + (u64)target * KEPT * channels + channel_of(i);
#pragma unroll
            for (int t = 1; t < KEPT; ++t) kept[(t - 1) * channels] = window[n][t];
            kept[(KEPT - 1) * channels] = newest[n];
        }
    }
    cluster_wait();
    if (part > 0) return;
    float all = 0.0f;
#pragma unroll
    for (int t = 0; t < TILES; ++t) all += peer_square[t];
    y *= rsqrtf(all / (TILE * TILES) + eps) * scale * gate;
    out[((u64)sequence * heads + head) * (TILE * TILES) + tile * TILE + column] = round_pair(y, 0.0f);
}
