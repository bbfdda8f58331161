// Products of rows with the matrices of a layer: how rows are prepared, and how the work is cut.
#include <algorithm>
#include <cstring>

#include "isa.h"
#include "ops.h"

namespace bifolio {
namespace {

// Rows as bytes, with the scales of their blocks.
struct QuantizedRows {
  int8_t* bytes;  // [rows][k]
  float *scale, *sum;
  int32_t* isum;
  int32_t* half_isum;  // [rows][k / 16]
  int64_t rows, k;

  int64_t scale_at(int64_t row, int64_t column) const {
    return (row / kRowGroup * (k / kQuantBlock) + column / kQuantBlock) * kRowGroup + row % kRowGroup;
  }

  // x holds the columns [begin, end) of a row.
  void put(const float* x, int64_t row, int64_t begin, int64_t end) const {
    const int64_t at = scale_at(row, begin);
    const int8_t* q = bytes + row * k + begin;
    kernels().quantize_row(x, end - begin, bytes + row * k + begin, scale + at, sum + at, isum + at);
    int32_t* halves = half_isum + (row * k + begin) / 16;
    for (int64_t i = 0; i < (end - begin) / 16; ++i) {
      int32_t total = 0;
      for (int64_t j = 0; j < 16; ++j) total += q[16 * i + j];
      halves[i] = total;
    }
  }

  // The rounding error of a row: x minus its bytes times their scales.
  void subtract(const float* x, int64_t row, float* rest) const {
    for (int64_t i = 0; i < k; ++i) rest[i] = x[i] - scale[scale_at(row, i)] * float(bytes[row * k + i]);
  }
};

// Memory for rows of k numbers as bytes.
QuantizedRows quantized_rows(int64_t rows, int64_t k, RowMemory& memory) {
  const int64_t scales = round_up(rows, kRowGroup) * (k / kQuantBlock);
  auto* scale = memory.scales.array<float>(size_t(scales * 3 + rows * (k / 16)));
  auto* totals = reinterpret_cast<int32_t*>(scale + 2 * scales);
  return {memory.bytes.array<int8_t>(size_t(rows * k)), scale, scale + scales, totals, totals + scales, rows, k};
}

// Rows as bfloat16, in tiles: 32 numbers of `height` rows together.
struct RoundedRows {
  uint16_t* words;
  KParts parts;
  int64_t height, rows;

  int64_t tiles() const { return (rows + height - 1) / height; }
  int64_t step() const { return height * kQuantBlock; }  // from 32 numbers of a row to the next of the same part
  uint16_t* at(int64_t row, int64_t part) const {
    return words + (parts.place(part, row / height, tiles()) * height + row % height) * kQuantBlock;
  }

  // Sets the padding of the last tile to zero.
  void clear_padding() const {
    const int64_t padding = tiles() * height - rows;
    for (int64_t part = 0; part < parts.count && padding > 0; ++part)
      for (int64_t piece = 0; piece < parts.size(part); ++piece)
        std::memset(at(rows - 1, part) + piece * step() + kQuantBlock, 0, size_t(padding * kQuantBlock) * sizeof(uint16_t));
  }

  // x holds the columns [begin, end) of a row; begin is the first of 32.
  void put(const float* x, int64_t row, int64_t begin, int64_t end) const {
    for (int64_t part = 0; part < parts.count; ++part) {
      const int64_t start = parts.begin(part), from = std::max(start * kQuantBlock, begin);
      const int64_t to = std::min((start + parts.size(part)) * kQuantBlock, end);
      if (from < to) kernels().round_row(x + from - begin, to - from, at(row, part) + (from / kQuantBlock - start) * step(), step());
    }
  }
};

// Memory for rows of k numbers as bfloat16; fewer than sixteen rows make lower tiles.
RoundedRows rounded_rows(int64_t rows, int64_t k, RowMemory& memory) {
  const int64_t steps = round_up(k, kQuantBlock) / kQuantBlock, height = std::min(rows, kTileRows);
  RoundedRows result{nullptr, KParts(steps), height, rows};
  result.words = memory.words.array<uint16_t>(size_t(result.tiles() * height * steps * kQuantBlock));
  result.clear_padding();
  return result;
}

int64_t planes_of(const LinearWeights& weights) { return weights.quantizes() ? weights.planes() : 1; }

// Whether weights are multiplied with bytes. Tiles take bfloat16 instead, but for activations of two bytes.
bool needs_bytes(const LinearWeights& weights) {
  return weights.quantizes() && (!kernels().has_tiles || planes_of(weights) > 1);
}
bool needs_words(const LinearWeights& weights) {
  return kernels().has_tiles && (weights.has_format(Format::BF16) || (weights.quantizes() && !needs_bytes(weights)));
}
bool needs_floats(const LinearWeights& weights) {
  return weights.has_format(Format::F32) || weights.has_format(Format::F16) || (weights.has_format(Format::BF16) && !kernels().has_tiles);
}

// The rows of a product in the forms that its weights need.
struct Inputs {
  Activations plain, quantized;

  Inputs(Rows x, int64_t k) : plain{x.data, x.stride, x.count, k, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}, quantized(plain) {}
  void set(const QuantizedRows& rows) {
    quantized.rows = rows.rows;
    quantized.q = rows.bytes, quantized.scale = rows.scale, quantized.sum = rows.sum, quantized.isum = rows.isum, quantized.half_isum = rows.half_isum;
  }
  const Activations& of(Format format) const { return format >= Format::Q8_0 && quantized.q ? quantized : plain; }
};

// With two planes the rounding errors of the first plane are quantised too, as rows [count, 2 * count). The sum of the products
// of both planes is that of activations with about twice as many bits.
void quantize_rows(Member& m, Rows x, int64_t planes, const QuantizedRows& rows, Workspace& workspace) {
  // The scales of four rows share cache lines: one thread writes all four, to avoid false sharing.
  const int64_t piece = row_piece(4 * x.width * planes), unit = x.count < kTileRows ? 1 : kRowGroup;
  m.split(x.count, round_up(piece, unit), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      rows.put(x.row(row), row, 0, x.width);
      if (planes == 1) continue;
      float* rest = workspace.residuals.array<float>(0) + row * x.width;
      rows.subtract(x.row(row), row, rest);
      rows.put(rest, x.count + row, 0, x.width);
    }
  });
}

Inputs prepare(Member& m, Rows x, const LinearWeights& weights, Workspace& workspace) {
  Inputs inputs(x, x.width);
  if (needs_words(weights)) {
    const RoundedRows rows = rounded_rows(x.count, x.width, workspace.input);
    each_row(m, x.count, x.width, [&](int64_t row) { rows.put(x.row(row), row, 0, x.width); });
    inputs.plain.bf16 = rows.words;
  }
  if (!needs_bytes(weights)) return inputs;
  const int64_t planes = planes_of(weights);
  if (planes > 1) workspace.residuals.bytes(size_t(x.count * x.width) * sizeof(float));
  const QuantizedRows rows = quantized_rows(x.count * planes, x.width, workspace.input);
  quantize_rows(m, x, planes, rows, workspace);
  inputs.set(rows);
  return inputs;
}

// Panels of a piece of work: at least eight pieces for each thread, where there are so many panels. Tiles take two panels
// side by side.
int64_t panel_piece(const PackedMatrix& matrix, int threads, int64_t rows) {
  const int64_t even = std::max<int64_t>(1, matrix.num_panels / (8 * threads));
  return kernels().has_tiles && rows >= kTileRows ? round_up(even, 2) : even;
}

void multiply(Member& m, const Inputs& inputs, int64_t count, const LinearWeights& weights, Rows out, Workspace& workspace) {
  const KernelTable& isa = kernels();
  for (const LinearWeights::Piece& piece : weights.pieces()) {
    const PackedMatrix& matrix = piece.matrix;
    const bool split_planes = planes_of(weights) > 1 && matrix.format >= Format::Q8_0;
    const int64_t width = round_up(matrix.n, kPanel);
    float* target = split_planes ? workspace.planes.array<float>(size_t(2 * count * width)) : out.data + piece.column;
    const int64_t stride = split_planes ? width : out.stride;
    const float* bias = weights.bias() && !split_planes ? weights.bias() + piece.column : nullptr;
    m.split(matrix.num_panels, panel_piece(matrix, m.size, count), [&](int64_t begin, int64_t end) {
      isa.matmul(matrix, inputs.of(matrix.format), bias, target, stride, begin, end, m.scratch().bytes(matmul_scratch_bytes()));
    });
    if (!split_planes) continue;
    each_row(m, count, matrix.n, [&](int64_t row) {
      float* y = out.row(row) + piece.column;
      isa.add_row(target + row * width, target + (count + row) * width, matrix.n, y);
      if (weights.bias()) isa.add_row(y, weights.bias() + piece.column, matrix.n, y);
    });
  }
}

}  // namespace

void linear(Member& m, Rows x, const LinearWeights& weights, Rows out, Workspace& workspace) {
  if (x.count == 0) return;  // a chunk that ends inside its prompt has no logits; kernels write whole tiles
  const Rows input{x.data, x.count, weights.in_features(), x.stride};
  multiply(m, prepare(m, input, weights, workspace), x.count, weights, out, workspace);
}

namespace {

// Some columns of all rows between two products, in the forms that the second product reads.
struct Middle {
  Rows floats;  // where weights are multiplied with floats
  bool has_floats, has_words, has_bytes;
  RoundedRows words;
  QuantizedRows bytes;

  void put(const float* x, int64_t row, int64_t begin, int64_t end) const {
    if (has_floats) std::memcpy(floats.row(row) + begin, x, size_t(end - begin) * sizeof(float));
    if (has_words) words.put(x, row, begin, end);
    if (has_bytes) bytes.put(x, row, begin, end);
  }

  Inputs inputs() const {
    Inputs inputs(floats, floats.width);
    if (has_words) inputs.plain.bf16 = words.words;
    if (has_bytes) inputs.set(bytes);
    return inputs;
  }
};

Middle make_middle(Rows floats, const LinearWeights& next, RowMemory& memory) {
  const bool words = needs_words(next), bytes = needs_bytes(next);
  return {floats, needs_floats(next), words, bytes,
          words ? rounded_rows(floats.count, floats.width, memory) : RoundedRows{nullptr, KParts(1), 1, 1},
          bytes ? quantized_rows(floats.count, floats.width, memory) : QuantizedRows{}};
}

constexpr int64_t kGatedRows = 512, kGatedColumns = 128;  // their products stay in the cache of one core

// Columns of gate and of up in one piece of work: at least four pieces for each thread.
int64_t gated_columns(int64_t width, int threads) {
  return std::max(kQuantBlock, std::min(width / (4 * threads), kGatedColumns) / kQuantBlock * kQuantBlock);
}

// Columns [begin, end) between the products.
void gate_columns(Member& m, const Inputs& inputs, const LinearWeights& pair, Activation activation, int64_t begin, int64_t end,
                  const Middle& target) {
  const KernelTable& isa = kernels();
  const int64_t width = pair.out_features() / 2, columns = end - begin, rows = inputs.plain.rows;
  uint8_t* scratch = m.scratch().bytes(matmul_scratch_bytes() + size_t((rows + 1) * 2 * columns) * sizeof(float));
  auto* bias = reinterpret_cast<float*>(scratch + matmul_scratch_bytes());
  float* products = bias + 2 * columns;  // [rows][gate, up]
  for (int64_t i = 0; i < columns && pair.bias(); ++i)
    bias[i] = pair.bias()[begin + i], bias[columns + i] = pair.bias()[width + begin + i];
  const PackedMatrix both = pair.pieces().front().matrix.side_by_side(begin / kPanel, (width + begin) / kPanel, columns / kPanel);
  isa.matmul(both, inputs.of(both.format), pair.bias() ? bias : nullptr, products, 2 * columns, 0, both.num_panels, scratch);
  for (int64_t row = 0; row < rows; ++row) {
    float* gate = products + row * 2 * columns;
    isa.act_mul_row(gate, gate + columns, columns, activation, gate);
    target.put(gate, row, begin, end);
  }
}

Rows some_rows(Rows x, int64_t begin, int64_t count, int64_t width) { return {x.row(begin), count, width, x.stride}; }

// At most kGatedRows rows of gated_linear.
void gate_rows(Member& m, Rows x, const LinearWeights& pair, Activation activation, const LinearWeights& last, Rows middle, Rows out,
               Workspace& workspace) {
  const int64_t width = last.in_features(), most = gated_columns(width, m.size);
  const Inputs inputs = prepare(m, x, pair, workspace);
  const Middle target = make_middle(middle, last, workspace.middle);
  m.split((width + most - 1) / most, 1, [&](int64_t first, int64_t end) {
    for (int64_t begin = first * most; begin < std::min(end * most, width); begin += most)
      gate_columns(m, inputs, pair, activation, begin, std::min(begin + most, width), target);
  });
  multiply(m, target.inputs(), x.count, last, out, workspace);
}

}  // namespace

bool can_gate(const LinearWeights& pair, const LinearWeights& last, int64_t rows) {
  return rows >= kTileRows && pair.pieces().size() == 1 && pair.out_features() == 2 * last.in_features() &&
         last.in_features() % kQuantBlock == 0 && planes_of(pair) == 1 && planes_of(last) == 1;
}

void gated_linear(Member& m, Rows x, const LinearWeights& pair, Activation activation, const LinearWeights& last, Rows middle,
                  Rows out, Workspace& workspace) {
  const int64_t pieces = (x.count + kGatedRows - 1) / kGatedRows, most = round_up((x.count + pieces - 1) / pieces, kTileRows);
  for (int64_t begin = 0; begin < x.count; begin += most) {
    const int64_t count = std::min(most, x.count - begin);
    gate_rows(m, some_rows(x, begin, count, pair.in_features()), pair, activation, last,
              some_rows(middle, begin, count, last.in_features()), some_rows(out, begin, count, last.out_features()), workspace);
  }
}

}  // namespace bifolio
