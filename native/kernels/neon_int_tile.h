// Four rows against eight columns of bytes, in an order of instructions that keeps both vector units of a Neoverse N1
// busy 95 % of the time; in the order of a compiler, the same instructions take a fifth longer.
//
// A block is 64 dot products, and 24 operations that scale their sums: float(sum) * (d_w * d) is added to the result.
// Those depend on each other, so dot products of the other four columns hide their latency: columns 4 to 7 are half a
// block behind columns 0 to 3.
//
//   v0, v2, v4, v6   bytes 0 to 15 of a block of each row      v1, v3, v5, v7   bytes 16 to 31
//   v8-v11           dot products of columns 0 to 3            v12-v15          of columns 4 to 7
//   v16-v19          results of columns 0 to 3                 v20-v23          of columns 4 to 7
//   v24, v25         weights                                   v27              scales of the rows
//   v28, v29         products of scales                        v30              scales of four columns
//   v31              -1.5 * 2^23, see kTileConstants
//
// Nibbles become bytes on the way, for the rows that follow: by the integer units, which are idle otherwise.
#pragma once

// Converting integers to floats takes an execution unit for two cycles on some cores. Sums that start at the bits of
// 1.5 * 2^23 are floats already, off by that number: adding its negative makes them exact. The constant is loaded each
// time, since loads are cheaper than moves between vector registers.
alignas(16) static const int32_t kTileConstants[8] = {0x4b400000,  0x4b400000,  0x4b400000,  0x4b400000,
                                                      -0x34c00000, -0x34c00000, -0x34c00000, -0x34c00000};

struct IntTile {
  const uint8_t* weights;  // bytes of eight columns
  int64_t gap;             // bytes that follow every second block, at most 64
  const float* scales;     // of the columns, kPanel from block to block
  const int8_t* rows;
  int64_t row_stride;
  const float* row_scales;  // kRowGroup from block to block
  int64_t blocks;           // at least 1
  const float* start;       // initial results
  int64_t start_stride;
  float* results;
  int64_t stride;
  const uint8_t* ahead;  // prefetched while the blocks are multiplied, `ahead_step` bytes of it with each block
  int64_t ahead_step;    // of more than 192, the rest is left to the hardware
};

#define LOAD(REGISTER, FROM, AT) "ldr q" #REGISTER ", [%[" #FROM "], #" #AT "]\n"
#define LOAD_NEXT(REGISTER, ROW) "ldr q" #REGISTER ", [" ROW "], #32\n"
#define LOAD_LAST(REGISTER, ROW) "ldur q" #REGISTER ", [" ROW ", #-16]\n"
#define LOAD_LOWER LOAD_NEXT(0, "%[row]") LOAD_NEXT(2, "x14") LOAD_NEXT(4, "x15") LOAD_NEXT(6, "x17")
#define LOAD_UPPER LOAD_LAST(1, "%[row]") LOAD_LAST(3, "x14") LOAD_LAST(5, "x15") LOAD_LAST(7, "x17")
#define FIND_ROWS "add x14, %[row], %[row_stride]\n add x15, x14, %[row_stride]\n add x17, x15, %[row_stride]\n"
// A few lines at a time, into the second level. All lines of a panel at once, before the tile, would mostly be dropped: with
// eight rows the tile then took a fifth longer.
#define PREFETCH_LINE(AT) "prfm pldl2keep, [%[ahead], #" #AT "]\n"
#define PREFETCH PREFETCH_LINE(0) PREFETCH_LINE(64) PREFETCH_LINE(128) "add %[ahead], %[ahead], %[ahead_step]\n"
#define DOT(SUM, WEIGHTS, ROW, LANE) "sdot v" #SUM ".4s, v" #WEIGHTS ".16b, v" #ROW ".4b[" #LANE "]\n"
#define FLOAT(SUM) "fadd v" #SUM ".4s, v" #SUM ".4s, v31.4s\n"
#define SCALE(PRODUCT, ROW) "fmul v" #PRODUCT ".4s, v30.4s, v27.s[" #ROW "]\n"
#define ADD(RESULT, SUM, PRODUCT) "fmla v" #RESULT ".4s, v" #SUM ".4s, v" #PRODUCT ".4s\n"
#define CLEAR(SUM) LOAD(SUM, constants, 0)

// Weights of four k and four columns, from the first half of a block and from the second. Unpacked blocks have no gaps.
#define LOWER_BYTES(WHICH, AT) LOAD(24, WHICH, AT)
#define UPPER_BYTES(WHICH, AT) LOAD(25, WHICH, AT)
#define NEXT_BYTES "mov %[last], %[next]\n add %[next], %[next], %[step]\n eor %[step], %[step], %[gap]\n"
#define LOWER_UNPACKED(WHICH, AT) "ldr q24, [%[last], #" WHICH##_AT "+" #AT "]\n"
#define UPPER_UNPACKED(WHICH, AT) "ldr q25, [%[last], #" WHICH##_AT "+" #AT "]\n"
#define last_AT "0"
#define next_AT "512"
// The block after the next is unpacked meanwhile; at the end the last one is unpacked again.
#define NEXT_UNPACKED                                                                                   \
  "add %[last], %[last], #512\n cmp %[left], #2\n csel x9, %[step], xzr, gt\n add %[packed], %[packed], x9\n" \
  "cset x9, gt\n add %[target], %[target], x9, lsl #9\n eor %[step], %[step], %[gap]\n"
#define KEEP(AT)
// Nibbles stay in the upper half of their byte.
#define UNPACK(AT)                                                                                      \
  "ldp x9, x10, [%[packed], #" #AT "]\n"                                                                \
  "and x11, x13, x9, lsl #4\n and x12, x13, x10, lsl #4\n and x9, x9, x13\n and x10, x10, x13\n" \
  "stp x11, x12, [%[target], #" #AT "]\n stp x9, x10, [%[target], #256+" #AT "]\n"

#define LOWER_DOTS(A, B, C, D, LANE) DOT(A, 24, 0, LANE) DOT(B, 24, 2, LANE) DOT(C, 24, 4, LANE) DOT(D, 24, 6, LANE)
#define UPPER_DOTS(A, B, C, D, LANE) DOT(A, 25, 1, LANE) DOT(B, 25, 3, LANE) DOT(C, 25, 5, LANE) DOT(D, 25, 7, LANE)
// The dot products A to D of four columns go into their results I to L.
#define FINISH(A, B, C, D, I, J, K, L)                                                                                \
  FLOAT(A) FLOAT(B) FLOAT(C) FLOAT(D) SCALE(28, 0) SCALE(29, 1) ADD(I, A, 28) ADD(J, B, 29) SCALE(28, 2) SCALE(29, 3) \
  ADD(K, C, 28) ADD(L, D, 29)
// Half a block: four columns with the sums E to H end it with the bytes of LAST; those with the sums A to D and the results
// I to L are finished and begin their next block.
#define HALF_BLOCK(LOWER, UPPER, OTHER, A, B, C, D, I, J, K, L, N0, N1, N2, N3, E, F, G, H, LAST, F0, F1, F2, F3, O0, O1, O2, O3) \
  UPPER(LAST, F0) UPPER_DOTS(E, F, G, H, 0) OTHER(O0) FLOAT(A)                                                            \
  UPPER(LAST, F1) FLOAT(B) DOT(E, 25, 1, 1) FLOAT(C) FLOAT(D) DOT(F, 25, 3, 1) SCALE(28, 0) DOT(G, 25, 5, 1)              \
  SCALE(29, 1) DOT(H, 25, 7, 1) OTHER(O1) ADD(I, A, 28) CLEAR(A)                                                          \
  UPPER(LAST, F2) ADD(J, B, 29) DOT(E, 25, 1, 2) CLEAR(B) SCALE(28, 2) DOT(F, 25, 3, 2) SCALE(29, 3)                      \
  DOT(G, 25, 5, 2) ADD(K, C, 28) DOT(H, 25, 7, 2) CLEAR(C) ADD(L, D, 29) OTHER(O2)                                        \
  UPPER(LAST, F3) CLEAR(D) DOT(E, 25, 1, 3) DOT(F, 25, 3, 3) DOT(G, 25, 5, 3) LOWER(next, N0) DOT(H, 25, 7, 3)            \
  LOWER_DOTS(A, B, C, D, 0) LOWER(next, N1) LOWER_DOTS(A, B, C, D, 1) OTHER(O3) LOWER(next, N2)                           \
  LOWER_DOTS(A, B, C, D, 2) LOWER(next, N3) LOWER_DOTS(A, B, C, D, 3)

// clang-format off
#define TILE(LOWER, UPPER, OTHER, NEXT)                                                                                 \
  LOAD(31, constants, 16) FIND_ROWS                                                                                     \
  LOAD_LOWER                                                                                                            \
  CLEAR(8) CLEAR(9) CLEAR(10) CLEAR(11) CLEAR(12) CLEAR(13) CLEAR(14) CLEAR(15)                                         \
  LOWER(last, 0) LOWER_DOTS(8, 9, 10, 11, 0) LOWER(last, 64) LOWER_DOTS(8, 9, 10, 11, 1)                                \
  LOWER(last, 128) LOWER_DOTS(8, 9, 10, 11, 2) LOWER(last, 192) LOWER_DOTS(8, 9, 10, 11, 3)                             \
  LOAD_UPPER                                                                                                            \
  UPPER(last, 256) UPPER_DOTS(8, 9, 10, 11, 0) LOWER(last, 16) LOWER_DOTS(12, 13, 14, 15, 0)                            \
  UPPER(last, 320) UPPER_DOTS(8, 9, 10, 11, 1) LOWER(last, 80) LOWER_DOTS(12, 13, 14, 15, 1)                            \
  UPPER(last, 384) UPPER_DOTS(8, 9, 10, 11, 2) LOWER(last, 144) LOWER_DOTS(12, 13, 14, 15, 2)                           \
  UPPER(last, 448) UPPER_DOTS(8, 9, 10, 11, 3) LOWER(last, 208) LOWER_DOTS(12, 13, 14, 15, 3)                           \
  "cbz %[left], 2f\n"                                                                                                   \
  ".p2align 4\n"                                                                                                        \
  "1:\n"                                                                                                                \
  LOAD_LOWER LOAD(30, scales, 0) LOAD(27, row_scales, 0)                                                                \
  HALF_BLOCK(LOWER, UPPER, OTHER, 8, 9, 10, 11, 16, 17, 18, 19, 0, 64, 128, 192,                                        \
             12, 13, 14, 15, last, 272, 336, 400, 464, 0, 16, 64, 80)                                                   \
  LOAD_UPPER LOAD(30, scales, 16)                                                                                       \
  HALF_BLOCK(LOWER, UPPER, OTHER, 12, 13, 14, 15, 20, 21, 22, 23, 16, 80, 144, 208,                                     \
             8, 9, 10, 11, next, 256, 320, 384, 448, 128, 144, 192, 208)                                                \
  NEXT                                                                                                                  \
  PREFETCH                                                                                                              \
  "add %[scales], %[scales], #64\n"                                                                                     \
  "add %[row_scales], %[row_scales], #16\n"                                                                             \
  "subs %[left], %[left], #1\n"                                                                                         \
  "b.ne 1b\n"                                                                                                           \
  "2:\n"                                                                                                                \
  LOAD(30, scales, 0) LOAD(27, row_scales, 0)                                                                           \
  UPPER(last, 272) UPPER_DOTS(12, 13, 14, 15, 0) UPPER(last, 336) UPPER_DOTS(12, 13, 14, 15, 1)                         \
  UPPER(last, 400) UPPER_DOTS(12, 13, 14, 15, 2) UPPER(last, 464) UPPER_DOTS(12, 13, 14, 15, 3)                         \
  FINISH(8, 9, 10, 11, 16, 17, 18, 19)                                                                                  \
  LOAD(30, scales, 16)                                                                                                  \
  FINISH(12, 13, 14, 15, 20, 21, 22, 23)
// clang-format on

#define LOAD_RESULTS                                                         \
  "ldp q16, q20, [%[start]]\n add %[start], %[start], %[start_stride]\n"     \
  "ldp q17, q21, [%[start]]\n add %[start], %[start], %[start_stride]\n"     \
  "ldp q18, q22, [%[start]]\n add %[start], %[start], %[start_stride]\n"     \
  "ldp q19, q23, [%[start]]\n"
#define STORE_RESULTS                                                        \
  "stp q16, q20, [%[results]]\n add %[results], %[results], %[stride]\n"     \
  "stp q17, q21, [%[results]]\n add %[results], %[results], %[stride]\n"     \
  "stp q18, q22, [%[results]]\n add %[results], %[results], %[stride]\n"     \
  "stp q19, q23, [%[results]]\n"

#define IN_AND_OUT                                                                                                        \
  [last] "+&r"(last), [step] "+&r"(step), [left] "+&r"(left), [scales] "+&r"(scales), [row_scales] "+&r"(row_scales),     \
      [row] "+&r"(row), [start] "+&r"(start), [results] "+&r"(results), [ahead] "+&r"(ahead)
#define IN                                                                                                                \
  [constants] "r"(kTileConstants), [start_stride] "r"(tile.start_stride * 4), [stride] "r"(tile.stride * 4),              \
      [ahead_step] "r"(tile.ahead_step), [row_stride] "r"(tile.row_stride)
#define VECTORS                                                                                                           \
  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", \
      "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31"
#define VARIABLES                                                                                                         \
  const int8_t* row = tile.rows;                                                                                          \
  const float *scales = tile.scales, *row_scales = tile.row_scales, *start = tile.start;                                  \
  const uint8_t* ahead = tile.ahead;                                                                                      \
  float* results = tile.results;                                                                                          \
  int64_t left = tile.blocks - 1;

static inline void int_tile_4x8(const IntTile& tile) {
  VARIABLES
  const uint8_t *last = tile.weights, *next = last + kQuantBlock * kPanel;
  int64_t step = kQuantBlock * kPanel + tile.gap;
  asm volatile(LOAD_RESULTS TILE(LOWER_BYTES, UPPER_BYTES, KEEP, NEXT_BYTES) STORE_RESULTS
               : IN_AND_OUT, [next] "+&r"(next)
               : IN, [gap] "r"(tile.gap)
               : "memory", "cc", "x14", "x15", "x17", VECTORS);
}

// The same with weights that are nibbles, of which the first two blocks have been unpacked: `packed` has the second (or
// the first, if there is only one), with `gap` bytes after every second block. tile.weights is where bytes are put.
static inline void int_tile_4x8_unpacking(const IntTile& tile, const uint8_t* packed, int64_t gap) {
  VARIABLES
  const uint8_t* last = tile.weights;
  auto* target = const_cast<uint8_t*>(last) + (left > 1 ? 2 : left) * kQuantBlock * kPanel;
  int64_t step = kQuantBlock * kPanel / 2 + gap;
  if (left > 1) packed += step, step ^= gap;
  asm volatile("mov x13, #0xf0f0f0f0f0f0f0f0\n" LOAD_RESULTS TILE(LOWER_UNPACKED, UPPER_UNPACKED, UNPACK, NEXT_UNPACKED) STORE_RESULTS
               : IN_AND_OUT, [packed] "+&r"(packed), [target] "+&r"(target)
               : IN, [gap] "r"(gap)
               : "memory", "cc", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x17", VECTORS);
}

#undef LOAD
#undef LOAD_NEXT
#undef LOAD_LAST
#undef LOAD_LOWER
#undef LOAD_UPPER
#undef FIND_ROWS
#undef PREFETCH_LINE
#undef PREFETCH
#undef DOT
#undef FLOAT
#undef SCALE
#undef ADD
#undef CLEAR
#undef LOWER_BYTES
#undef UPPER_BYTES
#undef NEXT_BYTES
#undef LOWER_UNPACKED
#undef UPPER_UNPACKED
#undef last_AT
#undef next_AT
#undef NEXT_UNPACKED
#undef KEEP
#undef UNPACK
#undef LOWER_DOTS
#undef UPPER_DOTS
#undef FINISH
#undef HALF_BLOCK
#undef TILE
#undef LOAD_RESULTS
#undef STORE_RESULTS
#undef IN_AND_OUT
#undef IN
#undef VECTORS
#undef VARIABLES
