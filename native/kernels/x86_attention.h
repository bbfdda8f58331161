// Attention on x86: few queries read the rows of a cache in place, four dimensions of a position in a quarter of a register;
// for many, tiles are transposed and interleaved in registers. Needs AVX2.
#pragma once

#define BIFOLIO_OWN_TRANSPOSE
#define BIFOLIO_OWN_FEW_ROWS
#define BIFOLIO_OWN_MANY_ROWS
#define BIFOLIO_OWN_PACK
#define BIFOLIO_OWN_ROW_SCALES

#ifdef __AVX512F__
#define BIFOLIO_OWN_SOFTMAX
constexpr int64_t kSoftmaxRows = 4;
static inline void softmax_four(float* scores, float* maximum, float* total, float* mixed, int64_t padded);
#endif

struct Tile;
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out);
static inline void permute_queries(const float* query, int64_t rows, int64_t head_dim, int64_t chain_length, float* out);
template <int R>
static void score_rows(const float* query, int64_t chain_length, const float* keys, float* scores);
template <int R>
static inline void mix_rows(const float* weights, const float* values, int64_t padded, int64_t count, float* mixed);
static inline bool reads_directly(const KvLayer& kv, int64_t rows);
template <KvType T>
static inline void prepare_direct(const AttentionRows& rows, int64_t head_dim, float* query);
template <KvType T, int R>
static void score_directly(const Tile& tile, const float* query, float* scores);
template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed);
static inline void pack_keys(const Tile& tile, uint8_t* out);
static inline void pack_values(const Tile& tile, uint8_t* out);
template <int R>
static void direct_key_dots(const Tile& tile, int64_t b, const int8_t* query, int64_t stride, const int32_t* sums, float* dots);
template <int R>
static void direct_value_dots(const Tile& tile, int64_t b, const int8_t* weights, float* dots);
static inline void load_row_scales(const Tile& tile, const uint8_t* const groups[], float* out);

#include "attention.h"
#include "x86_few_rows.h"
#ifdef __AVX512F__
#include "avx512_softmax.h"
#endif

// Eight numbers of a row as floats; dimensions past the end are 0.
template <KvType T>
static inline __m256 load_eight(const uint8_t* row, int64_t at, int64_t head_dim) {
  constexpr int64_t bytes = T == KvType::F32 ? 4 : 2;
  alignas(32) uint8_t part[32] = {};
  const uint8_t* source = row + at * bytes;
  if (at + 8 > head_dim) {
    std::memcpy(part, source, size_t((head_dim - at) * bytes));
    source = part;
  }
  if constexpr (T == KvType::F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(source));
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  if constexpr (T == KvType::F16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

static inline void transpose_eight(__m256 r[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// Eight positions and eight dimensions at a time. Columns of positions that no query sees hold the values of their rows, or 0: older
// content of the scratch may be numbers below the normal ones, whose products take a hundred times as long.
template <KvType T>
static void transpose_keys(const Tile& tile, int64_t chain_length, float* out) {
  for (int64_t first = tile.begin / 8 * 8; first < tile.end; first += 8)
    for (int64_t d = 0; d < 4 * chain_length; d += 8) {
      __m256 rows[8];
      for (int i = 0; i < 8; ++i) rows[i] = load_eight<T>(tile.key(first + i), d, tile.kv.head_dim);
      transpose_eight(rows);
      for (int j = 0; j < 8 && d + j < 4 * chain_length; ++j)
        _mm256_storeu_ps(out + chain_row(d + j, chain_length) * kTile + first, rows[j]);
    }
  for (int64_t first = 0; first < kTile; first += 8)
    for (int64_t d = 0; d < 4 * chain_length && (first < tile.begin / 8 * 8 || first >= tile.end); ++d)
      _mm256_storeu_ps(out + d * kTile + first, _mm256_setzero_ps());
}

// Queries in the order of the transposed keys, four (or the remaining ones) side by side:
// [chain_length][4][those rows], 0 past head_dim.
static inline void permute_queries(const float* query, int64_t rows, int64_t head_dim, int64_t chain_length, float* out) {
  for (int64_t first = 0; first < rows; first += 4) {
    const int64_t last = first + 4 < rows ? first + 4 : rows;
    for (int64_t d = 0; d < 4 * chain_length; ++d)
      for (int64_t r = first; r < last; ++r) *out++ = d < head_dim ? query[r * head_dim + d] : 0.0f;
  }
}

// N neighbouring chains for two registers of positions; keys of the first of the chains.
template <int R, int N>
static inline void score_chains(const float* query, int64_t chain_length, const float* keys, Reg sums[N][R][2]) {
  UNROLL for (int c = 0; c < N; ++c) UNROLL for (int r = 0; r < R; ++r) sums[c][r][0] = sums[c][r][1] = reg_broadcast(0.0f);
  for (int64_t k = 0; k < chain_length; ++k, query += 4 * R, keys += kTile)
    UNROLL for (int c = 0; c < N; ++c) {
      const float* column = keys + c * chain_length * kTile;
      const Reg left = reg_load(column), right = reg_load(column + kRegLanes);
      UNROLL for (int r = 0; r < R; ++r) {
        const Reg x = reg_broadcast(query[c * R + r]);
        sums[c][r][0] = fma(left, x, sums[c][r][0]);
        sums[c][r][1] = fma(right, x, sums[c][r][1]);
      }
    }
}

// Two chains at a time where the registers hold their sums: one alone would stall on latency.
template <int R>
ALONE static void score_rows(const float* query, int64_t chain_length, const float* keys, float* scores) {
  constexpr int N = kRegs == 1 ? 2 : 1;
  for (int64_t p = 0; p < kTile; p += 2 * kRegLanes) {
    Reg sums[4][R][2];
    UNROLL for (int c = 0; c < 4; c += N) score_chains<R, N>(query + c * R, chain_length, keys + c * chain_length * kTile + p, sums + c);
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int i = 0; i < 2; ++i)
      reg_store(scores + r * kTile + p + i * kRegLanes, add(add(sums[0][r][i], sums[1][r][i]), add(sums[2][r][i], sums[3][r][i])));
  }
}

template <int R, int C>
ALONE static void mix_block(const float* weights, const float* values, int64_t padded, int64_t count, float* mixed) {
  Reg sums[R][C];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) sums[r][c] = reg_load(mixed + r * padded + c * kRegLanes);
  for (int64_t i = 0; i < count; ++i, ++weights, values += padded) {
    Reg column[C];
    UNROLL for (int c = 0; c < C; ++c) column[c] = reg_load(values + c * kRegLanes);
    UNROLL for (int r = 0; r < R; ++r) {
      const Reg weight = reg_broadcast(weights[r * kTile]);
      UNROLL for (int c = 0; c < C; ++c) sums[r][c] = fma(column[c], weight, sums[r][c]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) reg_store(mixed + r * padded + c * kRegLanes, sums[r][c]);
}

template <int R>
static inline void mix_rows(const float* weights, const float* values, int64_t padded, int64_t count, float* mixed) {
  each_columns<kMixed<R>>(0, padded, [&](auto columns, int64_t d) {
    mix_block<R, columns.value>(weights, values + d, padded, count, mixed + d);
  });
}

static inline void store_bytes(uint8_t* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }

// Four positions and sixteen dimensions: words of four dimensions side by side for the four positions.
static inline void pack_keys(const Tile& tile, uint8_t* out) {
  const size_t step = tile.kv.row_bytes;
  for (int64_t i = 0; i < kTile; i += 4)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
      const uint8_t* row = tile.keys[i / 4] + d;
      const __m128i a = load_bytes(row), b = load_bytes(row + step), e = load_bytes(row + 2 * step), f = load_bytes(row + 3 * step);
      const __m128i ab = _mm_unpacklo_epi32(a, b), ab2 = _mm_unpackhi_epi32(a, b);
      const __m128i ef = _mm_unpacklo_epi32(e, f), ef2 = _mm_unpackhi_epi32(e, f);
      uint8_t* target = out + d / 32 * 1024 + i / 16 * 512 + d % 32 / 4 * 64 + i % 16 * 4;
      store_bytes(target, _mm_unpacklo_epi64(ab, ef));
      store_bytes(target + 64, _mm_unpackhi_epi64(ab, ef));
      store_bytes(target + 128, _mm_unpacklo_epi64(ab2, ef2));
      store_bytes(target + 192, _mm_unpackhi_epi64(ab2, ef2));
    }
}

// Four positions and sixteen dimensions: the four positions of a dimension side by side.
static inline void pack_values(const Tile& tile, uint8_t* out) {
  const size_t step = tile.kv.row_bytes;
  for (int64_t i = 0; i < kTile; i += 4)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
      const uint8_t* row = tile.values[i / 4] + d;
      const __m128i a = load_bytes(row), b = load_bytes(row + step), e = load_bytes(row + 2 * step), f = load_bytes(row + 3 * step);
      const __m128i ab = _mm_unpacklo_epi8(a, b), ab2 = _mm_unpackhi_epi8(a, b);
      const __m128i ef = _mm_unpacklo_epi8(e, f), ef2 = _mm_unpackhi_epi8(e, f);
      uint8_t* target = out + d / 16 * 512 + i / 4 * 64;
      store_bytes(target, _mm_unpacklo_epi16(ab, ef));
      store_bytes(target + 16, _mm_unpackhi_epi16(ab, ef));
      store_bytes(target + 32, _mm_unpacklo_epi16(ab2, ef2));
      store_bytes(target + 48, _mm_unpackhi_epi16(ab2, ef2));
    }
}
