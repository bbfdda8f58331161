// One row against sixteen columns of nibbles.
//
// The two vector units are the limit: a block takes 32 dot products, 32 instructions that take nibbles apart, 12 that scale
// sums, and four conversions of scales, which occupy one of the units for two cycles each. A quarter of the nibbles is therefore taken
// apart by the integer units, which are idle otherwise, one block ahead and by way of the nearest cache. More would need more
// instructions than the core can decode. The sums of a block are scaled while the next block is multiplied. Each instruction is one
// statement of inline assembly, which the compiler does not reorder.
#pragma once

#define IN_ORDER static inline __attribute__((always_inline))

typedef uint8x16_t AnyBytes __attribute__((may_alias));
struct TakenLine {
  uint8_t low[16], high[16];
};

template <class T>
IN_ORDER void load_now(T& value, const void* from) {
  asm volatile("ldr %q0, %1" : "=w"(value) : "m"(*static_cast<const AnyBytes*>(from)));
}
template <int Lane>
IN_ORDER void dot_now(int32x4_t& sum, uint8x16_t weights, uint8x16_t row) {
  asm volatile("sdot %0.4s, %1.16b, %2.4b[%c3]" : "+w"(sum) : "w"(weights), "w"(row), "i"(Lane));
}

// Nibbles as bytes. Signed ones stay in the upper half of their byte.
template <bool Signed>
struct Nibbles {
  static constexpr float kUnit = Signed ? 0.0625f : 1.0f;
  uint8x16_t mask = vdupq_n_u8(Signed ? 0xf0 : 0x0f);
  uint64_t word_mask = Signed ? 0xf0f0f0f0f0f0f0f0u : 0x0f0f0f0f0f0f0f0fu;

  __attribute__((always_inline)) void low(uint8x16_t& nibbles, uint8x16_t pairs) const {
    if constexpr (Signed) asm volatile("shl %0.16b, %1.16b, #4" : "=w"(nibbles) : "w"(pairs));
    else asm volatile("and %0.16b, %1.16b, %2.16b" : "=w"(nibbles) : "w"(pairs), "w"(mask));
  }
  __attribute__((always_inline)) void high(uint8x16_t& nibbles, uint8x16_t pairs) const {
    if constexpr (Signed) asm volatile("and %0.16b, %1.16b, %2.16b" : "=w"(nibbles) : "w"(pairs), "w"(mask));
    else asm volatile("ushr %0.16b, %1.16b, #4" : "=w"(nibbles) : "w"(pairs));
  }
  // Line J of the last four columns, by the integer units.
  template <int J>
  __attribute__((always_inline)) void take_apart(const uint8_t* quants, TakenLine lines[4]) const {
#define TAKE_APART(LOW, HIGH)                                                                                               \
  asm volatile("ldp x9, x10, [%1, %c4]\n and x11, %3, x9" LOW "\n and x12, %3, x10" LOW "\n and x9, %3, x9" HIGH            \
               "\n and x10, %3, x10" HIGH "\n stp x11, x12, [%2, %c5]\n stp x9, x10, [%2, %c5 + 16]"                        \
               : "=m"(lines[J]) : "r"(quants), "r"(lines), "r"(word_mask), "i"(J * 64 + 48), "i"(J * 32) : "x9", "x10", "x11", "x12")
    if constexpr (Signed) TAKE_APART(", lsl #4", "");
    else TAKE_APART("", ", lsr #4");
#undef TAKE_APART
  }
};

// The dot products of a block, and the scales that they need.
struct BlockSums {
  int32x4_t dots[4];     // of four columns each; they start at kTileConstants
  uint8x16_t halves[2];  // scales of the columns, half floats
  float32x4_t row;       // scale of the row, in the first lane

  // Step I of sixteen that add them to the results.
  template <int I>
  __attribute__((always_inline)) void scale(float32x4_t bias, float32x4_t factors[4], float32x4_t results[4]) {
#define STEP(STEP_I, INSTRUCTION) if constexpr (I == STEP_I) INSTRUCTION;
#define CONVERT(G, SUFFIX, LANES) asm volatile("fcvtl" SUFFIX " %0.4s, %1." LANES : "=w"(factors[G]) : "w"(halves[G / 2]))
#define FLOAT(G) asm volatile("fadd %0.4s, %0.4s, %1.4s" : "+w"(dots[G]) : "w"(bias))
#define FACTOR(G) asm volatile("fmul %0.4s, %0.4s, %1.s[0]" : "+w"(factors[G]) : "w"(row))
#define ADD(G) asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(results[G]) : "w"(dots[G]), "w"(factors[G]))
    STEP(0, CONVERT(0, "", "4h")) STEP(1, FLOAT(0)) STEP(2, CONVERT(1, "2", "8h")) STEP(3, FLOAT(1))
    STEP(4, FACTOR(0)) STEP(5, CONVERT(2, "", "4h")) STEP(6, FACTOR(1)) STEP(7, ADD(0))
    STEP(8, CONVERT(3, "2", "8h")) STEP(9, FLOAT(2)) STEP(10, ADD(1)) STEP(11, FACTOR(2))
    STEP(12, FLOAT(3)) STEP(13, FACTOR(3)) STEP(14, ADD(2)) STEP(15, ADD(3))
#undef STEP
#undef CONVERT
#undef FLOAT
#undef FACTOR
#undef ADD
  }
};

// The row and the columns of one block, where they lie.
struct OneBlock {
  const uint8_t *quants, *next;  // of this block and the next
  const TakenLine* taken;        // [4] lines of the last four columns of this block
  TakenLine* next_taken;
  const int8_t* row;
  const uint8_t* scales;
  const float* row_scale;
};

// Multiplies a block, and adds the sums of the block before to the results.
template <bool Signed>
IN_ORDER void multiply_block(const OneBlock& block, const Nibbles<Signed>& nibbles, const int32_t* constants, float32x4_t bias,
                             BlockSums& before, BlockSums& now, float32x4_t results[4]) {
  float32x4_t factors[4];
  uint8x16_t low_row, high_row, pairs, low, high, last_low, last_high;
  load_now(low_row, block.row);
  load_now(high_row, block.row + 16);
  UNROLL for (int g = 0; g < 4; ++g) load_now(now.dots[g], constants);
// Four k values and four columns: their nibbles become bytes, those of the line before are multiplied.
#define LINE(J, G)                                                                                     \
  if constexpr (G == 3) {                                                                              \
    load_now(low, block.taken[J].low);                                                                 \
    load_now(high, block.taken[J].high);                                                               \
    nibbles.template take_apart<J>(block.next, block.next_taken);                                      \
  } else {                                                                                             \
    load_now(pairs, block.quants + J * 64 + G * 16);                                                   \
    nibbles.low(low, pairs);                                                                           \
  }                                                                                                    \
  if constexpr (J + G > 0) dot_now<(4 * J + G - 1) / 4>(now.dots[(G + 3) % 4], last_low, low_row);     \
  before.scale<4 * J + G>(bias, factors, results);                                                     \
  if constexpr (G < 3) nibbles.high(high, pairs);                                                      \
  if constexpr (J + G > 0) dot_now<(4 * J + G - 1) / 4>(now.dots[(G + 3) % 4], last_high, high_row);   \
  last_low = low, last_high = high;
  LINE(0, 0) LINE(0, 1) LINE(0, 2) LINE(0, 3) LINE(1, 0) LINE(1, 1) LINE(1, 2) LINE(1, 3)
  LINE(2, 0) LINE(2, 1) LINE(2, 2) LINE(2, 3) LINE(3, 0) LINE(3, 1) LINE(3, 2) LINE(3, 3)
#undef LINE
  dot_now<3>(now.dots[3], last_low, low_row);
  dot_now<3>(now.dots[3], last_high, high_row);
  load_now(now.halves[0], block.scales);
  load_now(now.halves[1], block.scales + 16);
  now.row = vld1q_dup_f32(block.row_scale);
}

// Blocks [begin, end) of a panel against one row; begin is even.
template <Format F>
static inline void add_one_row(const PackedPanel<F>& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16& acc) {
  constexpr int64_t header = header_bytes(F), size = quant_bytes(F), scales = kPanel * 2;
  const Nibbles<coding(F).is_signed> nibbles;
  const float32x4_t bias = vdupq_n_f32(-12582912.0f);
  const int32_t* constants = kTileConstants;
  asm("" : "+r"(constants));  // otherwise the constant is kept in a register and moved
  float32x4_t results[4], factors[4];  // in the unit of the dot products
  UNROLL for (int g = 0; g < 4; ++g) results[g] = vmulq_n_f32(acc.v[g], 1 / nibbles.kUnit);
  BlockSums even, odd;
  UNROLL for (int g = 0; g < 4; ++g) load_now(odd.dots[g], constants);  // before the first block: sums of 0
  odd.halves[0] = odd.halves[1] = vdupq_n_u8(0), odd.row = vdupq_n_f32(0.0f);
  alignas(64) TakenLine taken[2][4];
  const uint8_t* pair = w.group(begin);
  const int8_t* row = x.q + begin * kQuantBlock;
  const float* row_scale = x.scale + begin * kRowGroup + first_row;
#define TAKE(J) nibbles.template take_apart<J>(pair + header, taken[0]);
  TAKE(0) TAKE(1) TAKE(2) TAKE(3)
#undef TAKE
  int64_t left = end - begin;
  for (; left >= 2; left -= 2) {
    const uint8_t *first = pair + header, *second = first + size, *third = left > 2 ? second + size + header : second;
    multiply_block({first, second, taken[0], taken[1], row, pair, row_scale}, nibbles, constants, bias, odd, even, results);
    multiply_block({second, third, taken[1], taken[0], row + kQuantBlock, pair + scales, row_scale + kRowGroup}, nibbles, constants,
                   bias, even, odd, results);
    pair += group_bytes(F), row += 2 * kQuantBlock, row_scale += 2 * kRowGroup;
  }
  if (left > 0) {
    multiply_block({pair + header, pair + header, taken[0], taken[1], row, pair, row_scale}, nibbles, constants, bias, odd, even, results);
    odd = even;
  }
#define STEP(I) odd.scale<I>(bias, factors, results);
  STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9) STEP(10) STEP(11) STEP(12) STEP(13) STEP(14) STEP(15)
#undef STEP
  UNROLL for (int g = 0; g < 4; ++g) acc.v[g] = vmulq_n_f32(results[g], nibbles.kUnit);
}

#undef IN_ORDER
