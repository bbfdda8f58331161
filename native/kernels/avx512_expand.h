// Compact formats (compact.h) with 512-bit registers: as bytes for many rows, and multiplied in registers for one.
//
// Grids of up to 512 rows are looked up as codes of 16 bits in registers. Rows of larger ones are loaded one by one: instructions that gather are
// slow where a processor is protected against leaks through them.
#pragma once

// The codes of 256 rows of a grid, by 32 numbers.
static inline __m512i look_up(const uint8_t* codes, __m512i numbers) {
  const __mmask32 second = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(64)), upper = _mm512_test_epi16_mask(numbers, _mm512_set1_epi16(128));
  const auto quarter = [&](int i) {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(codes + 128 * i), numbers, _mm512_loadu_si512(codes + 128 * i + 64));
  };
  return _mm512_mask_blend_epi16(upper, _mm512_mask_blend_epi16(second, quarter(0), quarter(1)),
                                 _mm512_mask_blend_epi16(second, quarter(2), quarter(3)));
}

static inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// ---- small grids ---------------------------------------------------------------------------------------------------

template <Format F>
struct SmallGridBlock {
  static constexpr int kLines = has_rows_of_four(F) ? 2 : 4;  // of a pair of rows

  const uint8_t *own, *highs;
  SmallGrid<F> grid;
  alignas(64) uint64_t negative[8];  // bit 4 * column + element of a line

  __attribute__((always_inline)) SmallGridBlock(const uint8_t* group, int64_t b, const int8_t* table)
      : own(group + header_bytes(F) + b * quant_bytes(F)), highs(group + compact(F).highs + b * kPanel), grid{table} {
    _mm512_store_si512(negative, signs(_mm512_loadu_si512(own + quant_bytes(F) - 64)));
  }

  // Words of 64 bits; with seven signs of eight in two of them, the last one makes their number even.
  static __m512i signs(__m512i stored) {
    if constexpr (!has_seven_signs(F)) return stored;
    constexpr int64_t lasts = int64_t(0x8888888888888888u);
    const __m512i odd_words = _mm512_set_epi64(lasts, 0, lasts, 0, lasts, 0, lasts, 0), seven = _mm512_andnot_si512(odd_words, stored);
    const __m512i both = _mm512_xor_si512(seven, _mm512_shuffle_epi32(seven, _MM_PERM_BADC));
    const __m512i halves = _mm512_xor_si512(both, _mm512_slli_epi64(both, 2));
    const __m512i last = _mm512_xor_si512(halves, _mm512_slli_epi64(halves, 1));
    return _mm512_or_si512(seven, _mm512_and_si512(last, odd_words));
  }

  // Calls take(line, values without their signs) for the lines of a block.
  template <class Take>
  __attribute__((always_inline)) void each_line(Take take) const {
    const __m512i values = _mm512_broadcast_i32x4(load_bytes(grid.values()));
#pragma GCC unroll 4
    for (int p = 0; p < 8 / kLines; ++p) {
      const __m512i numbers = _mm512_cvtepu8_epi16(load_32(own + 32 * p));
      __m512i found = look_up(grid.codes(), numbers);
      if constexpr (F == Format::IQ3_S) found = _mm512_mask_blend_epi16(number_at<uint32_t>(highs + 4 * p), found, look_up(grid.codes() + 512, numbers));
      const auto put = [&](int line, __m512i places) { take(line, _mm512_shuffle_epi8(values, places)); };
      if constexpr (has_rows_of_four(F)) {  // the bits above a code of three bits, but for the lowest and the highest, do not matter
        const __m512i words = _mm512_set1_epi32(0xffff);
        put(2 * p, _mm512_ternarylogic_epi32(words, found, _mm512_slli_epi32(found, 12), 0xca));
        put(2 * p + 1, _mm512_ternarylogic_epi32(words, _mm512_srli_epi32(found, 16), _mm512_srli_epi32(found, 4), 0xca));
      } else {
        const __m512i first = _mm512_shuffle_epi8(found, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13)));
        const __m512i last = _mm512_shuffle_epi8(found, _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15)));
        const __m512i left = _mm512_set1_epi32(0x00020000), right = _mm512_set1_epi32(0x00060004), mask = _mm512_set1_epi8(3);
        put(4 * p, _mm512_and_si512(_mm512_srlv_epi16(first, left), mask));
        put(4 * p + 1, _mm512_and_si512(_mm512_srlv_epi16(first, right), mask));
        put(4 * p + 2, _mm512_and_si512(_mm512_srlv_epi16(last, left), mask));
        put(4 * p + 3, _mm512_and_si512(_mm512_srlv_epi16(last, right), mask));
      }
    }
  }
};

// ---- large grids ---------------------------------------------------------------------------------------------------

// Rows of eight values of eight columns. The first row of each 256 bits is loaded, the others are put into their lanes.
__attribute__((always_inline)) static inline __m512i eight_rows(const int8_t* grid, const uint16_t* numbers) {
  const auto row = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid + 8 * size_t(numbers[i]))); };
  const auto four = [&](int i) {
    __m256i rows = _mm256_castsi128_si256(row(i));
    rows = _mm256_mask_broadcastq_epi64(rows, 2, row(i + 1));
    rows = _mm256_mask_broadcastq_epi64(rows, 4, row(i + 2));
    return _mm256_mask_broadcastq_epi64(rows, 8, row(i + 3));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(4), 1);
}

static inline __m256i bytes_to_words(const uint8_t* p) { return _mm256_cvtepu8_epi16(load_bytes(p)); }

// Bits of `mask` after a shift to the left, of sixteen words.
static inline __m256i high_bits(__m256i words, int left, int mask) {
  return _mm256_and_si256(_mm256_slli_epi16(words, left), _mm256_set1_epi16(int16_t(mask)));
}

// Eight values of sixteen columns: those from `begin` to `end` of the four in a block.
template <Format F>
struct LargeGridBlock {
  const uint8_t *own, *signs, *highs;
  const int8_t* grid;
  alignas(64) uint16_t numbers[4 * kPanel];  // of IQ2_XS the codes of the rows
  alignas(64) uint64_t negative[8];  // of 8 columns each

  __attribute__((always_inline)) LargeGridBlock(const uint8_t* group, int64_t b, const int8_t* table, int begin, int end)
      : own(group + header_bytes(F) + b * quant_bytes(F)), signs(own + quant_bytes(F) - 64),
        highs(group + compact(F).highs + b * (is_iq1(F) ? 2 : 1) * kPanel), grid(table) {
#pragma GCC unroll 4
    for (int j = begin; j < end; ++j) {
      if constexpr (F != Format::IQ2_XS) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + j * kPanel), _mm256_or_si256(bytes_to_words(own + j * kPanel), upper(j)));
      } else if (j % 2 == 0) {  // `begin` is even, and so is `end`
        const __m512i lower = _mm512_cvtepu8_epi16(load_32(own + j * kPanel));
        const __m256i bytes = load_32(signs + j * kPanel);
        const SmallGrid<F> codes{table};
        _mm512_store_si512(numbers + j * kPanel, _mm512_mask_blend_epi16(_mm256_movepi8_mask(bytes), look_up(codes.codes(), lower),
                                                                         look_up(codes.codes() + 512, lower)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(negative + 2 * j), eight_of(bytes));
      }
    }
  }

  // The upper bits of numbers.
  __m256i upper(int j) const {
    if constexpr (F == Format::IQ2_S) return high_bits(bytes_to_words(highs), 8 - 2 * j, 0x300);
    return high_bits(bytes_to_words(highs + j / 2 * kPanel), j % 2 ? 4 : 8, 0x700);  // IQ1
  }

  // Seven signs in each byte, and the eighth that makes their number even.
  static __m256i eight_of(__m256i bytes) {
    const __m256i seven = _mm256_and_si256(bytes, _mm256_set1_epi8(127)), halves = _mm256_xor_si256(seven, _mm256_srli_epi64(seven, 4));
    const __m256i quarters = _mm256_xor_si256(halves, _mm256_srli_epi64(halves, 2));
    const __m256i odd = _mm256_xor_si256(_mm256_slli_epi64(quarters, 7), _mm256_slli_epi64(quarters, 6));
    return _mm256_or_si256(seven, _mm256_and_si256(odd, _mm256_set1_epi8(char(128))));
  }

  __mmask64 minus(int j, int side) const { return F == Format::IQ2_XS ? negative[2 * j + side] : number_at<uint64_t>(signs + j * kPanel + 8 * side); }

  // Eight values of the columns of a side, without their signs.
  __attribute__((always_inline)) __m512i values(int j, int side) const {
    if constexpr (F != Format::IQ2_XS) return eight_rows(grid, numbers + j * kPanel + 8 * side);
    const __m512i codes = _mm512_cvtepu16_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers + j * kPanel + 8 * side)));
    const __m512i four = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9)));
    const __m512i places = _mm512_and_si512(_mm512_srlv_epi16(four, _mm512_set1_epi64(0x0006000400020000)), _mm512_set1_epi8(3));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(SmallGrid<F>{grid}.values())), places);
  }

  // IQ1: the difference of values to those of the grid, 1 or -1, and `more`.
  __m512i difference(int j, int side, int more) const {
    const int from = F == Format::IQ1_S ? 3 : j;  // the nibble that has its sign
    const __m512i columns = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(highs + from / 2 * kPanel + 8 * side)));
    const __mmask8 minus = _mm512_test_epi64_mask(columns, _mm512_set1_epi64(from % 2 ? 0x80 : 0x08));
    return _mm512_mask_blend_epi64(minus, _mm512_set1_epi8(char(more + 1)), _mm512_set1_epi8(char(more - 1)));
  }
};

// Lanes of 32 bits: the even ones of two registers, and the odd ones.
static inline __m512i even_lanes(__m512i a, __m512i b) {
  return _mm512_permutex2var_epi32(a, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), b);
}
static inline __m512i odd_lanes(__m512i a, __m512i b) {
  return _mm512_permutex2var_epi32(a, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), b);
}

// ---- blocks --------------------------------------------------------------------------------------------------------

static inline __m512i two_bits(const uint8_t* own, int line) {
  const __m512i fours = _mm512_loadu_si512(own + line / 4 * 64);
  return _mm512_and_si512(line % 4 ? _mm512_srli_epi16(fours, unsigned(line % 4 * 2)) : fours, _mm512_set1_epi8(3));
}

static inline __m512i negated(__m512i bytes, __mmask64 where) { return _mm512_mask_sub_epi8(bytes, where, _mm512_setzero_si512(), bytes); }

template <Format F>
EXPANSION void expand_block(const uint8_t* group, int64_t b, const int8_t* table, uint8_t* out) {
  const auto put = [&](int line, __m512i bytes) { _mm512_storeu_si512(out + 64 * line, bytes); };
  if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    const uint8_t* own = group + header_bytes(F) + b * quant_bytes(F);
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
      const __m512i two = two_bits(own, line);
      if constexpr (F == Format::Q2_K) put(line, two);
      else put(line, _mm512_mask_sub_epi8(two, number_at<uint64_t>(own + 128 + 8 * line), two, _mm512_set1_epi8(4)));
    }
  } else if constexpr (has_small_grid(F)) {
    const SmallGridBlock<F> block(group, b, table);
    block.each_line([&](int line, __m512i values) __attribute__((always_inline)) { put(line, negated(values, block.negative[line])); });
  } else {
    const LargeGridBlock<F> block(group, b, table, 0, 4);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i sides[2];
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m512i values = block.values(j, side);
        sides[side] = is_iq1(F) ? _mm512_add_epi8(values, block.difference(j, side, 0)) : negated(values, block.minus(j, side));
      }
      put(2 * j, even_lanes(sides[0], sides[1]));
      put(2 * j + 1, odd_lanes(sides[0], sides[1]));
    }
  }
}

// One row: half `s` of block `b` of a group, or all of it where it has one scale. Values of a grid stay in registers, and the signs of a
// column are those of the activations: both factors have eight bits. Values of IQ1 are raised by 128.
#define BIFOLIO_OWN_COMPACT_DOTS
template <Format F>
__attribute__((always_inline)) static inline V16 compact_dots(const uint8_t* group, int64_t b, int s, const int8_t* table, const int8_t* x, int32_t isum) {
  if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    const uint8_t* own = group + header_bytes(F) + b * quant_bytes(F) + 64 * s;
    __m512i total = _mm512_set1_epi32(F == Format::Q3_K ? -4 * isum : 0);
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      __m512i two = two_bits(own, line);
      if constexpr (F == Format::Q3_K)
        two = _mm512_mask_add_epi8(two, ~number_at<uint64_t>(own + 128 - 32 * s + 8 * line), two, _mm512_set1_epi8(4));
      total = _mm512_dpbusd_epi32(total, two, four_bytes(x + 4 * line));
    }
    return {{_mm512_cvtepi32_ps(total)}};
  } else if constexpr (has_small_grid(F)) {
    const SmallGridBlock<F> block(group, b, table);
    __m512i totals[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    block.each_line([&](int line, __m512i values) __attribute__((always_inline)) {
      totals[line % 2] = _mm512_dpbusd_epi32(totals[line % 2], values, negated(four_bytes(x + 4 * line), block.negative[line]));
    });
    return {{_mm512_cvtepi32_ps(_mm512_add_epi32(totals[0], totals[1]))}};
  } else {
    constexpr int count = 4 / coding(F).scales;
    const int begin = count == 4 ? 0 : 2 * s;
    const LargeGridBlock<F> block(group, b, table, begin, begin + count);
    __m512i totals[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 4
    for (int i = 0; i < count; ++i) {
      const __m512i row = _mm512_set1_epi64(number_at<int64_t>(reinterpret_cast<const uint8_t*>(x) + 8 * i));
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        __m512i values = block.values(begin + i, side), signed_row = row;
        if constexpr (is_iq1(F)) values = _mm512_add_epi8(values, block.difference(begin + i, side, 128));
        else signed_row = negated(row, block.minus(begin + i, side));
        totals[side] = _mm512_dpbusd_epi32(totals[side], values, signed_row);
      }
    }
    const __m512i total = _mm512_add_epi32(even_lanes(totals[0], totals[1]), odd_lanes(totals[0], totals[1]));
    return {{_mm512_cvtepi32_ps(is_iq1(F) ? _mm512_sub_epi32(total, _mm512_set1_epi32(128 * isum)) : total)}};
  }
}
