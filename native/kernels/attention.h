// Attention of query rows over a part of a paged context, in tiles of 32 positions.
#pragma once

#include "attention_bytes.h"
#include "attention_floats.h"
#include "context_tile.h"

// Scores of one row to weights: positions outside [first, last) get 0. The row's state moves to the new maximum.
static inline void softmax_row(float* scores, int64_t first, int64_t last, float& maximum, float& total, float* mixed,
                               int64_t padded) {
  for (int64_t j = 0; j < first; ++j) scores[j] = -INFINITY;
  for (int64_t j = last; j < kTile; ++j) scores[j] = -INFINITY;
  const float largest = reduce_max(max(load(scores), load(scores + 16)));
  if (!(largest <= maximum)) {
    const float shrink = exp1(maximum - largest);
    for (int64_t d = 0; d < padded; d += 16) store(mixed + d, mul(load(mixed + d), broadcast(shrink)));
    total *= shrink;
    maximum = largest;
  }
  const V16 top = broadcast(maximum);
  for (int64_t j = 0; j < kTile; j += 16) store(scores + j, exp(sub(load(scores + j), top)));
  total += reduce_add(add(load(scores), load(scores + 16)));
}

// Scores of rows from `first_row` on, of a whole tile. Positions that a row does not see may hold anything.
static inline void adjust_scores(const AttentionRows& rows, int64_t first_row, int64_t start, float* scores) {
  for (int64_t r = first_row; r < rows.count && rows.slopes; ++r) {
    const int64_t first = start + 1 - rows.end[r];  // distance of the first position of the tile from the query
    for (int64_t j = 0; j < kTile; ++j) scores[r * kTile + j] += rows.slopes[r] * float(first + j);
  }
  if (rows.softcap == 0.0f) return;
  for (int64_t r = first_row; r < rows.count; ++r) softcap_row(scores + r * kTile, kTile, rows.softcap);
}

// Adds the bias of each position's distance to the scores of a whole tile.
static inline void bias_scores(const AttentionRows& rows, int64_t first_row, int64_t start, float* scores) {
  if (!rows.bias) return;
  for (int64_t r = first_row; r < rows.count; ++r) {
    const float* bias = rows.bias[r];
    const int64_t nearest = start - rows.position[r];
    float* own = scores + r * kTile;
    if (nearest >= -rows.reach && nearest + kTile - 1 <= rows.reach) {
      for (int64_t j = 0; j < kTile; ++j) own[j] += bias[nearest + j];
      continue;
    }
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t distance = nearest + j < -rows.reach ? -rows.reach : nearest + j;
      own[j] += bias[distance > rows.reach ? rows.reach : distance];
    }
  }
}

#ifndef BIFOLIO_OWN_SOFTMAX
constexpr int64_t kSoftmaxRows = INT64_MAX;  // rows that an instruction set works on together
static inline void softmax_four(float*, float*, float*, float*, int64_t) {}
#endif

// Whether the next kSoftmaxRows rows see all positions of a tile.
static inline bool all_visible(const AttentionRows& rows, int64_t r, int64_t start) {
  if (rows.count - r < kSoftmaxRows) return false;
  for (int64_t i = r; i < r + kSoftmaxRows; ++i)
    if (rows.begin[i] > start || rows.end[i] < start + kTile) return false;
  return true;
}

static inline void softmax_rows(const AttentionRows& rows, int64_t first_row, int64_t start, int64_t padded, float* scores) {
  for (int64_t r = first_row; r < rows.count; ++r) {
    if (all_visible(rows, r, start)) {
      softmax_four(scores + r * kTile, rows.maximum + r, rows.total + r, rows.mixed + r * padded, padded);
      r += kSoftmaxRows - 1;
      continue;
    }
    const int64_t first = (rows.begin[r] > start ? rows.begin[r] : start) - start;
    const int64_t last = (rows.end[r] < start + kTile ? rows.end[r] : start + kTile) - start;
    if (first >= last) {
      std::memset(scores + r * kTile, 0, kTile * sizeof(float));
    } else {
      softmax_row(scores + r * kTile, first, last, rows.maximum[r], rows.total[r], rows.mixed + r * padded, padded);
    }
  }
}

#ifndef BIFOLIO_OWN_FEW_SOFTMAX
// The same before mix_directly; an instruction set may leave a part of the work to mix_directly.
template <KvType T>
static inline void softmax_directly(const AttentionRows& rows, int64_t first_row, int64_t start, int64_t padded, float* scores) {
  softmax_rows(rows, first_row, start, padded, scores);
}
#endif

// The scratch of one call: scores, copied rows, and behind them the queries and a tile in the order of the products.
struct PartScratch {
  PartScratch(int64_t head_dim, uint8_t* scratch)
      : padded(round_up(head_dim, 16)), scores(reinterpret_cast<float*>(scratch)),
        copies(scratch + kMaxRows * kTile * sizeof(float)), rest(scores + kMaxRows * kTile + 2 * kTile * padded) {}
  const int64_t padded;
  float* const scores;    // [kMaxRows][kTile]
  uint8_t* const copies;  // [2][kTile] rows
  float* const rest;
};

static IntScratch prepare_ints(const KvLayer& kv, const AttentionRows& rows, const PartScratch& part) {
  const int64_t blocks = kv.head_dim / kQuantBlock;
  IntScratch s{};
  s.direct = reads_directly(kv, rows.count);
  s.scales = part.rest;
  s.query_scales = s.scales + blocks * kTile;
  s.query_sums = reinterpret_cast<int32_t*>(s.query_scales + blocks * kMaxRows);
  s.packed = reinterpret_cast<uint8_t*>(s.query_sums + blocks * kMaxRows);
  s.query = reinterpret_cast<int8_t*>(s.packed + kv.head_dim * kTile);
  quantize_queries(rows, kv.head_dim, s);
  return s;
}

template <KvType T>
static FloatScratch prepare_floats(const KvLayer& kv, const AttentionRows& rows, const PartScratch& part) {
  FloatScratch s{};
  s.chain_length = (kv.head_dim + 3) / 4;
  s.padded = part.padded;
  s.direct = reads_directly(kv, rows.count);
  s.keys = part.rest;
  s.values = s.keys + 4 * s.chain_length * kTile;
  s.query = s.values + kTile * part.padded;
  s.direct ? prepare_direct<T>(rows, kv.head_dim, s.query)
           : permute_queries(rows.query, rows.count, kv.head_dim, s.chain_length, s.query);
  return s;
}

template <KvType T>
static void attend_to(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                      const AttentionRows& rows, uint8_t* scratch) {
  const PartScratch part(kv.head_dim, scratch);
  const int64_t padded = part.padded;
  float* const scores = part.scores;
  if constexpr (T == KvType::Q8_0) {
    const IntScratch s = prepare_ints(kv, rows, part);
    each_tile(kv, kv_head, table, begin, end, rows, part.copies, [&](const Tile& tile, int64_t start) {
      const int64_t first = first_row(rows, start);
      score_ints(tile, rows, first, s, scores);
      adjust_scores(rows, first, start, scores);
      bias_scores(rows, first, start, scores);
      softmax_rows(rows, first, start, padded, scores);
      mix_ints(tile, rows, first, s, scores, padded);
    });
  } else {
    const FloatScratch s = prepare_floats<T>(kv, rows, part);
    each_tile(kv, kv_head, table, begin, end, rows, part.copies, [&](const Tile& tile, int64_t start) {
      const int64_t first = first_row(rows, start);
      score_floats<T>(tile, rows, first, s, scores);
      adjust_scores(rows, first, start, scores);
      bias_scores(rows, first, start, scores);
      s.direct ? softmax_directly<T>(rows, first, start, padded, scores) : softmax_rows(rows, first, start, padded, scores);
      mix_floats<T>(tile, rows, first, s, scores);
    });
  }
}

static void attend_part(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                        const AttentionRows& rows, uint8_t* scratch) {
  switch (kv.type) {
    case KvType::F32: return attend_to<KvType::F32>(kv, kv_head, table, begin, end, rows, scratch);
    case KvType::F16: return attend_to<KvType::F16>(kv, kv_head, table, begin, end, rows, scratch);
    case KvType::BF16: return attend_to<KvType::BF16>(kv, kv_head, table, begin, end, rows, scratch);
    case KvType::Q8_0: return attend_to<KvType::Q8_0>(kv, kv_head, table, begin, end, rows, scratch);
  }
}

static void merge_span(float* M, float* L, float* A, float m, float l, const float* a, int64_t size) {
  if (l == 0.0f) return;  // nothing visible in that span
  const float largest = *M > m ? *M : m;
  const Reg old_factor = exp(reg_broadcast(*M - largest)), new_factor = exp(reg_broadcast(m - largest));
  float lanes[kRegLanes];
  reg_store(lanes, fma(reg_broadcast(*L), old_factor, mul(reg_broadcast(l), new_factor)));
  *L = lanes[0];
  *M = largest;
  for (int64_t d = 0; d < size; d += kRegLanes)
    reg_store(A + d, fma(reg_load(A + d), old_factor, mul(reg_load(a + d), new_factor)));
}
