// Parts of all kernels: short names of types, single instructions, activations.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(1024) u8 memory[];

// -- programmatic dependent launch -----------------------------------------------------------------------------------
// Allows the next kernel to start as soon as every thread block of this one has.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until all earlier kernels are complete.
__device__ __forceinline__ void wait_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void wait_for_inputs() { wait_inputs(), launch_dependents(); }

// -- shared memory -----------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 shared_address(const void *pointer) {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(pointer));
    return address;
}

__device__ __forceinline__ uint4 shared_load(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void start_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes started barriers visible to bulk copies.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 target, const u8 *source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Waits for the first THREADS threads of a thread block, all of which call it.
template <int THREADS> __device__ __forceinline__ void sync_threads() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// -- numbers -----------------------------------------------------------------------------------------------------------
__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

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
    return activate(gate, activation) * up;
}
