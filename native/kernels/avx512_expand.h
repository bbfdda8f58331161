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
// Numbers are loaded in pairs: units that load are the limit.
__attribute__((always_inline)) static inline __m512i eight_rows(const int8_t* grid, const uint16_t* numbers) {
  const auto row = [&](uint32_t number) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(grid + 8 * size_t(number))); };
  const auto four = [&](int i) {
    const auto pair = [&](int at) { return number_at<uint32_t>(reinterpret_cast<const uint8_t*>(numbers + i + at)); };
    const uint32_t first = pair(0), last = pair(2);
    __m256i rows = _mm256_castsi128_si256(row(first & 0xffff));
    rows = _mm256_mask_broadcastq_epi64(rows, 2, row(first >> 16));
    rows = _mm256_mask_broadcastq_epi64(rows, 4, row(last & 0xffff));
    return _mm256_mask_broadcastq_epi64(rows, 8, row(last >> 16));
  };
  return _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(4), 1);
}

// A block: four times eight values of sixteen columns.
template <Format F>
struct LargeGridBlock {
  const uint8_t *own, *signs, *highs;
  const int8_t* grid;

  __attribute__((always_inline)) LargeGridBlock(const uint8_t* group, int64_t b, const int8_t* table)
      : own(group + header_bytes(F) + b * quant_bytes(F)), signs(own + quant_bytes(F) - 64),
        highs(group + compact(F).highs + b * (is_iq1(F) ? 2 : 1) * kPanel), grid(table) {}

  // The numbers of rows, of IQ2_XS the codes of rows; and (IQ2_XS) the signs of 8 columns each.
  __attribute__((always_inline)) void number(uint16_t numbers[4 * kPanel], uint64_t negative[8]) const {
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2) {
      const __m512i lower = _mm512_cvtepu8_epi16(load_32(own + j * kPanel));
      if constexpr (F != Format::IQ2_XS) {
        _mm512_store_si512(numbers + j * kPanel, with_upper(lower, j));
      } else {
        const __m256i bytes = load_32(signs + j * kPanel);
        const SmallGrid<F> codes{grid};
        _mm512_store_si512(numbers + j * kPanel, _mm512_mask_blend_epi16(_mm256_movepi8_mask(bytes), look_up(codes.codes(), lower),
                                                                         look_up(codes.codes() + 512, lower)));
        _mm256_store_si256(reinterpret_cast<__m256i*>(negative + 2 * j), eight_of(bytes));
      }
    }
  }

  // Numbers j and j + 1 with their upper bits.
  __m512i with_upper(__m512i lower, int j) const {
    const __m512i bytes = _mm512_broadcast_i64x4(_mm256_cvtepu8_epi16(load_bytes(highs + (is_iq1(F) ? j / 2 * kPanel : 0))));
    const int first = is_iq1(F) ? 8 : 8 - 2 * j, second = is_iq1(F) ? 4 : 6 - 2 * j;  // shifts to the left
    const __m512i upper = _mm512_sllv_epi16(bytes, _mm512_inserti64x4(_mm512_set1_epi16(int16_t(first)), _mm256_set1_epi16(int16_t(second)), 1));
    return _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(is_iq1(F) ? 0x700 : 0x300), 0xf8);  // lower | (upper & mask)
  }

  // Seven signs in each byte, and the eighth that makes their number even.
  static __m256i eight_of(__m256i bytes) {
    const __m256i seven = _mm256_and_si256(bytes, _mm256_set1_epi8(127)), halves = _mm256_xor_si256(seven, _mm256_srli_epi64(seven, 4));
    const __m256i quarters = _mm256_xor_si256(halves, _mm256_srli_epi64(halves, 2));
    const __m256i odd = _mm256_xor_si256(_mm256_slli_epi64(quarters, 7), _mm256_slli_epi64(quarters, 6));
    return _mm256_or_si256(seven, _mm256_and_si256(odd, _mm256_set1_epi8(char(128))));
  }

  __mmask64 minus(const uint64_t negative[8], int j, int side) const {
    return F == Format::IQ2_XS ? negative[2 * j + side] : number_at<uint64_t>(signs + j * kPanel + 8 * side);
  }

  // Eight values of the columns of a side, without their signs; of IQ1 as the grid has them.
  __attribute__((always_inline)) __m512i values(const uint16_t numbers[4 * kPanel], int j, int side) const {
    if constexpr (F != Format::IQ2_XS) return eight_rows(grid, numbers + j * kPanel + 8 * side);
    const __m512i codes = _mm512_cvtepu16_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers + j * kPanel + 8 * side)));
    const __m512i four = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 8, 9, 8, 9, 8, 9, 8, 9)));
    const __m512i places = _mm512_and_si512(_mm512_srlv_epi16(four, _mm512_set1_epi64(0x0006000400020000)), _mm512_set1_epi8(3));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_bytes(SmallGrid<F>{grid}.values())), places);
  }

  // IQ1: columns whose eight values are lower.
  __mmask16 lower(int j) const {
    const int from = F == Format::IQ1_S ? 3 : j;  // the nibble that has the bit
    const __m512i columns = _mm512_cvtepu8_epi32(load_bytes(highs + from / 2 * kPanel));
    return _mm512_test_epi32_mask(columns, _mm512_set1_epi32(from % 2 ? 0x80 : 0x08));
  }
};

// The numbers of some blocks.
template <Format F, int Blocks>
struct LargeGridNumbers {
  alignas(64) uint16_t numbers[Blocks][4 * kPanel];
  alignas(64) uint64_t negative[F == Format::IQ2_XS ? Blocks : 1][8];

  __attribute__((always_inline)) LargeGridNumbers(const uint8_t* group, int64_t begin, const int8_t* table) {
    for (int b = 0; b < Blocks; ++b) LargeGridBlock<F>(group, begin + b, table).number(numbers[b], negative[F == Format::IQ2_XS ? b : 0]);
    asm("" : "+m"(numbers));  // GCC would move the numbers of a single block from lane to lane instead of through memory
  }
  const uint64_t* signs(int64_t b) const { return negative[F == Format::IQ2_XS ? b : 0]; }
};

// One row: the work for a group that is done before its blocks are multiplied. The way from bits to numbers to rows of a grid is long: numbers
// of eight blocks are made at a time, so that the rows of many are loaded at once.
struct NoNumbers {
  NoNumbers(const uint8_t*, int64_t, const int8_t*) {}
};
template <Format F>
using GroupNumbers = std::conditional_t<(F >= Format::IQ2_XXS && !has_small_grid(F)), LargeGridNumbers<F, 8>, NoNumbers>;

// IQ1: the difference of values to those of the grid, for eight columns.
static inline __m512i iq1_difference(unsigned lower) {
  return _mm512_mask_blend_epi64(__mmask8(lower), _mm512_set1_epi8(kIq1Upper), _mm512_set1_epi8(kIq1Lower));
}

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
    const LargeGridBlock<F> block(group, b, table);
    const LargeGridNumbers<F, 1> all(group, b, table);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512i sides[2];
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {
        const __m512i values = block.values(all.numbers[0], j, side);
        if constexpr (is_iq1(F)) sides[side] = _mm512_add_epi8(values, iq1_difference(unsigned(block.lower(j)) >> (8 * side)));
        else sides[side] = negated(values, block.minus(all.signs(0), j, side));
      }
      put(2 * j, even_lanes(sides[0], sides[1]));
      put(2 * j + 1, odd_lanes(sides[0], sides[1]));
    }
  }
}

// The scales of block `b` of a group without the factor: small numbers choose one of sixteen floats.
template <Format F>
__attribute__((always_inline)) static inline void compact_scales(const uint8_t* group, int64_t b, V16 out[coding(F).scales]) {
  const uint8_t* scales = group + compact(F).scales;
  const auto columns = [&](int64_t i) { return _mm512_cvtepu8_epi32(load_bytes(scales + i * kPanel)); };
  const __m512 wholes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 quarters = _mm512_add_ps(_mm512_mul_ps(wholes, _mm512_set1_ps(0.25f)), _mm512_set1_ps(0.125f));  // folded by the compiler
  if constexpr (F == Format::Q2_K) {
    for (int s = 0; s < 2; ++s) out[s].v[0] = _mm512_permutexvar_ps(columns(2 * b + s), wholes);
  } else if constexpr (F == Format::IQ2_XS || F == Format::IQ2_S) {
    const __m512i both = columns(b);
    out[0].v[0] = _mm512_permutexvar_ps(both, quarters);
    out[1].v[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), quarters);
  } else if constexpr (F == Format::IQ1_M) {  // two bits and a third one; the fourth does not matter
    const __m512i low = _mm512_srlv_epi32(columns(b / 2), _mm512_set1_epi32(int(b % 2 * 4)));
    const __m512i high = _mm512_rorv_epi32(columns(4 + b / 4), _mm512_set1_epi32(int(b % 4 * 2 - 2)));
    const __m512 eight = _mm512_shuffle_f32x4(quarters, quarters, 0x44);
    const auto choose = [&](__m512i two, __m512i third) {
      return _mm512_permutexvar_ps(_mm512_ternarylogic_epi32(_mm512_set1_epi32(3), two, third, 0xca), eight);
    };
    out[0].v[0] = choose(low, high);
    out[1].v[0] = choose(_mm512_srli_epi32(low, 2), _mm512_srli_epi32(high, 1));
  } else {
    for (int s = 0; s < coding(F).scales; ++s) out[s] = compact_scale<F>(group, b, s);
  }
}

// One row: the sums of block `b` of a group, or of both of its halves. Values of a grid stay in registers, and the signs of a column are
// those of the activations: both factors have eight bits. `isums` are the sums of activations.
#define BIFOLIO_OWN_COMPACT_DOTS
template <Format F>
__attribute__((always_inline)) static inline void compact_dots(const uint8_t* group, int64_t b, const int8_t* table, const GroupNumbers<F>& all,
                                                               const int8_t* x, const int32_t* isums, V16 sums[coding(F).scales]) {
  (void)all;  // of most formats
  if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    const uint8_t* own = group + header_bytes(F) + b * quant_bytes(F);
#pragma GCC unroll 2
    for (int s = 0; s < 2; ++s) {
      __m512i total = _mm512_set1_epi32(F == Format::Q3_K ? -4 * isums[s] : 0);
#pragma GCC unroll 4
      for (int line = 4 * s; line < 4 * s + 4; ++line) {
        __m512i two = two_bits(own, line);
        if constexpr (F == Format::Q3_K) two = _mm512_mask_add_epi8(two, ~number_at<uint64_t>(own + 128 + 8 * line), two, _mm512_set1_epi8(4));
        total = _mm512_dpbusd_epi32(total, two, four_bytes(x + 4 * line));
      }
      sums[s].v[0] = _mm512_cvtepi32_ps(total);
    }
  } else if constexpr (has_small_grid(F)) {
    const SmallGridBlock<F> block(group, b, table);
    __m512i totals[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    block.each_line([&](int line, __m512i values) __attribute__((always_inline)) {
      totals[line % 2] = _mm512_dpbusd_epi32(totals[line % 2], values, negated(four_bytes(x + 4 * line), block.negative[line]));
    });
    sums[0].v[0] = _mm512_cvtepi32_ps(_mm512_add_epi32(totals[0], totals[1]));
  } else {
    constexpr int scales = coding(F).scales, count = 4 / scales;
    const LargeGridBlock<F> block(group, b, table);
    alignas(32) int64_t twice[4];  // the sums of eight activations: the lower values are less by 2 than the upper ones
    if constexpr (F == Format::IQ1_M) {
      const __m256i raised = _mm256_xor_si256(load_32(reinterpret_cast<const uint8_t*>(x)), _mm256_set1_epi8(char(128)));
      const __m256i eights = _mm256_sub_epi64(_mm256_sad_epu8(raised, _mm256_setzero_si256()), _mm256_set1_epi64x(8 * 128));
      _mm256_store_si256(reinterpret_cast<__m256i*>(twice), _mm256_add_epi64(eights, eights));
    }
#pragma GCC unroll 2
    for (int s = 0; s < scales; ++s) {
      __m512i totals[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      __m512i total = _mm512_set1_epi32(is_iq1(F) ? kIq1Upper * isums[s] : 0);
      if constexpr (F == Format::IQ1_S) total = _mm512_mask_set1_epi32(total, block.lower(0), kIq1Lower * isums[0]);
#pragma GCC unroll 4
      for (int j = s * count; j < (s + 1) * count; ++j) {
        const __m512i row = _mm512_set1_epi64(number_at<int64_t>(reinterpret_cast<const uint8_t*>(x) + 8 * j));
#pragma GCC unroll 2
        for (int side = 0; side < 2; ++side) {
          __m512i signed_row = row;
          if constexpr (!is_iq1(F)) signed_row = negated(row, block.minus(all.signs(b), j, side));
          totals[side] = _mm512_dpbusd_epi32(totals[side], block.values(all.numbers[b], j, side), signed_row);
        }
        if constexpr (F == Format::IQ1_M) total = _mm512_mask_sub_epi32(total, block.lower(j), total, _mm512_set1_epi32(int32_t(twice[j])));
      }
      const __m512i pairs = _mm512_add_epi32(even_lanes(totals[0], totals[1]), odd_lanes(totals[0], totals[1]));
      sums[s].v[0] = _mm512_cvtepi32_ps(is_iq1(F) ? _mm512_add_epi32(pairs, total) : pairs);
    }
  }
}
