// The experts of one token from its logits, chosen by one warp as `kernels.triton.expert_choice` does.
//
// IS_GIVEN: they were chosen before; the arguments are the numbers and shares of the choices.
//
// Constants: CHOICES, IS_GIVEN, EXPERTS (to choose from), TOP_K, IS_SIGMOID (scores; else a softmax), IS_RENORMALISED, HAS_CHOICE_BIAS, HAS_SHARED
// (expert EXPERTS is one more choice), HAS_SHARED_GATE (its share is the sigmoid of the logit behind the others; else 1),
// ARE_LOGITS_WIDE (f32).
constexpr int PER_LANE = (EXPERTS + 31) / 32;
constexpr int LOWEST = -2147483647 - 1;  // in order below all numbers

struct Choice {
    int expert;   // of the choice with the number of the lane, best first
    float share;  // of it in the sum
};

__device__ __forceinline__ float logit(const void *logits, int i) {
    return ARE_LOGITS_WIDE ? ((const float *)logits)[i] : __uint_as_float((u32)((const u16 *)logits)[i] << 16);
}

// An integer in the order of floats.
__device__ __forceinline__ int in_order(float value) {
    int bits = (int)__float_as_uint(value);
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    return x;
}

__device__ __forceinline__ Choice choose(const void *logits, const float *bias, float scale) {
    int lane = threadIdx.x % 32, order[PER_LANE];
    if (IS_GIVEN) return lane < CHOICES ? Choice{((const int *)logits)[lane], bias[lane]} : Choice{0, 0.0f};
    float value[PER_LANE], own_bias[PER_LANE], highest = 0.0f, total = 1.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        int expert = j * 32 + lane;
        value[j] = expert < EXPERTS ? logit(logits, expert) : -1e30f;
        own_bias[j] = HAS_CHOICE_BIAS && expert < EXPERTS ? bias[expert] : 0.0f;
    }
    if (!IS_SIGMOID) {
        int most = LOWEST;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) most = max(most, in_order(value[j]));
        most = warp_max(most);
        highest = __uint_as_float((u32)(most < 0 ? most ^ 0x7FFFFFFF : most));
        total = 0.0f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += __expf(value[j] - highest);
        total = lanes_sum(total);
    }
    auto score = [&](float given) {
        return IS_SIGMOID ? 1.0f / (1.0f + __expf(-given)) : __expf(given - highest) / total;
    };
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
        order[j] = j * 32 + lane < EXPERTS ? in_order(score(value[j]) + own_bias[j]) : LOWEST;
    Choice own{0, 0.0f};
#pragma unroll
    for (int i = 0; i < TOP_K; ++i) {
        int most = LOWEST;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) most = max(most, order[j]);
        most = warp_max(most);
        int first = 1 << 30;  // of equal ones
#pragma unroll
        for (int j = PER_LANE - 1; j >= 0; --j)
            if (order[j] == most) first = j * 32 + lane;
        first = warp_min(first);
        if (lane == i) own.expert = first;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (j * 32 + lane == first) order[j] = LOWEST;
    }
    if (lane < TOP_K) own.share = score(logit(logits, own.expert));
    if (IS_RENORMALISED) {
        float sum = lanes_sum(own.share);
        own.share /= sum + 1e-20f;
    }
    own.share *= scale;
    if (HAS_SHARED && lane == TOP_K) {
        own.expert = EXPERTS;
        own.share = HAS_SHARED_GATE ? 1.0f / (1.0f + __expf(-logit(logits, EXPERTS))) : 1.0f;
    }
    return own;
}
