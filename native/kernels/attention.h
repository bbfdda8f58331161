// Attention of query rows over one span of a paged context, in tiles of 32 positions.
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

// One tile of the context: where its visible positions lie. Positions are counted from the start of the tile.
struct Tile {
  const KvLayer& kv;
  int64_t begin, end;            // visible to at least one row
  const uint8_t* keys[kTile];    // set from begin to end
  const uint8_t* values[kTile];
};

static inline void find_rows(Tile& tile, int64_t kv_head, const int32_t* table, int64_t start) {
  const KvLayer& kv = tile.kv;
  for (int64_t i = tile.begin; i < tile.end; ++i) {
    const int64_t position = start + i, block = table[position / kv.block_size];
    const int64_t row = (block * kv.num_kv_heads + kv_head) * kv.block_size + position % kv.block_size;
    tile.keys[i] = kv.keys + size_t(row) * kv.row_bytes;
    tile.values[i] = kv.values + size_t(row) * kv.row_bytes;
  }
}

// ---- caches of floats ----------------------------------------------------------------------------------------------

// Dimension d of a head as the transposed tile has it: chain d mod 4, then d / 4.
static inline int64_t chain_row(int64_t d, int64_t chain_length) { return d % 4 * chain_length + d / 4; }

#ifndef BIFOLIO_OWN_TRANSPOSE
// 16 dimensions of up to 16 positions, row by row, to columns.
static inline void store_transposed(const V16 rows[16], int64_t count, int64_t d, int64_t chain_length, float* out) {
  float lanes[16][16];
  for (int64_t i = 0; i < count; ++i) store(lanes[i], rows[i]);
  for (int64_t j = 0; j < 16 && d + j < 4 * chain_length; ++j)
    for (int64_t i = 0; i < count; ++i) out[chain_row(d + j, chain_length) * kTile + i] = lanes[i][j];
}
#endif

// The tile's keys as [4][chain_length][kTile]. Columns of positions that nobody sees are left as they are.
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out) {
  const int64_t head_dim = tile.kv.head_dim;
  for (int64_t first = tile.begin; first < tile.end; first += 16) {
    const int64_t count = tile.end - first < 16 ? tile.end - first : 16;
    for (int64_t d = 0; d < head_dim; d += 16) {
      V16 rows[16];
      for (int64_t i = 0; i < count; ++i) rows[i] = load_kv(T, tile.keys[first + i], d, head_dim);
      store_transposed(rows, count, d, chain_length, out + first);
    }
  }
}

template <KvType T>
static void widen_values(const Tile& tile, int64_t padded, float* out) {
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) store(out + i * padded + d, load_kv(T, tile.values[i], d, tile.kv.head_dim));
}

// Queries in the order of the transposed keys: [rows][4][chain_length], 0 past head_dim.
static void permute_queries(const float* query, int64_t rows, int64_t head_dim, int64_t chain_length, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < 4 * chain_length; ++d)
      out[r * 4 * chain_length + chain_row(d, chain_length)] = d < head_dim ? query[r * head_dim + d] : 0.0f;
}

template <int R>
static inline void score_rows(const float* query, int64_t chain_length, const float* keys, float* scores) {
  const int64_t stride = 4 * chain_length;
  for (int64_t column = 0; column < kTile; column += 16) {
    V16 chains[4][R];
    for (int c = 0; c < 4; ++c) {
      for (int r = 0; r < R; ++r) chains[c][r] = zero();
      fma_tile<R>(query + c * chain_length, stride, keys + c * chain_length * kTile + column, kTile, chain_length, chains[c]);
    }
    for (int r = 0; r < R; ++r)
      store(scores + r * kTile + column, add(add(chains[0][r], chains[1][r]), add(chains[2][r], chains[3][r])));
  }
}

template <int R>
static inline void mix_rows(const float* weights, const float* values, int64_t padded, int64_t count, float* mixed) {
  for (int64_t d = 0; d < padded; d += 16) {
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = load(mixed + r * padded + d);
    fma_tile<R>(weights, kTile, values + d, padded, count, acc);
    for (int r = 0; r < R; ++r) store(mixed + r * padded + d, acc[r]);
  }
}

#ifndef BIFOLIO_OWN_FEW_ROWS
// Whether a few rows are better served without transposing; an instruction set that says so has the two functions.
static inline bool reads_directly(const KvLayer&, int64_t) { return false; }
template <KvType T, int R>
static inline void score_directly(const Tile&, const float*, float*) {}
template <KvType T, int R>
static inline void mix_directly(const Tile&, const float*, int64_t, float*) {}
#endif

#define BIFOLIO_BY_ROWS(COUNT, CALL)              \
  {                                               \
    int64_t r = 0;                                \
    for (; r + 4 <= COUNT; r += 4) CALL(4);       \
    if (COUNT - r == 3) CALL(3);                  \
    if (COUNT - r == 2) CALL(2);                  \
    if (COUNT - r == 1) CALL(1);                  \
  }

// Scratch of one span.
struct FloatScratch {
  float* keys;    // [4][chain_length][kTile]
  float* values;  // [kTile][padded]
  float* query;   // [rows][4][chain_length]
  int64_t chain_length, padded;
  bool direct;
};

template <KvType T>
static void score_floats(const Tile& tile, const AttentionRows& rows, const FloatScratch& s, float* scores) {
  if (s.direct) {
#define CALL(R) score_directly<T, R>(tile, rows.query + r * tile.kv.head_dim, scores + r * kTile)
    BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
    return;
  }
  transpose_keys<T>(tile, s.chain_length, s.keys);
#define CALL(R) score_rows<R>(s.query + r * 4 * s.chain_length, s.chain_length, s.keys, scores + r * kTile)
  BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
}

template <KvType T>
static void mix_floats(const Tile& tile, const AttentionRows& rows, const FloatScratch& s, const float* weights) {
  if (s.direct) {
#define CALL(R) mix_directly<T, R>(tile, weights + r * kTile, s.padded, rows.mixed + r * s.padded)
    BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
    return;
  }
  widen_values<T>(tile, s.padded, s.values);
#define CALL(R)                                                                                                \
  mix_rows<R>(weights + r * kTile + tile.begin, s.values + tile.begin * s.padded, s.padded, tile.end - tile.begin, \
              rows.mixed + r * s.padded)
  BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
}

// ---- Q8_0 caches ---------------------------------------------------------------------------------------------------

// Scratch of one span; the packed tiles have the layout of Q8_0 weights, so that `block_dots` multiplies by them.
struct IntScratch {
  uint8_t* keys;        // [head_dim / 32][2][8][16][4]  columns are positions
  uint8_t* values;      // [head_dim / 16][8][16][4]     columns are dimensions, the block's 32 values are positions
  float* key_scales;    // [head_dim / 32][kTile]
  float* value_scales;  // the same
  int8_t* query;        // [rows][head_dim]
  float* query_scales;  // [head_dim / 32][rows]
  int32_t* query_sums;  // the same
};

#ifndef BIFOLIO_OWN_PACK
static inline void pack_keys(const Tile& tile, uint8_t* out) {
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 4)
      std::memcpy(out + d / 32 * 1024 + i / 16 * 512 + d % 32 / 4 * 64 + i % 16 * 4, tile.keys[i] + d, 4);
}

static inline void pack_values(const Tile& tile, uint8_t* out) {  // positions that nobody sees are 0
  if (tile.begin > 0 || tile.end < kTile) std::memset(out, 0, size_t(tile.kv.head_dim * kTile));
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; ++d) out[d / 16 * 512 + i / 4 * 64 + d % 16 * 4 + i % 4] = tile.values[i][d];
}
#endif

static inline void load_row_scales(const Tile& tile, const uint8_t* const rows[], float* out) {
  const int64_t head_dim = tile.kv.head_dim;
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t b = 0; b < head_dim / kBlock; ++b) {
      uint16_t half;
      std::memcpy(&half, rows[i] + head_dim + 2 * b, 2);
      out[b * kTile + i] = half_to_float(half);
    }
}

static void quantize_queries(const AttentionRows& rows, int64_t head_dim, const IntScratch& s) {
  const int64_t blocks = head_dim / kBlock;
  float scale[64], sum[64];  // at most 512 dimensions
  int32_t isum[64];
  for (int64_t r = 0; r < rows.count; ++r) {
    quantize_row(rows.query + r * head_dim, head_dim, s.query + r * head_dim, scale, sum, isum);
    for (int64_t b = 0; b < blocks; ++b) {
      s.query_scales[b * rows.count + r] = scale[b * kRowGroup];
      s.query_sums[b * rows.count + r] = isum[b * kRowGroup];
    }
  }
}

template <int R>
static inline void score_int_rows(const IntScratch& s, int64_t first_row, int64_t num_rows, int64_t head_dim, float* scores) {
  for (int64_t column = 0; column < kTile; column += 16) {
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int64_t b = 0; b < head_dim / kBlock; ++b) {
      V16 dots[R];
      block_dots<8, true, R>(s.keys + b * 1024 + column * 32, s.query + first_row * head_dim + b * kBlock, head_dim,
                             s.query_sums + b * num_rows + first_row, dots);
      const V16 scale = load(s.key_scales + b * kTile + column);
      for (int r = 0; r < R; ++r)
        acc[r] = fma(dots[r], mul(scale, broadcast(s.query_scales[b * num_rows + first_row + r])), acc[r]);
    }
    for (int r = 0; r < R; ++r) store(scores + r * kTile + column, acc[r]);
  }
}

template <int R>
static inline void mix_int_rows(const Tile& tile, const IntScratch& s, const float* weights, int64_t padded, float* mixed) {
  for (int64_t b = 0; b < tile.kv.head_dim / kBlock; ++b) {
    int8_t q[R][kBlock];
    float scale[R][kRowGroup], sum[R][kRowGroup];
    int32_t isum[R][kRowGroup], sums[R];
    for (int r = 0; r < R; ++r) {
      float scaled[kTile] = {};
      for (int64_t i = tile.begin; i < tile.end; ++i) scaled[i] = weights[r * kTile + i] * s.value_scales[b * kTile + i];
      quantize_row(scaled, kBlock, q[r], scale[r], sum[r], isum[r]);
      sums[r] = isum[r][0];
    }
    for (int64_t d = b * kBlock; d < (b + 1) * kBlock; d += 16) {
      V16 dots[R];
      block_dots<8, true, R>(s.values + d * 32, q[0], kBlock, sums, dots);
      for (int r = 0; r < R; ++r) {
        float* target = mixed + r * padded + d;
        store(target, fma(dots[r], broadcast(scale[r][0]), load(target)));
      }
    }
  }
}

static void score_ints(const Tile& tile, const AttentionRows& rows, const IntScratch& s, float* scores) {
  pack_keys(tile, s.keys);
  load_row_scales(tile, tile.keys, s.key_scales);
#define CALL(R) score_int_rows<R>(s, r, rows.count, tile.kv.head_dim, scores + r * kTile)
  BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
}

static void mix_ints(const Tile& tile, const AttentionRows& rows, const IntScratch& s, const float* weights, int64_t padded) {
  pack_values(tile, s.values);
  load_row_scales(tile, tile.values, s.value_scales);
#define CALL(R) mix_int_rows<R>(tile, s, weights + r * kTile, padded, rows.mixed + r * padded)
  BIFOLIO_BY_ROWS(rows.count, CALL)
#undef CALL
}

// ---- the online softmax --------------------------------------------------------------------------------------------

// Scores of one row to weights: positions outside [first, last) get 0. The row's state moves to the new maximum.
static inline void softmax_row(float* scores, int64_t first, int64_t last, float& maximum, float& total, float* mixed,
                               int64_t padded) {
  for (int64_t j = 0; j < first; ++j) scores[j] = -INFINITY;
  for (int64_t j = last; j < kTile; ++j) scores[j] = -INFINITY;
  const V16 low = load(scores), high = load(scores + 16);
  const float largest = reduce_max(max(low, high));
  if (!(largest <= maximum)) {
    const V16 shrink = exp(broadcast(maximum - largest));
    for (int64_t d = 0; d < padded; d += 16) store(mixed + d, mul(load(mixed + d), shrink));
    float lanes[16];
    store(lanes, shrink);
    total *= lanes[0];
    maximum = largest;
  }
  const V16 weight_low = exp(sub(low, broadcast(maximum))), weight_high = exp(sub(high, broadcast(maximum)));
  total += reduce_add(add(weight_low, weight_high));
  store(scores, weight_low);
  store(scores + 16, weight_high);
}

static inline void softmax_rows(const AttentionRows& rows, int64_t start, int64_t padded, float* scores) {
  for (int64_t r = 0; r < rows.count; ++r) {
    const int64_t first = (rows.begin[r] > start ? rows.begin[r] : start) - start;
    const int64_t last = (rows.end[r] < start + kTile ? rows.end[r] : start + kTile) - start;
    if (first >= last) {
      std::memset(scores + r * kTile, 0, kTile * sizeof(float));
    } else {
      softmax_row(scores + r * kTile, first, last, rows.maximum[r], rows.total[r], rows.mixed + r * padded, padded);
    }
  }
}

// Calls step(tile, start of the tile) for every tile of the span that some row sees.
template <class Step>
static inline void each_tile(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t span_begin,
                             const AttentionRows& rows, Step step) {
  int64_t first = rows.begin[0], last = rows.end[0];
  for (int64_t r = 1; r < rows.count; ++r) {
    first = rows.begin[r] < first ? rows.begin[r] : first;
    last = rows.end[r] > last ? rows.end[r] : last;
  }
  for (int64_t start = span_begin; start < span_begin + kSpan; start += kTile) {
    Tile tile{kv, first > start ? first - start : 0, last < start + kTile ? last - start : kTile, {}, {}};
    if (tile.begin >= tile.end) continue;
    find_rows(tile, kv_head, table, start);
    step(tile, start);
  }
}

template <KvType T>
static void attend_span_of(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t span_begin,
                           const AttentionRows& rows, int64_t padded, uint8_t* scratch) {
  auto* scores = reinterpret_cast<float*>(scratch);  // [kMaxRows][kTile]
  float* rest = scores + kMaxRows * kTile;
  if constexpr (T == KvType::Q8_0) {
    const int64_t tile_scales = kv.head_dim / kBlock * kTile, row_scales = kv.head_dim / kBlock * kMaxRows;
    IntScratch s{};
    s.key_scales = rest;
    s.value_scales = s.key_scales + tile_scales;
    s.query_scales = s.value_scales + tile_scales;
    s.query_sums = reinterpret_cast<int32_t*>(s.query_scales + row_scales);
    s.keys = reinterpret_cast<uint8_t*>(s.query_sums + row_scales);
    s.values = s.keys + kv.head_dim * kTile;
    s.query = reinterpret_cast<int8_t*>(s.values + kv.head_dim * kTile);
    quantize_queries(rows, kv.head_dim, s);
    each_tile(kv, kv_head, table, span_begin, rows, [&](const Tile& tile, int64_t start) {
      score_ints(tile, rows, s, scores);
      softmax_rows(rows, start, padded, scores);
      mix_ints(tile, rows, s, scores, padded);
    });
  } else {
    FloatScratch s{};
    s.chain_length = (kv.head_dim + 3) / 4;
    s.padded = padded;
    s.direct = reads_directly(kv, rows.count);
    s.keys = rest;
    s.values = s.keys + 4 * s.chain_length * kTile;
    s.query = s.values + kTile * padded;
    if (!s.direct) permute_queries(rows.query, rows.count, kv.head_dim, s.chain_length, s.query);
    each_tile(kv, kv_head, table, span_begin, rows, [&](const Tile& tile, int64_t start) {
      score_floats<T>(tile, rows, s, scores);
      softmax_rows(rows, start, padded, scores);
      mix_floats<T>(tile, rows, s, scores);
    });
  }
}

static void attend_span(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t span_begin,
                        const AttentionRows& rows, uint8_t* scratch) {
  const int64_t padded = round_up(kv.head_dim, 16);
  for (int64_t r = 0; r < rows.count; ++r) {
    rows.maximum[r] = -INFINITY;
    rows.total[r] = 0.0f;
  }
  std::memset(rows.mixed, 0, size_t(rows.count * padded) * sizeof(float));
  switch (kv.type) {
    case KvType::F32: return attend_span_of<KvType::F32>(kv, kv_head, table, span_begin, rows, padded, scratch);
    case KvType::F16: return attend_span_of<KvType::F16>(kv, kv_head, table, span_begin, rows, padded, scratch);
    case KvType::BF16: return attend_span_of<KvType::BF16>(kv, kv_head, table, span_begin, rows, padded, scratch);
    case KvType::Q8_0: return attend_span_of<KvType::Q8_0>(kv, kv_head, table, span_begin, rows, padded, scratch);
  }
}

static void merge_span(float* M, float* L, float* A, float m, float l, const float* a, int64_t size) {
  if (l == 0.0f) return;  // nothing visible in that span
  const float largest = *M > m ? *M : m;
  const V16 old_factor = exp(broadcast(*M - largest)), new_factor = exp(broadcast(m - largest));
  float lanes[16];
  store(lanes, fma(broadcast(*L), old_factor, mul(broadcast(l), new_factor)));
  *L = lanes[0];
  *M = largest;
  for (int64_t d = 0; d < size; d += 16)
    store(A + d, fma(load(A + d), old_factor, mul(load(a + d), new_factor)));
}
