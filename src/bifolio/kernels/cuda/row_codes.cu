// A row of x against rows of codes with scales of groups of columns (layouts: `triton/row_layouts.py`).
//
//     value = scale * code + offset          (both of GROUP columns)
//
// A lane has CHUNK columns of every span of its warp. Its x is a whole number of 16 bits times the largest value of the chunk, in
// two signed bytes, so that four products are one instruction and sums of a chunk are exact:
//
//     x = unit * (256 * coarse + fine)       unit: the largest value over 32512
//
// Codes of 4 columns are the bytes of a word after one shift and mask of a plane:
//
//     LOW 8      word i: columns 4 i to 4 i + 3
//     LOW 4      word i of 8 columns: byte k has column k in the low bits, column 4 + k in the high ones
//     LOW 2      word i of 16 columns: byte k has the columns k, 4 + k, 8 + k, 12 + k, from the lowest bits on
//     HIGH 2, 1  the bits above LOW, in words of 16 or 32 columns in the same order; 0: none
//
// Constants: CODE_BYTES (of a row; 0: not used), LOW, HIGH, GROUP, SCALES, ZERO, and the first bytes of the regions of a row:
// HIGH_AT, SCALES_AT, TOPS_AT.
struct Codes {
    static constexpr int CHUNK = 16, SPAN = 32 * CHUNK, PARTS = (DEPTH + WARPS * SPAN - 1) / (WARPS * SPAN);
    static constexpr int SEGMENT = CHOICES > 0 && ACTIVATION < 0 ? DEPTH / CHOICES : DEPTH;  // columns of a matrix
    u32 coarse[PARTS][4], fine[PARTS][4];
    float unit[PARTS];
    int total[PARTS];  // of the whole numbers
    Values<CHUNK> factors[IS_NORMED ? PARTS : 1];

    __device__ __forceinline__ static int column(int p) {
        return (p * WARPS + threadIdx.x / 32) * SPAN + threadIdx.x % 32 * CHUNK;
    }
    __device__ __forceinline__ static bool exists(int p) { return DEPTH % (WARPS * SPAN) == 0 || column(p) < DEPTH; }

    __device__ __forceinline__ void read_factors(const void *source) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
            if (exists(p)) factors[p].read<IS_SCALE_WIDE>(source, column(p));
    }

    // Returns this lane's sum of squares, if there is a norm.
    __device__ __forceinline__ float read(const void *source) {
        Values<CHUNK> x[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            x[p] = Values<CHUNK>{};
            if (exists(p)) x[p].read<IS_X_WIDE>(source, column(p));
        }
        float square = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (IS_NORMED && exists(p)) square += x[p].scale(factors[p]);
            round(p, x[p]);
        }
        return square;
    }

    __device__ __forceinline__ void round(int p, const Values<CHUNK> &x) {
        float largest = 0.0f, broken = 0.0f;  // NaN if one value is no number
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) largest = fmaxf(largest, fabsf(x.v[i])), broken = fmaf(x.v[i], 0.0f, broken);
        float inverse = largest > 1e-30f ? 32512.0f / largest : 0.0f;
        unit[p] = largest * (1.0f / 32512.0f) + broken;
        total[p] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 upper = 0, lower = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int number = whole(x.v[4 * i + k] * inverse), above = (number + 128) >> 8;
                total[p] += number;
                upper |= (u32)(above & 255) << 8 * k, lower |= (u32)(number & 255) << 8 * k;
            }
            coarse[p][i] = upper, fine[p][i] = lower;
        }
    }

    // The codes of the chunk at `place` of a row: words of 4 columns.
    __device__ __forceinline__ static void read_codes(u32 row, int place, u32 (&codes)[4]) {
        if (LOW == 8) {
            uint4 found = shared_load(row + place);
            codes[0] = found.x, codes[1] = found.y, codes[2] = found.z, codes[3] = found.w;
        } else if (LOW == 4) {
            uint2 found = shared_pair(row + place / 2);
            codes[0] = found.x & 0x0F0F0F0Fu, codes[1] = found.x >> 4 & 0x0F0F0F0Fu;
            codes[2] = found.y & 0x0F0F0F0Fu, codes[3] = found.y >> 4 & 0x0F0F0F0Fu;
        } else {
            u32 found = shared_word(row + place / 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) codes[i] = found >> 2 * i & 0x03030303u;
        }
        if (HIGH == 2) {
            u32 found = shared_word(row + HIGH_AT + place / 4);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                codes[i] |= (2 * i < LOW ? found << (LOW - 2 * i) : found >> (2 * i - LOW)) & (0x03030303u << LOW);
        }
        if (HIGH == 1) {
            u32 found = shared_word(row + HIGH_AT + place / 32 * 4) >> place % 32 / 4;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                codes[i] |= (i < LOW ? found << (LOW - i) : found >> (i - LOW)) & (0x01010101u << LOW);
        }
    }

    // Products of the chunk: the scale and the offset of its group are applied to whole sums.
    __device__ __forceinline__ static float scaled(u32 row, int place, int dot, int total) {
        int group = place / GROUP;
        if (SCALES == HALF_PAIRS) {
            u32 pair = shared_word(row + SCALES_AT + 4 * group);
            return fmaf(half_number(pair & 0xFFFFu), (float)dot, half_number(pair >> 16) * (float)total);
        }
        if (SCALES == BYTE_PAIRS) {
            u32 pair = shared_half(row + SCALES_AT + 2 * group), top = shared_word(row + TOPS_AT + place / 256 * 4);
            float first = half_number(top & 0xFFFFu) * (float)((int)(pair & 255u) * dot);
            return fmaf(-half_number(top >> 16), (float)((int)(pair >> 8) * total), first);
        }
        int own = dot - ZERO * total;
        if (SCALES == SIGNED_BYTES) {
            int scale = (int)(shared_byte(row + SCALES_AT + group) ^ 128u) - 128;
            float top = half_number(shared_word(row + TOPS_AT + place / 256 * 4) & 0xFFFFu);
            return top * (float)scale * (float)own;
        }
        return half_number(shared_half(row + SCALES_AT + 2 * group)) * (float)own;
    }

    // Adds the products of a unit at `slot` over the lanes, and writes them to sums[row * WARPS].
    __device__ __forceinline__ void multiply(u32 slot, float *sums) const {
        float sum[UNIT] = {};
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
            if (!exists(p)) continue;
            int place = column(p) % SEGMENT;
            u32 first = slot + column(p) / SEGMENT * (UNIT * CODE_BYTES);
#pragma unroll
            for (int r = 0; r < UNIT; ++r) {
                u32 row = first + r * CODE_BYTES, codes[4];
                read_codes(row, place, codes);
                int upper = 0, lower = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    upper = dot_bytes(codes[i], coarse[p][i], upper), lower = dot_bytes(codes[i], fine[p][i], lower);
                sum[r] = fmaf(unit[p], scaled(row, place, 256 * upper + lower, total[p]), sum[r]);
            }
        }
        add_lanes(sum, sums);
    }
};
