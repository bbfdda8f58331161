// Sums of blocks with 256-bit registers: bytes are multiplied in pairs, and each pair of products is added in 16 bits.
//
// Two products of signed bytes fill the 16 bits. Quants of four and of six bits without a sign leave room for the sum of sixteen
// and of four, so these are raised to be 0 or more; the excess of a sum is 8 or 32 times the sum of the row, and is subtracted.
#pragma once

static inline __m256i load_line(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

static inline __m256i four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

static inline __m256i add_words(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// Bytes of four k values and eight columns against four bytes of a row: exact, since the pairs that are added in 16
// bits stay below 2^15 (weights at most 128 in size, activations at most 127).
static inline __m256i dot_bytes(__m256i weights, __m256i row) {
  return add_words(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(row, weights)));
}

// The same for weights that are not negative.
static inline __m256i dot_unsigned(__m256i weights, __m256i row) { return add_words(_mm256_maddubs_epi16(weights, row)); }

// Sums of signed bytes over `Lines` times four k values.
template <int Lines, int R>
static inline void signed_dots(const uint8_t* w, const int8_t* x, int64_t stride, V16 sums[R]) {
  __m256i totals[R][2];
  for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
  for (int line = 0; line < Lines; ++line)
    for (int c = 0; c < 2; ++c) {
      const __m256i weights = load_line(w + line * 64 + c * 32);
      for (int r = 0; r < R; ++r)
        totals[r][c] = _mm256_add_epi32(totals[r][c], dot_bytes(weights, four_bytes(x + r * stride + line * 4)));
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) sums[r].v[c] = _mm256_cvtepi32_ps(totals[r][c]);
}

// The sums of a row from its words; `Shift` is the logarithm of the number that signed quants are raised by.
template <bool Signed, int Shift>
static inline void finish_sums(const __m256i totals[2], int32_t isum, V16& sums) {
  const __m256i excess = _mm256_slli_epi32(_mm256_set1_epi32(isum), Shift);
  for (int c = 0; c < 2; ++c) sums.v[c] = _mm256_cvtepi32_ps(Signed ? _mm256_sub_epi32(totals[c], excess) : totals[c]);
}

// Raised quants of four bits: at most eight lines.
template <int Lines, bool Signed, int R>
static inline void raised_nibble_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m256i words[R][2];
  for (int r = 0; r < R; ++r) words[r][0] = words[r][1] = _mm256_setzero_si256();
  for (int line = 0; line < Lines; ++line) {
    const __m256i left = load_line(w + line * 64), right = load_line(w + line * 64 + 32);
    for (int r = 0; r < R; ++r) {
      const __m256i row = four_bytes(x + r * stride + line * 4);
      words[r][0] = _mm256_add_epi16(words[r][0], _mm256_maddubs_epi16(left, row));
      words[r][1] = _mm256_add_epi16(words[r][1], _mm256_maddubs_epi16(right, row));
    }
  }
  for (int r = 0; r < R; ++r) {
    const __m256i totals[2] = {add_words(words[r][0]), add_words(words[r][1])};
    finish_sums<Signed, 3>(totals, isum[r], sums[r]);
  }
}

// A whole block of nibbles as they are packed.
template <bool Signed, int R>
static inline void nibble_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i words[R][2];
  for (int r = 0; r < R; ++r) words[r][0] = words[r][1] = _mm256_setzero_si256();
  for (int line = 0; line < 4; ++line)
    for (int c = 0; c < 2; ++c) {
      const __m256i packed = load_line(w + line * 64 + c * 32);
      const __m256i nibbles = Signed ? _mm256_xor_si256(packed, _mm256_set1_epi8(int8_t(0x88))) : packed;
      const __m256i low = _mm256_and_si256(nibbles, mask), high = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask);
      for (int r = 0; r < R; ++r) {
        const __m256i first = _mm256_maddubs_epi16(low, four_bytes(x + r * stride + line * 4));
        const __m256i second = _mm256_maddubs_epi16(high, four_bytes(x + r * stride + 16 + line * 4));
        words[r][c] = _mm256_add_epi16(words[r][c], _mm256_add_epi16(first, second));
      }
    }
  for (int r = 0; r < R; ++r) {
    const __m256i totals[2] = {add_words(words[r][0]), add_words(words[r][1])};
    finish_sums<Signed, 3>(totals, isum[r], sums[r]);
  }
}

// Raised quants of six bits: the words of two lines can be added.
template <int Lines, int R>
static inline void raised_six_bit_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m256i totals[R][2];
  for (int c = 0; c < 2; ++c)
    for (int line = 0; line < Lines; line += 2) {
      const __m256i first = load_line(w + line * 64 + c * 32), second = load_line(w + line * 64 + 64 + c * 32);
      for (int r = 0; r < R; ++r) {
        const int8_t* row = x + r * stride + line * 4;
        const __m256i words = _mm256_add_epi16(_mm256_maddubs_epi16(first, four_bytes(row)), _mm256_maddubs_epi16(second, four_bytes(row + 4)));
        totals[r][c] = line ? _mm256_add_epi32(totals[r][c], add_words(words)) : add_words(words);
      }
    }
  for (int r = 0; r < R; ++r) finish_sums<true, 5>(totals[r], isum[r], sums[r]);
}

// The same for quants as they are packed, one or both halves of a block: without a way through memory for few rows.
#define BIFOLIO_OWN_SIX_BITS
template <int Halves, int R>
static inline void packed_six_bit_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  const auto mask = [](__m256i a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi8(char(bits))); };
  const auto raised = [](const uint8_t* p, int bits) { return _mm256_xor_si256(load_line(p), _mm256_set1_epi8(char(bits))); };
  __m256i totals[R][2];
  for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
  for (int half = 0; half < Halves; ++half, w += 192, x += 16)
    for (int c = 0; c < 2; ++c) {
      const __m256i first = raised(w + c * 32, 0x20), second = raised(w + 64 + c * 32, 0x20), third = raised(w + 128 + c * 32, 0xa0);
      const __m256i lower = _mm256_or_si256(mask(_mm256_srli_epi16(second, 4), 0x0c), mask(_mm256_srli_epi16(first, 6), 0x03));
      const __m256i fourth = _mm256_or_si256(mask(_mm256_srli_epi16(third, 2), 0x30), lower);
      const __m256i lines[4] = {mask(first, 0x3f), mask(second, 0x3f), mask(third, 0x3f), fourth};
      for (int r = 0; r < R; ++r) {
        const int8_t* row = x + r * stride;
        const auto words = [&](int line) { return _mm256_maddubs_epi16(lines[line], four_bytes(row + 4 * line)); };
        const __m256i both = _mm256_add_epi32(add_words(_mm256_add_epi16(words(0), words(1))), add_words(_mm256_add_epi16(words(2), words(3))));
        totals[r][c] = _mm256_add_epi32(totals[r][c], both);
      }
    }
  for (int r = 0; r < R; ++r) finish_sums<true, 5>(totals[r], isum[r], sums[r]);
}

template <Coding C, int R>
static inline void raised_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  constexpr int lines = 8 / C.scales;
  if constexpr (C.bits == 4) raised_nibble_dots<lines, C.is_signed, R>(w, x, stride, isum, sums);
  else raised_six_bit_dots<lines, R>(w, x, stride, isum, sums);
}

template <int Bits, bool Signed, int R>
static inline void block_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  if constexpr (Bits == 4) nibble_dots<Signed, R>(w, x, stride, isum, sums);
  else signed_dots<8, R>(w, x, stride, sums);
}

// Sixteen bytes of each row against half a block of bytes.
template <bool, int R>
static inline void half_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t*, V16 sums[R]) {
  signed_dots<4, R>(w, x, stride, sums);
}

#define BIFOLIO_OWN_UNPACK
constexpr float kNibbleUnit = 1.0f, kSixBitUnit = 1.0f;
constexpr Coding unpacked_coding(Coding packed) { return packed.unpacked_raised(); }

template <Coding C>
static inline void unpack_block(const uint8_t* quants, const int8_t* table, uint8_t* out) {
  const auto store = [&](int at, __m256i a) { _mm256_store_si256(reinterpret_cast<__m256i*>(out + at), a); };
  const auto mask = [](__m256i a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi8(char(bits))); };
  if constexpr (C.bits == 4) {
    const __m256i values = C.table ? _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))) : _mm256_setzero_si256();
    const __m256i signs = _mm256_set1_epi8(C.is_signed ? int8_t(0x88) : 0);
    for (int i = 0; i < 256; i += 32) {
      const __m256i pairs = _mm256_xor_si256(load_line(quants + i), signs), low = mask(pairs, 15), high = mask(_mm256_srli_epi16(pairs, 4), 15);
      store(i, C.table ? _mm256_shuffle_epi8(values, low) : low);
      store(256 + i, C.table ? _mm256_shuffle_epi8(values, high) : high);
    }
  } else {
    const __m256i sign = _mm256_set1_epi8(32);
    for (int half = 0; half < 2; ++half, quants += 192, out += 256)
      for (int i = 0; i < 64; i += 32) {
        const __m256i first = load_line(quants + i), second = load_line(quants + 64 + i), third = load_line(quants + 128 + i);
        store(i, _mm256_xor_si256(mask(first, 0x3f), sign));
        store(64 + i, _mm256_xor_si256(mask(second, 0x3f), sign));
        store(128 + i, _mm256_xor_si256(mask(third, 0x3f), sign));
        const __m256i lower = _mm256_or_si256(mask(_mm256_srli_epi16(second, 4), 0x0c), mask(_mm256_srli_epi16(first, 6), 0x03));
        store(192 + i, _mm256_xor_si256(_mm256_or_si256(mask(_mm256_srli_epi16(third, 2), 0x30), lower), sign));
      }
  }
}
