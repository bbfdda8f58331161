// What attention does differently on ARM: rows of a cache are read where they lie when there are few queries, and tiles
// are transposed in registers.
#pragma once

#define BIFOLIO_OWN_TRANSPOSE
#define BIFOLIO_OWN_FEW_ROWS
#define BIFOLIO_OWN_INT_TILES

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
static inline void pack_keys(const Tile&, uint8_t*) {}  // bytes are read where they lie, too
static inline void pack_values(const Tile&, uint8_t*) {}
template <int R>
static inline void key_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* query, int64_t stride,
                            const int32_t* sums, float* dots);
template <int R>
static inline void value_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* weights,
                              const int32_t* sums, float* dots);

#include "attention.h"

// Four positions and sixteen dimensions at a time. Columns of positions that nobody sees get what their rows hold.
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

// Numbers that must be widened first are better widened once, when many rows want them.
static inline bool reads_directly(const KvLayer& kv, int64_t rows) {
  return rows <= (kv.type == KvType::F32 ? 16 : 8) && kv.head_dim % 16 == 0;
}

// Eight numbers of a row as floats, the upper four in units of 2^-112 if they are half floats.
template <KvType T>
static inline void load_eight(const uint8_t* row, int64_t at, float32x4_t& low, float32x4_t& high) {
  if constexpr (T == KvType::F32) {
    low = vld1q_f32(reinterpret_cast<const float*>(row) + at);
    high = vld1q_f32(reinterpret_cast<const float*>(row) + at + 4);
  } else {
    const uint16x8_t words = vld1q_u16(reinterpret_cast<const uint16_t*>(row) + at);
    if constexpr (T == KvType::F16) {
      widen_halves(words, low, high);
    } else {
      low = vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), words));
      high = vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), words));
    }
  }
}

// The queries with the unit of `load_eight` in them.
template <KvType T>
static inline void prepare_direct(const AttentionRows& rows, int64_t head_dim, float* query) {
  constexpr float unit = T == KvType::F16 ? kHalfUnit : 1.0f;
  for (int64_t i = 0; i < rows.count * head_dim; i += 8) {
    vst1q_f32(query + i, vld1q_f32(rows.query + i));
    vst1q_f32(query + i + 4, vmulq_n_f32(vld1q_f32(rows.query + i + 4), unit));
  }
}

// Ask for what `count` numbers of four rows, from number `at` on, take of the rows' memory: all of it is asked for once, a
// little in every round of the work that it is to hide behind.
template <KvType T>
static inline void prefetch_numbers(const uint8_t* four_rows, int64_t at, int64_t count) {
  constexpr int64_t bytes = T == KvType::F32 ? 4 : 2;
  for (int64_t i = 4 * bytes * at; i < 4 * bytes * (at + count); i += 64) __builtin_prefetch(four_rows + i);
}

// P positions at a time; the four lanes of a sum are the four chains.
template <KvType T, int R, int P>
static inline void score_positions(const uint8_t* const rows[P], const uint8_t* const* ahead, const float* query,
                                   int64_t head_dim, float* scores) {
  float32x4_t sums[R][P];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int p = 0; p < P; ++p) sums[r][p] = vdupq_n_f32(0.0f);
  for (int64_t d = 0; d < head_dim; d += 8) {
    UNROLL for (int p = 0; p < P; p += 4) prefetch_numbers<T>(ahead[p / 4], d, 8);
    UNROLL for (int p = 0; p < P; ++p) {
      float32x4_t low, high;
      load_eight<T>(rows[p], d, low, high);
      UNROLL for (int r = 0; r < R; ++r) sums[r][p] = vfmaq_f32(sums[r][p], low, vld1q_f32(query + r * head_dim + d));
      UNROLL for (int r = 0; r < R; ++r) sums[r][p] = vfmaq_f32(sums[r][p], high, vld1q_f32(query + r * head_dim + d + 4));
    }
  }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int p = 0; p < P; p += 4) {
    const float32x4_t four = vpaddq_f32(vpaddq_f32(sums[r][p], sums[r][p + 1]), vpaddq_f32(sums[r][p + 2], sums[r][p + 3]));
    vst1q_f32(scores + r * kTile + p, four);
  }
}

template <KvType T, int R>
static inline void score_directly(const Tile& tile, const float* query, float* scores) {
  constexpr int P = R == 1 ? 8 : 4;
  const uint8_t* const* ahead = (tile.next ? tile.next : &tile)->keys;
  for (int64_t i = tile.begin / P * P; i < tile.end; i += P) {
    const uint8_t* rows[P];
    UNROLL for (int p = 0; p < P; ++p) rows[p] = tile.key(i + p);
    score_positions<T, R, P>(rows, ahead + i / 4, query, tile.kv.head_dim, scores + i);
  }
}

// One position, sixteen dimensions: values times the weights of lane L.
#define MIX_POSITION(L)                                                                                             \
  {                                                                                                                 \
    float32x4_t values[4];                                                                                          \
    load_eight<T>(row + L * step, d, values[0], values[1]);                                                         \
    load_eight<T>(row + L * step, d + 8, values[2], values[3]);                                                     \
    UNROLL for (int r = 0; r < R; ++r) {                                                                            \
      sums[r][0] = vfmaq_laneq_f32(sums[r][0], values[0], weight[r], L);                                            \
      sums[r][1] = vfmaq_laneq_f32(sums[r][1], values[1], upper[r], L);                                             \
      sums[r][2] = vfmaq_laneq_f32(sums[r][2], values[2], weight[r], L);                                            \
      sums[r][3] = vfmaq_laneq_f32(sums[r][3], values[3], upper[r], L);                                             \
    }                                                                                                               \
  }

// Sixteen dimensions at a time, position after position: first those in fours, then what is left.
template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed) {
  constexpr float unit = T == KvType::F16 ? kHalfUnit : 1.0f;
  const size_t step = tile.kv.row_bytes;
  const int64_t first = (tile.begin + 3) / 4 * 4, last = tile.end / 4 * 4;
  float scaled[R * kTile];
  if constexpr (T == KvType::F16)
    for (int64_t i = 0; i < R * kTile; i += 4) vst1q_f32(scaled + i, vmulq_n_f32(vld1q_f32(weights + i), unit));
  const float* above = T == KvType::F16 ? scaled : weights;
  const uint8_t* const* ahead = (tile.next ? tile.next : &tile)->values;
  for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
    float32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vld1q_f32(mixed + r * padded + d + 4 * c);
    const auto one = [&](int64_t i) {
      const uint8_t* row = tile.value(i);
      float32x4_t weight[R], upper[R];
      UNROLL for (int r = 0; r < R; ++r) weight[r] = vdupq_n_f32(weights[r * kTile + i]), upper[r] = vdupq_n_f32(above[r * kTile + i]);
      MIX_POSITION(0)
    };
    int64_t i = tile.begin;
    for (; i < first && i < tile.end; ++i) one(i);
    for (; i < last; i += 4) {
      const uint8_t* row = tile.values[i / 4];
      float32x4_t weight[R], upper[R];
      UNROLL for (int r = 0; r < R; ++r) weight[r] = vld1q_f32(weights + r * kTile + i), upper[r] = vld1q_f32(above + r * kTile + i);
      prefetch_numbers<T>(ahead[i / 4], d, 16);
      MIX_POSITION(0) MIX_POSITION(1) MIX_POSITION(2) MIX_POSITION(3)
    }
    for (; i < tile.end; ++i) one(i);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(mixed + r * padded + d + 4 * c, sums[r][c]);
  }
}

// Four positions at a time: the four sums of each are added across.
template <int R>
static inline void key_dots(const Tile& tile, const IntScratch&, int64_t b, const int8_t* query, int64_t stride,
                            const int32_t*, float* dots) {
  const size_t step = tile.kv.row_bytes;
  int8x16_t low[R], high[R];
  UNROLL for (int r = 0; r < R; ++r) {
    low[r] = vld1q_s8(query + r * stride + b * kBlock);
    high[r] = vld1q_s8(query + r * stride + b * kBlock + 16);
  }
  for (int64_t g = 0; g < kTile / 4; ++g) {
    const auto* row = reinterpret_cast<const int8_t*>(tile.keys[g]) + b * kBlock;
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
  for (int64_t d = 0; d < kBlock; d += 16) {
    int32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vdupq_n_s32(0);
#define STEP(G, HALF, LANE)                                                                                         \
  {                                                                                                                 \
    const uint8_t* row = tile.values[G] + b * kBlock + d;                                                           \
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
      UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(dots + r * kBlock + d + 4 * c, vcvtq_f32_s32(sums[r][c]));
  }
}
