// Attention over Q8_0 caches: the scores of a tile of bytes, and its contribution to the outputs.
#pragma once

#include "context_tile.h"

// Scratch of one call.
struct IntScratch {
  uint8_t* packed;      // keys [head_dim / 32][2][8][16][4] or values [head_dim / 16][8][16][4]: the layout of weights
  float* scales;        // [head_dim / 32][kTile] of keys or values
  int8_t* query;        // [rows][head_dim]
  float* query_scales;  // [head_dim / 32][rows]
  int32_t* query_sums;  // the same
  bool direct;          // nothing is packed
};

#if !defined(BIFOLIO_OWN_INT_TILES) && !defined(BIFOLIO_OWN_PACK)
// Keys with positions as columns.
static inline void pack_keys(const Tile& tile, uint8_t* out) {
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 4)
      std::memcpy(out + d / 32 * 1024 + i / 16 * 512 + d % 32 / 4 * 64 + i % 16 * 4, tile.key(i) + d, 4);
}

// Values with dimensions as columns.
static inline void pack_values(const Tile& tile, uint8_t* out) {
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; ++d) out[d / 16 * 512 + i / 4 * 64 + d % 16 * 4 + i % 4] = tile.value(i)[d];
}
#endif

#ifndef BIFOLIO_OWN_INT_TILES
// dots[r][position] of block b of the queries and keys.
template <int R>
static inline void key_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* query, int64_t stride,
                            const int32_t* sums, float* dots) {
  if (s.direct) return direct_key_dots<R>(tile, b, query, stride, sums, dots);
  for (int64_t column = 0; column < kTile; column += 16) {
    V16 found[R];
    block_dots<8, true, R>(s.packed + b * 1024 + column * 32, query + b * kQuantBlock, stride, sums, found);
    for (int r = 0; r < R; ++r) store(dots + r * kTile + column, found[r]);
  }
}

// dots[r][dimension] of the tile's weights and the 32 dimensions of block b.
template <int R>
static inline void value_dots(const Tile& tile, const IntScratch& s, int64_t b, const int8_t* weights, const int32_t* sums,
                              float* dots) {
  if (s.direct) return direct_value_dots<R>(tile, b, weights, dots);
  for (int64_t d = 0; d < kQuantBlock; d += 16) {
    V16 found[R];
    block_dots<8, true, R>(s.packed + (b * kQuantBlock + d) * 32, weights, kTile, sums, found);
    for (int r = 0; r < R; ++r) store(dots + r * kQuantBlock + d, found[r]);
  }
}
#endif

#ifndef BIFOLIO_OWN_ROW_SCALES
// The half floats behind the bytes of each row: [head_dim / 32][kTile].
static inline void load_row_scales(const Tile& tile, const uint8_t* const groups[], float* out) {
  for (int64_t b = 0; b < tile.kv.head_dim / kQuantBlock; ++b) {
    uint16_t halves[kTile];
    for (int64_t g = 0; g < kTile / 4; ++g) {
      const uint8_t* row = groups[g] + tile.kv.head_dim + 2 * b;
      for (int64_t i = 0; i < 4; ++i, row += tile.kv.row_bytes) std::memcpy(halves + 4 * g + i, row, 2);
    }
    store(out + b * kTile, load_f16(halves));
    store(out + b * kTile + 16, load_f16(halves + 16));
  }
}
#endif

static void quantize_queries(const AttentionRows& rows, int64_t head_dim, const IntScratch& s) {
  for (int64_t r = 0; r < rows.count; ++r)
    for (int64_t b = 0; b < head_dim / kQuantBlock; ++b) {
      const int64_t at = r * head_dim + b * kQuantBlock;
      s.query_sums[b * rows.count + r] = quantize_block(rows.query + at, s.query + at, s.query_scales[b * rows.count + r]);
    }
}

template <int R>
static inline void score_int_rows(const Tile& tile, const IntScratch& s, int64_t first_row, int64_t num_rows, float* scores) {
  const int64_t head_dim = tile.kv.head_dim;
  V16 acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  for (int64_t b = 0; b < head_dim / kQuantBlock; ++b) {
    float dots[R * kTile];
    const int64_t at = b * num_rows + first_row;
    key_dots<R>(tile, s, b, s.query + first_row * head_dim, head_dim, s.query_sums + at, dots);
    for (int c = 0; c < 2; ++c) {
      const V16 scale = load(s.scales + b * kTile + 16 * c);
      for (int r = 0; r < R; ++r)
        acc[r][c] = fma(load(dots + r * kTile + 16 * c), mul(scale, broadcast(s.query_scales[at + r])), acc[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) store(scores + r * kTile + 16 * c, acc[r][c]);
}

template <int R>
static inline void mix_int_rows(const Tile& tile, const IntScratch& s, const float* weights, int64_t padded, float* mixed) {
  for (int64_t b = 0; b < tile.kv.head_dim / kQuantBlock; ++b) {
    const V16 low = load(s.scales + b * kTile), high = load(s.scales + b * kTile + 16);
    float most[R];
    int8_t q[R * kTile];
    int32_t sums[R];
    for (int r = 0; r < R; ++r) {
      const V16 first = mul(load(weights + r * kTile), low), second = mul(load(weights + r * kTile + 16), high);
      const float largest = reduce_max(max(first, second));
      most[r] = largest > 1e-30f ? largest : 1e-30f;
      const V16 factor = broadcast(127.0f / most[r]);
      sums[r] = store_i8(q + r * kTile, whole(first, factor)) + store_i8(q + r * kTile + 16, whole(second, factor));
    }
    float dots[R * kQuantBlock];
    value_dots<R>(tile, s, b, q, sums, dots);
    for (int r = 0; r < R; ++r) {
      const V16 unit = broadcast(most[r] * (1.0f / 127.0f));
      for (int c = 0; c < 2; ++c) {
        float* target = mixed + r * padded + b * kQuantBlock + 16 * c;
        store(target, fma(load(dots + r * kQuantBlock + 16 * c), unit, load(target)));
      }
    }
  }
}

// Positions that no row sees may hold anything, NaN included: their values get a scale of 0.
static inline void clear_unseen(const Tile& tile, float* scales) {
  if (tile.begin == 0 && tile.end == kTile) return;
  for (int64_t b = 0; b < tile.kv.head_dim / kQuantBlock; ++b, scales += kTile) {
    for (int64_t i = 0; i < tile.begin; ++i) scales[i] = 0.0f;
    for (int64_t i = tile.end; i < kTile; ++i) scales[i] = 0.0f;
  }
}

static void score_ints(const Tile& tile, const AttentionRows& rows, int64_t first, const IntScratch& s, float* scores) {
  if (!s.direct) pack_keys(tile, s.packed);
  load_row_scales(tile, tile.keys, s.scales);
#define CALL(R) score_int_rows<R>(tile, s, r, rows.count, scores + r * kTile)
  BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
}

static void mix_ints(const Tile& tile, const AttentionRows& rows, int64_t first, const IntScratch& s, const float* weights,
                     int64_t padded) {
  if (!s.direct) pack_values(tile, s.packed);
  load_row_scales(tile, tile.values, s.scales);
  clear_unseen(tile, s.scales);
#define CALL(R) mix_int_rows<R>(tile, s, weights + r * kTile, padded, rows.mixed + r * padded)
  BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
}
