// Attention of few queries on x86. A quad is four neighbouring dimensions of one position: the four chains of its score.
// A register holds the same quad of kQuads positions, so that keys need no transposing but that of whole quads.
#pragma once

// The inner loops have constant bounds: unrolled early, their arrays become registers.
#define UNROLL _Pragma("GCC unroll 16")
// Not inlined: the addresses would not fit into the remaining registers.
#define ALONE __attribute__((noinline))

constexpr int kQuads = kRegLanes / 4;

static inline __m256i load_block(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// ---- registers of either width -------------------------------------------------------------------------------------

#ifdef __AVX512F__
using Ints = __m512i;

static inline Reg reg_load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_words(p)); }
static inline Reg broadcast_quad(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

// Quad c of register r becomes quad r of register c.
static inline void exchange_quads(Reg r[4]) {
  const Reg even = _mm512_shuffle_f32x4(r[0], r[1], 0x88), odd = _mm512_shuffle_f32x4(r[0], r[1], 0xdd);
  const Reg even2 = _mm512_shuffle_f32x4(r[2], r[3], 0x88), odd2 = _mm512_shuffle_f32x4(r[2], r[3], 0xdd);
  r[0] = _mm512_shuffle_f32x4(even, even2, 0x88);
  r[1] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
  r[2] = _mm512_shuffle_f32x4(even, even2, 0xdd);
  r[3] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
}

// Neighbours added, in each quad: a0 + a1, a2 + a3, b0 + b1, b2 + b3.
static inline Reg add_pairs(Reg a, Reg b) { return add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)); }
static inline Ints add_pairs(Ints a, Ints b) {
  const Reg x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}

// The first two numbers of every quad, as positions follow each other: first the first ones.
static inline void store_firsts(float* p, Reg sums) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm256_storeu_ps(p, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
}

// The same for all four numbers, as floats.
static inline void store_quads(float* p, Ints sums) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  reg_store(p, _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(order, sums)));
}

static inline Ints broadcast_bytes(const int8_t* p) {
  return _mm512_broadcast_i32x4(load_bytes(reinterpret_cast<const uint8_t*>(p)));
}

// A block of kQuads rows: the first sixteen bytes of each, and the last. Shifted by 128 to be unsigned; the sum of
// a query's block starts at the negative of the excess, a quarter of it in each number of a quad.
static inline void load_key_blocks(const uint8_t* row, size_t step, Ints& low, Ints& high) {
  const Ints first = _mm512_inserti64x4(_mm512_castsi256_si512(load_block(row)), load_block(row + step), 1);
  const Ints second = _mm512_inserti64x4(_mm512_castsi256_si512(load_block(row + 2 * step)), load_block(row + 3 * step), 1);
  const Ints shift = _mm512_set1_epi8(int8_t(0x80));
  low = _mm512_xor_si512(_mm512_shuffle_i32x4(first, second, 0x88), shift);
  high = _mm512_xor_si512(_mm512_shuffle_i32x4(first, second, 0xdd), shift);
}
static inline Ints start_of_keys(int32_t query_sum) { return _mm512_set1_epi32(-32 * query_sum); }
static inline Ints add_key_products(Ints sums, Ints keys, Ints query) { return _mm512_dpbusd_epi32(sums, keys, query); }

// Four positions of values are read side by side with those that come kSideStep fours later.
constexpr int64_t kSideStep = 4;
#define UNROLL_SIDES UNROLL
static inline Ints load_sides(const uint8_t* left, const uint8_t* right) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load_block(left)), load_block(right), 1);
}
static inline Ints broadcast_sides(const int8_t* p) {
  int32_t left, right;
  std::memcpy(&left, p, 4);
  std::memcpy(&right, p + 4 * kSideStep, 4);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi32(left)), _mm256_set1_epi32(right), 1);
}
static inline Ints no_sums() { return _mm512_setzero_si512(); }
static inline Ints add_products(Ints sums, Ints positive, Ints values) { return _mm512_dpbusd_epi32(sums, positive, values); }
static inline Ints low_bytes(Ints a, Ints b) { return _mm512_unpacklo_epi8(a, b); }
static inline Ints high_bytes(Ints a, Ints b) { return _mm512_unpackhi_epi8(a, b); }
static inline Ints low_words(Ints a, Ints b) { return _mm512_unpacklo_epi16(a, b); }
static inline Ints high_words(Ints a, Ints b) { return _mm512_unpackhi_epi16(a, b); }

// Quad c of the dimensions 0-15 and 16-31 is in columns[c], once for each side.
static inline void store_columns(float* p, const Ints columns[4]) {
  const auto both = [](Ints a, Ints b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  };
  const Ints left = both(columns[0], columns[1]), right = both(columns[2], columns[3]);
  reg_store(p, _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(left, right, 0x88)));
  reg_store(p + 16, _mm512_cvtepi32_ps(_mm512_shuffle_i32x4(left, right, 0xdd)));
}

// The lower halves of sixteen pairs of half floats.
static inline V16 widen_lower(const __m128i pairs[4]) {
  const __m256i left = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs[0]), pairs[1], 1);
  const __m256i right = _mm256_inserti128_si256(_mm256_castsi128_si256(pairs[2]), pairs[3], 1);
  return {{_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_inserti64x4(_mm512_castsi256_si512(left), right, 1)))}};
}
#else
using Ints = __m256i;

static inline Reg reg_load_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_eight_words(p)); }
static inline Reg broadcast_quad(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
static inline void exchange_quads(Reg r[2]) {
  const Reg first = _mm256_permute2f128_ps(r[0], r[1], 0x20);
  r[1] = _mm256_permute2f128_ps(r[0], r[1], 0x31);
  r[0] = first;
}
static inline Reg add_pairs(Reg a, Reg b) { return _mm256_hadd_ps(a, b); }
static inline Ints add_pairs(Ints a, Ints b) { return _mm256_hadd_epi32(a, b); }
static inline void store_firsts(float* p, Reg sums) {
  _mm_storeu_ps(p, _mm_unpacklo_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
static inline void store_quads(float* p, Ints sums) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  reg_store(p, _mm256_cvtepi32_ps(_mm256_permutevar8x32_epi32(sums, order)));
}
static inline Ints broadcast_bytes(const int8_t* p) {
  return _mm256_broadcastsi128_si256(load_bytes(reinterpret_cast<const uint8_t*>(p)));
}
static inline void load_key_blocks(const uint8_t* row, size_t step, Ints& low, Ints& high) {
  const Ints first = load_block(row), second = load_block(row + step);
  low = _mm256_permute2x128_si256(first, second, 0x20);
  high = _mm256_permute2x128_si256(first, second, 0x31);
}
static inline Ints start_of_keys(int32_t) { return _mm256_setzero_si256(); }
static inline Ints add_key_products(Ints sums, Ints keys, Ints query) { return _mm256_add_epi32(sums, dot_bytes(keys, query)); }

constexpr int64_t kSideStep = 8;  // there is one side
#define UNROLL_SIDES  // there are too few registers for that
static inline Ints load_sides(const uint8_t* left, const uint8_t*) { return load_block(left); }
static inline Ints broadcast_sides(const int8_t* p) { return four_bytes(p); }
static inline Ints no_sums() { return _mm256_setzero_si256(); }
static inline Ints add_products(Ints sums, Ints positive, Ints values) { return _mm256_add_epi32(sums, dot_unsigned(positive, values)); }
static inline Ints low_bytes(Ints a, Ints b) { return _mm256_unpacklo_epi8(a, b); }
static inline Ints high_bytes(Ints a, Ints b) { return _mm256_unpackhi_epi8(a, b); }
static inline Ints low_words(Ints a, Ints b) { return _mm256_unpacklo_epi16(a, b); }
static inline Ints high_words(Ints a, Ints b) { return _mm256_unpackhi_epi16(a, b); }
static inline void store_columns(float* p, const Ints columns[4]) {
  UNROLL for (int c = 0; c < 4; c += 2) {
    const Ints low = _mm256_permute2x128_si256(columns[c], columns[c + 1], 0x20);
    const Ints high = _mm256_permute2x128_si256(columns[c], columns[c + 1], 0x31);
    reg_store(p + 4 * c, _mm256_cvtepi32_ps(low));
    reg_store(p + 16 + 4 * c, _mm256_cvtepi32_ps(high));
  }
}
static inline V16 widen_lower(const __m128i pairs[4]) {
  const __m128i mask = _mm_set1_epi32(0xffff);
  const auto eight = [&](__m128i a, __m128i b) {
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm_and_si128(a, mask), _mm_and_si128(b, mask)));
  };
  return {{eight(pairs[0], pairs[1]), eight(pairs[2], pairs[3])}};
}
#endif

// The same rows of the next tile are prefetched in small parts as these rows are read. Without a next tile, these rows are
// prefetched again.
static inline const uint8_t* keys_ahead(const Tile& tile, int64_t i) { return (tile.next ? tile.next : &tile)->keys[i / 4]; }
static inline const uint8_t* values_ahead(const Tile& tile, int64_t i) { return (tile.next ? tile.next : &tile)->values[i / 4]; }
template <int Bytes>
static inline void prefetch_bytes(const uint8_t* p) {
  UNROLL for (int at = 0; at < Bytes; at += 64) __builtin_prefetch(p + at);
}

// Registers of outputs of R rows that can be summed at a time.
template <int R>
constexpr int kMixed = kRegs == 1 || R <= 2 ? 4 : 2;

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls work(Count<registers>, begin) for all columns from `begin` to `end`, C registers at a time and the rest by
// halves; columns are a multiple of 16.
template <int C, class Work>
static inline void each_columns(int64_t begin, int64_t end, Work work) {
  for (; begin + C * kRegLanes <= end; begin += C * kRegLanes) work(Count<C>{}, begin);
  if constexpr (C > kRegs) each_columns<C / 2>(begin, end, work);
}

// ---- caches of floats ----------------------------------------------------------------------------------------------

// Every four rows read the cache again: from some number on it is faster to transpose it once.
static inline bool reads_directly(const KvLayer& kv, int64_t rows) { return rows <= 8 && kv.head_dim % 16 == 0; }

// Rows of one step, four or the remaining ones: [head_dim / 4][those rows][4].
template <KvType T>
static inline void prepare_direct(const AttentionRows& rows, int64_t head_dim, float* query) {
  for (int64_t first = 0; first < rows.count; first += 4) {
    const int64_t count = rows.count - first < 4 ? rows.count - first : 4;
    for (int64_t d = 0; d < head_dim; d += 4)
      for (int64_t r = first; r < first + count; ++r, query += 4) std::memcpy(query, rows.query + r * head_dim + d, 16);
  }
}

template <KvType T>
constexpr int kBytes = T == KvType::F32 ? 4 : 2;

template <KvType T>
static inline Reg load_reg(const uint8_t* p) {
  if constexpr (T == KvType::F32) return reg_load(reinterpret_cast<const float*>(p));
  const auto* words = reinterpret_cast<const uint16_t*>(p);
  return T == KvType::F16 ? reg_load_f16(words) : reg_load_bf16(words);
}

// Two registers of positions at a time, for enough independent sums of one query.
template <KvType T, int R>
ALONE static void score_directly(const Tile& tile, const float* query, float* scores) {
  const int64_t head_dim = tile.kv.head_dim;
  const size_t step = tile.kv.row_bytes;
  for (int64_t i = tile.begin / (2 * kQuads) * (2 * kQuads); i < tile.end; i += 2 * kQuads) {
    const uint8_t *rows[2] = {tile.key(i), tile.key(i + kQuads)}, *ahead[2] = {keys_ahead(tile, i), keys_ahead(tile, i + kQuads)};
    const float* x = query;
    Reg sums[R][2];
    UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = reg_broadcast(0.0f);
    for (int64_t left = head_dim; left > 0; left -= kRegLanes, x += R * kRegLanes) {
      Reg keys[2][kQuads];
      UNROLL for (int side = 0; side < 2; ++side) {
        UNROLL for (int p = 0; p < kQuads; ++p) keys[side][p] = load_reg<T>(rows[side] + size_t(p) * step);
        exchange_quads(keys[side]);
        if (side * kQuads % 4 == 0) prefetch_bytes<4 * kRegLanes * kBytes<T>>(ahead[side]);
        rows[side] += kRegLanes * kBytes<T>, ahead[side] += 4 * kRegLanes * kBytes<T>;
      }
      UNROLL for (int c = 0; c < kQuads; ++c) UNROLL for (int r = 0; r < R; ++r) {
        const Reg quad = broadcast_quad(x + (c * R + r) * 4);
        sums[r][0] = fma(keys[0][c], quad, sums[r][0]);
        sums[r][1] = fma(keys[1][c], quad, sums[r][1]);
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      const Reg halves = add_pairs(sums[r][0], sums[r][1]);
      store_firsts(scores + r * kTile + i, add_pairs(halves, halves));
    }
  }
}

// C registers of dimensions from d on, position after position: those in fours have one address.
template <KvType T, int R, int C>
ALONE static void mix_columns(const Tile& tile, const float* weights, int64_t padded, int64_t d, float* mixed) {
  constexpr int bytes = kRegLanes * kBytes<T>;
  const size_t step = tile.kv.row_bytes;
  Reg sums[R][C];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) sums[r][c] = reg_load(mixed + r * padded + d + c * kRegLanes);
  const auto add_position = [&](const uint8_t* row, int64_t i) __attribute__((always_inline)) {
    Reg values[C];
    UNROLL for (int c = 0; c < C; ++c) values[c] = load_reg<T>(row + c * bytes);
    UNROLL for (int r = 0; r < R; ++r) {
      const Reg weight = reg_broadcast(weights[r * kTile + i]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] = fma(values[c], weight, sums[r][c]);
    }
  };
  int64_t i = tile.begin;
  for (; i % 4 && i < tile.end; ++i) add_position(tile.value(i) + d * kBytes<T>, i);
  for (; i + 4 <= tile.end; i += 4) {
    const uint8_t *row = tile.values[i / 4] + d * kBytes<T>, *ahead = values_ahead(tile, i) + d * kBytes<T>;
    UNROLL for (int p = 0; p < 4; ++p, row += step, ahead += step) {
      asm("" : "+r"(row), "+r"(ahead));  // one address is enough: more would not fit into the registers
      add_position(row, i + p);
      prefetch_bytes<C * bytes>(ahead);
    }
  }
  for (; i < tile.end; ++i) add_position(tile.value(i) + d * kBytes<T>, i);
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) reg_store(mixed + r * padded + d + c * kRegLanes, sums[r][c]);
}

template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed) {
  each_columns<kMixed<R>>(0, padded, [&](auto count, int64_t d) { mix_columns<T, R, count.value>(tile, weights, padded, d, mixed); });
}

// ---- Q8_0 caches ---------------------------------------------------------------------------------------------------

// A register of positions at a time.
template <int R>
ALONE static void direct_key_dots(const Tile& tile, int64_t b, const int8_t* query, int64_t stride, const int32_t* sums,
                                   float* dots) {
  for (int64_t i = 0; i < kTile; i += kRegLanes) {
    Ints low[4], high[4];
    UNROLL for (int g = 0; g < 4; ++g) load_key_blocks(tile.key(i + g * kQuads) + b * kQuantBlock, tile.kv.row_bytes, low[g], high[g]);
    UNROLL for (int p = 0; p < kRegLanes; p += 4) prefetch_bytes<4 * kQuantBlock>(keys_ahead(tile, i + p) + b * 4 * kQuantBlock);
    UNROLL for (int r = 0; r < R; ++r) {
      const int8_t* x = query + r * stride + b * kQuantBlock;
      const Ints left = broadcast_bytes(x), right = broadcast_bytes(x + 16);
      Ints totals[4];
      UNROLL for (int g = 0; g < 4; ++g)
        totals[g] = add_key_products(add_key_products(start_of_keys(sums[r]), low[g], left), high[g], right);
      store_quads(dots + r * kTile + i, add_pairs(add_pairs(totals[0], totals[1]), add_pairs(totals[2], totals[3])));
    }
  }
}

// Four positions of a dimension side by side, made in registers. Weights are not negative: p and scales are not.
template <int R>
ALONE static void direct_value_dots(const Tile& tile, int64_t b, const int8_t* weights, float* dots) {
  if constexpr (kRegs > 1 && R > 2) {  // more sums than registers
    direct_value_dots<2>(tile, b, weights, dots);
    return direct_value_dots<R - 2>(tile, b, weights + 2 * kTile, dots + 2 * kQuantBlock);
  }
  const size_t step = tile.kv.row_bytes;
  Ints totals[R][4];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) totals[r][c] = no_sums();
  UNROLL_SIDES for (int64_t g = 0; g < kSideStep; ++g) {
    const uint8_t *left = tile.values[g] + b * kQuantBlock, *right = tile.values[(g + kSideStep) % (kTile / 4)] + b * kQuantBlock;
    for (int64_t i = g; i < kTile / 4; i += kSideStep) prefetch_bytes<4 * kQuantBlock>(values_ahead(tile, 4 * i) + b * 4 * kQuantBlock);
    Ints rows[4];
    UNROLL for (int p = 0; p < 4; ++p) rows[p] = load_sides(left + size_t(p) * step, right + size_t(p) * step);
    const Ints first = low_bytes(rows[0], rows[1]), second = high_bytes(rows[0], rows[1]);
    const Ints third = low_bytes(rows[2], rows[3]), fourth = high_bytes(rows[2], rows[3]);
    const Ints columns[4] = {low_words(first, third), high_words(first, third), low_words(second, fourth), high_words(second, fourth)};
    UNROLL for (int r = 0; r < R; ++r) {
      const Ints four = broadcast_sides(weights + r * kTile + 4 * g);
      UNROLL for (int c = 0; c < 4; ++c) totals[r][c] = add_products(totals[r][c], four, columns[c]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) store_columns(dots + r * kQuantBlock, totals[r]);
}

// Scales of one block, or of two that follow each other: a word of a row is a half float or a pair of them.
template <class Word>
ALONE static void load_scales(const uint8_t* const groups[], size_t at, size_t step, float* out) {
  for (int64_t i = 0; i < kTile; i += 16) {
    __m128i words[4], upper[4];
    UNROLL for (int g = 0; g < 4; ++g) {
      const uint8_t* row = groups[i / 4 + g] + at;
      Word four[4];
      UNROLL for (int p = 0; p < 4; ++p) std::memcpy(four + p, row + size_t(p) * step, sizeof(Word));
      words[g] = _mm_setr_epi32(int(four[0]), int(four[1]), int(four[2]), int(four[3]));
      upper[g] = _mm_srli_epi32(words[g], 16);
    }
    store(out + i, widen_lower(words));
    if constexpr (sizeof(Word) == 4) store(out + kTile + i, widen_lower(upper));
  }
}

// The half floats behind the bytes of each row: [head_dim / 32][kTile].
static inline void load_row_scales(const Tile& tile, const uint8_t* const groups[], float* out) {
  const size_t bytes = size_t(tile.kv.head_dim), step = tile.kv.row_bytes;
  int64_t b = 0;
  for (; b + 2 <= tile.kv.head_dim / kQuantBlock; b += 2) load_scales<uint32_t>(groups, bytes + size_t(2 * b), step, out + b * kTile);
  if (b < tile.kv.head_dim / kQuantBlock) load_scales<uint16_t>(groups, bytes + size_t(2 * b), step, out + b * kTile);
}
