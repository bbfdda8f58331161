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

// The number of lanes with a larger key, or with the same one before this lane.
__device__ __forceinline__ int rank_of(int key) {
    int lane = threadIdx.x % 32, rank = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        int other = __shfl_sync(0xFFFFFFFFu, key, i);
        rank += other > key || (other == key && i < lane);
    }
    return rank;
}

// The best TOP_K experts, one after the other: for logits of which more than 32 may be among them.
__device__ __forceinline__ int choose_slowly(int (&order)[PER_LANE]) {
    int lane = threadIdx.x % 32, chosen = 0;
#pragma unroll 1
    for (int i = 0; i < TOP_K; ++i) {
        int most = LOWEST, first = 1 << 30;  // of equal ones
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) most = max(most, order[j]);
        most = warp_max(most);
#pragma unroll
        for (int j = PER_LANE - 1; j >= 0; --j)
            if (order[j] == most) first = j * 32 + lane;
        first = warp_min(first);
        if (lane == i) chosen = first;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j)
            if (j * 32 + lane == first) order[j] = LOWEST;
    }
    return chosen;
}

// The best TOP_K are at least as good as the TOP_K-th of the best of each lane, usually with a few others. Each lane takes one of
// all of these, in the order of experts, and finds its rank. `scratch`: 64 words in shared memory.
__device__ __forceinline__ int choose_best(int (&order)[PER_LANE], int *scratch) {
    int lane = threadIdx.x % 32, own_best = LOWEST, count = 0;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) own_best = max(own_best, order[j]);
    u32 last = __ballot_sync(0xFFFFFFFFu, rank_of(own_best) == TOP_K - 1);
    int least = __shfl_sync(0xFFFFFFFFu, own_best, __ffs(last) - 1);
    scratch[lane] = LOWEST;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        bool is_good = order[j] >= least;
        u32 good = __ballot_sync(0xFFFFFFFFu, is_good);
        int place = count + __popc(good & ((1u << lane) - 1));
        if (is_good && place < 32) scratch[place] = order[j], scratch[32 + place] = j * 32 + lane;
        count += __popc(good);
    }
    if (count > 32) return choose_slowly(order);
    __syncwarp();
    int rank = rank_of(scratch[lane]), expert = lane < count ? scratch[32 + lane] : 0;
    __syncwarp();
    scratch[rank] = expert;
    __syncwarp();
    return scratch[lane];
}

__device__ __forceinline__ Choice choose(const void *logits, const float *bias, float scale, int *scratch) {
    int lane = threadIdx.x % 32, order[PER_LANE];
    if (IS_GIVEN) return lane < CHOICES ? Choice{((const int *)logits)[lane], bias[lane]} : Choice{0, 0.0f};
    constexpr bool IS_RELATIVE = !IS_SIGMOID && IS_RENORMALISED && !HAS_CHOICE_BIAS;  // the sum of all shares is not needed
    float value[PER_LANE], highest = 0.0f, total = 1.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) value[j] = j * 32 + lane < EXPERTS ? logit(logits, j * 32 + lane) : -1e30f;
    if (!IS_SIGMOID) {
        int most = LOWEST;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) most = max(most, in_order(value[j]));
        most = warp_max(most);
        highest = __uint_as_float((u32)(most < 0 ? most ^ 0x7FFFFFFF : most));
    }
    if (!IS_SIGMOID && !IS_RELATIVE) {
        total = 0.0f;
#pragma unroll
        for (int j = 0; j < PER_LANE; ++j) total += __expf(value[j] - highest);
        total = lanes_sum(total);
    }
    auto score = [&](float given) {
        return IS_SIGMOID ? 1.0f / (1.0f + __expf(-given)) : __expf(given - highest) / total;
    };
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) {
        int expert = j * 32 + lane;
        float ranked = value[j];  // in the order of scores
        if (HAS_CHOICE_BIAS && expert < EXPERTS) ranked = score(value[j]) + bias[expert];
        order[j] = expert < EXPERTS ? in_order(ranked) : LOWEST;
    }
    Choice own{choose_best(order, scratch), 0.0f};
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
