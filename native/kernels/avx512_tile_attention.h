// Attention on tiles, the part between products, with 512-bit registers. See attention_tiles.h.
#pragma once

alignas(64) static const uint16_t kOddWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

// 32 numbers rounded to bfloat16, ties away from zero.
static inline void store_nearest(uint16_t* words, __m512 a, __m512 b) {
  const auto rounded = [](__m512 x) { return _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)); };
  _mm512_storeu_si512(words, _mm512_permutex2var_epi16(rounded(a), _mm512_load_si512(kOddWords), rounded(b)));
}

// Sixteen rows of sixteen become sixteen columns.
static inline void transpose_sixteen(__m512i r[16]) {
  __m512i t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; ++j) {
    r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
    r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
  }
  // Quarter q of r[4 g + c] is column 4 q + c of the rows 4 g to 4 g + 3.
  UNROLL for (int c = 0; c < 4; ++c) {
    const __m512i ab = _mm512_shuffle_i32x4(r[c], r[c + 4], 0x44), ab2 = _mm512_shuffle_i32x4(r[c], r[c + 4], 0xee);
    const __m512i ef = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0x44), ef2 = _mm512_shuffle_i32x4(r[c + 8], r[c + 12], 0xee);
    t[c] = _mm512_shuffle_i32x4(ab, ef, 0x88);
    t[c + 4] = _mm512_shuffle_i32x4(ab, ef, 0xdd);
    t[c + 8] = _mm512_shuffle_i32x4(ab2, ef2, 0x88);
    t[c + 12] = _mm512_shuffle_i32x4(ab2, ef2, 0xdd);
  }
  UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// 32 dimensions of a row, 0 past its end.
static inline __m512i load_dimensions(const uint8_t* row, int64_t at, int64_t head_dim) {
  const int64_t left = head_dim - at;
  if (left >= 32) return _mm512_loadu_si512(row + at * 2);
  return _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), row + at * 2);
}

static void pair_keys(const Tile& tile, const TileScratch& s) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t step = 0; step < s.steps; ++step) {
      uint16_t* out = s.keys + (step * 2 + half) * kPiece;
      __m512i rows[16];
      UNROLL for (int i = 0; i < 16; ++i) rows[i] = load_dimensions(tile.key(half * 16 + i), step * 32, tile.kv.head_dim);
      transpose_sixteen(rows);
      UNROLL for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + i * 32, rows[i]);
    }
}

static void pair_values(const Tile& tile, const TileScratch& s) {
  alignas(64) static const uint16_t lower[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(lower), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const auto load_row = [&](int64_t i, int64_t d) {
    return i >= tile.begin && i < tile.end ? load_dimensions(tile.value(i), d, tile.kv.head_dim) : _mm512_setzero_si512();
  };
  for (int64_t i = 0; i < kTile; i += 2)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 32) {
      const __m512i a = load_row(i, d), b = load_row(i + 1, d);
      if (tile.next) {
        for (int64_t j = i; j < i + 2; ++j) {
          __builtin_prefetch(tile.next->value(j) + d * 2);
          __builtin_prefetch(tile.next->key(j) + d * 2);
        }
      }
      uint16_t* out = s.values + d / 16 * kPiece + i / 2 * 32;
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
      if (d + 16 < s.padded) _mm512_storeu_si512(out + kPiece, _mm512_permutex2var_epi16(a, high, b));
    }
}

// 2^(x * log2 e - base) where the mask is set, else 0.
static inline __m512 power_of_score(__mmask16 visible, __m512 x, __m512 base) {
  const auto c = [](float value) { return _mm512_set1_ps(value); };
  const __m512 t = _mm512_max_ps(c(-126.0f), _mm512_fmsub_ps(x, c(kLog2E), base));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(t, n);
  __m512 p = c(kPowerTerms[5]);
  UNROLL for (int i = 4; i >= 0; --i) p = _mm512_fmadd_ps(p, f, c(kPowerTerms[i]));
  return _mm512_maskz_scalef_ps(visible, p, n);
}

static void weigh_four(float* scores, const uint32_t visible[4], const RowState& rows, int64_t padded) {
  const Reg lowest = reg_broadcast(-INFINITY);
  Reg x[8], pairs[4];
  UNROLL for (int i = 0; i < 8; ++i) x[i] = _mm512_mask_loadu_ps(lowest, __mmask16(visible[i / 2] >> i % 2 * 16), scores + 16 * i);
  UNROLL for (int r = 0; r < 4; ++r) pairs[r] = max(x[2 * r], x[2 * r + 1]);
  const Reg largest = reduce_rows(pairs, [](Reg a, Reg b) { return max(a, b); });
  const Reg before = to_quarters(rows.maximum);
  const __mmask16 grows = _mm512_cmp_ps_mask(largest, before, _CMP_NLE_UQ);
  const Reg top = _mm512_mask_mov_ps(before, grows, largest);
  const Reg base = _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(top, lowest, _CMP_NEQ_UQ), top, reg_broadcast(kLog2E));
  Reg sums = to_quarters(rows.total);
  if (grows) {
    const Reg shrink = power_of_score(_mm512_cmp_ps_mask(before, lowest, _CMP_NEQ_UQ), before, base);
    sums = _mm512_mask_mul_ps(sums, grows, sums, shrink);
    UNROLL for (int r = 0; r < 4; ++r) {
      if ((grows >> 4 * r & 1) == 0) continue;
      const Reg factor = quarter_to_all(shrink, r);
      for (int64_t d = 0; d < padded; d += 16) reg_store(rows.mixed + r * padded + d, mul(reg_load(rows.mixed + r * padded + d), factor));
    }
    from_quarters(rows.maximum, top);
  }
  UNROLL for (int r = 0; r < 4; ++r) {
    const Reg own = quarter_to_all(base, r);
    const Reg a = power_of_score(__mmask16(visible[r]), x[2 * r], own), b = power_of_score(__mmask16(visible[r] >> 16), x[2 * r + 1], own);
    pairs[r] = add(a, b);
    store_nearest(reinterpret_cast<uint16_t*>(scores + r * kTile), a, b);
  }
  from_quarters(rows.total, add(sums, reduce_rows(pairs, [](Reg a, Reg b) { return add(a, b); })));
}

static void turn_columns(const float* columns, float* scores) {
  alignas(64) static const int32_t first[16] = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
  const __m512i low = _mm512_load_si512(first), high = _mm512_add_epi32(low, _mm512_set1_epi32(2));
  UNROLL for (int half = 0; half < 2; ++half) {
    Reg x[4];  // four positions each
    UNROLL for (int i = 0; i < 4; ++i) x[i] = reg_load(columns + half * 64 + i * 16);
    UNROLL for (int pair = 0; pair < 2; ++pair) {  // of rows: eight positions of the first, then of the second
      const __m512i order = pair ? high : low;
      const Reg left = _mm512_permutex2var_ps(x[0], order, x[1]), right = _mm512_permutex2var_ps(x[2], order, x[3]);
      reg_store(scores + 2 * pair * kTile + half * 16, _mm512_shuffle_f32x4(left, right, 0x44));
      reg_store(scores + (2 * pair + 1) * kTile + half * 16, _mm512_shuffle_f32x4(left, right, 0xee));
    }
  }
}
