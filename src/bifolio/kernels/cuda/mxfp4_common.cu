// Common parts of the products of experts in MXFP4 by tensor cores: weights are the left factor, tokens the right one.
//
// A chunk holds 16 rows times 64 columns in 544 bytes, as `mxfp4_fragments.py` packs them. Lane 4 g + t of a warp owns
// 16 bytes of codes, its own fragments of four instructions (16 columns each), and one word of scales:
//
//     word j       columns 16 j + 2 t + 0, 1, 8, 9 of rows g and g + 8
//     scale bytes  (row g, columns 0..31), (row g + 8, 0..31), (row g, 32..63), (row g + 8, 32..63)
//
// Gate and up of 8 outputs are one tile of 16 rows: gate in rows 0..7, up in 8..15. The chunks of 4 tiles (64 rows) for
// the same columns are neighbours.
constexpr int CHUNK = 544, CODES = 512, GROUP = 4 * CHUNK;  // bytes: a chunk, its codes, the chunks of 64 rows
constexpr u32 NUMBER = 0x81C081C0u;  // sign, two bits of exponent and one of mantissa of a pair of bf16

// The first chunk of a tile; `tiles` is a multiple of 4.
__device__ __forceinline__ const u8 *tile_of(const u8 *weights, int expert, int tile, int tiles, int chunks) {
    return weights + ((u64)expert * tiles + tile / 4 * 4) * chunks * CHUNK + tile % 4 * CHUNK;
}

// -- instructions ------------------------------------------------------------------------------------------------------
__device__ __forceinline__ uint4 load_matrices(u32 address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// -- unpacking ---------------------------------------------------------------------------------------------------------
// The scale in byte BYTE as a pair of bf16: 2 ** (byte - 127), which is the scale of the block times 2 ** 126.
template <int BYTE> __device__ __forceinline__ u32 scale_pair(u32 scales) {
    return __byte_perm(scales, 0, 0x4040 + BYTE * 0x0101) * 128;
}

// Codes have the bits s e e m; in a pair of bf16 they are the number over 2 ** 126. Bits of the four pairs in each half:
//     pair 0: 15 8 7 6    pair 1: 9 2 1 0    pair 2: 3 (of the other half) 12 11 10    pair 3: 13 14 5 4
// Pairs 0 and 2 belong to row g, 1 and 3 to row g + 8.
__device__ __forceinline__ void unpack_codes(u32 word, u32 (&pairs)[4]) {
    pairs[0] = word & NUMBER;
    pairs[1] = word << 6 & NUMBER;
    pairs[2] = __funnelshift_r(word, word, 4) & NUMBER;
    pairs[3] = (word << 2 & 0x80C080C0u) | (word >> 6 & 0x01000100u);
}

// The numbers themselves: codes times the scales of both rows.
__device__ __forceinline__ void unpack(u32 word, u32 first, u32 second, u32 (&pairs)[4]) {
    unpack_codes(word, pairs);
    pairs[0] = multiply_pair(pairs[0], first), pairs[2] = multiply_pair(pairs[2], first);
    pairs[1] = multiply_pair(pairs[1], second), pairs[3] = multiply_pair(pairs[3], second);
}
