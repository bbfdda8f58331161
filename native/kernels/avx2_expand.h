// Compact formats (compact.h) as bytes, with 256-bit registers: eight columns of a line at a time. Values of Q3_K are raised by 8.
#pragma once

// A byte for each bit: 0 or -1.
static inline __m256i bits_to_bytes(uint32_t bits) {
  const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
  return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(bits)), places), each), each);
}

// The words of sixteen bytes.
static inline __m256i bytes_to_words(const uint8_t* p) { return _mm256_cvtepu8_epi16(load_bytes(p)); }

static inline __m256i high_bits(__m256i words, int left, int mask) {
  return _mm256_and_si256(_mm256_slli_epi16(words, left), _mm256_set1_epi16(int16_t(mask)));
}

// Row i of the numbers of a block, without upper bits, of sixteen columns.
template <Format F>
static inline __m256i lower_bits(const uint8_t* own, int i) {
  if constexpr (!has_small_grid(F)) return bytes_to_words(own + i * kPanel);
  const __m256i pairs = load_line(own + i / 2 * 32);
  return i % 2 ? _mm256_srli_epi16(pairs, 8) : _mm256_and_si256(pairs, _mm256_set1_epi16(255));
}

// The upper bits.
template <Format F>
static inline __m256i upper_bits(const uint8_t* highs, const uint8_t* signs, int i) {
  if constexpr (F == Format::IQ2_XS) return high_bits(bytes_to_words(signs + i * kPanel), 1, 0x100);
  if constexpr (F == Format::IQ2_S) return high_bits(bytes_to_words(highs), 8 - 2 * i, 0x300);
  if constexpr (F == Format::IQ3_S) {
    const __m256i places = _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1, 2, -1, 2, -1, 2, -1, 2, -1, 3, -1, 3, -1, 3, -1, 3, -1);
    const __m256i each = _mm256_set1_epi64x(i % 2 ? 0x0080002000080002 : 0x0040001000040001);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(number_at<int32_t>(highs + i / 2 * 4)), places);
    return _mm256_and_si256(_mm256_cmpeq_epi16(_mm256_and_si256(bytes, each), each), _mm256_set1_epi16(0x100));
  }
  if constexpr (is_iq1(F)) return high_bits(bytes_to_words(highs + i / 2 * kPanel), i % 2 ? 4 : 8, 0x700);
  return _mm256_setzero_si256();
}

// Seven signs in each byte, and the eighth that makes their number even.
static inline uint32_t eight_signs_of(uint32_t bytes) {
  const uint32_t seven = bytes & 0x7f7f7f7fu, halves = seven ^ seven >> 4, quarters = halves ^ halves >> 2;
  return seven | ((quarters << 7 ^ quarters << 6) & 0x80808080u);
}

// Eight values of a column by the number of their row, or by those of two rows of four.
template <int Rows>
static inline int64_t row_of_eight(const int8_t* table, const uint16_t* numbers) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(table);
  if constexpr (Rows == 1) return number_at<int64_t>(bytes + 8 * numbers[0]);
  else return int64_t(number_at<uint32_t>(bytes + 4 * numbers[0]) | uint64_t(number_at<uint32_t>(bytes + 4 * numbers[kPanel])) << 32);
}

// The signs of eight values of four columns, a byte each.
template <Format F>
static inline uint32_t signs_of_four(const uint8_t* signs, int j, int c) {
  const auto nibbles = [&](int line) {  // of four columns, a byte each
    const uint32_t four = number_at<uint16_t>(signs + 8 * line + c / 2), two = (four | four << 8) & 0x00ff00ffu;
    return (two | two << 4) & 0x0f0f0f0fu;
  };
  const uint32_t stored = has_small_grid(F) ? nibbles(2 * j) | nibbles(2 * j + 1) << 4 : number_at<uint32_t>(signs + j * kPanel + c);
  return has_seven_signs(F) ? eight_signs_of(stored) : stored;
}

template <Format F>
EXPANSION void expand_block(const uint8_t* group, int64_t b, const int8_t* table, uint8_t* out) {
  const uint8_t *own = group + header_bytes(F) + b * quant_bytes(F), *signs = own + quant_bytes(F) - 64;
  const auto put = [&](int at, __m256i a) { _mm256_store_si256(reinterpret_cast<__m256i*>(out + at), a); };
  if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line)
      for (int side = 0; side < 64; side += 32) {
        const __m256i fours = load_line(own + line / 4 * 64 + side);
        const __m256i two = _mm256_and_si256(line % 4 ? _mm256_srli_epi16(fours, line % 4 * 2) : fours, _mm256_set1_epi8(3));
        if constexpr (F == Format::Q2_K) put(64 * line + side, two);
        else put(64 * line + side, _mm256_add_epi8(two, _mm256_blendv_epi8(_mm256_set1_epi8(8), _mm256_set1_epi8(4),
                                                                           bits_to_bytes(number_at<uint32_t>(signs + 8 * line + side / 8)))));
      }
  } else {
    constexpr int rows = has_rows_of_four(F) ? 2 : 1;  // of eight values
    const uint8_t* highs = group + compact(F).highs + b * (is_iq1(F) ? 2 : 1) * kPanel;
    for (int j = 0; j < 4; ++j) {
      alignas(32) uint16_t numbers[rows * kPanel];
      for (int i = 0; i < rows; ++i)
        _mm256_store_si256(reinterpret_cast<__m256i*>(numbers + i * kPanel),
                           _mm256_or_si256(lower_bits<F>(own, rows * j + i), upper_bits<F>(highs, signs, rows * j + i)));
      // Eight values of four columns from `c` on, with their signs.
      const auto four_columns = [&](int c) __attribute__((always_inline)) {
        const __m256i values = _mm256_setr_epi64x(row_of_eight<rows>(table, numbers + c), row_of_eight<rows>(table, numbers + c + 1),
                                                  row_of_eight<rows>(table, numbers + c + 2), row_of_eight<rows>(table, numbers + c + 3));
        if constexpr (is_iq1(F)) {
          const int from = F == Format::IQ1_S ? 3 : j;  // the nibble that has the sign of the difference
          const uint32_t nibbles = number_at<uint32_t>(highs + from / 2 * kPanel + c) << (from % 2 ? 0 : 4);  // its bit is the last of a byte
          const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
          const __m256i minus = _mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(nibbles)), places);
          return _mm256_add_epi8(values, _mm256_blendv_epi8(_mm256_set1_epi8(kIq1Upper), _mm256_set1_epi8(kIq1Lower), minus));
        } else {
          const __m256i minus = bits_to_bytes(signs_of_four<F>(signs, j, c));
          return _mm256_sub_epi8(_mm256_xor_si256(values, minus), minus);
        }
      };
#pragma GCC unroll 2
      for (int side = 0; side < 2; ++side) {  // columns 0, 1, 4, 5 and 2, 3, 6, 7 side by side, so that a line has them in order
        const __m256i first = four_columns(8 * side), second = four_columns(8 * side + 4);
        const __m256 left = _mm256_castsi256_ps(_mm256_permute2x128_si256(first, second, 0x20));
        const __m256 right = _mm256_castsi256_ps(_mm256_permute2x128_si256(first, second, 0x31));
        put(128 * j + 32 * side, _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0x88)));
        put(128 * j + 64 + 32 * side, _mm256_castps_si256(_mm256_shuffle_ps(left, right, 0xdd)));
      }
    }
  }
}
