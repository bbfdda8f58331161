// Attention on ARM: few queries read the rows of a cache in place; for many, tiles are transposed in registers.
#pragma once

#define BIFOLIO_OWN_TRANSPOSE
#define BIFOLIO_OWN_FEW_ROWS
#define BIFOLIO_OWN_INT_TILES
#define BIFOLIO_OWN_FEW_SOFTMAX

struct Tile;
static inline int64_t chain_row(int64_t d, int64_t chain_length);
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out);
static inline bool reads_directly(const KvLayer& kv, int64_t rows);
template <KvType T>
static inline void prepare_direct(const AttentionRows& rows, int64_t head_dim, float* query);
template <KvType T, int R>
static inline void score_directly(const Tile& tile, const float* query, float* scores);
template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed);
struct IntScratch;
static inline void pack_keys(const Tile&, uint8_t*) {}  // bytes are read in place, too
static inline void pack_values(const Tile&, uint8_t*) {}
template <int R>
static inline void key_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* query, int64_t stride,
                            const int32_t* sums, float* dots);
template <int R>
static inline void value_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* weights,
                              const int32_t* sums, float* dots);

template <KvType T>
static inline void softmax_directly(const AttentionRows& rows, int64_t first_row, int64_t start, int64_t padded, float* scores);

#include "attention.h"
#include "neon_few_rows.h"
#include "neon_softmax.h"

// Four positions and sixteen dimensions at a time. Columns of positions that no query sees hold the values of their rows.
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out) {
  for (int64_t i = tile.begin / 4 * 4; i < tile.end; i += 4) {
    tile.prefetch_keys(i);
    for (int64_t d = 0; d < 4 * chain_length; d += 16) {
      V16 rows[4];
      UNROLL for (int p = 0; p < 4; ++p) rows[p] = load_kv(T, tile.key(i + p), d, tile.kv.head_dim);
      UNROLL for (int c = 0; c < 4; ++c) {
        if (d / 4 + c >= chain_length) break;
        const float32x4_t a = rows[0].v[c], b = rows[1].v[c], e = rows[2].v[c], f = rows[3].v[c];
        const float32x4_t ae = vzip1q_f32(a, e), bf = vzip1q_f32(b, f), ae2 = vzip2q_f32(a, e), bf2 = vzip2q_f32(b, f);
        float* target = out + (d / 4 + c) * kTile + i;
        vst1q_f32(target, vzip1q_f32(ae, bf));
        vst1q_f32(target + chain_length * kTile, vzip2q_f32(ae, bf));
        vst1q_f32(target + 2 * chain_length * kTile, vzip1q_f32(ae2, bf2));
        vst1q_f32(target + 3 * chain_length * kTile, vzip2q_f32(ae2, bf2));
      }
    }
  }
}

// With many rows it is faster to widen the numbers of a tile once.
static inline bool reads_directly(const KvLayer& kv, int64_t rows) {
  return rows <= (kv.type == KvType::F32 ? 16 : 8) && kv.head_dim % 16 == 0;
}

// Four positions at a time: the four sums of each are added across.
template <int R>
static inline void key_dots(const Tile& tile, const IntScratch&, int64_t b, const int8_t* query, int64_t stride,
                            const int32_t*, float* dots) {
  const size_t step = tile.kv.row_bytes;
  int8x16_t low[R], high[R];
  UNROLL for (int r = 0; r < R; ++r) {
    low[r] = vld1q_s8(query + r * stride + b * kQuantBlock);
    high[r] = vld1q_s8(query + r * stride + b * kQuantBlock + 16);
  }
  for (int64_t g = 0; g < kTile / 4; ++g) {
    const auto* row = reinterpret_cast<const int8_t*>(tile.keys[g]) + b * kQuantBlock;
    if (b == 0) tile.prefetch_keys(4 * g);
    int32x4_t sums[R][4];
    UNROLL for (int p = 0; p < 4; ++p) {
      const int8x16_t first = vld1q_s8(row + p * step), second = vld1q_s8(row + p * step + 16);
      UNROLL for (int r = 0; r < R; ++r) sums[r][p] = vdotq_s32(vdotq_s32(vdupq_n_s32(0), first, low[r]), second, high[r]);
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const int32x4_t four = vpaddq_s32(vpaddq_s32(sums[r][0], sums[r][1]), vpaddq_s32(sums[r][2], sums[r][3]));
      vst1q_f32(dots + r * kTile + 4 * g, vcvtq_f32_s32(four));
    }
  }
}

// Four positions and sixteen dimensions at a time, the four positions of a dimension side by side in registers.
template <int R>
static inline void value_dots(const Tile& tile, const IntScratch&, int64_t b, const int8_t* weights, const int32_t*,
                              float* dots) {
  const size_t step = tile.kv.row_bytes;
  int8x16_t low[R], high[R];
  UNROLL for (int r = 0; r < R; ++r) {
    low[r] = vld1q_s8(weights + r * kTile);
    high[r] = vld1q_s8(weights + r * kTile + 16);
  }
  for (int64_t d = 0; d < kQuantBlock; d += 16) {
    int32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vdupq_n_s32(0);
#define STEP(G, HALF, LANE)                                                                                         \
  {                                                                                                                 \
    const uint8_t* row = tile.values[G] + b * kQuantBlock + d;                                                           \
    if (b == 0 && d == 0) tile.prefetch_values(4 * G);                                                              \
    const uint8x16_t p0 = vld1q_u8(row), p1 = vld1q_u8(row + step), p2 = vld1q_u8(row + 2 * step), p3 = vld1q_u8(row + 3 * step); \
    const uint16x8_t a = vreinterpretq_u16_u8(vzip1q_u8(p0, p1)), e = vreinterpretq_u16_u8(vzip2q_u8(p0, p1));      \
    const uint16x8_t f = vreinterpretq_u16_u8(vzip1q_u8(p2, p3)), h = vreinterpretq_u16_u8(vzip2q_u8(p2, p3));      \
    const int8x16_t columns[4] = {vreinterpretq_s8_u16(vzip1q_u16(a, f)), vreinterpretq_s8_u16(vzip2q_u16(a, f)),   \
                                  vreinterpretq_s8_u16(vzip1q_u16(e, h)), vreinterpretq_s8_u16(vzip2q_u16(e, h))};  \
    UNROLL for (int r = 0; r < R; ++r)                                                                              \
      UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vdotq_laneq_s32(sums[r][c], columns[c], HALF[r], LANE);       \
  }
    STEP(0, low, 0) STEP(1, low, 1) STEP(2, low, 2) STEP(3, low, 3)
    STEP(4, high, 0) STEP(5, high, 1) STEP(6, high, 2) STEP(7, high, 3)
#undef STEP
    UNROLL for (int r = 0; r < R; ++r)
      UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(dots + r * kQuantBlock + d + 4 * c, vcvtq_f32_s32(sums[r][c]));
  }
}
