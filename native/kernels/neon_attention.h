// What attention does differently on ARM: rows of a cache are read where they lie when there are few queries, and tiles
// are transposed in registers.
#pragma once

#define BIFOLIO_OWN_TRANSPOSE
#define BIFOLIO_OWN_FEW_ROWS
#define BIFOLIO_OWN_PACK

struct Tile;
static inline int64_t chain_row(int64_t d, int64_t chain_length);
static inline void store_transposed(const V16 rows[16], int64_t count, int64_t d, int64_t chain_length, float* out);
static inline bool reads_directly(const KvLayer& kv, int64_t rows);
template <KvType T, int R>
static inline void score_directly(const Tile& tile, const float* query, float* scores);
template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed);
static inline void pack_keys(const Tile& tile, uint8_t* out);
static inline void pack_values(const Tile& tile, uint8_t* out);

#include "attention.h"

static inline void store_transposed(const V16 rows[16], int64_t count, int64_t d, int64_t chain_length, float* out) {
  for (int64_t i = 0; i < count; i += 4) {
    const int64_t left = count - i;
    for (int c = 0; c < 4 && d / 4 + c < chain_length; ++c) {
      const float32x4_t a = rows[i].v[c], b = left > 1 ? rows[i + 1].v[c] : a;
      const float32x4_t e = left > 2 ? rows[i + 2].v[c] : a, f = left > 3 ? rows[i + 3].v[c] : a;
      const float32x4_t ae = vzip1q_f32(a, e), bf = vzip1q_f32(b, f), ae2 = vzip2q_f32(a, e), bf2 = vzip2q_f32(b, f);
      const float32x4_t columns[4] = {vzip1q_f32(ae, bf), vzip2q_f32(ae, bf), vzip1q_f32(ae2, bf2), vzip2q_f32(ae2, bf2)};
      for (int j = 0; j < 4; ++j) {
        float* target = out + (j * chain_length + d / 4 + c) * kTile + i;
        if (left >= 4) {
          vst1q_f32(target, columns[j]);
        } else {
          for (int64_t n = 0; n < left; ++n) target[n] = columns[j][n];
        }
      }
    }
  }
}

static inline bool reads_directly(const KvLayer& kv, int64_t rows) { return rows <= 8 && kv.head_dim % 16 == 0; }

// Eight numbers of a row as floats.
template <KvType T>
static inline void load_eight(const uint8_t* row, int64_t at, float32x4_t& low, float32x4_t& high) {
  if constexpr (T == KvType::F32) {
    low = vld1q_f32(reinterpret_cast<const float*>(row) + at);
    high = vld1q_f32(reinterpret_cast<const float*>(row) + at + 4);
  } else {
    const uint16x8_t words = vld1q_u16(reinterpret_cast<const uint16_t*>(row) + at);
    if constexpr (T == KvType::F16) {
      low = vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u16(words)));
      high = vcvt_high_f32_f16(vreinterpretq_f16_u16(words));
    } else {
      low = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(words), 16));
      high = vreinterpretq_f32_u32(vshll_high_n_u16(words, 16));
    }
  }
}

// Four positions at a time; the four lanes of a sum are the four chains.
template <KvType T, int R>
static inline void score_directly(const Tile& tile, const float* query, float* scores) {
  const int64_t head_dim = tile.kv.head_dim;
  for (int64_t i = tile.begin; i < tile.end; i += 4) {
    const uint8_t* rows[4];
    UNROLL for (int p = 0; p < 4; ++p) rows[p] = tile.keys[i + p < tile.end ? i + p : tile.end - 1];
    float32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int p = 0; p < 4; ++p) sums[r][p] = vdupq_n_f32(0.0f);
    for (int64_t d = 0; d < head_dim; d += 8) {
      float32x4_t low[R], high[R];
      UNROLL for (int r = 0; r < R; ++r) {
        low[r] = vld1q_f32(query + r * head_dim + d);
        high[r] = vld1q_f32(query + r * head_dim + d + 4);
      }
      UNROLL for (int p = 0; p < 4; ++p) {
        float32x4_t first, second;
        load_eight<T>(rows[p], d, first, second);
        UNROLL for (int r = 0; r < R; ++r) sums[r][p] = vfmaq_f32(sums[r][p], first, low[r]);
        UNROLL for (int r = 0; r < R; ++r) sums[r][p] = vfmaq_f32(sums[r][p], second, high[r]);
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const float32x4_t four = vpaddq_f32(vpaddq_f32(sums[r][0], sums[r][1]), vpaddq_f32(sums[r][2], sums[r][3]));
      if (i + 4 <= kTile) {
        vst1q_f32(scores + r * kTile + i, four);
      } else {
        for (int64_t p = 0; i + p < kTile; ++p) scores[r * kTile + i + p] = four[p];
      }
    }
  }
}

// Sixteen dimensions at a time, position after position.
template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed) {
  for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
    float32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vld1q_f32(mixed + r * padded + d + 4 * c);
    for (int64_t i = tile.begin; i < tile.end; ++i) {
      float32x4_t values[4];
      load_eight<T>(tile.values[i], d, values[0], values[1]);
      load_eight<T>(tile.values[i], d + 8, values[2], values[3]);
      UNROLL for (int r = 0; r < R; ++r) {
        const float weight = weights[r * kTile + i];
        UNROLL for (int c = 0; c < 4; ++c) sums[r][c] = vfmaq_n_f32(sums[r][c], values[c], weight);
      }
    }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(mixed + r * padded + d + 4 * c, sums[r][c]);
  }
}

// Four positions and sixteen dimensions: words of four dimensions side by side for the four positions.
static inline void pack_keys(const Tile& tile, uint8_t* out) {
  for (int64_t i = tile.begin / 4 * 4; i < tile.end; i += 4) {
    const uint8_t* rows[4];
    for (int p = 0; p < 4; ++p) {
      const int64_t at = i + p < tile.begin ? tile.begin : i + p < tile.end ? i + p : tile.end - 1;
      rows[p] = tile.keys[at];
    }
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
      const uint32x4_t a = vreinterpretq_u32_u8(vld1q_u8(rows[0] + d)), b = vreinterpretq_u32_u8(vld1q_u8(rows[1] + d));
      const uint32x4_t e = vreinterpretq_u32_u8(vld1q_u8(rows[2] + d)), f = vreinterpretq_u32_u8(vld1q_u8(rows[3] + d));
      const uint32x4_t ae = vzip1q_u32(a, e), bf = vzip1q_u32(b, f), ae2 = vzip2q_u32(a, e), bf2 = vzip2q_u32(b, f);
      const uint32x4_t words[4] = {vzip1q_u32(ae, bf), vzip2q_u32(ae, bf), vzip1q_u32(ae2, bf2), vzip2q_u32(ae2, bf2)};
      uint8_t* target = out + d / 32 * 1024 + i / 16 * 512 + d % 32 / 4 * 64 + i % 16 * 4;
      UNROLL for (int j = 0; j < 4; ++j) vst1q_u8(target + j * 64, vreinterpretq_u8_u32(words[j]));
    }
  }
}

// Four positions and sixteen dimensions: the four positions of a dimension side by side.
static inline void pack_values(const Tile& tile, uint8_t* out) {
  if (tile.begin > 3 || tile.end < kTile - 3) std::memset(out, 0, size_t(tile.kv.head_dim * kTile));
  static const uint8_t none[512] = {};  // stands for positions that nobody sees
  for (int64_t i = tile.begin / 4 * 4; i < tile.end; i += 4) {
    const uint8_t* rows[4];
    for (int p = 0; p < 4; ++p) rows[p] = i + p >= tile.begin && i + p < tile.end ? tile.values[i + p] : none;
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
      const uint8x16_t a = vld1q_u8(rows[0] + d), b = vld1q_u8(rows[1] + d), e = vld1q_u8(rows[2] + d), f = vld1q_u8(rows[3] + d);
      const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(a, b)), ab2 = vreinterpretq_u16_u8(vzip2q_u8(a, b));
      const uint16x8_t ef = vreinterpretq_u16_u8(vzip1q_u8(e, f)), ef2 = vreinterpretq_u16_u8(vzip2q_u8(e, f));
      uint8_t* target = out + d / 16 * 512 + i / 4 * 64;
      vst1q_u8(target, vreinterpretq_u8_u16(vzip1q_u16(ab, ef)));
      vst1q_u8(target + 16, vreinterpretq_u8_u16(vzip2q_u16(ab, ef)));
      vst1q_u8(target + 32, vreinterpretq_u8_u16(vzip1q_u16(ab2, ef2)));
      vst1q_u8(target + 48, vreinterpretq_u8_u16(vzip2q_u16(ab2, ef2)));
    }
  }
}
