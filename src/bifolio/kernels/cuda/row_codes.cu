// A row of x against rows of codes with scales of groups of columns (layouts: `triton/row_layouts.py`).
//
//     value = scale * code + offset          (both of GROUP columns)
//
// A lane has CHUNK columns of every span of its warp, of one group or of two. Its x is a whole number of 16 bits times the
// largest value of the group, in two signed bytes, so that four products are one instruction and sums of a group are exact:
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
// Constants: CODE_BYTES (of a row; 0: not used), CHUNK (16; 32 of up to 4 low bits), LOW, HIGH, GROUP, SCALES, ZERO, and the first bytes of the regions of a row:
// HIGH_AT, SCALES_AT, TOPS_AT.
struct Codes {
    static constexpr int WORDS = CHUNK / 4, SPAN = 32 * CHUNK;
    static constexpr int PARTS = (DEPTH + WARPS * SPAN - 1) / (WARPS * SPAN), SETS = GROUP < CHUNK ? CHUNK / GROUP : 1;
    static constexpr int SEGMENT = CHOICES > 0 && ACTIVATION < 0 ? DEPTH / CHOICES : DEPTH;  // columns of a matrix
    u32 coarse[PARTS][WORDS], fine[PARTS][WORDS];
    float unit[PARTS][SETS];  // of each group
    int total[PARTS][SETS];  // of the whole numbers of each group
    Values<CHUNK> factors[IS_NORMED ? PARTS : 1];

    __device__ __forceinline__ static int column(int p) {
        return (p * WARPS + threadIdx.x / 32 % WARPS) * SPAN + threadIdx.x % 32 * CHUNK;
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
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const float *v = x.v + set * (CHUNK / SETS);
            float largest = 0.0f, broken = 0.0f;  // NaN if one value is no number
#pragma unroll
            for (int i = 0; i < CHUNK / SETS; ++i) largest = fmaxf(largest, fabsf(v[i])), broken = fmaf(v[i], 0.0f, broken);
            float inverse = largest > 1e-30f ? 32512.0f / largest : 0.0f;
            unit[p][set] = largest * (1.0f / 32512.0f) + broken;
            total[p][set] = 0;
#pragma unroll
            for (int i = 0; i < WORDS / SETS; ++i) {
                u32 upper = 0, lower = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    int number = whole(v[4 * i + k] * inverse), above = (number + 128) >> 8;
                    total[p][set] += number;
                    upper |= (u32)(above & 255) << 8 * k, lower |= (u32)(number & 255) << 8 * k;
                }
                coarse[p][set * WORDS / SETS + i] = upper, fine[p][set * WORDS / SETS + i] = lower;
            }
        }
    }

    template <int BYTES> __device__ __forceinline__ static void read_words(u32 address, u32 (&words)[4]) {
        if (BYTES == 4) words[0] = shared_word(address);
        if (BYTES == 8) {
            uint2 found = shared_pair(address);
            words[0] = found.x, words[1] = found.y;
        }
        if (BYTES == 16) {
            uint4 found = shared_load(address);
            words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
        }
    }

    // The codes of the chunk at `place` of a row: words of 4 columns.
    __device__ __forceinline__ static void read_codes(u32 row, int place, u32 (&codes)[WORDS]) {
        u32 words[4];
        read_words<CHUNK * LOW / 8>(row + place * LOW / 8, words);
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            codes[i] = LOW == 8 ? words[i % 4] : words[i * LOW / 8 % 4] >> i * LOW % 8 & (1u << LOW % 8) * 0x01010101u - 0x01010101u;
        if (HIGH == 0) return;
        if (HIGH == 2) read_words<CHUNK / 4>(row + HIGH_AT + place / 4, words);
        else words[0] = shared_word(row + HIGH_AT + place / 32 * 4) >> place % 32 / 4;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            u32 word = words[i * HIGH / 8];
            int from = i * HIGH % 8;
            codes[i] |= (from < LOW ? word << (LOW - from) : word >> (from - LOW)) & (((1u << HIGH) - 1) * 0x01010101u << LOW % 8);
        }
    }

    // The products of group `set` of the chunk at `place`, over its unit: scale and offset are applied to whole sums.
    __device__ __forceinline__ static float scaled(u32 factors, float top, float least, int set, int dot, int total) {
        if (SCALES == HALF_PAIRS) return fmaf(half_number(factors & 0xFFFFu), (float)dot, half_number(factors >> 16) * (float)total);
        if (SCALES == BYTE_PAIRS) {
            int scale = factors >> 16 * set & 255u, minimum = factors >> (16 * set + 8) & 255u;
            return fmaf(-least, (float)(minimum * total), top * (float)(scale * dot));
        }
        int own = dot - ZERO * total;
        if (SCALES == SIGNED_BYTES) return top * (float)(((int)((factors >> 8 * set & 255u) ^ 128u) - 128) * own);
        return half_number(factors) * (float)own;
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
                u32 row = first + r * CODE_BYTES, codes[WORDS];
                read_codes(row, place, codes);
                constexpr int BYTES = SCALES == HALF_PAIRS ? 4 : SCALES == SIGNED_BYTES ? 1 : 2;  // of a group
                u32 from = row + SCALES_AT + place / GROUP * BYTES, found;
                found = BYTES * SETS == 4 ? shared_word(from) : BYTES * SETS == 2 ? shared_half(from) : shared_byte(from);
                u32 tops = SCALES == BYTE_PAIRS || SCALES == SIGNED_BYTES ? shared_word(row + TOPS_AT + place / 256 * 4) : 0;
                float top = half_number(tops & 0xFFFFu), least = half_number(tops >> 16);
                int upper[SETS] = {}, dots[SETS] = {};
#pragma unroll
                for (int i = 0; i < WORDS; ++i) {
                    int set = i * SETS / WORDS;
                    upper[set] = dot_bytes(codes[i], coarse[p][i], upper[set]);
                    dots[set] = dot_bytes(codes[i], fine[p][i], dots[set]);
                }
#pragma unroll
                for (int i = 0; i < SETS; ++i)
                    sum[r] = fmaf(unit[p][i], scaled(found, top, least, i, dots[i] + 256 * upper[i], total[p][i]), sum[r]);
            }
        }
        add_lanes(sum, sums);
    }
};
