// Scores of positions by the heads of an indexer, in tiles of 32 positions: see IndexRows.
#pragma once

#include "attention.h"

// A query's sum over its heads, ascending, for the positions of a tile. A NaN stays NaN.
static inline void weigh_heads(const float* scores, const float* weights, int64_t heads, float* out) {
  V16 left = zero(), right = zero();
  for (int64_t head = 0; head < heads; ++head, scores += kTile) {
    const V16 weight = broadcast(weights[head]);
    left = fma(max(zero(), load(scores)), weight, left);
    right = fma(max(zero(), load(scores + 16)), weight, right);
  }
  store(out, left);
  store(out + 16, right);
}

template <KvType T>
static void score_index_in(const KvLayer& kv, const int32_t* table, int64_t begin, int64_t end, const IndexRows& index, uint8_t* scratch) {
  const PartScratch part(kv.head_dim, scratch);
  int64_t begins[kMaxRows], ends[kMaxRows];
  AttentionRows rows{};
  rows.count = index.count * index.heads, rows.query = index.query, rows.begin = begins, rows.end = ends;
  for (int64_t r = 0; r < rows.count; ++r) begins[r] = begin, ends[r] = end;
  const auto weigh = [&](int64_t start) {
    for (int64_t i = 0; i < index.count; ++i)
      weigh_heads(part.scores + i * index.heads * kTile, index.weights + i * index.heads, index.heads, index.scores + i * index.stride + start);
  };
  if constexpr (T == KvType::Q8_0) {
    const IntScratch s = prepare_ints(kv, rows, part);
    each_tile(kv, 0, table, begin, end, rows, part.copies, [&](const Tile& tile, int64_t start) {
      score_ints(tile, rows, 0, s, part.scores);
      weigh(start);
    });
  } else {
    const FloatScratch s = prepare_floats<T>(kv, rows, part);
    each_tile(kv, 0, table, begin, end, rows, part.copies, [&](const Tile& tile, int64_t start) {
      score_floats<T>(tile, rows, 0, s, part.scores);
      weigh(start);
    });
  }
}

static void score_index(const KvLayer& kv, const int32_t* table, int64_t begin, int64_t end, const IndexRows& index, uint8_t* scratch) {
  switch (kv.type) {
    case KvType::F32: return score_index_in<KvType::F32>(kv, table, begin, end, index, scratch);
    case KvType::F16: return score_index_in<KvType::F16>(kv, table, begin, end, index, scratch);
    case KvType::BF16: return score_index_in<KvType::BF16>(kv, table, begin, end, index, scratch);
    case KvType::Q8_0: return score_index_in<KvType::Q8_0>(kv, table, begin, end, index, scratch);
  }
}
