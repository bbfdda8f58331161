#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"

namespace bifolio {
namespace {

// Rows per piece so that a piece is worth handing out: about 8 K numbers.
int64_t row_piece(int64_t width) { return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width)); }

template <class Body>
void each_row(Member& m, int64_t count, int64_t width, Body body) {
  m.split(count, row_piece(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace

void embed(Member& m, const EmbeddingTable& table, const int32_t* ids, float scale, Rows out) {
  each_row(m, out.count, out.width, [&](int64_t row) {
    float* target = out.row(row);
    dequantize_row(table.format, table.data + size_t(ids[row]) * table.row_bytes, table.width, target);
    if (scale != 1.0f)
      for (int64_t i = 0; i < out.width; ++i) target[i] *= scale;
  });
}

void norm(Member& m, Rows x, const NormWeights& weights, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) { kernels().norm_row(x.row(row), weights, out.row(row)); });
}

void add(Member& m, Rows x, Rows y, Rows out) {
  each_row(m, x.count, x.width, [&](int64_t row) { kernels().add_row(x.row(row), y.row(row), x.width, out.row(row)); });
}

void add_norm(Member& m, Rows x, Rows delta, const NormWeights& weights, Rows sum, Rows normed) {
  each_row(m, x.count, x.width, [&](int64_t row) {
    kernels().add_row(x.row(row), delta.row(row), x.width, sum.row(row));
    kernels().norm_row(sum.row(row), weights, normed.row(row));
  });
}

void act(Member& m, Rows x, Activation activation, Rows out) {
  each_row(m, x.count, 4 * x.width, [&](int64_t row) { kernels().act_row(x.row(row), x.width, activation, out.row(row)); });
}

void act_mul(Member& m, Rows x, Activation activation, Rows out) {
  constexpr int64_t piece = 512;  // columns: a single row of a wide network is worth sharing
  const int64_t pieces = (out.width + piece - 1) / piece;
  m.split(x.count * pieces, std::max<int64_t>(1, 1024 / std::min(out.width, piece)), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / pieces, column = unit % pieces * piece;
      const float* gate = x.row(row) + column;
      kernels().act_mul_row(gate, gate + out.width, std::min(piece, out.width - column), activation, out.row(row) + column);
    }
  });
}

void take(Member& m, Rows x, const int32_t* rows, Rows out) {
  each_row(m, out.count, out.width, [&](int64_t row) {
    std::memcpy(out.row(row), x.row(rows ? rows[row] : row), size_t(out.width) * sizeof(float));
  });
}

void softcap(Member& m, Rows x, float cap) {
  each_row(m, x.count, x.width, [&](int64_t row) { kernels().softcap_row(x.row(row), x.width, cap); });
}

namespace {

// Row `row` of `rows` to where it belongs in tiles of `height` rows.
template <class Number>
void to_tiles(const Number* values, int64_t steps, int64_t height, int64_t row, int64_t rows, Number* tiles) {
  const int64_t count = round_up(rows, height) / height;
  for (int64_t step = 0; step < steps; ++step)
    std::memcpy(tiles + (tile_place(row / height, step, count, steps) * height + row % height) * kBlock,
                values + step * kBlock, kBlock * sizeof(Number));
}

// Sets what pads the last of the tiles to zero.
template <class Number>
void pad_tiles(int64_t steps, int64_t height, int64_t rows, Number* tiles) {
  const int64_t count = round_up(rows, height) / height, used = rows - (count - 1) * height;
  for (int64_t step = 0; step < steps && used < height; ++step)
    std::memset(tiles + (tile_place(count - 1, step, count, steps) * height + used) * kBlock, 0,
                size_t((height - used) * kBlock) * sizeof(Number));
}

// Quantises every row; with two planes also what the first left over, as rows [count, 2 * count). The products of both
// planes with the same weights, added, are those of activations with about twice as many bits.
Activations quantize_rows(Member& m, Rows x, int64_t k, int64_t planes, Workspace& workspace) {
  const KernelTable& isa = kernels();
  const int64_t rows = x.count * planes, blocks = k / kBlock;
  const bool tiled = isa.has_tiles && rows >= kTileRows;
  const int64_t padded_rows = round_up(rows, tiled ? kTileRows : kRowGroup), scales = padded_rows * blocks;
  if (m.rank == 0) {
    if (!tiled) workspace.quants.bytes(size_t(padded_rows * k));
    auto* numbers = workspace.scales.array<float>(size_t(scales) * 3);
    if (tiled) {  // nobody looks at what comes of the padding, but it must not be what lay there before
      const int64_t whole = rows / kTileRows * kTileRows;
      for (int kind = 0; kind < 3; ++kind)
        std::memset(numbers + kind * scales + whole * blocks, 0, size_t((padded_rows - whole) * blocks) * sizeof(float));
      pad_tiles(blocks, kTileRows, rows, workspace.tiles.array<int8_t>(size_t(padded_rows * k)));
    }
    if (planes > 1) workspace.residuals.bytes(size_t(x.count * k) * sizeof(float));
  }
  m.barrier();
  auto* q = tiled ? nullptr : workspace.quants.array<int8_t>(0);
  auto* scale = workspace.scales.array<float>(0);
  float* sum = scale + scales;
  auto* isum = reinterpret_cast<int32_t*>(sum + scales);
  auto* tiles = tiled ? workspace.tiles.array<int8_t>(0) : nullptr;
  const auto quantize = [&](const float* values, int64_t row) {  // returns the bytes of the row
    const int64_t at = row / kRowGroup * blocks * kRowGroup + row % kRowGroup;
    int8_t* bytes = tiled ? m.scratch().array<int8_t>(size_t(k)) : q + row * k;
    isa.quantize_row(values, k, bytes, scale + at, sum + at, isum + at);
    if (tiled) to_tiles(bytes, blocks, kTileRows, row, rows, tiles);
    return bytes;
  };
  each_row(m, x.count, 4 * k * planes, [&](int64_t row) {
    const int8_t* bytes = quantize(x.row(row), row);
    if (planes == 1) return;
    float* rest = workspace.residuals.array<float>(0) + row * k;
    const float* factors = scale + row / kRowGroup * blocks * kRowGroup + row % kRowGroup;
    for (int64_t i = 0; i < k; ++i) rest[i] = x.row(row)[i] - factors[i / kBlock * kRowGroup] * float(bytes[i]);
    quantize(rest, x.count + row);
  });
  return {x.data, x.stride, rows, k, q, scale, sum, isum, tiles, nullptr};
}

// Every row as bfloat16, in tiles; in memory of its own, for a layer may have quantised parts as well.
const uint16_t* round_rows(Member& m, Rows x, int64_t k, Workspace& workspace) {
  const int64_t blocks = round_up(k, kBlock) / kBlock, height = std::min(x.count, kTileRows);
  if (m.rank == 0)
    pad_tiles(blocks, height, x.count, workspace.bf16.array<uint16_t>(size_t(round_up(x.count, height) * blocks * kBlock)));
  m.barrier();
  auto* words = workspace.bf16.array<uint16_t>(0);
  each_row(m, x.count, k, [&](int64_t row) {
    auto* rounded = m.scratch().array<uint16_t>(size_t(blocks * kBlock));
    kernels().store_kv_row(x.row(row), k, KvType::BF16, rounded);
    std::memset(rounded + k, 0, size_t(blocks * kBlock - k) * 2);
    to_tiles(rounded, blocks, height, row, x.count, words);
  });
  return words;
}

}  // namespace

void linear(Member& m, Rows x, const LinearWeights& weights, Rows out, Workspace& workspace) {
  if (x.count == 0) return;  // no logits are wanted of a chunk that ends inside its prompt; kernels write whole tiles
  const KernelTable& isa = kernels();
  const int64_t k = weights.in_features(), planes = weights.quantizes() ? weights.planes() : 1;
  Activations plain{x.data, x.stride, x.count, k, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (isa.has_tiles && weights.has_format(Format::BF16)) plain.bf16 = round_rows(m, x, k, workspace);
  const Activations quantized = weights.quantizes() ? quantize_rows(m, x, k, planes, workspace) : plain;
  for (const LinearWeights::Piece& piece : weights.pieces()) {
    const PackedMatrix& matrix = piece.matrix;
    const bool split_planes = planes > 1 && matrix.format >= Format::Q8_0;
    const int64_t width = round_up(matrix.n, kPanel);
    if (split_planes) {
      if (m.rank == 0) workspace.planes.bytes(size_t(2 * x.count * width) * sizeof(float));
      m.barrier();
    }
    float* target = split_planes ? workspace.planes.array<float>(0) : out.data + piece.column;
    const int64_t stride = split_planes ? width : out.stride;
    const Activations& input = matrix.format >= Format::Q8_0 ? quantized : plain;
    // Pieces of at least 32 KB of weights, and at least eight for each thread where there are so many panels.
    const int64_t large = std::max<int64_t>(1, int64_t(32768 / matrix.panel_bytes));
    const int64_t even = std::max<int64_t>(1, matrix.num_panels / (8 * m.size));
    const float* bias = weights.bias() && !split_planes ? weights.bias() + piece.column : nullptr;
    m.split(matrix.num_panels, std::max<int64_t>(1, std::min(even, std::max(large, even))), [&](int64_t begin, int64_t end) {
      isa.matmul(matrix, input, bias, target, stride, begin, end, m.scratch().bytes(matmul_scratch_bytes()));
    });
    if (!split_planes) continue;
    each_row(m, x.count, matrix.n, [&](int64_t row) {
      float* y = out.row(row) + piece.column;
      isa.add_row(target + row * width, target + (x.count + row) * width, matrix.n, y);
      if (weights.bias()) isa.add_row(y, weights.bias() + piece.column, matrix.n, y);
    });
  }
}

void rotation(Member& m, const float* frequencies, float scale, const int32_t* positions, Rows cosine, Rows sine) {
  each_row(m, cosine.count, 64 * cosine.width, [&](int64_t row) {
    for (int64_t i = 0; i < cosine.width; ++i) {
      const float angle = float(positions[row]) * frequencies[i];
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

}  // namespace

void rope_and_write(Member& m, Rows qkv, const AttentionConstants& shape, const Rows* cosine, const Rows* sine,
                    const KvLayer* kv, const int64_t* slots) {
  const KernelTable& isa = kernels();
  const int64_t dim = shape.head_dim, rotated = shape.num_heads + shape.num_kv_heads;
  each_row(m, qkv.count, qkv.width, [&](int64_t row) {
    float* heads = qkv.row(row);
    for (int64_t h = 0; h < rotated; ++h) {
      float* head = heads + h * dim;
      const NormWeights* norm = h < shape.num_heads ? shape.query_norm : shape.key_norm;
      if (norm) isa.norm_row(head, *norm, head);
      if (cosine) rotate(head, cosine->row(row), sine->row(row), cosine->width, shape.interleaved);
    }
    if (!kv) return;
    const int64_t block = slots[row] / kv->block_size, offset = slots[row] % kv->block_size;
    for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
      const size_t at = size_t((block * kv->num_kv_heads + h) * kv->block_size + offset) * kv->row_bytes;
      isa.store_kv_row(heads + (shape.num_heads + h) * dim, dim, kv->type, kv->keys + at);
      isa.store_kv_row(heads + (rotated + h) * dim, dim, kv->type, kv->values + at);
    }
  });
}

}  // namespace bifolio
