// ARM: 128-bit registers, and the dot product instructions (ARMv8.2 dotprod).
#include <arm_neon.h>

#include "blocks.h"
#include "contracts.h"
#include "platform.h"

namespace bifolio {
namespace {

#include "simd/neon.h"

#include "kernels/neon_exp.h"

#include "kernels/elementwise.h"
#include "kernels/packing.h"
#include "kernels/recurrence.h"
#include "kernels/rwkv.h"

#define BIFOLIO_OWN_FMA_TILE
// The inner loops have constant bounds: unrolled early, their arrays become registers.
#define UNROLL _Pragma("GCC unroll 16")

template <int R>
__attribute__((always_inline)) static inline void fma_tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride,
                                                           int64_t count, V16 acc[R]) {
  float32x4_t sums[R][4];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = acc[r].v[c];
  int64_t k = 0;
#define STEP(LANE)                                                                             \
  UNROLL for (int c = 0; c < 4; ++c) {                                                         \
    const float32x4_t column = vld1q_f32(w + (k + LANE) * w_stride + 4 * c);                   \
    UNROLL for (int r = 0; r < R; ++r) sums[r][c] = vfmaq_laneq_f32(sums[r][c], column, values[r], LANE); \
  }
  for (; k + 4 <= count; k += 4) {
    float32x4_t values[R];
    UNROLL for (int r = 0; r < R; ++r) values[r] = vld1q_f32(x + r * x_stride + k);
    STEP(0) STEP(1) STEP(2) STEP(3)
  }
#undef STEP
  for (; k < count; ++k)
    UNROLL for (int c = 0; c < 4; ++c) {
      const float32x4_t column = vld1q_f32(w + k * w_stride + 4 * c);
      UNROLL for (int r = 0; r < R; ++r) sums[r][c] = vfmaq_n_f32(sums[r][c], column, x[r * x_stride + k]);
    }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) acc[r].v[c] = sums[r][c];
}

#define BIFOLIO_OWN_FMA_PACKED
#define BIFOLIO_PAIRED_ROWS 0  // one panel has four sums
template <Format F, int R, int P>
static inline void fma_packed(const float* x, int64_t x_stride, const uint8_t* panel, size_t panel_bytes, int64_t count,
                              V16 acc[P][R]);

#include "kernels/matmul_float.h"

// Half floats are widened in two ways at once, because one instruction for it would keep half of the vector units busy:
// the lower four of eight by conversion, the upper four by moving their bits, which leaves them 2^112 times too small.
// Their factors correct this exactly. Infinities and NaN of the upper four become finite.
constexpr float kHalfUnit = 5.192296858534828e33f;  // 2^112

static inline void widen_halves(uint16x8_t words, float32x4_t& low, float32x4_t& high) {
  low = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(words)));
  const int32x4_t shifted = vshll_high_n_s16(vreinterpretq_s16_u16(words), 13);
  high = vreinterpretq_f32_s32(vandq_s32(shifted, vdupq_n_s32(int32_t(0x8fffffffu))));
}

// The sixteen columns of one k, and for half floats the columns whose unit is 2^-112.
template <Format F>
static inline void load_columns(const uint16_t* w, int64_t k, float32x4_t columns[4]) {
  if constexpr (F == Format::F16) {
    widen_halves(vld1q_u16(w + k * kPanel), columns[0], columns[1]);
    widen_halves(vld1q_u16(w + k * kPanel + 8), columns[2], columns[3]);
  } else {  // pairs of k
    const uint16_t* pairs = w + k / 2 * 2 * kPanel;
    UNROLL for (int c = 0; c < 4; ++c) {
      const uint16x8_t both = vld1q_u16(pairs + 8 * c);
      columns[c] = vreinterpretq_f32_u16(k % 2 ? vandq_u16(both, vreinterpretq_u16_u32(vdupq_n_u32(0xffff0000u)))
                                               : vtrn1q_u16(vdupq_n_u16(0), both));  // a shift has one unit, this two
    }
  }
}

// Weights for few rows: four values of k at a time, each panel's sums in registers. Half of the columns lack a
// factor of 2^112: activations get 2^56 of it and the sums the rest at the end, so that both stay in the range of floats:
// with activations between 1e-18 and 1e21. Beyond, F16 weights give a few rows other bits than many rows.
constexpr float kHalfOfUnit = 7.205759403792794e16f;  // 2^56

#include "kernels/neon_halves.h"

template <Format F, int R, int P>
static inline void fma_packed(const float* x, int64_t x_stride, const uint8_t* panel, size_t panel_bytes, int64_t count,
                              V16 acc[P][R]) {  // acc is 0
  if constexpr (F == Format::F32) {
    for (int p = 0; p < P; ++p)
      fma_tile<R>(x, x_stride, reinterpret_cast<const float*>(panel + size_t(p) * panel_bytes), kPanel, count, acc[p]);
    return;
  }
  float32x4_t sums[P][R][4];
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[p][r][c] = vdupq_n_f32(0.0f);
  const uint16_t* w[P];
  UNROLL for (int p = 0; p < P; ++p) w[p] = reinterpret_cast<const uint16_t*>(panel + size_t(p) * panel_bytes);
#define STEP(LANE)                                                                                       \
  UNROLL for (int p = 0; p < P; ++p) {                                                                   \
    float32x4_t columns[4];                                                                              \
    load_columns<F>(w[p], k + LANE, columns);                                                            \
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c)                                \
        sums[p][r][c] = vfmaq_laneq_f32(sums[p][r][c], columns[c], c % 2 ? upper[r] : values[r], LANE);  \
  }
  int64_t k = 0;
  if constexpr (F == Format::F16 && R == 1 && P == 1) {
    k = (count - 1) / 4 * 4;
    multiply_halves(x, w[0], k, sums[0][0]);
  }
  for (; k + 4 <= count; k += 4) {
    float32x4_t values[R], upper[R];
    UNROLL for (int r = 0; r < R; ++r) {
      values[r] = vld1q_f32(x + r * x_stride + k);
      upper[r] = F == Format::F16 ? vmulq_n_f32(values[r], kHalfOfUnit) : values[r];
    }
    STEP(0) STEP(1) STEP(2) STEP(3)
  }
  for (; k < count; ++k) {
    float32x4_t values[R], upper[R];
    UNROLL for (int r = 0; r < R; ++r) {
      values[r] = vdupq_n_f32(x[r * x_stride + k]);
      upper[r] = F == Format::F16 ? vmulq_n_f32(values[r], kHalfOfUnit) : values[r];
    }
    STEP(0)
  }
#undef STEP
  UNROLL for (int p = 0; p < P; ++p)
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c)
        acc[p][r].v[c] = F == Format::F16 && c % 2 ? vmulq_n_f32(sums[p][r][c], kHalfOfUnit) : sums[p][r][c];
}

#define BIFOLIO_OWN_UNPACK
constexpr float kNibbleUnit = 0.0625f;  // signed nibbles stay in the upper half of their byte
constexpr float kSixBitUnit = 0.25f;
constexpr Coding unpacked_coding(Coding packed) { return packed.unpacked(); }

// Sixteen bytes of weights: line J of the half `Half` of a block, four columns.
template <Coding C, int Half, int J>
static inline int8x16_t line_of(const uint8_t* quants, int8x16_t table) {
  if constexpr (C.bits == 8) {
    return vld1q_s8(reinterpret_cast<const int8_t*>(quants) + (4 * Half + J) * 64);
  } else if constexpr (C.bits == 4) {
    const uint8x16_t pairs = vld1q_u8(quants + J * 64);
    const uint8x16_t nibbles = Half ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(15));
    if constexpr (C.table) return vqtbl1q_s8(table, nibbles);
    else if constexpr (!C.is_signed) return vreinterpretq_s8_u8(nibbles);
    // Two instructions for sixteen bytes, one for each vector unit: shifts have only one of them.
    else return vreinterpretq_s8_u8(Half ? vandq_u8(pairs, vdupq_n_u8(0xf0)) : vshlq_n_u8(pairs, 4));
  } else {
    const uint8_t* three = quants + Half * 192;
    if constexpr (J < 3) return vreinterpretq_s8_u8(vshlq_n_u8(vld1q_u8(three + J * 64), 2));
    const uint8x16_t upper = vsriq_n_u8(vld1q_u8(three + 128), vld1q_u8(three + 64), 2);
    return vreinterpretq_s8_u8(vandq_u8(vsriq_n_u8(upper, vld1q_u8(three), 4), vdupq_n_u8(0xfc)));
  }
}

template <Coding C>
static inline void unpack_block(const uint8_t* quants, const int8_t* values, uint8_t* out) {
  const int8x16_t table = C.table ? vld1q_s8(values) : vdupq_n_s8(0);
  auto* bytes = reinterpret_cast<int8_t*>(out);
#define LINE(HALF, J) vst1q_s8(bytes + (4 * HALF + J) * 64 + i, (line_of<C, HALF, J>(quants + i, table)));  // a macro in clang
  UNROLL for (int i = 0; i < 64; i += 16) {
    LINE(0, 0) LINE(0, 1) LINE(0, 2) LINE(0, 3) LINE(1, 0) LINE(1, 1) LINE(1, 2) LINE(1, 3)
  }
#undef LINE
}

#define BIFOLIO_OWN_INT_TILE
struct IntRows;
template <Coding C, int R, class Panel>
static inline void int_sums(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16 acc[R]);

#define BIFOLIO_FEW_ROWS_BLOCKS 32  // they and the rows fit into 64 KB, the first cache level of a Neoverse N1
#define BIFOLIO_OWN_INT_4
template <Format F>
constexpr bool kUnpacksInTile = F == Format::Q4_0;
template <Format F>
struct PackedPanel;
struct UnpackedPanel;
struct MemoryPart;
template <Format F>
static inline void accumulate_int_4(const PackedPanel<F>& packed, const UnpackedPanel& w, const IntRows& x, int64_t block,
                                    int64_t blocks, bool first_rows, float* sums, int64_t stride, MemoryPart ahead);

#include "kernels/matmul_int.h"
#include "kernels/neon_int_tile.h"

// Four rows against blocks with one scale each, from block `block` of a panel on. `start` is null for zeros.
template <Format F>
static inline void add_sums_of_4(const PackedPanel<F>& packed, const UnpackedPanel& w, const IntRows& x, int64_t block,
                                 int64_t blocks, bool unpack, bool first, float* sums, int64_t stride, MemoryPart ahead) {
  static const float zeros[8] = {};
  for (int64_t i = 0; unpack && i < 2 && i < blocks; ++i)
    packed.unpack(block + i, const_cast<uint8_t*>(w.quants(i)));
  for (int column = 0; column < kPanel; column += 8) {
    const MemoryPart half = ahead.part(column / 8, 2);
    const IntTile tile{w.first + 4 * column, w.pair - 2 * kQuantBlock * kPanel, w.all_scales + column, x.q, x.stride, x.scale, blocks,
                       first ? zeros : sums + column, first ? 0 : stride, sums + column, stride, half.data, int64_t(half.size) / blocks};
    if (unpack) {
      int_tile_4x8_unpacking(tile, packed.quants(block + (blocks > 1)) + 4 * column, header_bytes(F));
    } else {
      int_tile_4x8(tile);
    }
  }
}

// Minima of some blocks times the sums of four rows.
static inline void add_minima_of_4(const UnpackedPanel& w, const IntRows& x, int64_t blocks, float* sums, int64_t stride) {
  float32x4_t acc[4][4];
  UNROLL for (int r = 0; r < 4; ++r) UNROLL for (int c = 0; c < 4; ++c) acc[r][c] = vld1q_f32(sums + r * stride + 4 * c);
  for (int64_t b = 0; b < blocks; ++b) {
    const float32x4_t rows = vld1q_f32(x.sum + b * kRowGroup);
    UNROLL for (int c = 0; c < 4; ++c) {
      const float32x4_t minimum = vld1q_f32(w.minima(b) + 4 * c);
      acc[0][c] = vfmaq_laneq_f32(acc[0][c], minimum, rows, 0);
      acc[1][c] = vfmaq_laneq_f32(acc[1][c], minimum, rows, 1);
      acc[2][c] = vfmaq_laneq_f32(acc[2][c], minimum, rows, 2);
      acc[3][c] = vfmaq_laneq_f32(acc[3][c], minimum, rows, 3);
    }
  }
  UNROLL for (int r = 0; r < 4; ++r) UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(sums + r * stride + 4 * c, acc[r][c]);
}

// Four rows from block `block` on.
template <Format F>
static inline void accumulate_int_4(const PackedPanel<F>& packed, const UnpackedPanel& w, const IntRows& x, int64_t block,
                                    int64_t blocks, bool first_rows, float* sums, int64_t stride, MemoryPart ahead) {
  if constexpr (!coding(F).minima) {
    add_sums_of_4(packed, w, x, block, blocks, kUnpacksInTile<F> && first_rows, block == 0, sums, stride, ahead);
  } else {
    const int64_t pieces = (blocks + kMinimaBlocks - 1) / kMinimaBlocks;
    for (int64_t b = 0; b < blocks; b += kMinimaBlocks) {
      const int64_t count = blocks - b < kMinimaBlocks ? blocks - b : kMinimaBlocks;
      add_sums_of_4(packed, w.from(b), x.from(b), block + b, count, false, block + b == 0, sums, stride, ahead.part(b / kMinimaBlocks, pieces));
      add_minima_of_4(w.from(b), x.from(b), count, sums, stride);
    }
  }
}

static inline void load_scales(const float* p, float32x4_t out[2]) {
  out[0] = vld1q_f32(p);
  out[1] = vld1q_f32(p + 4);
}

static inline void load_scales(const uint16_t* p, float32x4_t out[2]) {
  const float16x8_t scales = vreinterpretq_f16_u16(vld1q_u16(p));
  out[0] = vcvt_f32_f16(vget_low_f16(scales));
  out[1] = vcvt_high_f32_f16(scales);
}

// See kTileConstants.
static inline int32x4_t biased_zero(const int32_t* bias) {
  int32x4_t value;
  asm volatile("ldr %q0, [%1]" : "=w"(value) : "r"(bias));
  return value;
}

static inline float32x4_t unbiased(int32x4_t sum) { return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(12582912.0f)); }

// The sums of a line of four k values with R rows.
template <Coding C, int Half, int J, int R, int G>
static inline void add_line(const uint8_t* quants, int8x16_t table, const int8x16_t rows[R], int32x4_t dots[R][G]) {
  UNROLL for (int g = 0; g < G; ++g) {
    const int8x16_t weights = line_of<C, Half, J>(quants + g * 16, table);
    UNROLL for (int r = 0; r < R; ++r) dots[r][g] = vdotq_laneq_s32(dots[r][g], weights, rows[r], J);
  }
}

// Columns [column, column + 4 * G) of a panel against R rows. All sums of a block are in registers.
template <Coding C, int R, int G, class Panel>
static inline void int_columns(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, int column,
                               V16 acc[R]) {
  float32x4_t sums[R][G];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int g = 0; g < G; ++g) sums[r][g] = acc[r].v[column / 4 + g];
  const int32_t* bias = kTileConstants;
  asm("" : "+r"(bias));  // otherwise the constant is kept in a register and moved
  const int8x16_t table = C.table ? vld1q_s8(w.table) : vdupq_n_s8(0);
  // Signed nibbles stay in the upper half of their byte, sixteen times too large: the scale of the row corrects it.
  constexpr float unit = C.bits == 4 && C.is_signed ? 0.0625f : C.unit();
  for (int64_t b = begin; b < end; ++b) {
    const int8_t* values = x.q + b * kQuantBlock;
    const uint8_t* quants = w.quants(b) + column * 4;
    const float* row_scale = x.scale + b * kRowGroup + first_row;
    int32x4_t dots[R][G];
    int8x16_t low[R], high[R];
    const auto clear = [&]() __attribute__((always_inline)) {
      UNROLL for (int r = 0; r < R; ++r) UNROLL for (int g = 0; g < G; ++g) dots[r][g] = biased_zero(bias);
    };
    const auto scale_dots = [&](int s) __attribute__((always_inline)) {
      UNROLL for (int g = 0; g < G; g += 2) {
        float32x4_t scale[2];
        load_scales(w.scales(b) + s * kPanel + column + 4 * g, scale);
        UNROLL for (int h = 0; h < 2; ++h)
          UNROLL for (int r = 0; r < R; ++r)
            sums[r][g + h] = vfmaq_f32(sums[r][g + h], unbiased(dots[r][g + h]), vmulq_n_f32(scale[h], row_scale[r] * unit));
      }
    };
    UNROLL for (int r = 0; r < R; ++r) low[r] = vld1q_s8(values + r * x.stride), high[r] = vld1q_s8(values + r * x.stride + 16);
    clear();
#define LINE(HALF, J, ROWS) add_line<C, HALF, J, R, G>(quants, table, ROWS, dots);
    if constexpr (C.scales == 1 && C.bits == 4) {  // both nibbles of a byte one after the other
      LINE(0, 0, low) LINE(1, 0, high) LINE(0, 1, low) LINE(1, 1, high) LINE(0, 2, low) LINE(1, 2, high) LINE(0, 3, low) LINE(1, 3, high)
    } else {
      LINE(0, 0, low) LINE(0, 1, low) LINE(0, 2, low) LINE(0, 3, low)
      if constexpr (C.scales == 2) scale_dots(0), clear();
      LINE(1, 0, high) LINE(1, 1, high) LINE(1, 2, high) LINE(1, 3, high)
    }
#undef LINE
    scale_dots(C.scales - 1);
  }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int g = 0; g < G; ++g) acc[r].v[column / 4 + g] = sums[r][g];
}

#include "kernels/neon_one_row.h"

template <class Panel>
constexpr bool kHasNibbles = false;
template <Format F>
constexpr bool kHasNibbles<PackedPanel<F>> = coding(F).bits == 4 && !coding(F).table && coding(F).scales == 1;

template <Coding C, int R, class Panel>
static inline void int_sums(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16 acc[R]) {
  constexpr int G = R <= 2 ? 4 : 2;
  if constexpr (R == 1 && kHasNibbles<Panel>) {
    add_one_row(w, x, first_row, begin, end, acc[0]);
  } else if constexpr (C.compact) {  // a block at a time as bytes
    for (int64_t b = begin; b < end; ++b) {
      alignas(64) uint8_t bytes[kQuantBlock * kPanel];
      float scales[C.scales * kPanel];
      w.unpack(b, bytes);
      for (int s = 0; s < C.scales; ++s) store(scales + s * kPanel, w.scale(b, s));
      const UnpackedPanel block{bytes, 0, scales, nullptr, 0};
      for (int column = 0; column < kPanel; column += 4 * G) int_columns<C.unpacked(), R, G>(block, x.from(b), first_row, 0, 1, column, acc);
    }
  } else {
    for (int column = 0; column < kPanel; column += 4 * G) int_columns<C, R, G>(w, x, first_row, begin, end, column, acc);
  }
}

#include "kernels/neon_attention.h"
#include "kernels/index_scores.h"


int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 20;
#define EACH_REGISTER(INSTRUCTION)                                                                     \
  INSTRUCTION(0) INSTRUCTION(1) INSTRUCTION(2) INSTRUCTION(3) INSTRUCTION(4) INSTRUCTION(5) INSTRUCTION(6) \
  INSTRUCTION(7) INSTRUCTION(8) INSTRUCTION(9) INSTRUCTION(10) INSTRUCTION(11)
#define DOT(N) "sdot v" #N ".4s, v16.16b, v16.4b[0]\n"
#define FMA(N) "fmla v" #N ".4s, v16.4s, v16.s[0]\n"
#define CLOBBERS "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16"
  for (int64_t i = 0; i < rounds; ++i) {
    if (bytes) {
      asm volatile("movi v16.4s, #0\n" EACH_REGISTER(DOT) ::: CLOBBERS);
    } else {
      asm volatile("movi v16.4s, #0\n" EACH_REGISTER(FMA) ::: CLOBBERS);
    }
  }
#undef EACH_REGISTER
#undef DOT
#undef FMA
#undef CLOBBERS
  return rounds * 12 * (bytes ? 32 : 8);
}

int score() { return platform::has_dot_products() ? 10 : 0; }

}  // namespace

#include "kernels/table.h"
const KernelTable kNeonKernels = BIFOLIO_KERNEL_TABLE("neon", false, matmul, attend_part);

}  // namespace bifolio
