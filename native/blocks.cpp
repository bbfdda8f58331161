#include "blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace bifolio {
namespace {

#include "simd/generic.h"

float half_at(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return half_to_float(word);
}

template <class T>
T number_at(const uint8_t* p) {
  T number;
  std::memcpy(&number, p, sizeof number);
  return number;
}

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

void put_nibbles(const uint8_t* pairs, int count, int8_t* out) {
  for (int i = 0; i < count; ++i) out[i] = int8_t(pairs[i] & 15), out[count + i] = int8_t(pairs[i] >> 4);
}

void decode_q8_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  std::memcpy(out.codes, p + 2, 32);
}

void decode_q4_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 2, 16, out.codes);
  for (int i = 0; i < 32; ++i) out.codes[i] = int8_t(out.codes[i] - 8);
}

void decode_q4_1(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p), out.minima[0] = half_at(p + 2);
  put_nibbles(p + 4, 16, out.codes);
}

void add_fifth_bits(uint32_t bits, Codes& out, int lowest) {
  for (int i = 0; i < 32; ++i) out.codes[i] = int8_t(out.codes[i] + int((bits >> i & 1) << 4) + lowest);
}

void decode_q5_0(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 6, 16, out.codes);
  add_fifth_bits(number_at<uint32_t>(p + 2), out, -16);
}

void decode_q5_1(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p), out.minima[0] = half_at(p + 2);
  put_nibbles(p + 8, 16, out.codes);
  add_fifth_bits(number_at<uint32_t>(p + 4), out, 0);
}

void decode_iq4_nl(const uint8_t* p, Codes& out) {
  out.scales[0] = half_at(p);
  put_nibbles(p + 2, 16, out.codes);
}

// The scale is a power of two, halved because the table holds doubled values.
void decode_mxfp4(const uint8_t* p, Codes& out) {
  const uint32_t bits = p[0] < 2 ? 0x00200000u << p[0] : uint32_t(p[0] - 1) << 23;
  std::memcpy(out.scales, &bits, 4);
  put_nibbles(p + 1, 16, out.codes);
}

// Four groups of 16, each with a float of four bits of exponent and three of mantissa.
void decode_nvfp4(const uint8_t* p, Codes& out) {
  for (int group = 0; group < 4; ++group) {
    const int exponent = p[group] >> 3 & 15, mantissa = p[group] & 7;
    const float scale = exponent ? std::ldexp(1.0f + float(mantissa) / 8.0f, exponent - 7) : std::ldexp(float(mantissa), -9);
    out.scales[group] = p[group] == 0 || p[group] == 0x7f ? 0.0f : scale * 0.5f;
    put_nibbles(p + 4 + 8 * group, 8, out.codes + 16 * group);
  }
}

// ---- blocks of 256 -------------------------------------------------------------------------------------------------

// Four times 64 numbers of two bits lie in 32 bytes each: the first 32 numbers in their lowest bits, and so on.
void put_pairs_of_bits(const uint8_t* p, int8_t* out) {
  for (int part = 0; part < 2; ++part)
    for (int shift = 0; shift < 4; ++shift)
      for (int i = 0; i < 32; ++i) out[part * 128 + shift * 32 + i] = int8_t(p[part * 32 + i] >> (2 * shift) & 3);
}

void decode_q2_k(const uint8_t* p, Codes& out) {
  const float d = half_at(p + 80), lowest = half_at(p + 82);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * float(p[i] & 15), out.minima[i] = -(lowest * float(p[i] >> 4));
  put_pairs_of_bits(p + 16, out.codes);
}

// Codes number the values -4 to 3.
void decode_q3_k(const uint8_t* p, Codes& out) {
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
void put_six_bit_scales(const uint8_t* p, float d, float lowest, Codes& out) {
  for (int i = 0; i < 4; ++i) {
    out.scales[i] = d * float(p[i] & 63), out.scales[4 + i] = d * float((p[8 + i] & 15) | (p[i] >> 6) << 4);
    out.minima[i] = -(lowest * float(p[4 + i] & 63)), out.minima[4 + i] = -(lowest * float(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4));
  }
}

void decode_q4_k(const uint8_t* p, Codes& out) {
  put_six_bit_scales(p + 4, half_at(p), half_at(p + 2), out);
  for (int part = 0; part < 4; ++part) put_nibbles(p + 16 + 32 * part, 32, out.codes + 64 * part);
}

void decode_q5_k(const uint8_t* p, Codes& out) {
  put_six_bit_scales(p + 4, half_at(p), half_at(p + 2), out);
  for (int part = 0; part < 4; ++part) put_nibbles(p + 48 + 32 * part, 32, out.codes + 64 * part);
  for (int i = 0; i < 256; ++i) out.codes[i] = int8_t(out.codes[i] | (p[16 + i % 32] >> (i / 32) & 1) << 4);
}

void decode_q6_k(const uint8_t* p, Codes& out) {
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

void decode_iq4_xs(const uint8_t* p, Codes& out) {
  const float d = half_at(p);
  const uint16_t high = number_at<uint16_t>(p + 2);
  for (int i = 0; i < 8; ++i) {
    const int low = p[4 + i / 2] >> (4 * (i % 2)) & 15;
    out.scales[i] = d * float((low | (high >> (2 * i) & 3) << 4) - 32);
    put_nibbles(p + 8 + 16 * i, 16, out.codes + 32 * i);
  }
}

// Five numbers of three values each in a byte, as the digits of a fraction; the last 16 are four to a byte.
void decode_tq1_0(const uint8_t* p, Codes& out) {
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

void decode_tq2_0(const uint8_t* p, Codes& out) {
  for (int i = 0; i < 8; ++i) out.scales[i] = half_at(p + 64);
  put_pairs_of_bits(p, out.codes);
  for (int i = 0; i < 256; ++i) out.codes[i] = int8_t(out.codes[i] - 1);
}

// ---- blocks of numbers of rows in a grid ---------------------------------------------------------------------------

std::vector<uint8_t>& grid(FileFormat format) {
  static std::vector<uint8_t> grids[size_t(FileFormat::Count)];
  return grids[size_t(format)];
}

// For each byte of signs, eight bytes with 8 where a bit is set: added to a magnitude, the code of its negative.
struct SignBytes {
  uint64_t of[256];

  SignBytes() {
    for (unsigned signs = 0; signs < 256; ++signs) {
      uint8_t bytes[8];
      for (int i = 0; i < 8; ++i) bytes[i] = uint8_t((signs >> i & 1) << 3);
      std::memcpy(of + signs, bytes, 8);
    }
  }
};
const SignBytes kSigns;

// A row of eight (or four) magnitudes, with their signs. Magnitudes are below 8.
void put_signed(const uint8_t* magnitudes, int count, unsigned signs, int8_t* out) {
  if (count == 8) {
    const uint64_t row = number_at<uint64_t>(magnitudes) | kSigns.of[signs & 255];
    std::memcpy(out, &row, 8);
  } else {
    const uint32_t row = number_at<uint32_t>(magnitudes) | number_at<uint32_t>(reinterpret_cast<const uint8_t*>(kSigns.of + (signs & 15)));
    std::memcpy(out, &row, 4);
  }
}

// Seven signs are stored; the eighth makes the number of negative ones even.
unsigned eight_signs(unsigned seven) { return seven | unsigned(__builtin_parity(seven)) << 7; }

void decode_iq2_xxs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ2_XXS).data();
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) {
    const uint8_t* numbers = p + 2 + 8 * i;
    const uint32_t signs = number_at<uint32_t>(numbers + 4);
    out.scales[i] = d * (0.5f + float(signs >> 28)) * 0.25f;
    for (int j = 0; j < 4; ++j) put_signed(rows + 8 * numbers[j], 8, eight_signs(signs >> (7 * j) & 127), out.codes + 32 * i + 8 * j);
  }
}

void decode_iq2_xs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ2_XS).data();
  const float d = half_at(p);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * (0.5f + float(p[66 + i / 2] >> (4 * (i % 2)) & 15)) * 0.25f;
  for (int i = 0; i < 32; ++i) {
    const uint16_t number = number_at<uint16_t>(p + 2 + 2 * i);
    put_signed(rows + 8 * (number & 511), 8, eight_signs(number >> 9), out.codes + 8 * i);
  }
}

void decode_iq2_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ2_S).data();
  const float d = half_at(p);
  for (int i = 0; i < 16; ++i) out.scales[i] = d * (0.5f + float(p[74 + i / 2] >> (4 * (i % 2)) & 15)) * 0.25f;
  for (int i = 0; i < 32; ++i) {
    const int number = p[2 + i] | (p[66 + i / 4] >> (2 * (i % 4)) & 3) << 8;
    put_signed(rows + 8 * number, 8, p[34 + i], out.codes + 8 * i);
  }
}

void decode_iq3_xxs(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ3_XXS).data();
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) {
    const uint32_t signs = number_at<uint32_t>(p + 66 + 4 * i);
    out.scales[i] = d * (0.5f + float(signs >> 28)) * 0.5f;
    for (int j = 0; j < 8; ++j)
      put_signed(rows + 4 * p[2 + 8 * i + j], 4, eight_signs(signs >> (7 * (j / 2)) & 127) >> (4 * (j % 2)), out.codes + 32 * i + 4 * j);
  }
}

void decode_iq3_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ3_S).data();
  const float d = half_at(p);
  for (int i = 0; i < 8; ++i) out.scales[i] = d * float(1 + 2 * (p[106 + i / 2] >> (4 * (i % 2)) & 15));
  for (int i = 0; i < 64; ++i) {
    const int number = p[2 + i] | (p[66 + i / 8] >> (i % 8) & 1) << 8;
    put_signed(rows + 4 * number, 4, unsigned(p[74 + i / 2] >> (4 * (i % 2))), out.codes + 4 * i);
  }
}

// Eight times the numbers -1, 0, 1 plus or minus an eighth; the codes are twice the number in the grid, plus one for plus.
void put_thirds(const uint8_t* numbers, bool minus, int8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = int8_t(2 * numbers[i] + (minus ? 0 : 1));
}

void decode_iq1_s(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ1_S).data();
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

void decode_iq1_m(const uint8_t* p, Codes& out) {
  const uint8_t* rows = grid(FileFormat::IQ1_M).data();
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

alignas(16) constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kSmallFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
alignas(16) constexpr int8_t kThreeBits[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
alignas(16) constexpr int8_t kThree[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43};
alignas(16) constexpr int8_t kEight[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
alignas(16) constexpr int8_t kOdd[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
alignas(16) constexpr int8_t kThirds[16] = {-9, -7, -1, 1, 7, 9};

const FileBlock kBlocks[size_t(FileFormat::Count)] = {
    {"F32", 1, 4, Format::F32, nullptr, nullptr},
    {"F16", 1, 2, Format::F16, nullptr, nullptr},
    {"BF16", 1, 2, Format::BF16, nullptr, nullptr},
    {"Q8_0", 32, 34, Format::Q8_0, nullptr, decode_q8_0},
    {"Q4_0", 32, 18, Format::Q4_0, nullptr, decode_q4_0},
    {"Q4_1", 32, 20, Format::Q4_1, nullptr, decode_q4_1},
    {"Q5_0", 32, 22, Format::Q6_0, nullptr, decode_q5_0},
    {"Q5_1", 32, 24, Format::Q6_1, nullptr, decode_q5_1},
    {"Q2_K", 256, 84, Format::Q4_1_16, nullptr, decode_q2_k},
    {"Q3_K", 256, 110, Format::Q4_T_16, kThreeBits, decode_q3_k},
    {"Q4_K", 256, 144, Format::Q4_1, nullptr, decode_q4_k},
    {"Q5_K", 256, 176, Format::Q6_1, nullptr, decode_q5_k},
    {"Q6_K", 256, 210, Format::Q6_0_16, nullptr, decode_q6_k},
    {"IQ4_NL", 32, 18, Format::Q4_T, kUneven, decode_iq4_nl},
    {"IQ4_XS", 256, 136, Format::Q4_T, kUneven, decode_iq4_xs},
    {"MXFP4", 32, 17, Format::Q4_T, kSmallFloats, decode_mxfp4},
    {"NVFP4", 64, 36, Format::Q4_T_16, kSmallFloats, decode_nvfp4},
    {"TQ1_0", 256, 54, Format::Q4_0, nullptr, decode_tq1_0},
    {"TQ2_0", 256, 66, Format::Q4_0, nullptr, decode_tq2_0},
    {"IQ2_XXS", 256, 66, Format::Q4_T, kThree, decode_iq2_xxs},
    {"IQ2_XS", 256, 74, Format::Q4_T_16, kThree, decode_iq2_xs},
    {"IQ2_S", 256, 82, Format::Q4_T_16, kThree, decode_iq2_s},
    {"IQ3_XXS", 256, 98, Format::Q4_T, kEight, decode_iq3_xxs},
    {"IQ3_S", 256, 110, Format::Q4_T, kOdd, decode_iq3_s},
    {"IQ1_S", 256, 50, Format::Q4_T, kThirds, decode_iq1_s},
    {"IQ1_M", 256, 56, Format::Q4_T_16, kThirds, decode_iq1_m},
};

}  // namespace

const FileBlock& file_block(FileFormat format) { return kBlocks[size_t(format)]; }

void set_grid(FileFormat format, std::vector<uint8_t> numbers) { grid(format) = std::move(numbers); }

size_t grid_rows(FileFormat format) {
  switch (format) {
    case FileFormat::IQ2_XXS: case FileFormat::IQ3_XXS: return 256;
    case FileFormat::IQ2_XS: case FileFormat::IQ3_S: return 512;
    case FileFormat::IQ2_S: return 1024;
    case FileFormat::IQ1_S: case FileFormat::IQ1_M: return 2048;
    default: return 0;
  }
}

bool needs_grid(FileFormat format) { return grid_rows(format) > 0 && grid(format).empty(); }

}  // namespace bifolio
