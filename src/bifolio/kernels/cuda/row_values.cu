// Values of x in the registers of a lane, and sums over the lanes of a warp.
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

// Adds the sums of ROWS rows over the lanes of a warp, and writes them to sums[row * WARPS]. Each exchange halves the rows of
// a lane.
template <int ROWS> __device__ __forceinline__ void add_lanes(float (&sum)[ROWS], float *sums) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = ROWS, mask = 16; n > 1; n /= 2, mask /= 2)
#pragma unroll
        for (int i = 0; i < n / 2; ++i) {
            float kept = lane & mask ? sum[i + n / 2] : sum[i], sent = lane & mask ? sum[i] : sum[i + n / 2];
            sum[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, mask);
        }
#pragma unroll
    for (int mask = 16 / ROWS; mask > 0; mask /= 2) sum[0] += __shfl_xor_sync(0xFFFFFFFFu, sum[0], mask);
    if (lane % (32 / ROWS) == 0) sums[lane / (32 / ROWS) * WARPS] = sum[0];
}
