// Activations of gates; the numbers are those of `kernels.triton.norm.ACTIVATIONS`.
__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == 0) return x / (1.0f + __expf(-x));
    if (activation == 1) return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    if (activation == 3) return x > 0.0f ? x * x : 0.0f;
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
}

__device__ __forceinline__ float gated(float gate, float up, int activation) {
    if (activation == 4) {
        gate = fminf(gate, 7.0f);
        up = fminf(fmaxf(up, -7.0f), 7.0f);
        return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
    }
    if (activation == 5) {
        gate = fminf(gate, 10.0f);
        up = fminf(fmaxf(up, -10.0f), 10.0f);
        return gate / (1.0f + __expf(-gate)) * up;
    }
    return activate(gate, activation) * up;
}
