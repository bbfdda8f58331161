// Attention of query rows over one span of a paged context.
#pragma once

// One row of keys or values as floats; lanes past head_dim are 0.
static inline V16 load_kv(KvType type, const uint8_t* row, int64_t at, int64_t head_dim) {
  const int64_t left = head_dim - at;
  if (left >= 16) {
    switch (type) {
      case KvType::F32: return load(reinterpret_cast<const float*>(row) + at);
      case KvType::F16: return load_f16(reinterpret_cast<const uint16_t*>(row) + at);
      case KvType::BF16: return load_bf16(reinterpret_cast<const uint16_t*>(row) + at);
      case KvType::Q8_0: {
        const auto* scales = reinterpret_cast<const uint16_t*>(row + head_dim);
        return mul(load_i8(reinterpret_cast<const int8_t*>(row) + at), broadcast(half_to_float(scales[at / kBlock])));
      }
    }
  }
  if (type == KvType::F32) return load_part(reinterpret_cast<const float*>(row) + at, left);
  uint16_t words[16] = {};
  std::memcpy(words, row + at * 2, size_t(left) * 2);
  return type == KvType::F16 ? load_f16(words) : load_bf16(words);
}

static inline const uint8_t* kv_row(const KvLayer& kv, const uint8_t* base, int64_t kv_head, const int32_t* table,
                                    int64_t position) {
  const int64_t block = table[position / kv.block_size];
  return base + size_t((block * kv.num_kv_heads + kv_head) * kv.block_size + position % kv.block_size) * kv.row_bytes;
}

#ifndef BIFOLIO_OWN_TRANSPOSE
// 16 positions of keys, row by row, to columns: out[d][position].
static inline void store_transposed(const V16 rows[16], float* out, int64_t stride, int64_t dims, int64_t positions) {
  float lanes[16][16];
  for (int i = 0; i < positions; ++i) store(lanes[i], rows[i]);
  for (int d = 0; d < dims; ++d)
    for (int i = 0; i < positions; ++i) out[d * stride + i] = lanes[i][d];
}
#endif

// Keys of positions [begin, end) of a tile, transposed: out[head_dim][kTile]. Other columns are left as they are.
static void load_keys(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t tile, int64_t begin,
                      int64_t end, float* out) {
  for (int64_t first = begin; first < end;) {
    const int64_t count = end - first < 16 ? end - first : 16;
    const uint8_t* source[16];
    for (int64_t i = 0; i < count; ++i) source[i] = kv_row(kv, kv.keys, kv_head, table, first + i);
    for (int64_t d = 0; d < kv.head_dim; d += 16) {
      V16 rows[16];
      for (int64_t i = 0; i < count; ++i) rows[i] = load_kv(kv.type, source[i], d, kv.head_dim);
      const int64_t dims = kv.head_dim - d < 16 ? kv.head_dim - d : 16;
      store_transposed(rows, out + d * kTile + (first - tile), kTile, dims, count);
    }
    first += count;
  }
}

// Values of the same positions as they lie: out[kTile][padded].
static void load_values(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t tile, int64_t begin,
                        int64_t end, int64_t padded, float* out) {
  for (int64_t position = begin; position < end; ++position) {
    const uint8_t* source = kv_row(kv, kv.values, kv_head, table, position);
    for (int64_t d = 0; d < kv.head_dim; d += 16)
      store(out + (position - tile) * padded + d, load_kv(kv.type, source, d, kv.head_dim));
  }
}

// The weights of one row's visible positions in a tile, 0 elsewhere; the row's state moves to the new maximum.
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

template <int R>
static inline void score_rows(const float* query, int64_t head_dim, const float* keys, float* scores) {
  for (int64_t column = 0; column < kTile; column += 16) {
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    fma_tile<R>(query, head_dim, keys + column, kTile, head_dim, acc);
    for (int r = 0; r < R; ++r) store(scores + r * kTile + column, acc[r]);
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

#define BIFOLIO_BY_ROWS(CALL)                  \
  {                                            \
    int64_t r = 0;                             \
    for (; r + 4 <= rows.count; r += 4) CALL(4); \
    if (rows.count - r == 3) CALL(3);          \
    if (rows.count - r == 2) CALL(2);          \
    if (rows.count - r == 1) CALL(1);          \
  }

static void attend_span(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t span_begin,
                        const AttentionRows& rows, uint8_t* scratch) {
  const int64_t head_dim = kv.head_dim, padded = round_up(head_dim, 16);
  auto* keys = reinterpret_cast<float*>(scratch);  // [head_dim][kTile]
  float* values = keys + head_dim * kTile;         // [kTile][padded]
  float* scores = values + kTile * padded;         // [kMaxRows][kTile]
  int64_t first = rows.begin[0], last = rows.end[0];
  for (int64_t r = 0; r < rows.count; ++r) {
    first = rows.begin[r] < first ? rows.begin[r] : first;
    last = rows.end[r] > last ? rows.end[r] : last;
    rows.maximum[r] = -INFINITY;
    rows.total[r] = 0.0f;
  }
  std::memset(rows.mixed, 0, size_t(rows.count * padded) * sizeof(float));
  for (int64_t tile = span_begin; tile < span_begin + kSpan; tile += kTile) {
    const int64_t begin = first > tile ? first : tile;
    const int64_t end = last < tile + kTile ? last : tile + kTile;
    if (begin >= end) continue;
    load_keys(kv, kv_head, table, tile, begin, end, keys);
#define CALL(R) score_rows<R>(rows.query + r * head_dim, head_dim, keys, scores + r * kTile)
    BIFOLIO_BY_ROWS(CALL)
#undef CALL
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t from = (rows.begin[r] > tile ? rows.begin[r] : tile) - tile;
      const int64_t to = (rows.end[r] < tile + kTile ? rows.end[r] : tile + kTile) - tile;
      if (from >= to) {
        std::memset(scores + r * kTile, 0, kTile * sizeof(float));
      } else {
        softmax_row(scores + r * kTile, from, to, rows.maximum[r], rows.total[r], rows.mixed + r * padded, padded);
      }
    }
    load_values(kv, kv_head, table, tile, begin, end, padded, values);
#define CALL(R)                                                                                               \
  mix_rows<R>(scores + r * kTile + (begin - tile), values + (begin - tile) * padded, padded, end - begin, \
              rows.mixed + r * padded)
    BIFOLIO_BY_ROWS(CALL)
#undef CALL
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
