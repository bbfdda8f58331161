// ARM: 128-bit registers, and the dot product instructions (ARMv8.2 dotprod).
#include <arm_neon.h>

#include "contracts.h"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace bifolio {
namespace {

#include "simd/neon.h"

#include "kernels/elementwise.h"

#define BIFOLIO_OWN_FMA_TILE
template <int R>
static inline void fma_tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                            V16 acc[R]) {
  int64_t k = 0;
#define STEP(LANE)                                                                                        \
  {                                                                                                       \
    const V16 column = load(w + (k + LANE) * w_stride);                                                   \
    for (int r = 0; r < R; ++r)                                                                           \
      for (int c = 0; c < 4; ++c) acc[r].v[c] = vfmaq_laneq_f32(acc[r].v[c], column.v[c], values[r], LANE); \
  }
  for (; k + 4 <= count; k += 4) {
    float32x4_t values[R];
    for (int r = 0; r < R; ++r) values[r] = vld1q_f32(x + r * x_stride + k);
    STEP(0) STEP(1) STEP(2) STEP(3)
  }
#undef STEP
  for (; k < count; ++k) {
    const V16 column = load(w + k * w_stride);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, broadcast(x[r * x_stride + k]), acc[r]);
  }
}

#include "kernels/matmul_float.h"

#define BIFOLIO_OWN_INT_TILE
struct IntPanel;
struct IntRows;
template <int Bits, bool Min, int R>
static inline void int_tile(const IntPanel& w, const IntRows& x, int first_row, int64_t blocks, V16 acc[R]);

#include "kernels/matmul_int.h"

// Eight columns (two registers of four) against R rows. The rows' bytes stay in registers for the whole block.
template <int Bits, bool Min, int R>
static inline void int_half_tile(const IntPanel& w, const IntRows& x, int first_row, int64_t blocks, int half,
                                 V16 acc[R]) {
  const uint8_t* quants = w.quants + half * 32;
  const uint16_t* scales = w.scales + half * 8;
  const uint16_t* minima = w.minima + half * 8;
  float32x4_t sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) sums[r][c] = acc[r].v[2 * half + c];
  for (int64_t b = 0; b < blocks; ++b) {
    int8x16_t low[R], high[R];
    for (int r = 0; r < R; ++r) {
      low[r] = vld1q_s8(x.q + r * x.stride + b * kBlock);
      high[r] = vld1q_s8(x.q + r * x.stride + b * kBlock + 16);
    }
    float32x4_t row_scales = vld1q_f32(x.scale + b * kRowGroup);
    // Signed nibbles are left in the upper half of their byte, sixteen times too large.
    if constexpr (Bits == 4 && !Min) row_scales = vmulq_n_f32(row_scales, 0.0625f);
    const float16x8_t scale = vreinterpretq_f16_u16(vld1q_u16(scales + b * kPanel));
    for (int c = 0; c < 2; ++c) {
      int32x4_t dots[R];
      for (int r = 0; r < R; ++r) dots[r] = vdupq_n_s32(0);
      if constexpr (Bits == 8) {
        const auto* q = reinterpret_cast<const int8_t*>(quants) + b * 512 + c * 16;
#define STEP(J, HALF, LANE)                                                                    \
  {                                                                                            \
    const int8x16_t weights = vld1q_s8(q + J * 64);                                            \
    for (int r = 0; r < R; ++r) dots[r] = vdotq_laneq_s32(dots[r], weights, HALF[r], LANE);    \
  }
        STEP(0, low, 0) STEP(1, low, 1) STEP(2, low, 2) STEP(3, low, 3)
        STEP(4, high, 0) STEP(5, high, 1) STEP(6, high, 2) STEP(7, high, 3)
#undef STEP
      } else {
        const uint8_t* q = quants + b * 256 + c * 16;
#define STEP(J)                                                                                                     \
  {                                                                                                                 \
    const uint8x16_t pairs = vld1q_u8(q + J * 64);                                                                  \
    const int8x16_t first = vreinterpretq_s8_u8(Min ? vandq_u8(pairs, vdupq_n_u8(15)) : vshlq_n_u8(pairs, 4));      \
    const int8x16_t second = vreinterpretq_s8_u8(Min ? vshrq_n_u8(pairs, 4) : vandq_u8(pairs, vdupq_n_u8(0xf0)));   \
    for (int r = 0; r < R; ++r) dots[r] = vdotq_laneq_s32(dots[r], first, low[r], J);                               \
    for (int r = 0; r < R; ++r) dots[r] = vdotq_laneq_s32(dots[r], second, high[r], J);                             \
  }
        STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
      }
      const float32x4_t column_scale = c == 0 ? vcvt_f32_f16(vget_low_f16(scale)) : vcvt_high_f32_f16(scale);
      for (int r = 0; r < R; ++r) {
        const float32x4_t product = R == 1 ? vmulq_n_f32(column_scale, row_scales[first_row])
                                           : vmulq_n_f32(column_scale, row_scales[r]);
        sums[r][c] = vfmaq_f32(sums[r][c], vcvtq_f32_s32(dots[r]), product);
      }
      if constexpr (Min) {
        const float32x4_t column_min = widen_f16(vld1_u16(minima + b * kPanel + c * 4));
        const float32x4_t row_sums = vld1q_f32(x.sum + b * kRowGroup);
        for (int r = 0; r < R; ++r)
          sums[r][c] = R == 1 ? vfmaq_n_f32(sums[r][c], column_min, row_sums[first_row])
                              : vfmaq_n_f32(sums[r][c], column_min, row_sums[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) acc[r].v[2 * half + c] = sums[r][c];
}

template <int Bits, bool Min, int R>
static inline void int_tile(const IntPanel& w, const IntRows& x, int first_row, int64_t blocks, V16 acc[R]) {
  int_half_tile<Bits, Min, R>(w, x, first_row, blocks, 0, acc);
  int_half_tile<Bits, Min, R>(w, x, first_row, blocks, 1, acc);
}

#define BIFOLIO_OWN_TRANSPOSE
static inline void store_transposed(const V16 rows[16], float* out, int64_t stride, int64_t dims, int64_t positions) {
  for (int64_t i = 0; i < positions; i += 4) {
    const int64_t count = positions - i < 4 ? positions - i : 4;
    for (int c = 0; 4 * c < dims; ++c) {
      const float32x4_t a = rows[i].v[c], b = count > 1 ? rows[i + 1].v[c] : a;
      const float32x4_t e = count > 2 ? rows[i + 2].v[c] : a, f = count > 3 ? rows[i + 3].v[c] : a;
      const float32x4_t ae = vzip1q_f32(a, e), bf = vzip1q_f32(b, f), ae2 = vzip2q_f32(a, e), bf2 = vzip2q_f32(b, f);
      const float32x4_t columns[4] = {vzip1q_f32(ae, bf), vzip2q_f32(ae, bf), vzip1q_f32(ae2, bf2), vzip2q_f32(ae2, bf2)};
      for (int d = 0; d < 4 && 4 * c + d < dims; ++d) {
        float* target = out + (4 * c + d) * stride + i;
        if (count == 4) {
          vst1q_f32(target, columns[d]);
        } else {
          for (int64_t j = 0; j < count; ++j) target[j] = columns[d][j];
        }
      }
    }
  }
}

#include "kernels/attention.h"

int score() {
#if defined(__linux__)
  constexpr unsigned long dotprod = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & dotprod ? 10 : 0;
#else
  return 10;
#endif
}

}  // namespace

#include "kernels/table.h"
const KernelTable kNeonKernels = BIFOLIO_KERNEL_TABLE("neon");

}  // namespace bifolio
