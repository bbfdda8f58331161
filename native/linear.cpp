// Products of rows with the matrices of a layer: how rows are prepared, and how the work is cut.
#include <algorithm>
#include <cmath>

#include "product_rows.h"

namespace bifolio {
namespace {

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

const float* pack(Member& m, Rows x, Workspace& workspace) {
  const PackedRows rows = packed_rows(x.count, x.width, workspace.input);
  if (!rows.data) return nullptr;
  std::vector<std::pair<int64_t, int64_t>> tiles;
  rows.each_tile([&](int64_t row, int64_t height) { tiles.emplace_back(row, height); });
  m.split(int64_t(tiles.size()), row_piece(kFloatTileRows * x.width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [row, height] = tiles[size_t(i)];
      rows.put(x.row(row), x.stride, row, height, 0, x.width);
    }
  });
  return rows.data;
}

Inputs prepare(Member& m, Rows x, const LinearWeights& weights, Workspace& workspace) {
  Inputs inputs(x, x.width);
  if (needs_words(weights)) {
    const RoundedRows rows = rounded_rows(x.count, x.width, workspace.input);
    each_row(m, x.count, x.width, [&](int64_t row) { rows.put(x.row(row), row, 0, x.width); });
    inputs.plain.bf16 = rows.words;
  }
  if (needs_floats(weights)) inputs.plain.packed = pack(m, x, workspace);
  if (!needs_bytes(weights)) return inputs;
  const int64_t planes = planes_of(weights);
  if (planes > 1) workspace.residuals.bytes(size_t(x.count * x.width) * sizeof(float));
  const QuantizedRows rows = quantized_rows(x.count * planes, x.width, workspace.input, weights);
  quantize_rows(m, x, planes, rows, workspace);
  inputs.set(rows);
  return inputs;
}

constexpr int64_t kBytePanels = 3;  // side by side in a tile of bytes, for many rows

// Panels of a piece of work: at least eight pieces for each thread, where there are so many panels. Tiles and floats take two
// panels side by side, bytes three: of those four pieces for each thread are enough.
int64_t panel_piece(const PackedMatrix& matrix, int threads, int64_t rows) {
  const int64_t even = std::max<int64_t>(1, matrix.num_panels / (8 * threads));
  const bool in_threes = !kernels().has_tiles && matrix.format >= Format::Q8_0 && rows >= kTileRows;
  if (in_threes && matrix.num_panels >= 4 * kBytePanels * threads) return round_up(even, kBytePanels);
  const bool in_pairs = kernels().has_tiles ? rows >= kTileRows : matrix.format < Format::Q8_0;
  return in_pairs ? round_up(even, 2) : even;
}

bool reads_packed(const PackedMatrix& matrix, const Inputs& inputs) {
  return inputs.plain.packed && matrix.format < Format::Q8_0 && !(matrix.format == Format::BF16 && inputs.plain.bf16);
}

// A product with packed rows of floats: units are blocks of rows and some panels each, at least eight for each thread.
void multiply_packed(Member& m, const Inputs& inputs, int64_t count, const PackedMatrix& matrix, const float* bias, float* y, int64_t stride) {
  const int64_t blocks = parts_of(count, kFloatBlock), groups = parts_of(8 * m.size, blocks);
  const int64_t most = round_up(parts_of(matrix.num_panels, groups), 2), per_block = parts_of(matrix.num_panels, most);
  m.split(blocks * per_block, 1, [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t block = unit / per_block, panel = unit % per_block * most;
      const int64_t row = part_begin(count, kFloatBlock, block), end = part_begin(count, kFloatBlock, block + 1);
      kernels().matmul(matrix, inputs.block(row, end), bias, y + row * stride, stride, panel, std::min(panel + most, matrix.num_panels),
                       m.scratch().bytes(matmul_scratch_bytes()));
    }
  });
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
    if (reads_packed(matrix, inputs)) {
      multiply_packed(m, inputs, count, matrix, bias, target, stride);
      continue;
    }
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

Middle make_middle(Rows floats, const LinearWeights& next, RowMemory& memory) {
  const bool words = needs_words(next), bytes = needs_bytes(next);
  return {floats, needs_floats(next), words, bytes,
          words ? rounded_rows(floats.count, floats.width, memory) : RoundedRows{nullptr, KParts(1), 1, 1},
          bytes ? quantized_rows(floats.count, floats.width, memory, next) : QuantizedRows{},
          needs_floats(next) ? packed_rows(floats.count, floats.width, memory) : PackedRows{}};
}

constexpr int64_t kGatedRows = 512;

// All panels of a matrix, with packed rows block by block.
void multiply_blocks(const PackedMatrix& matrix, const Inputs& inputs, const float* bias, float* y, int64_t stride, uint8_t* scratch) {
  const int64_t count = inputs.plain.rows;
  if (!reads_packed(matrix, inputs))
    return kernels().matmul(matrix, inputs.of(matrix.format), bias, y, stride, 0, matrix.num_panels, scratch);
  for (int64_t block = 0; block < parts_of(count, kFloatBlock); ++block) {
    const int64_t row = part_begin(count, kFloatBlock, block), end = part_begin(count, kFloatBlock, block + 1);
    kernels().matmul(matrix, inputs.block(row, end), bias, y + row * stride, stride, 0, matrix.num_panels, scratch);
  }
}

// Columns of gate and of up in one piece of work: at least four pieces for each thread; whole quant blocks, and for tiles of bytes
// whole tiles, where these are small enough.
int64_t gated_columns(int64_t width, const LinearWeights& weights, int threads) {
  const int64_t most = std::min(width / (4 * threads), kGatedColumns), tile = 2 * kBytePanels * kPanel;
  const int64_t unit = needs_bytes(weights) && most >= tile ? tile : kQuantBlock;
  return std::max(kQuantBlock, most / unit * unit);
}

}  // namespace

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
  multiply_blocks(both, inputs, pair.bias() ? bias : nullptr, products, 2 * columns, scratch);
  for (int64_t row = 0; row < rows; ++row) {
    float* gate = products + row * 2 * columns;
    isa.act_mul_row(gate, gate + columns, columns, activation, gate);
    target.put(gate, row, begin, end);
  }
  target.put_packed(products, 2 * columns, begin, end);
}

namespace {

// Columns [begin, end) of act(up x).
void act_columns(Member& m, const Inputs& inputs, const LinearWeights& up, Activation activation, int64_t begin, int64_t end,
                 const Middle& target) {
  const KernelTable& isa = kernels();
  const int64_t columns = end - begin, rows = inputs.plain.rows;
  uint8_t* scratch = m.scratch().bytes(matmul_scratch_bytes() + size_t(rows * columns) * sizeof(float));
  auto* products = reinterpret_cast<float*>(scratch + matmul_scratch_bytes());
  const PackedMatrix some = up.pieces().front().matrix.some(begin / kPanel, columns / kPanel);
  multiply_blocks(some, inputs, up.bias() ? up.bias() + begin : nullptr, products, columns, scratch);
  for (int64_t row = 0; row < rows; ++row) {
    float* own = products + row * columns;
    isa.act_row(own, columns, activation, own);
    target.put(own, row, begin, end);
  }
  target.put_packed(products, columns, begin, end);
}

Rows some_rows(Rows x, int64_t begin, int64_t count, int64_t width) { return {x.row(begin), count, width, x.stride}; }

// At most kGatedRows rows of activated_linear.
void activate_rows(Member& m, Rows x, const LinearWeights& pair, Activation activation, const LinearWeights& last, Rows middle, Rows out,
               Workspace& workspace) {
  const int64_t width = last.in_features(), most = gated_columns(width, pair, m.size);
  const Inputs inputs = prepare(m, x, pair, workspace);
  const Middle target = make_middle(middle, last, workspace.middle);
  const auto of_columns = pair.out_features() == width ? act_columns : gate_columns;
  m.split((width + most - 1) / most, 1, [&](int64_t first, int64_t end) {
    for (int64_t begin = first * most; begin < std::min(end * most, width); begin += most)
      of_columns(m, inputs, pair, activation, begin, std::min(begin + most, width), target);
  });
  multiply(m, target.inputs(), x.count, last, out, workspace);
}

}  // namespace

bool can_activate(const LinearWeights& pair, const LinearWeights& last, int64_t rows) {
  const bool fits = pair.out_features() == 2 * last.in_features() || pair.out_features() == last.in_features();
  return rows >= kTileRows && pair.pieces().size() == 1 && fits &&
         last.in_features() % kQuantBlock == 0 && planes_of(pair) == 1 && planes_of(last) == 1;
}

void activated_linear(Member& m, Rows x, const LinearWeights& pair, Activation activation, const LinearWeights& last, Rows middle,
                      Rows out, Workspace& workspace) {
  const int64_t pieces = (x.count + kGatedRows - 1) / kGatedRows, most = round_up((x.count + pieces - 1) / pieces, kTileRows);
  for (int64_t begin = 0; begin < x.count; begin += most) {
    const int64_t count = std::min(most, x.count - begin);
    activate_rows(m, some_rows(x, begin, count, pair.in_features()), pair, activation, last,
              some_rows(middle, begin, count, last.in_features()), some_rows(out, begin, count, last.out_features()), workspace);
  }
}

void act(Member& m, Rows x, Activation activation, Rows out) {
  each_row(m, x.count, (activation == Activation::Tanh ? 32 : 4) * x.width, [&](int64_t row) {
    const float* source = x.row(row);
    float* target = out.row(row);
    if (activation == Activation::Sigmoid) return kernels().sigmoid_row(source, x.width, target);
    if (activation != Activation::Tanh) return kernels().act_row(source, x.width, activation, target);
    for (int64_t i = 0; i < x.width; ++i) target[i] = std::tanh(source[i]);
  });
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

}  // namespace bifolio
