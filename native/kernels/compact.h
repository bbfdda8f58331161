// Formats of 1.5 to 3.5 bits, packed with the bits of the file: a column of a panel is a row of the file, whose bits are only in another
// order. They become bytes where they are multiplied.
//
// A group of a panel is 256 values of sixteen columns, one block of the file each: a header, then eight blocks of 32 values.
//   header   factor of the scales [16] f16 (Q2_K: then that of the minima), and as `Compact` has it
//              scales   bits of the scales, [..][16] bytes
//              highs    upper bits of numbers of the grid, [..][16] bytes for each block
//   Q2_K     two bits of each value: [2][16][4] bytes, of half a block each; bits 2 * i on have line i of the half
//   Q3_K     the same, then a bit for each value that is 4 less: a word of 64 bits for each line, bit 4 * column + element
//   IQ       numbers of rows of the grid, [4][16] bytes for rows of eight values; then (IQ2) a bit for each negative value, [4][16] bytes.
//            Where the file has seven of eight signs, the eighth makes the number of negative values even, and its bit is one of the scale
//            (IQ2_XXS, IQ3_XXS: bit j in sign 7 of eight values j) or the upper bit of the number (IQ2_XS).
//   small grids   of IQ2_XXS, IQ3_XXS and IQ3_S have pairs of numbers side by side, [2][16][2] bytes, of rows of four [4][16][2]; signs are
//            a word of 64 bits for each line, bit 4 * column + element; highs of IQ3_S are a word of 32 bits for each pair of rows, bit
//            2 * column + row: so that a vector of 16-bit codes can be looked up and taken apart
//   IQ1      highs are nibbles, low ones first: three upper bits of a number, then a bit of the scale or (IQ1_S: the last; IQ1_M: all)
//            whether the values are less or more by one than those of the grid
#pragma once

struct Compact {
  int64_t scales, highs;  // where they begin
};

constexpr Compact compact(Format format) {
  switch (format) {
    case Format::Q2_K: return {64, 0};
    case Format::IQ2_S: return {32, 160};
    case Format::IQ3_S: return {32, 96};
    case Format::IQ1_S: return {0, 32};
    case Format::IQ1_M: return {32, 128};
    default: return {32, 0};
  }
}

constexpr bool has_seven_signs(Format f) { return f == Format::IQ2_XXS || f == Format::IQ2_XS || f == Format::IQ3_XXS; }
constexpr bool has_rows_of_four(Format f) { return f == Format::IQ3_XXS || f == Format::IQ3_S; }
constexpr bool has_small_grid(Format f) { return f == Format::IQ2_XXS || has_rows_of_four(f); }
constexpr bool is_iq1(Format f) { return f == Format::IQ1_S || f == Format::IQ1_M; }
constexpr int kIq1Upper = -7, kIq1Lower = -9;  // added to the values of the grid, which are 0, 8 and 16: less by eight, and one more or less

// ---- scales --------------------------------------------------------------------------------------------------------

// Scale `s` of block `b` of a group without the factor, exact.
template <Format F>
static inline V16 compact_scale(const uint8_t* group, int64_t b, int s) {
  const uint8_t* scales = group + compact(F).scales;
  const auto affine = [](Bytes16 a, float slope, float start) { return fma(to_floats(a), broadcast(slope), broadcast(start)); };
  if constexpr (F == Format::Q2_K) return to_floats(bits_of(load_bytes(scales + (2 * b + s) * kPanel), 0, 15));
  if constexpr (F == Format::Q3_K) {
    const int64_t i = 2 * b + s;
    const Bytes16 low = bits_of(load_bytes(scales + i / 2 * kPanel), int(i % 2 * 4), 15);
    const Bytes16 high = bits_of(load_bytes(scales + (8 + i / 4) * kPanel), int(i % 4 * 2), 3);
    return fma(to_floats(high), broadcast(16.0f), affine(low, 1.0f, -32.0f));
  }
  if constexpr (F == Format::IQ2_XXS || F == Format::IQ3_XXS) {
    const uint8_t* words = group + header_bytes(F) + (b + 1) * quant_bytes(F) - 64;
    constexpr uint64_t lasts = 0x8888888888888888u;  // of the nibbles of sixteen columns
    const auto last = [&](int j) { return number_at<uint64_t>(words + 16 * j + 8) & lasts; };
    const Bytes16 four = nibbles_of(last(0) >> 3 | last(1) >> 2 | last(2) >> 1 | last(3));
    return F == Format::IQ2_XXS ? affine(four, 0.25f, 0.125f) : affine(four, 0.5f, 0.25f);
  }
  if constexpr (F == Format::IQ2_XS || F == Format::IQ2_S) return affine(bits_of(load_bytes(scales + b * kPanel), 4 * s, 15), 0.25f, 0.125f);
  if constexpr (F == Format::IQ3_S) return affine(bits_of(load_bytes(scales + b / 2 * kPanel), int(b % 2 * 4), 15), 2.0f, 1.0f);
  if constexpr (F == Format::IQ1_S) {
    const uint8_t* highs = group + compact(F).highs + b * 2 * kPanel;
    const Bytes16 first = load_bytes(highs), second = load_bytes(highs + kPanel);
    const V16 low = affine(bits_of(first, 3, 1), 0.25f, 0.125f), middle = fma(to_floats(bits_of(first, 7, 1)), broadcast(0.5f), low);
    return fma(to_floats(bits_of(second, 3, 1)), broadcast(1.0f), middle);
  }
  if constexpr (F == Format::IQ1_M) {
    const int64_t i = 2 * b + s;
    const V16 low = affine(bits_of(load_bytes(scales + i / 4 * kPanel), int(i % 4 * 2), 3), 0.25f, 0.125f);
    return fma(to_floats(bits_of(load_bytes(scales + (4 + i / 8) * kPanel), int(i % 8), 1)), broadcast(1.0f), low);
  }
}

// The same of a minimum; those of Q2_K are subtracted, so that their factor has the other sign.
template <Format F>
static inline V16 compact_minimum(const uint8_t* group, int64_t b, int s) {
  return to_floats(bits_of(load_bytes(group + compact(F).scales + (2 * b + s) * kPanel), 4, 15));
}

// ---- packing -------------------------------------------------------------------------------------------------------

// Four bits of a column in the word of a line.
static inline void put_line_bits(uint8_t* words, int64_t line, int64_t column, unsigned bits) {
  words[8 * line + column / 2] |= uint8_t((bits & 15) << (column % 2 * 4));
}

// The signs of eight values.
template <Format F>
static inline void put_signs(uint8_t* signs, int64_t j, int64_t column, unsigned eight) {
  if constexpr (has_small_grid(F)) put_line_bits(signs, 2 * j, column, eight), put_line_bits(signs, 2 * j + 1, column, eight >> 4);
  else signs[j * kPanel + column] = uint8_t(eight);
}

// The number of row i of a column.
template <Format F>
static inline void put_number(uint8_t* numbers, int64_t i, int64_t column, unsigned number) {
  numbers[has_small_grid(F) ? i / 2 * 32 + 2 * column + i % 2 : i * kPanel + column] = uint8_t(number);
}

// A half float of the file as it is; whether it is a number.
static inline bool put_factor(const uint8_t* source, uint8_t* group, int64_t column, bool negate = false) {
  group[2 * column] = source[0], group[2 * column + 1] = uint8_t(negate ? source[1] ^ 0x80 : source[1]);
  return (source[1] & 0x7c) != 0x7c;
}

static inline void put_byte(uint8_t* bytes, int64_t index, int64_t column, unsigned byte) { bytes[index * kPanel + column] |= uint8_t(byte); }

// The lower two bits of the codes of a block of the file.
static inline void put_two_bits(const int8_t* codes, uint8_t* blocks, int64_t block_bytes, int64_t column) {
  for (int64_t b = 0; b < 8; ++b)
    for (int64_t half = 0; half < 2; ++half) {
      uint32_t four = 0;
      for (int line = 0; line < 4; ++line) {
        uint32_t part;
        std::memcpy(&part, codes + 32 * b + 16 * half + 4 * line, 4);
        four |= (part & 0x03030303u) << (2 * line);
      }
      std::memcpy(blocks + b * block_bytes + half * 64 + column * 4, &four, 4);
    }
}

// A block of the file as column `c` of a group of zeros; whether its factors are numbers.
template <Format F>
static inline bool pack_compact_block(const uint8_t* p, int64_t c, uint8_t* group) {
  uint8_t *scales = group + compact(F).scales, *highs = group + compact(F).highs, *blocks = group + header_bytes(F);
  const auto numbers = [&](int64_t b) { return blocks + b * quant_bytes(F); };
  const auto signs = [&](int64_t b) { return numbers(b) + quant_bytes(F) - 64; };
  if constexpr (F == Format::Q2_K) {
    Codes block;
    put_pairs_of_bits(p + 16, block.codes);
    put_two_bits(block.codes, blocks, quant_bytes(F), c);
    for (int i = 0; i < 16; ++i) put_byte(scales, i, c, p[i]);
    const bool good = put_factor(p + 80, group, c);
    return put_factor(p + 82, group + 32, c, true) && good;
  }
  if constexpr (F == Format::Q3_K) {
    Codes block;
    put_pairs_of_bits(p + 32, block.codes);
    put_two_bits(block.codes, blocks, quant_bytes(F), c);
    for (int i = 0; i < 256; i += 4) {
      unsigned lower = 0;
      for (int e = 0; e < 4; ++e) lower |= (~p[(i + e) % 32] >> (i / 32) & 1u) << e;
      put_line_bits(signs(i / 32), i % 32 / 4, c, lower);
    }
    for (int i = 0; i < 16; ++i) {
      const unsigned low = i < 8 ? p[96 + i] & 15u : p[96 + i - 8] >> 4, high = p[104 + i % 4] >> (2 * (i / 4)) & 3u;
      put_byte(scales, i / 2, c, low << (i % 2 * 4));
      put_byte(scales, 8 + i / 4, c, high << (i % 4 * 2));
    }
    return put_factor(p + 108, group, c);
  }
  if constexpr (F == Format::IQ2_XXS || F == Format::IQ3_XXS) {
    constexpr bool is_two = F == Format::IQ2_XXS;
    for (int64_t b = 0; b < 8; ++b) {
      const uint8_t* own = p + 2 + 8 * b;
      for (int j = 0; j < (is_two ? 4 : 8); ++j) put_number<F>(numbers(b), j, c, own[j]);
      const uint32_t word = number_at<uint32_t>(is_two ? own + 4 : p + 66 + 4 * b);
      for (int j = 0; j < 4; ++j) put_signs<F>(signs(b), j, c, (word >> (7 * j) & 127) | (word >> (28 + j) & 1) << 7);
    }
    return put_factor(p, group, c);
  }
  if constexpr (F == Format::IQ2_XS) {
    for (int64_t i = 0; i < 32; ++i) {
      const unsigned number = number_at<uint16_t>(p + 2 + 2 * i);
      put_number<F>(numbers(i / 4), i % 4, c, number & 255);
      put_signs<F>(signs(i / 4), i % 4, c, number >> 9 | (number >> 8 & 1) << 7);
    }
    for (int64_t b = 0; b < 8; ++b) put_byte(scales, b, c, p[66 + b]);
    return put_factor(p, group, c);
  }
  if constexpr (F == Format::IQ2_S) {
    for (int64_t i = 0; i < 32; ++i) put_number<F>(numbers(i / 4), i % 4, c, p[2 + i]), put_signs<F>(signs(i / 4), i % 4, c, p[34 + i]);
    for (int64_t b = 0; b < 8; ++b) put_byte(highs, b, c, p[66 + b]), put_byte(scales, b, c, p[74 + b]);
    return put_factor(p, group, c);
  }
  if constexpr (F == Format::IQ3_S) {
    for (int64_t i = 0; i < 64; ++i) put_number<F>(numbers(i / 8), i % 8, c, p[2 + i]);
    for (int64_t i = 0; i < 32; ++i) put_signs<F>(signs(i / 4), i % 4, c, p[74 + i]);
    for (int64_t i = 0; i < 32; ++i)  // pairs of rows
      highs[4 * i + c / 4] |= uint8_t((p[66 + i / 4] >> (i % 4 * 2) & 3) << (c % 4 * 2));
    for (int64_t i = 0; i < 4; ++i) put_byte(scales, i, c, p[106 + i]);
    return put_factor(p, group, c);
  }
  if constexpr (F == Format::IQ1_S) {
    for (int64_t b = 0; b < 8; ++b) {
      const unsigned word = number_at<uint16_t>(p + 34 + 2 * b);
      for (int j = 0; j < 4; ++j) {
        put_number<F>(numbers(b), j, c, p[2 + 4 * b + j]);
        put_byte(highs, 2 * b + j / 2, c, ((word >> (3 * j) & 7) | (word >> (12 + j) & 1) << 3) << (j % 2 * 4));
      }
    }
    return put_factor(p, group, c);
  }
  if constexpr (F == Format::IQ1_M) {
    for (int64_t i = 0; i < 32; ++i) put_number<F>(numbers(i / 4), i % 4, c, p[i]);
    for (int64_t i = 0; i < 16; ++i) put_byte(highs, i, c, p[32 + i]);
    unsigned factor = 0;
    for (int i = 0; i < 4; ++i) factor |= unsigned(number_at<uint16_t>(p + 48 + 2 * i) >> 12) << (4 * i);
    for (int i = 0; i < 16; ++i) {
      const unsigned scale = number_at<uint16_t>(p + 48 + i / 4 * 2) >> (3 * (i % 4)) & 7u;
      put_byte(scales, i / 4, c, (scale & 3) << (i % 4 * 2));
      put_byte(scales, 4 + i / 8, c, (scale >> 2) << (i % 8));
    }
    const uint8_t bytes[2] = {uint8_t(factor), uint8_t(factor >> 8)};
    return put_factor(bytes, group, c);
  }
}

template <Format F>
static bool pack_compact(const PackedMatrix& m, const Column* columns, int64_t count, uint8_t* panel) {
  bool good = true;
  std::memset(panel, 0, m.panel_bytes);
  for (int64_t at = 0; at < m.k / kMostElements; ++at, panel += group_bytes(F))
    for (int64_t c = 0; c < count; ++c)
      good = pack_compact_block<F>(columns[c].row + size_t(at) * columns[c].file->bytes, columns[c].place, panel) && good;
  return good;
}

// ---- bytes ---------------------------------------------------------------------------------------------------------

// A block is expanded by a call. GCC 12 takes the expansion of IQ3 for a function that writes nothing (its analysis of pure functions and
// of memory that functions modify), and drops the call: `noipa` keeps callers from such conclusions.
#if defined(__GNUC__) && !defined(__clang__)
#define EXPANSION __attribute__((noipa)) static
#else
#define EXPANSION __attribute__((noinline)) static
#endif

// A table of a grid: its rows of values, the same rows as codes of 16 bits, and the values of four or eight codes up to sixteen.
// Value e of a row of eight is in two bits of its code, from e % 2 * 8 + e / 2 * 2 on, of a row of four in four, from e % 2 * 8 + e / 2 * 4 on.
template <Format F>
struct SmallGrid {
  static constexpr int64_t kRows = F == Format::IQ3_S || F == Format::IQ2_XS ? 512 : 256, kBytes = kRows * (has_rows_of_four(F) ? 4 : 8);
  const int8_t* table;

  const uint8_t* codes() const { return reinterpret_cast<const uint8_t*>(table) + kBytes; }
  const uint8_t* values() const { return codes() + 2 * kRows; }
};

#ifndef BIFOLIO_OWN_EXPAND
// The signs of eight values of a column.
template <Format F>
static inline unsigned signs_of(const uint8_t* signs, int64_t j, int64_t c) {
  const auto nibble = [&](int64_t line) { return unsigned(signs[8 * line + c / 2] >> (c % 2 * 4) & 15); };
  const unsigned stored = has_small_grid(F) ? nibble(2 * j) | nibble(2 * j + 1) << 4 : signs[j * kPanel + c];
  return has_seven_signs(F) ? eight_signs(stored & 127) : stored;
}

// Block `b` of a group as bytes, in the order of Q8_0.
template <Format F>
static inline void expand_block(const uint8_t* group, int64_t b, const int8_t* grid, uint8_t* out) {
  const uint8_t *own = group + header_bytes(F) + b * quant_bytes(F), *signs = own + quant_bytes(F) - 64;
  const uint8_t* highs = group + compact(F).highs;
  if constexpr (F == Format::Q2_K || F == Format::Q3_K) {
    for (int line = 0; line < 8; ++line)
      for (int i = 0; i < 64; ++i) {
        const int lower = F == Format::Q3_K ? signs[8 * line + i / 8] >> (i % 8) & 1 : 0;
        out[64 * line + i] = uint8_t((own[line / 4 * 64 + i] >> (line % 4 * 2) & 3) - 4 * lower);
      }
  } else {
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t c = 0; c < kPanel; ++c) {
        int8_t row[8];
        if constexpr (has_rows_of_four(F)) {
          for (int64_t h = 0; h < 2; ++h) {
            unsigned number = own[32 * j + 2 * c + h];
            if constexpr (F == Format::IQ3_S) number |= (unsigned(highs[b * kPanel + 4 * j + c / 4]) >> (c % 4 * 2 + h) & 1) << 8;
            std::memcpy(row + 4 * h, grid + 4 * number, 4);
          }
        } else {
          unsigned number = has_small_grid(F) ? own[j / 2 * 32 + 2 * c + j % 2] : own[j * kPanel + c];
          if constexpr (F == Format::IQ2_XS) number |= unsigned(signs[j * kPanel + c] >> 7) << 8;
          if constexpr (F == Format::IQ2_S) number |= (unsigned(highs[b * kPanel + c]) >> (2 * j) & 3) << 8;
          if constexpr (is_iq1(F)) number |= (unsigned(highs[(2 * b + j / 2) * kPanel + c]) >> (j % 2 * 4) & 7) << 8;
          std::memcpy(row, grid + 8 * number, 8);
        }
        if constexpr (is_iq1(F)) {
          const int64_t i = F == Format::IQ1_S ? 3 : j;
          const bool minus = highs[(2 * b + i / 2) * kPanel + c] >> (i % 2 * 4 + 3) & 1;
          for (int8_t& value : row) value = int8_t(value + (minus ? kIq1Lower : kIq1Upper));
        }
        const unsigned negative = is_iq1(F) ? 0 : signs_of<F>(signs, j, c);
        for (int e = 0; e < 8; ++e) out[(2 * j + e / 4) * 64 + 4 * c + e % 4] = uint8_t(negative >> e & 1 ? -row[e] : row[e]);
      }
    }
  }
}
#endif
