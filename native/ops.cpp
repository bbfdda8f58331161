#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

namespace bifolio {
void embed(Member& m, const EmbeddingTable& table, const int32_t* ids, float scale, Rows out) {
  each_row(m, out.count, out.width, [&](int64_t row) {
    float* target = out.row(row);
    const int64_t id = ids[row] < table.rows ? ids[row] : 0;
    dequantize_row(table.format, table.data + size_t(id) * table.row_bytes, table.width, target);
    if (scale != 1.0f)
      for (int64_t i = 0; i < out.width; ++i) target[i] *= scale;
  });
}

void norm(Member& m, Rows x, const NormWeights& weights, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    for (int64_t at = 0; at < x.width; at += weights.size) kernels().norm_row(x.row(row) + at, weights, out.row(row) + at);
  });
}

void add(Member& m, Rows x, Rows y, float scale, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    float* sum = out.row(row);
    kernels().add_row(x.row(row), y.row(row), x.width, sum);
    if (scale != 1.0f)
      for (int64_t i = 0; i < x.width; ++i) sum[i] *= scale;
  });
}

void add_norm(Member& m, Rows x, Rows delta, const NormWeights& weights, Rows sum, Rows normed) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    kernels().add_row(x.row(row), delta.row(row), x.width, sum.row(row));
    kernels().norm_row(sum.row(row), weights, normed.row(row));
  });
}

void act(Member& m, Rows x, Activation activation, Rows out) {
  if (activation == Activation::Tanh) {
    each_row(m, x.count, 32 * x.width, [&](int64_t row) {
      for (int64_t i = 0; i < x.width; ++i) out.row(row)[i] = std::tanh(x.row(row)[i]);
    });
    return;
  }
  each_row(m, x.count, 4 * x.width, [&](int64_t row) { kernels().act_row(x.row(row), x.width, activation, out.row(row)); });
}

void act_mul(Member& m, Rows x, Activation activation, Rows out) {
  constexpr int64_t piece = 512;  // columns: threads share a single row of a wide network
  const int64_t pieces = (out.width + piece - 1) / piece;
  m.split(x.count * pieces, std::max<int64_t>(1, 1024 / std::min(out.width, piece)), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / pieces, column = unit % pieces * piece;
      const float* gate = x.row(row) + column;
      kernels().act_mul_row(gate, gate + out.width, std::min(piece, out.width - column), activation, out.row(row) + column);
    }
  });
}

void sparse_act_mul(Member& m, Rows x, float cutoff, Activation activation, Rows out) {
  const int64_t width = out.width;
  each_row(m, x.count, 8 * width, [&](int64_t row) {
    const float* gate = x.row(row);
    float* target = out.row(row);
    double sum = 0.0, spread = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += double(gate[i]);
    const double mean = sum / double(width);
    for (int64_t i = 0; i < width; ++i) spread += (double(gate[i]) - mean) * (double(gate[i]) - mean);
    const float least = float(mean + std::sqrt(spread / double(width)) * double(cutoff));
    for (int64_t i = 0; i < width; ++i) target[i] = std::max(gate[i] - least, 0.0f);
    kernels().act_mul_row(target, gate + width, width, activation, target);
  });
}

void take(Member& m, Rows x, const int32_t* rows, Rows out) {
  each_row(m, out.count, out.width, [&](int64_t row) {
    std::memcpy(out.row(row), x.row(rows ? rows[row] : row), size_t(out.width) * sizeof(float));
  });
}

void copy_columns(Member& m, Rows x, int64_t start, int64_t count, Rows out, int64_t target, const float* factors) {
  each_row(m, out.count, count, [&](int64_t row) {
    float* to = out.row(row) + target;
    std::memcpy(to, x.row(row) + start, size_t(count) * sizeof(float));
    for (int64_t i = 0; factors && i < count; ++i) to[i] *= factors[i];
  });
}

void softcap(Member& m, Rows x, float cap) {
  each_row(m, x.count, x.width, [&](int64_t row) { kernels().softcap_row(x.row(row), x.width, cap); });
}

void rotation(Member& m, const float* frequencies, bool two_sets, float scale, const int32_t* positions, Rows cosine, Rows sine) {
  each_row(m, cosine.count, 64 * cosine.width, [&](int64_t row) {
    const float* own = two_sets && positions[row] >= kLongRope ? frequencies + cosine.width : frequencies;
    const float position = float(positions[row] % kLongRope);
    for (int64_t i = 0; i < cosine.width; ++i) {
      const float angle = position * own[i];
      cosine.row(row)[i] = std::cos(angle) * scale;
      sine.row(row)[i] = std::sin(angle) * scale;
    }
  });
}

namespace {

void rotate(float* head, const float* cosine, const float* sine, int64_t half, bool interleaved) {
  const int64_t apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
  for (int64_t i = 0; i < half; ++i) {
    float& first = head[i * step];
    float& second = head[i * step + apart];
    const float a = first, b = second;
    first = a * cosine[i] - b * sine[i];
    second = b * cosine[i] + a * sine[i];
  }
}

// Norm each head, or all of them together.
void norm_heads(float* heads, int64_t count, int64_t dim, const NormWeights* norm) {
  if (!norm) return;
  for (int64_t at = 0; at < count * dim; at += norm->size) kernels().norm_row(heads + at, *norm, heads + at);
}

}  // namespace

void rope_and_write(Member& m, Rows qkv, const AttentionConstants& shape, const Rows* cosine, const Rows* sine,
                    const KvLayer* kv, const int64_t* slots) {
  const KernelTable& isa = kernels();
  const int64_t dim = shape.head_dim, rotated = shape.num_heads + (shape.queries_only ? 0 : shape.num_kv_heads);
  each_row(m, qkv.count, qkv.width, [&](int64_t row) {
    float* heads = qkv.row(row);
    const auto norm = [&] {
      norm_heads(heads, shape.num_heads, dim, shape.query_norm);
      norm_heads(heads + shape.query_width(), rotated - shape.num_heads, dim, shape.key_norm);
    };
    norm_heads(heads + rotated * dim, rotated - shape.num_heads, dim, shape.value_norm);
    if (!shape.norm_after_rope) norm();
    for (int64_t h = 0; h < rotated && cosine; ++h)
      rotate(heads + h * dim, cosine->row(row), sine->row(row), cosine->width, shape.interleaved);
    if (shape.norm_after_rope) norm();
    if (!kv || shape.queries_only) return;
    const int64_t block = slots[row] / kv->block_size, offset = slots[row] % kv->block_size;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const size_t at = size_t((block * kv->num_kv_heads + h) * kv->block_size + offset) * kv->row_bytes;
      isa.store_kv_row(heads + (shape.num_heads + h) * dim, dim, kv->type, kv->keys + at);
      if (kv->values != kv->keys) isa.store_kv_row(heads + (rotated + h) * dim, dim, kv->type, kv->values + at);
    }
  });
}

void head_linear(Member& m, Rows x, const std::vector<const LinearWeights*>& heads, int64_t start, Rows out, Workspace& workspace) {
  const int64_t step = x.width / int64_t(heads.size()), size = out.width / int64_t(heads.size());
  for (int64_t h = 0; h < int64_t(heads.size()); ++h) {
    const LinearWeights& weights = *heads[size_t(h)];
    linear(m, {x.data + h * step + start, x.count, weights.in_features(), x.stride}, weights, {out.data + h * size, out.count, size, out.stride},
           workspace);
  }
}

void join_latent(Member& m, Rows query, Rows absorbed, Rows latent, const NormWeights& norm, int64_t rope, Rows qkv) {
  const int64_t size = norm.size, dim = rope + size, heads = absorbed.width / size, step = query.width / heads;
  const auto copy = [](const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); };
  each_row(m, query.count, qkv.width, [&](int64_t row) {
    for (int64_t h = 0; h < heads; ++h) {
      float* head = qkv.row(row) + h * dim;
      copy(query.row(row) + (h + 1) * step - rope, rope, head);
      copy(absorbed.row(row) + h * size, size, head + rope);
    }
    float *key = qkv.row(row) + heads * dim, *value = key + dim;
    copy(latent.row(row) + size, rope, key);
    kernels().norm_row(latent.row(row), norm, key + rope);
    copy(key, dim, value);
  });
}

}  // namespace bifolio
