// Kernels in CUDA C++ on the host, for tests: takes the place of common.cu.
//
// A thread block is a thread of the operating system, and its threads are fibers that run in turns: a fiber goes on until it
// waits. The thread blocks of a cluster run at the same time, clusters one after the other. Shared memory is local to the
// thread. Copies and barriers are checked: alignment, bounds, bytes that were announced.
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static thread_local

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dimensions { int x, y, z; };

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "cuda_on_host: %s\n", what);
    abort();
}

// -- fibers ------------------------------------------------------------------------------------------------------------
constexpr int SHARED_BYTES = 227 * 1024, STACK_BYTES = 256 * 1024;
alignas(1024) static thread_local u8 memory[SHARED_BYTES];
static thread_local Dimensions threadIdx, blockIdx, gridDim, blockDim;

struct Barrier {  // of threads
    int arrived = 0, generation = 0;
};

struct TransferBarrier {
    int expected, pending, phase;
    long bytes;
    void check() {
        require(pending >= 0, "too many arrivals at a barrier");
        if (pending == 0 && bytes == 0) pending = expected, phase ^= 1;
    }
};

struct Cluster {
    int size;
    std::atomic<int> arrived{0}, generation{0};
    std::vector<u8 *> anchors;  // of each thread block: the address of its shared memory
    std::atomic<int> ready{0};
};

struct Copy {
    u8 *target;
    const u8 *source;
    u32 size, bytes;
};

struct Block {
    int rank = 0, current = 0, cluster_arrived = 0, cluster_generation = 0;
    long progress = 0;  // grows whenever a wait ends
    Cluster *cluster = nullptr;
    ucontext_t scheduler;
    std::vector<ucontext_t> contexts;
    std::vector<std::unique_ptr<u8[]>> stacks;
    std::vector<char> done;
    Barrier all, some, others;
    std::vector<Barrier> warps;
    std::vector<u32> exchanged;  // [warps, 8, 32]
    std::map<u32, TransferBarrier> transfers;
    std::vector<int> waited;  // clusters' generations that a fiber waits for
    std::vector<std::deque<std::vector<Copy>>> copies;  // of each fiber: groups that have not arrived, the open one last
    std::function<void()> body;
};
static thread_local Block *block;

static void yield() {
    int own = block->current;
    swapcontext(&block->contexts[own], &block->scheduler);
}

static void enter() {
    Block *own = block;
    own->body();
    own->done[own->current] = 1;
    swapcontext(&own->contexts[own->current], &own->scheduler);
}

static void wait_for(Barrier &barrier, int count) {
    int generation = barrier.generation;
    if (++barrier.arrived == count) barrier.arrived = 0, ++barrier.generation;
    while (barrier.generation == generation) yield();
    ++block->progress;
}

static void run_block(Dimensions grid, Dimensions place, int threads, Cluster *cluster, int rank, std::function<void()> body) {
    Block own;
    block = &own;
    own.rank = rank, own.cluster = cluster, own.body = body;
    memset(memory, 0xFF, sizeof memory);  // NaN
    cluster->anchors[rank] = memory;
    cluster->ready.fetch_add(1);
    while (cluster->ready.load() < cluster->size) std::this_thread::yield();
    own.contexts.resize(threads), own.done.resize(threads), own.waited.resize(threads);
    own.copies.assign(threads, std::deque<std::vector<Copy>>(1));
    own.warps.resize(threads / 32), own.exchanged.resize(threads * 8);
    for (int i = 0; i < threads; ++i) {
        own.stacks.emplace_back(new u8[STACK_BYTES]);
        getcontext(&own.contexts[i]);
        own.contexts[i].uc_stack.ss_sp = own.stacks[i].get();
        own.contexts[i].uc_stack.ss_size = STACK_BYTES;
        own.contexts[i].uc_link = nullptr;
        makecontext(&own.contexts[i], enter, 0);
    }
    gridDim = grid, blockIdx = place, blockDim = {threads, 1, 1};
    long before = 0, in_vain = 0;
    for (int left = threads; left;) {
        in_vain = own.progress == before ? in_vain + 1 : 0, before = own.progress;
        require(in_vain < 200000, "all threads wait");
        for (int i = 0; i < threads; ++i) {
            if (own.done[i]) continue;
            own.current = i, threadIdx = {i, 0, 0};
            swapcontext(&own.scheduler, &own.contexts[i]);
            left -= own.done[i];
        }
        if (cluster->size > 1) std::this_thread::yield();
    }
    cluster->ready.fetch_add(1);  // shared memory lives until all thread blocks of the cluster have ended
    while (cluster->ready.load() < 2 * cluster->size) std::this_thread::yield();
}

static void run_grid(Dimensions grid, int cluster_size, int threads, std::function<void()> body) {
    for (int z = 0; z < grid.z; ++z)
        for (int y = 0; y < grid.y; ++y)
            for (int x = 0; x < grid.x; x += cluster_size) {
                Cluster cluster;
                cluster.size = cluster_size, cluster.anchors.resize(cluster_size);
                std::vector<std::thread> blocks;
                for (int rank = 0; rank < cluster_size; ++rank)
                    blocks.emplace_back(run_block, grid, Dimensions{x + rank, y, z}, threads, &cluster, rank, body);
                for (auto &each : blocks) each.join();
            }
}

// -- the language ------------------------------------------------------------------------------------------------------
static inline float __uint_as_float(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline u32 __float_as_uint(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#define __expf expf
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
using std::max;
using std::min;

static u32 __byte_perm(u32 a, u32 b, u32 places) {
    u64 both = a | (u64)b << 32;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
    return found;
}

static void __syncthreads() { wait_for(block->all, blockDim.x); }
static void __syncwarp() { wait_for(block->warps[threadIdx.x / 32], 32); }

// All lanes of a warp give `count` words and see those of all lanes: [count, 32].
static u32 *exchange(const u32 *given, int count) {
    u32 *words = &block->exchanged[threadIdx.x / 32 * 256];
    for (int i = 0; i < count; ++i) words[i * 32 + threadIdx.x % 32] = given[i];
    __syncwarp();
    return words;
}
static u32 shuffled(u32 given, int source) {
    u32 found = exchange(&given, 1)[source];
    __syncwarp();
    return found;
}
static float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(shuffled(__float_as_uint(value), threadIdx.x % 32 ^ mask));
}
static int __shfl_sync(u32, int value, int source) { return (int)shuffled((u32)value, source); }

// -- common.cu ---------------------------------------------------------------------------------------------------------
static void launch_dependents() {}
static void wait_inputs() {}
static void wait_for_inputs() { wait_inputs(); }

static u32 shared_address(const void *pointer) { return (u32)((const u8 *)pointer - memory); }
static u8 *shared_place(u32 address, u32 bytes) {
    require(address % bytes == 0 && address + bytes <= SHARED_BYTES, "shared memory: alignment or bounds");
    return memory + address;
}
static uint4 shared_load(u32 address) { return *(uint4 *)shared_place(address, 16); }
static uint2 shared_pair(u32 address) { return *(uint2 *)shared_place(address, 8); }
static u32 shared_word(u32 address) { return *(u32 *)shared_place(address, 4); }
static u32 shared_half(u32 address) { return *(u16 *)shared_place(address, 2); }
static u32 shared_byte(u32 address) { return *shared_place(address, 1); }

static void start_barrier(u32 barrier, u32 arrivals) {
    shared_place(barrier, 8);
    block->transfers[barrier] = {(int)arrivals, (int)arrivals, 0, 0};
}
static void fence_barriers() {}
static void arrive(u32 barrier) { --block->transfers.at(barrier).pending, block->transfers.at(barrier).check(); }
static void expect_bytes(u32 barrier, u32 bytes) {
    TransferBarrier &own = block->transfers.at(barrier);
    own.bytes += bytes, --own.pending;
    own.check();
}
static void wait_barrier(u32 barrier, u32 parity) {
    while (block->transfers.at(barrier).phase == (int)parity) yield();
    ++block->progress;
}
static void copy_bulk(u32 target, const u8 *source, u32 bytes, u32 barrier) {
    require(target % 16 == 0 && (uintptr_t)source % 16 == 0 && bytes % 16 == 0 && bytes, "bulk copy: alignment");
    require(target + bytes <= SHARED_BYTES, "bulk copy: bounds");
    memcpy(memory + target, source, bytes);
    TransferBarrier &own = block->transfers.at(barrier);
    own.bytes -= bytes;
    own.check();
}
static void copy_passing(u32 target, const u8 *source, u32 bytes, u32 barrier) { copy_bulk(target, source, bytes, barrier); }
// A copy arrives as late as it may.
template <int SIZE = 16> static void copy_async(u32 target, const u8 *source, u32 bytes) {
    require((uintptr_t)source % SIZE == 0 && bytes <= SIZE, "copy: alignment");
    block->copies[threadIdx.x].back().push_back({shared_place(target, SIZE), source, SIZE, bytes});
}
static void commit_copies() { block->copies[threadIdx.x].emplace_back(); }
template <int PENDING> static void wait_for_copies() {
    auto &groups = block->copies[threadIdx.x];
    for (; groups.size() > PENDING + 1; groups.pop_front())
        for (auto &copy : groups.front()) {
            memset(copy.target, 0, copy.size);
            memcpy(copy.target, copy.source, copy.bytes);
        }
}
template <int THREADS> static void sync_threads() { wait_for(block->some, THREADS); }
template <int THREADS> static void sync_others() { wait_for(block->others, THREADS); }

static void add_arrival(int *count) { __atomic_fetch_add(count, 1, __ATOMIC_RELEASE); }
static int add_departure(int *count) { return __atomic_fetch_add(count, 1, __ATOMIC_ACQ_REL); }
static void wait_arrivals(const int *count, int wanted) {
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < wanted) ++block->progress, yield();  // others run
}
static float fresh_load(const float *source) { return *source; }
static void prefetch(const void *) {}

static u32 cluster_rank() { return block->rank; }
static void cluster_arrive() {
    Cluster &cluster = *block->cluster;
    block->waited[threadIdx.x] = block->cluster_generation;
    if (++block->cluster_arrived < blockDim.x) return;
    block->cluster_arrived = 0, ++block->cluster_generation;
    if (cluster.arrived.fetch_add(1) + 1 == cluster.size) cluster.arrived.store(0), cluster.generation.fetch_add(1);
}
static void cluster_wait() {
    while (block->cluster->generation.load() <= block->waited[threadIdx.x]) yield();
    ++block->progress;
}
static void peer_store(float *target, int rank, float value) {
    *(float *)(block->cluster->anchors[rank] + ((u8 *)target - memory)) = value;
}

static float4 peer_load(const float *source, int rank) {
    return *(float4 *)(block->cluster->anchors[rank] + ((const u8 *)source - memory));
}

static float low(u32 pair) { return __uint_as_float(pair << 16); }
static float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
struct float2 {
    float x, y;
};
static float e4m3(u32 byte) {  // with 4 bits of exponent and 3 of mantissa
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float size = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return byte & 128 ? -size : size;
}
static float2 fp8_pair(u32 word) { return {e4m3(word & 255), e4m3(word >> 8 & 255)}; }
static float half_number(u32 bits) {  // with 5 bits of exponent and 10 of mantissa
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits & 0x8000u ? -size : size;
}
static int whole(float x) { return (int)nearbyintf(x); }
static int dot_bytes(u32 a, u32 b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int)(signed char)(a >> i) * (int)(signed char)(b >> i);
    return sum;
}
static u32 rounded(float value) {  // to bf16, to the nearest even
    u32 bits = __float_as_uint(value);
    return value != value ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}
static u32 round_pair(float first, float second) { return rounded(first) | rounded(second) << 16; }
static u32 multiply_pair(u32 a, u32 b) { return round_pair(low(a) * low(b), high(a) * high(b)); }
static u32 subtract_pair(u32 a, u32 b) { return round_pair(low(a) - low(b), high(a) - high(b)); }
static u32 multiply_add_pair(u32 a, u32 b, u32 c) {
    return round_pair(fmaf(low(a), low(b), low(c)), fmaf(high(a), high(b), high(c)));
}
static float exp2_of(float x) { return exp2f(x); }

static void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 given[6] = {a[0], a[1], a[2], a[3], b0, b1}, *words = exchange(given, 6);
    auto number = [&](int reg, int lane, int k) { return k % 2 ? high(words[reg * 32 + lane]) : low(words[reg * 32 + lane]); };
    int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    float sums[4];
    for (int i = 0; i < 4; ++i) {
        int lower = i / 2, column = 2 * pair + i % 2;
        sums[i] = c[i];
        for (int k = 0; k < 16; ++k)
            sums[i] += number(lower + k / 8 * 2, group * 4 + k % 8 / 2, k) * number(4 + k / 8, column * 4 + k % 8 / 2, k);
    }
    __syncwarp();
    for (int i = 0; i < 4; ++i) c[i] = sums[i];
}

// -- calls -------------------------------------------------------------------------------------------------------------
struct Word {  // an argument of any type
    u64 bits;
    template <class T> operator T *() const { return (T *)bits; }
    operator int() const { return (int)bits; }
    operator float() const { return __uint_as_float((u32)bits); }
};
