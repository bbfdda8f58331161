#include "streams.h"

#include <algorithm>
#include <cmath>

namespace bifolio {
namespace {

constexpr float kLeastMeanSquare = 1e-5f;  // of a stream that is scaled

float mean_square(const float* x, int64_t size) {
  double total = 0.0;
  for (int64_t i = 0; i < size; ++i) total += double(x[i]) * double(x[i]);
  return float(total / double(size));
}

}  // namespace

void mix_streams(Member& m, Rows x, Rows coefficients, int64_t streams, Rows out) {
  const int64_t size = x.width / streams, count = out.width / size;
  each_row(m, x.count, streams * out.width, [&](int64_t row) {
    for (int64_t i = 0; i < count; ++i) {
      const float* factors = coefficients.row(row) + i * streams;
      float* target = out.row(row) + i * size;
      for (int64_t k = 0; k < size; ++k) target[k] = factors[0] * x.row(row)[k];
      for (int64_t j = 1; j < streams; ++j) {
        const float factor = factors[j];
        const float* source = x.row(row) + j * size;
        for (int64_t k = 0; k < size; ++k) target[k] += factor * source[k];
      }
    }
  });
}

void add_to_streams(Member& m, Rows x, Rows y, Rows coefficients, Rows out) {
  const int64_t size = y.width;
  each_row(m, x.count, 2 * x.width, [&](int64_t row) {
    const float* change = y.row(row);
    for (int64_t i = 0; i < x.width / size; ++i) {
      const float factor = coefficients.row(row)[i];
      const float* source = x.row(row) + i * size;
      float* target = out.row(row) + i * size;
      for (int64_t k = 0; k < size; ++k) target[k] = source[k] + factor * change[k];
    }
  });
}

void match_streams(Member& m, Rows x, Rows y, Rows out) {
  const int64_t size = x.width;
  each_row(m, x.count, 2 * out.width, [&](int64_t row) {
    const float target = std::sqrt(mean_square(x.row(row), size));
    for (int64_t at = 0; at < y.width; at += size) {
      const float* source = y.row(row) + at;
      const float factor = target / std::sqrt(std::max(mean_square(source, size), kLeastMeanSquare));
      for (int64_t k = 0; k < size; ++k) out.row(row)[at + k] = source[k] * factor;
    }
  });
}

}  // namespace bifolio
