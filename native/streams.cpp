#include "streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

namespace bifolio {
namespace {

constexpr float kLeastMeanSquare = 1e-5f;  // of a stream that is scaled

float mean_square(const float* x, int64_t size) {
  double total = 0.0;
  for (int64_t i = 0; i < size; ++i) total += double(x[i]) * double(x[i]);
  return float(total / double(size));
}

// The factor that gives a stream the root mean square `target`.
float matching(const float* stream, int64_t size, float target) {
  return target / std::sqrt(std::max(mean_square(stream, size), kLeastMeanSquare));
}

}  // namespace

void add_scaled(Member& m, Rows x, Rows y, float scale, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    const float *a = x.row(row), *b = y.row(row);
    float* target = out.row(row);
    for (int64_t i = 0; i < x.width; ++i) target[i] = (a[i] + b[i]) * scale;
  });
}

void embed_known(Member& m, const EmbeddingTable& table, const int32_t* ids, float scale, Rows out) {
  each_row(m, out.count, out.width, [&](int64_t row) {
    const int64_t id = ids[row] < table.rows ? ids[row] : 0;
    float* target = out.row(row);
    dequantize_row(table.format, table.data + size_t(id) * table.row_bytes, table.width, target);
    for (int64_t i = 0; i < out.width; ++i) target[i] *= scale;
  });
}

void norm_groups(Member& m, Rows x, const NormWeights& weights, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    for (int64_t at = 0; at < x.width; at += weights.size) kernels().norm_row(x.row(row) + at, weights, out.row(row) + at);
  });
}

void columns(Member& m, Rows x, int64_t start, const float* factors, Rows out) {
  each_row(m, x.count, out.width, [&](int64_t row) {
    const float* source = x.row(row) + start;
    for (int64_t i = 0; i < out.width; ++i) out.row(row)[i] = factors ? source[i] * factors[i] : source[i];
  });
}

void act_gate(Member& m, Rows x, Rows inputs, int64_t start, Activation activation, Rows out) {
  each_row(m, x.count, 4 * x.width, [&](int64_t row) {
    kernels().act_mul_row(x.row(row), inputs.row(row) + start, x.width, activation, out.row(row));
  });
}

void sparse_act_mul(Member& m, Rows x, float deviations, Activation activation, Rows out) {
  const int64_t width = out.width;
  each_row(m, x.count, 8 * width, [&](int64_t row) {
    const float* gate = x.row(row);
    float* target = out.row(row);
    double sum = 0.0, spread = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += double(gate[i]);
    const double mean = sum / double(width);
    for (int64_t i = 0; i < width; ++i) spread += (double(gate[i]) - mean) * (double(gate[i]) - mean);
    const float cutoff = float(mean + std::sqrt(spread / double(width)) * double(deviations));
    for (int64_t i = 0; i < width; ++i) target[i] = std::max(gate[i] - cutoff, 0.0f);
    kernels().act_mul_row(target, gate + width, width, activation, target);
  });
}

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

void correct_streams(Member& m, Rows x, Rows y, Rows coefficients, int64_t active, Rows out) {
  const int64_t size = y.width, streams = x.width / size;
  each_row(m, x.count, 2 * x.width, [&](int64_t row) {
    const float *expected = x.row(row) + active * size, *found = y.row(row);
    for (int64_t i = 0; i < streams; ++i) {
      const float factor = coefficients.row(row)[i];
      const float* source = x.row(row) + i * size;
      float* target = out.row(row) + i * size;
      for (int64_t k = 0; k < size; ++k) target[k] = source[k] + factor * (found[k] - expected[k]);
    }
  });
}

void add_to_streams(Member& m, Rows x, Rows y, int64_t first, Rows out) {
  const int64_t size = y.width;
  each_row(m, x.count, x.width, [&](int64_t row) {
    std::memcpy(out.row(row), x.row(row), size_t(first * size) * sizeof(float));
    for (int64_t at = first * size; at < x.width; at += size) kernels().add_row(x.row(row) + at, y.row(row), size, out.row(row) + at);
  });
}

void spread_streams(Member& m, Rows x, Rows y, Rows out) {
  const int64_t size = x.width;
  each_row(m, x.count, 2 * out.width, [&](int64_t row) {
    std::memcpy(out.row(row), x.row(row), size_t(size) * sizeof(float));
    const float target = std::sqrt(mean_square(x.row(row), size));
    for (int64_t at = 0; at < y.width; at += size) {
      const float factor = matching(y.row(row) + at, size, target);
      for (int64_t k = 0; k < size; ++k) out.row(row)[size + at + k] = y.row(row)[at + k] * factor;
    }
  });
}

void merge_streams(Member& m, Rows x, Rows y, Rows out) {
  const int64_t size = x.width, streams = y.width / size + 1;
  each_row(m, x.count, 2 * y.width, [&](int64_t row) {
    float* target = out.row(row);
    std::memcpy(target, x.row(row), size_t(size) * sizeof(float));
    const float wanted = std::sqrt(mean_square(x.row(row), size));
    for (int64_t at = 0; at < y.width; at += size) {
      const float factor = matching(y.row(row) + at, size, wanted);
      for (int64_t k = 0; k < size; ++k) target[k] += y.row(row)[at + k] * factor;
    }
    for (int64_t k = 0; k < size; ++k) target[k] /= float(streams);
  });
}

}  // namespace bifolio
