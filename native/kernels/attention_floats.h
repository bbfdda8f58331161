// Attention over caches of floats: the scores of a tile, and its contribution to the outputs.
#pragma once

#include "context_tile.h"

// Dimension d of a head as the transposed tile has it: chain d mod 4, then d / 4.
static inline int64_t chain_row(int64_t d, int64_t chain_length) { return d % 4 * chain_length + d / 4; }

#ifndef BIFOLIO_OWN_TRANSPOSE
// The tile's keys as [4][chain_length][kTile]. Columns of positions that no row sees may hold anything.
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out) {
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < 4 * chain_length; d += 16) {
      float lanes[16] = {};
      if (d < tile.kv.head_dim) store(lanes, load_kv(T, tile.key(i), d, tile.kv.head_dim));
      for (int64_t j = 0; j < 16 && d + j < 4 * chain_length; ++j) out[chain_row(d + j, chain_length) * kTile + i] = lanes[j];
    }
}
#endif

template <KvType T>
static void widen_values(const Tile& tile, int64_t padded, float* out) {
  for (int64_t i = 0; i < kTile; i += 4) tile.prefetch_values(i);
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) store(out + i * padded + d, load_kv(T, tile.value(i), d, tile.kv.head_dim));
}

#ifndef BIFOLIO_OWN_MANY_ROWS
// Queries in the order of the transposed keys: [rows][4][chain_length], 0 past head_dim.
static void permute_queries(const float* query, int64_t rows, int64_t head_dim, int64_t chain_length, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < 4 * chain_length; ++d)
      out[r * 4 * chain_length + chain_row(d, chain_length)] = d < head_dim ? query[r * head_dim + d] : 0.0f;
}

template <int R>
static inline void score_rows(const float* query, int64_t chain_length, const float* keys, float* scores) {
  const int64_t stride = 4 * chain_length;
  V16 left[4][R], right[4][R];
  for (int c = 0; c < 4; ++c) {
    for (int r = 0; r < R; ++r) left[c][r] = right[c][r] = zero();
    fma_two_tiles<R>(query + c * chain_length, stride, keys + c * chain_length * kTile, kTile, chain_length, left[c], right[c]);
  }
  for (int r = 0; r < R; ++r) {
    store(scores + r * kTile, add(add(left[0][r], left[1][r]), add(left[2][r], left[3][r])));
    store(scores + r * kTile + 16, add(add(right[0][r], right[1][r]), add(right[2][r], right[3][r])));
  }
}

template <int R>
static inline void mix_rows(const float* weights, const float* values, int64_t padded, int64_t count, float* mixed) {
  int64_t d = 0;
  V16 left[R], right[R];
  for (; d + 32 <= padded; d += 32) {
    for (int r = 0; r < R; ++r) left[r] = load(mixed + r * padded + d), right[r] = load(mixed + r * padded + d + 16);
    fma_two_tiles<R>(weights, kTile, values + d, padded, count, left, right);
    for (int r = 0; r < R; ++r) store(mixed + r * padded + d, left[r]), store(mixed + r * padded + d + 16, right[r]);
  }
  if (d < padded) {
    for (int r = 0; r < R; ++r) left[r] = load(mixed + r * padded + d);
    fma_tile<R>(weights, kTile, values + d, padded, count, left);
    for (int r = 0; r < R; ++r) store(mixed + r * padded + d, left[r]);
  }
}

#endif

// Scratch of one call.
struct FloatScratch {
  float* keys;    // [4][chain_length][kTile]
  float* values;  // [kTile][padded]
  float* query;   // the result of permute_queries or prepare_direct
  int64_t chain_length, padded;
  bool direct;
};

template <KvType T>
static void score_floats(const Tile& tile, const AttentionRows& rows, int64_t first, const FloatScratch& s, float* scores) {
  if (s.direct) {
#define CALL(R) score_directly<T, R>(tile, s.query + r * tile.kv.head_dim, scores + r * kTile)
    BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
    return;
  }
  transpose_keys<T>(tile, s.chain_length, s.keys);
#define CALL(R) score_rows<R>(s.query + r * 4 * s.chain_length, s.chain_length, s.keys, scores + r * kTile)
  BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
}

template <KvType T>
static void mix_floats(const Tile& tile, const AttentionRows& rows, int64_t first, const FloatScratch& s, const float* weights) {
  if (s.direct) {
#define CALL(R) mix_directly<T, R>(tile, weights + r * kTile, s.padded, rows.mixed + r * s.padded)
    BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
    return;
  }
  widen_values<T>(tile, s.padded, s.values);
#define CALL(R)                                                                                                \
  mix_rows<R>(weights + r * kTile + tile.begin, s.values + tile.begin * s.padded, s.padded, tile.end - tile.begin, \
              rows.mixed + r * s.padded)
  BIFOLIO_BY_ROWS(first, rows.count, CALL)
#undef CALL
}
