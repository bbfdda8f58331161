// Weights from the blocks of a file: taken apart, and packed as the columns of panels.
#pragma once

static float half_at(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return half_to_float(word);
}

template <class T>
static inline T number_at(const uint8_t* p) {
  T number;
  std::memcpy(&number, p, sizeof number);
  return number;
}

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

static void put_nibbles(const uint8_t* pairs, int count, int8_t* out) {
  for (int i = 0; i < count; ++i) out[i] = int8_t(pairs[i] & 15), out[count + i] = int8_t(pairs[i] >> 4);
}

static void decode_q8_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  std::memcpy(out.codes, p + 2, 32);
}

static void decode_q4_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 2, 16, out.codes);
  for (int i = 0; i < 32; ++i) out.codes[i] = int8_t(out.codes[i] - 8);
}

static void decode_q4_1(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p), out.minima[0] = half_at(p + 2);
  put_nibbles(p + 4, 16, out.codes);
}

static void add_fifth_bits(uint32_t bits, Codes& out, int lowest) {
  for (int i = 0; i < 32; ++i) out.codes[i] = int8_t(out.codes[i] + int((bits >> i & 1) << 4) + lowest);
}

static void decode_q5_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 6, 16, out.codes);
  add_fifth_bits(number_at<uint32_t>(p + 2), out, -16);
}

static void decode_q5_1(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p), out.minima[0] = half_at(p + 2);
  put_nibbles(p + 8, 16, out.codes);
  add_fifth_bits(number_at<uint32_t>(p + 4), out, 0);
}

static void decode_iq4_nl(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 2, 16, out.codes);
}

// The scale is a power of two, halved because the table holds doubled values.
static void decode_mxfp4(const uint8_t* p, Codes& out) {
  const uint32_t bits = p[0] < 2 ? 0x00200000u << p[0] : uint32_t(p[0] - 1) << 23;
  std::memcpy(out.scales, &bits, 4);
  put_nibbles(p + 1, 16, out.codes);
}

// Four groups of 16, each with a float of four bits of exponent and three of mantissa.
static void decode_nvfp4(const uint8_t* p, Codes& out) {
  for (int group = 0; group < 4; ++group) {
    const int exponent = p[group] >> 3 & 15, mantissa = p[group] & 7;
    const float scale = exponent ? std::ldexp(1.0f + float(mantissa) / 8.0f, exponent - 7) : std::ldexp(float(mantissa), -9);
    out.scales[group] = p[group] == 0 || p[group] == 0x7f ? 0.0f : scale * 0.5f;
    put_nibbles(p + 4 + 8 * group, 8, out.codes + 16 * group);
  }
}

// ---- blocks of 256 -------------------------------------------------------------------------------------------------

// Four times 64 numbers of two bits lie in 32 bytes each: the first 32 numbers in their lowest bits, and so on.
static void put_pairs_of_bits(const uint8_t* p, int8_t* out) {
  for (int part = 0; part < 2; ++part)
    for (int shift = 0; shift < 4; ++shift)
      for (int i = 0; i < 32; ++i) out[part * 128 + shift * 32 + i] = int8_t(p[part * 32 + i] >> (2 * shift) & 3);
}

static void decode_q2_k(const uint8_t* p, Codes& out) {
  const float d = half_at(p + 80), lowest = half_at(p + 82);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * float(p[i] & 15), out.minima[i] = -(lowest * float(p[i] >> 4));
  put_pairs_of_bits(p + 16, out.codes);
}

// Codes number the values -4 to 3.
static void decode_q3_k(const uint8_t* p, Codes& out) {
  const float d = half_at(p + 108);
  const uint8_t *low = p + 96, *high = p + 104;
  for (int i = 0; i < 16; ++i) {
    const int bits = (i < 8 ? low[i] & 15 : low[i - 8] >> 4) | (high[i % 4] >> (2 * (i / 4)) & 3) << 4;
    out.scales[i] = d * float(bits - 32);
  }
  put_pairs_of_bits(p + 32, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] = int8_t(out.codes[i] + ((p[i % 32] >> (i / 32) & 1) << 2));
}

// Eight scales and eight minima of six bits.
static inline void put_six_bits(const uint8_t* p, uint8_t scales[8], uint8_t minima[8]) {
  for (int i = 0; i < 4; ++i) {
    scales[i] = p[i] & 63, scales[4 + i] = uint8_t((p[8 + i] & 15) | (p[i] >> 6) << 4);
    minima[i] = p[4 + i] & 63, minima[4 + i] = uint8_t(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4);
  }
}

static void put_six_bit_scales(const uint8_t* p, float d, float lowest, Codes& out) {
  uint8_t scales[8], minima[8];
  put_six_bits(p, scales, minima);
  for (int i = 0; i < 8; ++i) out.scales[i] = d * float(scales[i]), out.minima[i] = -(lowest * float(minima[i]));
}

static inline void put_q4_k_codes(const uint8_t* p, int8_t* codes) {
  for (int part = 0; part < 4; ++part) put_nibbles(p + 32 * part, 32, codes + 64 * part);
}

static void decode_q4_k(const uint8_t* p, Codes& out) {
  put_six_bit_scales(p + 4, half_at(p), half_at(p + 2), out);
  put_q4_k_codes(p + 16, out.codes);
}

static void decode_q5_k(const uint8_t* p, Codes& out) {
  put_six_bit_scales(p + 4, half_at(p), half_at(p + 2), out);
  for (int part = 0; part < 4; ++part) put_nibbles(p + 48 + 32 * part, 32, out.codes + 64 * part);
  for (int i = 0; i < 256; ++i) out.codes[i] = int8_t(out.codes[i] | (p[16 + i % 32] >> (i / 32) & 1) << 4);
}

static void decode_q6_k(const uint8_t* p, Codes& out) {
  const float d = half_at(p + 208);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * float(int8_t(p[192 + i]));
  for (int part = 0; part < 2; ++part) {
    const uint8_t *low = p + 64 * part, *high = p + 128 + 32 * part;
    int8_t* codes = out.codes + 128 * part;
    for (int i = 0; i < 32; ++i) {
      codes[i] = int8_t(((low[i] & 15) | (high[i] & 3) << 4) - 32);
      codes[32 + i] = int8_t(((low[32 + i] & 15) | (high[i] >> 2 & 3) << 4) - 32);
      codes[64 + i] = int8_t((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
      codes[96 + i] = int8_t((low[32 + i] >> 4 | (high[i] >> 6) << 4) - 32);
    }
  }
}

static void decode_iq4_xs(const uint8_t* p, Codes& out) {
  const float d = half_at(p);
  const uint16_t high = number_at<uint16_t>(p + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = p[4 + i / 2] >> (4 * (i % 2)) & 15;
    out.scales[i] = d * float((low | (high >> (2 * i) & 3) << 4) - 32);
    put_nibbles(p + 8 + 16 * i, 16, out.codes + 32 * i);
  }
}

// Five numbers of three values each in a byte, as the digits of a fraction; the last 16 are four to a byte.
static void decode_tq1_0(const uint8_t* p, Codes& out) {
  static const uint8_t powers[] = {1, 3, 9, 27, 81};
  for (int i = 0; i < 8; ++i) out.scales[i] = half_at(p + 52);
  const auto digit = [](uint8_t byte, uint8_t power) { return int8_t((uint16_t(uint8_t(byte * power)) * 3 >> 8) - 1); };
  for (int n = 0; n < 5; ++n) {
    for (int i = 0; i < 32; ++i) out.codes[32 * n + i] = digit(p[i], powers[n]);
    for (int i = 0; i < 16; ++i) out.codes[160 + 16 * n + i] = digit(p[32 + i], powers[n]);
  }
  for (int n = 0; n < 4; ++n)
    for (int i = 0; i < 4; ++i) out.codes[240 + 4 * n + i] = digit(p[48 + i], powers[n]);
}

static void decode_tq2_0(const uint8_t* p, Codes& out) {
  for (int i = 0; i < 8; ++i) out.scales[i] = half_at(p + 64);
  put_pairs_of_bits(p, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] = int8_t(out.codes[i] - 1);
}

// ---- blocks of numbers of rows in a grid ---------------------------------------------------------------------------

// For each byte of signs, eight bytes with 8 where a bit is set: added to a magnitude, the code of its negative.
struct SignBytes {
  uint64_t of[256];

  constexpr SignBytes() : of() {
    for (unsigned signs = 0; signs < 256; ++signs)
      for (int i = 0; i < 8; ++i) of[signs] |= uint64_t(signs >> i & 1) << (8 * i + 3);
  }
};
constexpr SignBytes kSigns;  // a constant: nothing of an instruction set may run when the library is loaded

// A row of eight (or four) magnitudes, with their signs. Magnitudes are below 8.
static void put_signed(const uint8_t* magnitudes, int count, unsigned signs, int8_t* out) {
  if (count == 8) {
    const uint64_t row = number_at<uint64_t>(magnitudes) | kSigns.of[signs & 255];
    std::memcpy(out, &row, 8);
  } else {
    const uint32_t row = number_at<uint32_t>(magnitudes) | number_at<uint32_t>(reinterpret_cast<const uint8_t*>(kSigns.of + (signs & 15)));
    std::memcpy(out, &row, 4);
  }
}

// Seven signs are stored; the eighth makes the number of negative ones even.
static inline unsigned eight_signs(unsigned seven) { return seven | unsigned(__builtin_parity(seven)) << 7; }

static void decode_iq2_xxs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ2_XXS);
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) {
    const uint8_t* numbers = p + 2 + 8 * i;
    const uint32_t signs = number_at<uint32_t>(numbers + 4);
    out.scales[i] = d * (0.5f + float(signs >> 28)) * 0.25f;
    for (int j = 0; j < 4; ++j) put_signed(rows + 8 * numbers[j], 8, eight_signs(signs >> (7 * j) & 127), out.codes + 32 * i + 8 * j);
  }
}

static void decode_iq2_xs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ2_XS);
  const float d = half_at(p);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * (0.5f + float(p[66 + i / 2] >> (4 * (i % 2)) & 15)) * 0.25f;
  for (int i = 0; i < 32; ++i) {
    const uint16_t number = number_at<uint16_t>(p + 2 + 2 * i);
    put_signed(rows + 8 * (number & 511), 8, eight_signs(number >> 9), out.codes + 8 * i);
  }
}

static void decode_iq2_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ2_S);
  const float d = half_at(p);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * (0.5f + float(p[74 + i / 2] >> (4 * (i % 2)) & 15)) * 0.25f;
  for (int i = 0; i < 32; ++i) {
    const int number = p[2 + i] | (p[66 + i / 4] >> (2 * (i % 4)) & 3) << 8;
    put_signed(rows + 8 * number, 8, p[34 + i], out.codes + 8 * i);
  }
}

static void decode_iq3_xxs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ3_XXS);
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) {
    const uint32_t signs = number_at<uint32_t>(p + 66 + 4 * i);
    out.scales[i] = d * (0.5f + float(signs >> 28)) * 0.5f;
    for (int j = 0; j < 8; ++j)
      put_signed(rows + 4 * p[2 + 8 * i + j], 4, eight_signs(signs >> (7 * (j / 2)) & 127) >> (4 * (j % 2)), out.codes + 32 * i + 4 * j);
  }
}

static void decode_iq3_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ3_S);
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) out.scales[i] = d * float(1 + 2 * (p[106 + i / 2] >> (4 * (i % 2)) & 15));
  for (int i = 0; i < 64; ++i) {
    const int number = p[2 + i] | (p[66 + i / 8] >> (i % 8) & 1) << 8;
    put_signed(rows + 4 * number, 4, unsigned(p[74 + i / 2] >> (4 * (i % 2))), out.codes + 4 * i);
  }
}

// Eight times the numbers -1, 0, 1 plus or minus an eighth; the codes are twice the number in the grid, plus one for plus.
static void put_thirds(const uint8_t* numbers, bool minus, int8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = int8_t(2 * numbers[i] + (minus ? 0 : 1));
}

static void decode_iq1_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ1_S);
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) {
    const uint16_t high = number_at<uint16_t>(p + 34 + 2 * i);
    out.scales[i] = d * float(2 * (high >> 12 & 7) + 1) * 0.125f;
    for (int j = 0; j < 4; ++j) {
      const int number = p[2 + 4 * i + j] | (high >> (3 * j) & 7) << 8;
      put_thirds(rows + 8 * number, high & 0x8000, out.codes + 32 * i + 8 * j);
    }
  }
}

static void decode_iq1_m(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid_of(FileFormat::IQ1_M);
  uint16_t scales[4];
  std::memcpy(scales, p + 48, 8);
  const uint16_t word = uint16_t(scales[0] >> 12 | (scales[1] & 0xf000) >> 8 | (scales[2] & 0xf000) >> 4 | (scales[3] & 0xf000));
  const float d = half_to_float(word);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * float(2 * (scales[i / 4] >> (3 * (i % 4)) & 7) + 1) * 0.125f;
  for (int i = 0; i < 32; ++i) {
    const int high = p[32 + i / 2] >> (4 * (i % 2));
    put_thirds(rows + 8 * (p[i] | (high & 7) << 8), high & 8, out.codes + 8 * i);
  }
}

// ---- all of them ---------------------------------------------------------------------------------------------------

// By FileFormat; null for dense formats.
constexpr DecodeBlock kDecoders[size_t(FileFormat::Count)] = {
    nullptr, nullptr, nullptr, decode_q8_0, decode_q4_0, decode_q4_1, decode_q5_0, decode_q5_1, decode_q2_k,
    decode_q3_k, decode_q4_k, decode_q5_k, decode_q6_k, decode_iq4_nl, decode_iq4_xs, decode_mxfp4, decode_nvfp4,
    decode_tq1_0, decode_tq2_0, decode_iq2_xxs, decode_iq2_xs, decode_iq2_s, decode_iq3_xxs, decode_iq3_s,
    decode_iq1_s, decode_iq1_m,
};

// 32 codes of a row, as the low bits of bytes; `out` is the place of the row's column in a block.
template <int bits>
static inline void pack_codes(const int8_t* codes, uint8_t* out) {
  const auto four_at = [&](int e) {
    uint32_t four;
    std::memcpy(&four, codes + e, 4);
    return four;
  };
  const auto put = [&](int line, uint32_t four) { std::memcpy(out + line * 64, &four, 4); };
  if (bits == 8)
    for (int line = 0; line < 8; ++line) put(line, four_at(4 * line));
  if (bits == 4)
    for (int line = 0; line < 4; ++line) put(line, (four_at(4 * line) & 0x0f0f0f0fu) | (four_at(16 + 4 * line) & 0x0f0f0f0fu) << 4);
  if (bits == 6)
    for (int half = 0; half < 2; ++half) {
      const uint32_t last = four_at(16 * half + 12);
      for (int line = 0; line < 3; ++line)
        put(3 * half + line, (four_at(16 * half + 4 * line) & 0x3f3f3f3fu) | (last >> (2 * line) & 0x03030303u) << 6);
    }
}

static inline bool fits(float scale) { return std::fabs(scale) < 65520.0f; }  // false for NaN

// A block of a file as a column of a panel, from block `b` of the panel on; whether all its scales are half floats.
template <Coding C>
static inline bool pack_block(const PackedMatrix& m, const Codes& block, int64_t blocks, int64_t b, int64_t column, uint8_t* panel) {
  bool good = true;
  const auto put_half = [&](uint8_t* p, float value) {
    const uint16_t word = float_to_half(value);
    std::memcpy(p, &word, 2);
    good = good && fits(value);
  };
  for (int64_t i = 0; i < blocks; ++i, ++b) {
    uint8_t* pair = panel + b / 2 * group_bytes(m.format);
    for (int s = 0; s < C.scales; ++s) {
      uint8_t* scale = pair + ((b % 2 * C.scales + s) * kPanel + column) * 2;
      put_half(scale, block.scales[i * C.scales + s]);
      if (C.minima) put_half(scale + 64 * C.scales, block.minima[i * C.scales + s]);
    }
    pack_codes<C.bits>(block.codes + i * kQuantBlock, pair + header_bytes(m.format) + b % 2 * quant_bytes(m.format) + column * 4);
  }
  return good;
}

// Up to sixteen rows as the columns of a panel, block by block: the part of the panel that is written stays in the nearest cache.
template <Coding C>
static bool pack_columns(const PackedMatrix& m, const Column* columns, int64_t count, uint8_t* panel) {
  Codes block;
  bool good = true;
  if (count < kPanel || m.k / kQuantBlock % 2) std::memset(panel, 0, m.panel_bytes);
  constexpr int64_t step = kMostElements;  // values of a row before the next one
  for (int64_t at = 0; at < m.k; at += step)
    for (int64_t c = 0; c < count; ++c) {
      const Column& column = columns[c];
      const FileBlock& file = *column.file;
      const DecodeBlock decode = kDecoders[size_t(file.format)];
      const uint8_t* source = column.row + size_t(at / file.elements) * file.bytes;
      for (int64_t i = at; i < (at + step < m.k ? at + step : m.k); i += file.elements, source += file.bytes) {
        decode(source, block);
        good = pack_block<C>(m, block, file.elements / kQuantBlock, i / kQuantBlock, column.place, panel) && good;
      }
    }
  return good;
}

#ifdef BIFOLIO_PACKS_Q4_K
// The same for blocks of Q4_K, whose scales stay bytes; minima are subtracted there, so that their factor changes its sign.
static bool pack_q4_k(const PackedMatrix& m, const Column* columns, int64_t count, uint8_t* panel) {
  Codes block;
  bool good = true;
  if (count < kPanel) std::memset(panel, 0, m.panel_bytes);
  for (int64_t at = 0; at < m.k; at += kMostElements, panel += group_bytes(Format::Q4_K))
    for (int64_t c = 0; c < count; ++c) {
      const Column& column = columns[c];
      const uint8_t* source = column.row + size_t(at / kMostElements) * column.file->bytes;
      for (int word = 0; word < 2; ++word) {
        const uint8_t high = source[2 * word + 1];
        good = good && (high & 0x7c) != 0x7c;  // infinite, or no number
        uint8_t* out = panel + (word * kPanel + column.place) * 2;
        out[0] = source[2 * word], out[1] = uint8_t(word ? high ^ 0x80 : high);
      }
      uint8_t scales[16];
      put_six_bits(source + 4, scales, scales + 8);
      for (int i = 0; i < 16; ++i) panel[4 * kPanel + i * kPanel + column.place] = scales[i];
      put_q4_k_codes(source + 16, block.codes);
      for (int i = 0; i < 8; ++i)
        pack_codes<4>(block.codes + i * kQuantBlock, panel + header_bytes(Format::Q4_K) + i * quant_bytes(Format::Q4_K) + column.place * 4);
    }
  return good;
}
#endif

#include "compact.h"

static bool pack_blocks(const PackedMatrix& m, const Column* columns, int64_t count, uint8_t* panel) {
  switch (m.format) {
    case Format::Q8_0: return pack_columns<coding(Format::Q8_0)>(m, columns, count, panel);
    case Format::Q4_0: return pack_columns<coding(Format::Q4_0)>(m, columns, count, panel);
    case Format::Q4_1: return pack_columns<coding(Format::Q4_1)>(m, columns, count, panel);
    case Format::Q4_T: return pack_columns<coding(Format::Q4_T)>(m, columns, count, panel);
    case Format::Q4_T_16: return pack_columns<coding(Format::Q4_T_16)>(m, columns, count, panel);
    case Format::Q6_0: return pack_columns<coding(Format::Q6_0)>(m, columns, count, panel);
    case Format::Q6_1: return pack_columns<coding(Format::Q6_1)>(m, columns, count, panel);
    case Format::Q6_0_16: return pack_columns<coding(Format::Q6_0_16)>(m, columns, count, panel);
#ifdef BIFOLIO_PACKS_Q4_K
    case Format::Q4_K: return pack_q4_k(m, columns, count, panel);
#endif
    case Format::Q2_K: return pack_compact<Format::Q2_K>(m, columns, count, panel);
    case Format::Q3_K: return pack_compact<Format::Q3_K>(m, columns, count, panel);
    case Format::IQ2_XXS: return pack_compact<Format::IQ2_XXS>(m, columns, count, panel);
    case Format::IQ2_XS: return pack_compact<Format::IQ2_XS>(m, columns, count, panel);
    case Format::IQ2_S: return pack_compact<Format::IQ2_S>(m, columns, count, panel);
    case Format::IQ3_XXS: return pack_compact<Format::IQ3_XXS>(m, columns, count, panel);
    case Format::IQ3_S: return pack_compact<Format::IQ3_S>(m, columns, count, panel);
    case Format::IQ1_S: return pack_compact<Format::IQ1_S>(m, columns, count, panel);
    case Format::IQ1_M: return pack_compact<Format::IQ1_M>(m, columns, count, panel);
    default: return false;
  }
}
