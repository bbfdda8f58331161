// Attention of query rows over a part of a paged context, in tiles of 32 positions.
#pragma once

static inline V16 load_kv(KvType type, const uint8_t* row, int64_t at, int64_t head_dim) {  // lanes past the end are 0
  const int64_t left = head_dim - at;
  if (left >= 16) {
    if (type == KvType::F32) return load(reinterpret_cast<const float*>(row) + at);
    const auto* words = reinterpret_cast<const uint16_t*>(row) + at;
    return type == KvType::F16 ? load_f16(words) : load_bf16(words);
  }
  if (type == KvType::F32) return load_part(reinterpret_cast<const float*>(row) + at, left);
  uint16_t words[16] = {};
  std::memcpy(words, row + at * 2, size_t(left) * 2);
  return type == KvType::F16 ? load_f16(words) : load_bf16(words);
}

// One tile of the context. Positions are counted from the start of the tile. Four positions from a multiple of four on
// lie one row after the other; rows of positions that nobody sees can be read and hold anything.
struct Tile {
  const KvLayer& kv;
  int64_t begin, end;               // visible to at least one row
  const uint8_t* keys[kTile / 4];   // of the positions 0, 4, ..., 28
  const uint8_t* values[kTile / 4];
  const Tile* next;                 // null at the end; two tiles know what comes next, the one that is worked on and its next
  const Tile* ahead;                // what to ask for: the next one, or what is likely to be worked on after the end; may be null

  const uint8_t* key(int64_t i) const { return keys[i / 4] + size_t(i % 4) * kv.row_bytes; }
  const uint8_t* value(int64_t i) const { return values[i / 4] + size_t(i % 4) * kv.row_bytes; }

  // Ask for the same four rows of the tile ahead. Bit by bit: a burst would stop the work it is meant to hide behind.
  void prefetch_keys(int64_t i) const { if (ahead) prefetch(ahead->keys[i / 4]); }
  void prefetch_values(int64_t i) const { if (ahead) prefetch(ahead->values[i / 4]); }
  void prefetch(const uint8_t* rows) const {
    for (size_t at = 0; at < 4 * kv.row_bytes; at += 64) __builtin_prefetch(rows + at);
  }
};

// Blocks whose size is not a multiple of four do not have their rows in fours: they are copied.
static inline void copy_rows(Tile& tile, int64_t kv_head, const int32_t* table, int64_t start, uint8_t* rows) {
  const KvLayer& kv = tile.kv;
  for (int64_t i = tile.begin; i < tile.end; ++i) {
    const int64_t block = table[(start + i) / kv.block_size];
    const int64_t row = (block * kv.num_kv_heads + kv_head) * kv.block_size + (start + i) % kv.block_size;
    std::memcpy(rows + size_t(i) * kv.row_bytes, kv.keys + size_t(row) * kv.row_bytes, kv.row_bytes);
    std::memcpy(rows + size_t(kTile + i) * kv.row_bytes, kv.values + size_t(row) * kv.row_bytes, kv.row_bytes);
  }
  for (int64_t i = 0; i < kTile; i += 4) {
    tile.keys[i / 4] = rows + size_t(i) * kv.row_bytes;
    tile.values[i / 4] = rows + size_t(kTile + i) * kv.row_bytes;
  }
}

static inline void find_rows(Tile& tile, int64_t kv_head, const int32_t* table, int64_t start, uint8_t* rows) {
  const KvLayer& kv = tile.kv;
  if (kv.block_size % 4) return copy_rows(tile, kv_head, table, start, rows);
  if (kv.block_size % kTile == 0) {  // one block has them all
    const int64_t block = table[start / kv.block_size];
    const size_t at = size_t((block * kv.num_kv_heads + kv_head) * kv.block_size + start % kv.block_size) * kv.row_bytes;
    _Pragma("GCC unroll 8") for (size_t g = 0; g < kTile / 4; ++g)
      tile.keys[g] = kv.keys + at + 4 * g * kv.row_bytes, tile.values[g] = kv.values + at + 4 * g * kv.row_bytes;
    return;
  }
  const int64_t first = tile.begin / 4 * 4, last = (tile.end - 1) / 4 * 4;
  int64_t offset = (start + first) % kv.block_size;
  const int32_t* block = table + (start + first) / kv.block_size;
  for (int64_t i = first; i <= last; ++block, offset = 0) {
    const size_t base = size_t((int64_t(*block) * kv.num_kv_heads + kv_head) * kv.block_size) * kv.row_bytes;
    for (; offset < kv.block_size && i <= last; offset += 4, i += 4) {
      tile.keys[i / 4] = kv.keys + base + size_t(offset) * kv.row_bytes;
      tile.values[i / 4] = kv.values + base + size_t(offset) * kv.row_bytes;
    }
  }
  for (int64_t g = 0; g < first / 4; ++g) tile.keys[g] = tile.keys[first / 4], tile.values[g] = tile.values[first / 4];
  for (int64_t g = last / 4 + 1; g < kTile / 4; ++g) tile.keys[g] = tile.keys[last / 4], tile.values[g] = tile.values[last / 4];
}

// ---- caches of floats ----------------------------------------------------------------------------------------------

// Dimension d of a head as the transposed tile has it: chain d mod 4, then d / 4.
static inline int64_t chain_row(int64_t d, int64_t chain_length) { return d % 4 * chain_length + d / 4; }

#ifndef BIFOLIO_OWN_TRANSPOSE
// The tile's keys as [4][chain_length][kTile]. Columns of positions that nobody sees may hold anything.
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

#ifndef BIFOLIO_OWN_FEW_ROWS
// Whether a few rows are better served without transposing; an instruction set that says so has the other functions.
static inline bool reads_directly(const KvLayer&, int64_t) { return false; }
template <KvType T>
static inline void prepare_direct(const AttentionRows&, int64_t, float*) {}
template <KvType T, int R>
static inline void score_directly(const Tile&, const float*, float*) {}
template <KvType T, int R>
static inline void mix_directly(const Tile&, const float*, int64_t, float*) {}
template <int R>
static inline void direct_key_dots(const Tile&, int64_t, const int8_t*, int64_t, const int32_t*, float*) {}
template <int R>
static inline void direct_value_dots(const Tile&, int64_t, const int8_t*, float*) {}
#endif

#define BIFOLIO_BY_ROWS(FIRST, COUNT, CALL)       \
  {                                               \
    int64_t r = FIRST;                            \
    for (; r + 4 <= COUNT; r += 4) CALL(4);       \
    if (COUNT - r == 3) CALL(3);                  \
    if (COUNT - r == 2) CALL(2);                  \
    if (COUNT - r == 1) CALL(1);                  \
  }

// Scratch of one call.
struct FloatScratch {
  float* keys;    // [4][chain_length][kTile]
  float* values;  // [kTile][padded]
  float* query;   // what permute_queries or prepare_direct made of them
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

#include "attention_bytes.h"

// ---- the online softmax --------------------------------------------------------------------------------------------

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
// The same before mix_directly, which an instruction set can leave some of the work to.
template <KvType T>
static inline void softmax_directly(const AttentionRows& rows, int64_t first_row, int64_t start, int64_t padded, float* scores) {
  softmax_rows(rows, first_row, start, padded, scores);
}
#endif

// The rows before this one, in fours, end before a tile: queries of one sequence come in the order of their positions.
static inline int64_t first_row(const AttentionRows& rows, int64_t start) {
  int64_t r = 0;
  while (r < rows.count && rows.end[r] <= start) ++r;
  return r / 4 * 4;
}

// Calls step(tile, start of the tile) for every tile in [begin, end) that some row sees.
template <class Step>
static inline void each_tile(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                             const AttentionRows& rows, uint8_t* copies, Step step) {
  int64_t first = rows.begin[0], last = rows.end[0];
  for (int64_t r = 1; r < rows.count; ++r) {
    first = rows.begin[r] < first ? rows.begin[r] : first;
    last = rows.end[r] > last ? rows.end[r] : last;
  }
  first = first > begin ? first : begin;
  last = last < end ? last : end;
  const bool copied = kv.block_size % 4 != 0;  // into one place: only one tile at a time
  const int64_t known = rows.end[0] > last ? rows.end[0] : last;  // the table is the first row's
  const auto tile_at = [&](int64_t start) {
    const int64_t stop = start < last ? last : known;
    Tile tile{kv, first > start ? first - start : 0, stop < start + kTile ? stop - start : kTile, {}, {}, nullptr, nullptr};
    find_rows(tile, kv_head, table, start, copies);
    return tile;
  };
  int64_t start = first / kTile * kTile;
  if (first >= last) return;
  Tile tile = tile_at(start);
  if (copied) {
    for (; start < last; start += kTile) {
      if (start > first) new (&tile) Tile(tile_at(start));
      step(tile, start);
    }
    return;
  }
  const auto following = [&](int64_t at) { return tile_at(at < known ? at : start); };
  Tile next = following(start + kTile);
  for (; start < last; start += kTile) {
    const Tile after = following(start + 2 * kTile);
    next.ahead = start + 2 * kTile < known ? &after : nullptr;
    next.next = start + 2 * kTile < last ? &after : nullptr;
    tile.ahead = start + kTile < known ? &next : nullptr;
    tile.next = start + kTile < last ? &next : nullptr;
    step(tile, start);
    new (&tile) Tile(next);
    new (&next) Tile(after);
  }
}

template <KvType T>
static void attend_to(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                      const AttentionRows& rows, int64_t padded, uint8_t* scratch) {
  auto* scores = reinterpret_cast<float*>(scratch);                      // [kMaxRows][kTile]
  uint8_t* copies = scratch + kMaxRows * kTile * sizeof(float);          // [2][kTile] rows
  float* rest = scores + kMaxRows * kTile + 2 * kTile * padded;
  if constexpr (T == KvType::Q8_0) {
    const int64_t blocks = kv.head_dim / kBlock;
    IntScratch s{};
    s.direct = reads_directly(kv, rows.count);
    s.scales = rest;
    s.query_scales = s.scales + blocks * kTile;
    s.query_sums = reinterpret_cast<int32_t*>(s.query_scales + blocks * kMaxRows);
    s.packed = reinterpret_cast<uint8_t*>(s.query_sums + blocks * kMaxRows);
    s.query = reinterpret_cast<int8_t*>(s.packed + kv.head_dim * kTile);
    quantize_queries(rows, kv.head_dim, s);
    each_tile(kv, kv_head, table, begin, end, rows, copies, [&](const Tile& tile, int64_t start) {
      const int64_t first = first_row(rows, start);
      score_ints(tile, rows, first, s, scores);
      softmax_rows(rows, first, start, padded, scores);
      mix_ints(tile, rows, first, s, scores, padded);
    });
  } else {
    FloatScratch s{};
    s.chain_length = (kv.head_dim + 3) / 4;
    s.padded = padded;
    s.direct = reads_directly(kv, rows.count);
    s.keys = rest;
    s.values = s.keys + 4 * s.chain_length * kTile;
    s.query = s.values + kTile * padded;
    s.direct ? prepare_direct<T>(rows, kv.head_dim, s.query)
             : permute_queries(rows.query, rows.count, kv.head_dim, s.chain_length, s.query);
    each_tile(kv, kv_head, table, begin, end, rows, copies, [&](const Tile& tile, int64_t start) {
      const int64_t first = first_row(rows, start);
      score_floats<T>(tile, rows, first, s, scores);
      s.direct ? softmax_directly<T>(rows, first, start, padded, scores) : softmax_rows(rows, first, start, padded, scores);
      mix_floats<T>(tile, rows, first, s, scores);
    });
  }
}

static void attend_part(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                        const AttentionRows& rows, uint8_t* scratch) {
  const int64_t padded = round_up(kv.head_dim, 16);
  switch (kv.type) {
    case KvType::F32: return attend_to<KvType::F32>(kv, kv_head, table, begin, end, rows, padded, scratch);
    case KvType::F16: return attend_to<KvType::F16>(kv, kv_head, table, begin, end, rows, padded, scratch);
    case KvType::BF16: return attend_to<KvType::BF16>(kv, kv_head, table, begin, end, rows, padded, scratch);
    case KvType::Q8_0: return attend_to<KvType::Q8_0>(kv, kv_head, table, begin, end, rows, padded, scratch);
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
