#include "encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace bifolio {
namespace {

#include "simd/generic.h"

// The nearest whole number, ties to even, for numbers below 2^22: in two additions, which every compiler makes vectors of.
inline float whole_number(float x) { return (x + 12582912.0f) - 12582912.0f; }
inline float bounded(float x, float lowest, float highest) { return std::min(std::max(x, lowest), highest); }

// Writes a half float and returns its value.
float put_half(uint8_t* p, float value) {
  const uint16_t word = float_to_half(value);
  std::memcpy(p, &word, 2);
  return half_to_float(word);
}

float inverse_of(float x) { return x != 0.0f ? 1.0f / x : 0.0f; }

// The value of largest magnitude, with its sign.
float extreme(const float* x, int count) {
  float largest = 0.0f;
  for (int i = 0; i < count; ++i) largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
  return largest;
}

float mean_square(const float* x, int count) {
  float sum = 0.0f;
  for (int i = 0; i < count; ++i) sum += x[i] * x[i];
  return sum / float(count);
}

// Four floats, which every instruction set has registers for: a compiler keeps the order of a single sum, so sums have eight lanes.
typedef float Four __attribute__((vector_size(16)));

inline Four load_four(const float* x) {
  Four four;
  std::memcpy(&four, x, sizeof four);
  return four;
}
inline Four whole_numbers(Four x) { return (x + 12582912.0f) - 12582912.0f; }
inline Four bounded(Four x, float lowest, float highest) {
  const Four low = Four{} + lowest, high = Four{} + highest;
  x = x < low ? low : x;
  return x > high ? high : x;
}

struct Lanes {
  Four v[2] = {};

  float total() const {
    float sum = 0.0f;
    for (int i = 0; i < 8; ++i) sum += v[i / 4][i % 4];
    return sum;
  }
};
#define EACH_FOUR for (int i = 0; i < count; i += 8) for (int h = 0; h < 2; ++h)

// ---- scales --------------------------------------------------------------------------------------------------------

// Sums of a weighted fit x = scale * q.
struct ScaleFit {
  float xq = 0.0f, qq = 0.0f;

  bool better_than(const ScaleFit& other) const { return double(xq) * xq * other.qq > double(other.xq) * other.xq * qq; }
  float scale() const { return qq > 0.0f ? xq / qq : 0.0f; }
};

// The scale of codes from `lowest` to -lowest - 1. The extreme value becomes about `lowest`.
float fit_codes(const float* x, const float* w, int count, float lowest) {
  const float most = extreme(x, count);
  ScaleFit best;
  if (most == 0.0f) return 0.0f;
  for (int step = -9; step <= 9; ++step) {
    const float inverse = (lowest - 0.1f * float(step)) / most;
    Lanes xq, qq;
    EACH_FOUR {
      const Four values = load_four(x + i + 4 * h);
      const Four q = bounded(whole_numbers(values * inverse), lowest, -lowest - 1.0f), weighted = load_four(w + i + 4 * h) * q;
      xq.v[h] += weighted * values;
      qq.v[h] += weighted * q;
    }
    const ScaleFit fit{xq.total(), qq.total()};
    if (fit.qq > 0.0f && (best.qq == 0.0f || fit.better_than(best))) best = fit;
  }
  return best.scale();
}

// A scale and a minimum of at most 0 for codes from 0 to `highest`.
struct RangeFit {
  float scale, minimum;
};

RangeFit fit_range(const float* x, const float* w, int count, float highest) {
  float low = 0.0f, high = x[0], sum_w = 0.0f, sum_x = 0.0f, sum_xx = 0.0f;
  for (int i = 0; i < count; ++i) {
    low = std::min(low, x[i]), high = std::max(high, x[i]);
    sum_w += w[i], sum_x += w[i] * x[i], sum_xx += w[i] * x[i] * x[i];
  }
  RangeFit best{0.0f, low};
  if (!(high > low)) return best;
  double least = INFINITY;
  for (int step = -10; step <= 10; ++step) {
    const float inverse = (highest + 0.1f * float(step)) / (high - low);
    Lanes of_q, of_qq, of_qx;
    EACH_FOUR {
      const Four values = load_four(x + i + 4 * h);
      const Four q = bounded(whole_numbers((values - low) * inverse), 0.0f, highest), weighted = load_four(w + i + 4 * h) * q;
      of_q.v[h] += weighted, of_qq.v[h] += weighted * q, of_qx.v[h] += weighted * values;
    }
    const float sum_q = of_q.total(), sum_qq = of_qq.total(), sum_qx = of_qx.total();
    const double determinant = double(sum_w) * sum_qq - double(sum_q) * sum_q;
    if (!(sum_qq > 0.0f)) continue;
    double scale = (double(sum_w) * sum_qx - double(sum_x) * sum_q) / determinant;
    double minimum = (double(sum_qq) * sum_x - double(sum_q) * sum_qx) / determinant;
    const bool one_code = !(determinant > 1e-6 * double(sum_w) * sum_qq);  // then there is no use for a minimum
    if (one_code || minimum > 0.0) minimum = 0.0, scale = double(sum_qx) / sum_qq;
    const double error = scale * scale * sum_qq + 2.0 * scale * minimum * sum_q + minimum * minimum * sum_w - 2.0 * scale * sum_qx -
                         2.0 * minimum * sum_x + sum_xx;
    if (scale > 0.0 && error < least) least = error, best = {float(scale), float(minimum)};
  }
  return best;
}

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

void put_nibbles(const uint8_t* codes, int count, uint8_t* out) {  // `count` bytes of two codes
  for (int i = 0; i < count; ++i) out[i] = uint8_t((codes[i] & 15) | codes[count + i] << 4);
}

void put_fives(const uint8_t* codes, uint8_t* bits, uint8_t* nibbles) {
  uint32_t fifth = 0;
  for (int i = 0; i < 32; ++i) fifth |= uint32_t(codes[i] >> 4) << i;
  std::memcpy(bits, &fifth, 4);
  put_nibbles(codes, 16, nibbles);
}

void encode_q8_0(const float* x, const float*, uint8_t* out) {
  const float d = std::fabs(extreme(x, 32)) / 127.0f, inverse = inverse_of(d);
  put_half(out, d);
  for (int i = 0; i < 32; ++i) out[2 + i] = uint8_t(int8_t(std::round(x[i] * inverse)));
}

// The value of largest magnitude becomes -8, the larger end of the codes.
void encode_q4_0(const float* x, const float*, uint8_t* out) {
  const float d = extreme(x, 32) / -8.0f, inverse = inverse_of(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(bounded(std::trunc(x[i] * inverse + 8.5f), 0.0f, 15.0f));
  put_half(out, d);
  put_nibbles(codes, 16, out + 2);
}

void encode_q4_1(const float* x, const float*, uint8_t* out) {
  const float low = *std::min_element(x, x + 32), high = *std::max_element(x, x + 32);
  const float d = (high - low) / 15.0f, inverse = inverse_of(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(bounded(std::trunc((x[i] - low) * inverse + 0.5f), 0.0f, 15.0f));
  put_half(out, d), put_half(out + 2, low);
  put_nibbles(codes, 16, out + 4);
}

void encode_q5_0(const float* x, const float*, uint8_t* out) {
  const float d = extreme(x, 32) / -16.0f, inverse = inverse_of(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(bounded(std::trunc(x[i] * inverse + 16.5f), 0.0f, 31.0f));
  put_half(out, d);
  put_fives(codes, out + 2, out + 6);
}

void encode_q5_1(const float* x, const float*, uint8_t* out) {
  const float low = *std::min_element(x, x + 32), high = *std::max_element(x, x + 32);
  const float d = (high - low) / 31.0f, inverse = inverse_of(d);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(bounded(std::trunc((x[i] - low) * inverse + 0.5f), 0.0f, 31.0f));
  put_half(out, d), put_half(out + 2, low);
  put_fives(codes, out + 4, out + 8);
}

// ---- blocks of 256 -------------------------------------------------------------------------------------------------

// The weight of each error: by importance, or by `plain` of the value.
template <class Plain>
void weigh(const float* x, const float* importance, int count, float square, float* w, Plain plain) {
  for (int i = 0; i < count; ++i) w[i] = importance ? importance[i] * std::sqrt(square + x[i] * x[i]) : plain(x[i]);
}

// Eight scales and minima of six bits in twelve bytes.
void put_six_bit_scales(const uint8_t* scales, const uint8_t* minima, uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    out[i] = uint8_t(scales[i] | (scales[4 + i] >> 4) << 6);
    out[4 + i] = uint8_t(minima[i] | (minima[4 + i] >> 4) << 6);
    out[8 + i] = uint8_t((scales[4 + i] & 15) | (minima[4 + i] & 15) << 4);
  }
}

// Scales, minima and codes of a block of Q4_K or Q5_K; writes its first 16 bytes.
void encode_range_codes(const float* x, const float* importance, float highest, uint8_t* out, uint8_t* codes) {
  float w[32];
  RangeFit fits[8];
  float most_scale = 0.0f, most_minimum = 0.0f;
  const float square = 2.0f * mean_square(x, 256);
  for (int b = 0; b < 8; ++b) {
    const float* part = x + 32 * b;
    const float typical = std::sqrt(mean_square(part, 32));
    weigh(part, importance ? importance + 32 * b : nullptr, 32, square, w, [&](float value) { return typical + std::fabs(value); });
    fits[b] = fit_range(part, w, 32, highest);
    most_scale = std::max(most_scale, fits[b].scale), most_minimum = std::max(most_minimum, -fits[b].minimum);
  }
  const float d = put_half(out, most_scale / 63.0f), lowest = put_half(out + 2, most_minimum / 63.0f);
  uint8_t scales[8], minima[8];
  for (int b = 0; b < 8; ++b) {
    scales[b] = uint8_t(bounded(whole_number(fits[b].scale * inverse_of(d)), 0.0f, 63.0f));
    minima[b] = uint8_t(bounded(whole_number(-fits[b].minimum * inverse_of(lowest)), 0.0f, 63.0f));
    const float inverse = inverse_of(d * float(scales[b])), shift = lowest * float(minima[b]);
    for (int i = 0; i < 32; ++i) codes[32 * b + i] = uint8_t(bounded(whole_number((x[32 * b + i] + shift) * inverse), 0.0f, highest));
  }
  put_six_bit_scales(scales, minima, out + 4);
}

void encode_q4_k(const float* x, const float* importance, uint8_t* out) {
  uint8_t codes[256];
  encode_range_codes(x, importance, 15.0f, out, codes);
  for (int part = 0; part < 4; ++part) put_nibbles(codes + 64 * part, 32, out + 16 + 32 * part);
}

void encode_q5_k(const float* x, const float* importance, uint8_t* out) {
  uint8_t codes[256];
  encode_range_codes(x, importance, 31.0f, out, codes);
  std::memset(out + 16, 0, 32);
  for (int i = 0; i < 256; ++i) out[16 + i % 32] = uint8_t(out[16 + i % 32] | (codes[i] >> 4) << (i / 32));
  for (int part = 0; part < 4; ++part) put_nibbles(codes + 64 * part, 32, out + 48 + 32 * part);
}

void encode_q6_k(const float* x, const float* importance, uint8_t* out) {
  float w[16], scales[16];
  const float square = 2.0f * mean_square(x, 256);
  for (int b = 0; b < 16; ++b) {
    weigh(x + 16 * b, importance ? importance + 16 * b : nullptr, 16, square, w, [](float value) { return value * value; });
    scales[b] = fit_codes(x + 16 * b, w, 16, -32.0f);
  }
  const float d = put_half(out + 208, extreme(scales, 16) / -128.0f);
  uint8_t codes[256];
  for (int b = 0; b < 16; ++b) {
    const float scale = bounded(whole_number(scales[b] * inverse_of(d)), -128.0f, 127.0f), inverse = inverse_of(d * scale);
    out[192 + b] = uint8_t(int8_t(scale));
    for (int i = 0; i < 16; ++i) codes[16 * b + i] = uint8_t(32.0f + bounded(whole_number(x[16 * b + i] * inverse), -32.0f, 31.0f));
  }
  for (int part = 0; part < 2; ++part)
    for (int i = 0; i < 32; ++i) {
      const uint8_t* q = codes + 128 * part + i;
      out[64 * part + i] = uint8_t((q[0] & 15) | (q[64] & 15) << 4);
      out[64 * part + 32 + i] = uint8_t((q[32] & 15) | (q[96] & 15) << 4);
      out[128 + 32 * part + i] = uint8_t(q[0] >> 4 | (q[32] >> 4) << 2 | (q[64] >> 4) << 4 | (q[96] >> 4) << 6);
    }
}

// ---- uneven steps --------------------------------------------------------------------------------------------------

const int8_t* uneven() { return file_block(FileFormat::IQ4_NL).table; }

// The number of the nearest of the sixteen values.
int nearest(float x) {
  const int8_t* values = uneven();
  int code = 0;
  for (int i = 0; i < 15; ++i) code += x > 0.5f * float(values[i] + values[i + 1]);
  return code;
}

// The nearest value of whole numbers from -128 to 127: exact enough to compare scales.
struct NearestValues {
  float of[256];

  NearestValues() {
    for (int i = 0; i < 256; ++i) of[i] = float(uneven()[nearest(float(i - 128))]);
  }
};

float fit_uneven(const float* x, const float* w) {
  static const NearestValues values;
  constexpr int count = 32;
  const float most = extreme(x, count);
  ScaleFit best;
  if (most == 0.0f) return 0.0f;
  for (int step = -7; step <= 7; ++step) {
    const float inverse = (-127.0f + float(step)) / most;
    int whole[count];
    for (int i = 0; i < count; ++i) whole[i] = int(bounded(x[i] * inverse + 128.5f, 0.0f, 255.0f));
    float nearest_values[count];
    for (int i = 0; i < count; ++i) nearest_values[i] = values.of[whole[i]];
    Lanes xq, qq;
    EACH_FOUR {
      const Four q = load_four(nearest_values + i + 4 * h), weighted = load_four(w + i + 4 * h) * q;
      xq.v[h] += weighted * load_four(x + i + 4 * h);
      qq.v[h] += weighted * q;
    }
    const ScaleFit fit{xq.total(), qq.total()};
    if (fit.qq > 0.0f && (best.qq == 0.0f || fit.better_than(best))) best = fit;
  }
  return best.scale();
}

void put_uneven(const float* x, float scale, uint8_t* out) {
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = uint8_t(nearest(x[i] * inverse_of(scale)));
  put_nibbles(codes, 16, out);
}

void encode_iq4_nl(const float* x, const float* importance, uint8_t* out) {
  float w[32];
  weigh(x, importance, 32, 2.0f * mean_square(x, 32), w, [](float value) { return value * value; });
  put_uneven(x, put_half(out, fit_uneven(x, w)), out + 2);
}

void encode_iq4_xs(const float* x, const float* importance, uint8_t* out) {
  float w[32], scales[8];
  const float square = 2.0f * mean_square(x, 256);
  for (int b = 0; b < 8; ++b) {
    weigh(x + 32 * b, importance ? importance + 32 * b : nullptr, 32, square, w, [](float value) { return value * value; });
    scales[b] = fit_uneven(x + 32 * b, w);
  }
  const float d = put_half(out, extreme(scales, 8) / -32.0f);
  uint16_t high = 0;
  std::memset(out + 4, 0, 4);
  for (int b = 0; b < 8; ++b) {
    const int scale = int(bounded(whole_number(scales[b] * inverse_of(d)), -32.0f, 31.0f)), bits = scale + 32;
    out[4 + b / 2] = uint8_t(out[4 + b / 2] | (bits & 15) << (4 * (b % 2)));
    high = uint16_t(high | (bits >> 4) << (2 * b));
    put_uneven(x + 32 * b, d * float(scale), out + 8 + 16 * b);
  }
  std::memcpy(out + 2, &high, 2);
}

using Encoder = void (*)(const float* x, const float* importance, uint8_t* out);

Encoder encoder(FileFormat format) {
  switch (format) {
    case FileFormat::Q8_0: return encode_q8_0;
    case FileFormat::Q4_0: return encode_q4_0;
    case FileFormat::Q4_1: return encode_q4_1;
    case FileFormat::Q5_0: return encode_q5_0;
    case FileFormat::Q5_1: return encode_q5_1;
    case FileFormat::Q4_K: return encode_q4_k;
    case FileFormat::Q5_K: return encode_q5_k;
    case FileFormat::Q6_K: return encode_q6_k;
    case FileFormat::IQ4_NL: return encode_iq4_nl;
    case FileFormat::IQ4_XS: return encode_iq4_xs;
    default: return nullptr;
  }
}

}  // namespace

bool can_encode(FileFormat format) { return encoder(format) != nullptr; }

void encode_row(FileFormat format, const float* x, const float* importance, int64_t k, uint8_t* out) {
  const FileBlock& block = file_block(format);
  const Encoder encode = encoder(format);
  for (int64_t at = 0; at < k; at += block.elements, out += block.bytes) encode(x + at, importance ? importance + at : nullptr, out);
}

}  // namespace bifolio
