// The rows of a product in the forms that its weights are multiplied with; shared by linear.cpp and experts.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "isa.h"
#include "ops.h"

namespace bifolio {

// Rows as bytes, with the scales of their blocks.
struct QuantizedRows {
  int8_t* bytes;  // [rows][k]
  float *scale, *sum;
  int32_t* isum;
  int32_t* half_isum;  // [rows][k / 16]
  float* half_sum;     // [rows / 4][k / 16][4]
  int64_t rows, k;
  bool has_halves;  // half_isum and half_sum are read: the weights have two scales in a block

  int64_t scale_at(int64_t row, int64_t column) const {
    return (row / kRowGroup * (k / kQuantBlock) + column / kQuantBlock) * kRowGroup + row % kRowGroup;
  }

  // x holds the columns [begin, end) of a row.
  void put(const float* x, int64_t row, int64_t begin, int64_t end) const {
    const int64_t at = scale_at(row, begin);
    const int8_t* q = bytes + row * k + begin;
    kernels().quantize_row(x, end - begin, bytes + row * k + begin, scale + at, sum + at, isum + at);
    if (!has_halves) return;
    int32_t* halves = half_isum + (row * k + begin) / 16;
    for (int64_t i = 0; i < (end - begin) / 16; ++i) {
      int32_t total = 0;
      for (int64_t j = 0; j < 16; ++j) total += q[16 * i + j];
      halves[i] = total;
      half_sum[2 * at - row % kRowGroup + kRowGroup * i] = scale[at + i / 2 * kRowGroup] * float(total);
    }
  }

  // The rounding error of a row: x minus its bytes times their scales.
  void subtract(const float* x, int64_t row, float* rest) const {
    const int8_t* q = bytes + row * k;
    for (int64_t begin = 0; begin < k; begin += kQuantBlock) {
      const float unit = scale[scale_at(row, begin)];
      for (int64_t i = begin; i < begin + kQuantBlock; ++i) rest[i] = x[i] - unit * float(q[i]);
    }
  }
};

// Numbers of the scales and sums of rows of k numbers as bytes.
inline int64_t quantized_scales(int64_t rows, int64_t k) {
  return round_up(rows, kRowGroup) * (k / kQuantBlock) * 5 + rows * (k / 16);
}

inline QuantizedRows quantized_rows_at(int8_t* bytes, float* scale, int64_t rows, int64_t k, const LinearWeights& next) {
  const int64_t scales = round_up(rows, kRowGroup) * (k / kQuantBlock);
  auto* totals = reinterpret_cast<int32_t*>(scale + 2 * scales);
  return {bytes, scale, scale + scales, totals, totals + 3 * scales, scale + 3 * scales, rows, k, next.has_two_scales()};
}

// Memory for rows of k numbers as bytes, which `next` multiplies.
inline QuantizedRows quantized_rows(int64_t rows, int64_t k, RowMemory& memory, const LinearWeights& next) {
  auto* scale = memory.scales.array<float>(size_t(quantized_scales(rows, k)));
  return quantized_rows_at(memory.bytes.array<int8_t>(size_t(rows * k)), scale, rows, k, next);
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

// Numbers of rows of k numbers as bfloat16; fewer than sixteen rows make lower tiles.
inline int64_t rounded_words(int64_t rows, int64_t k) {
  return round_up(rows, std::min(rows, kTileRows)) * round_up(k, kQuantBlock);
}

inline RoundedRows rounded_rows_at(uint16_t* words, int64_t rows, int64_t k) {
  const RoundedRows result{words, KParts(round_up(k, kQuantBlock) / kQuantBlock), std::min(rows, kTileRows), rows};
  result.clear_padding();
  return result;
}

// Memory for rows of k numbers as bfloat16.
inline RoundedRows rounded_rows(int64_t rows, int64_t k, RowMemory& memory) {
  return rounded_rows_at(memory.words.array<uint16_t>(size_t(rounded_words(rows, k))), rows, k);
}

// Rows of floats in tiles, one after the other: a tile of `height` rows has a number of each of them for every column.
struct PackedRows {
  float* data;  // null: products read rows as they are
  int64_t rows, k;

  // Calls body(first row, height) for the tiles of all blocks.
  template <class Body>
  void each_tile(Body body) const {
    for (int64_t block = 0; block < parts_of(rows, kFloatBlock); ++block) {
      const int64_t from = part_begin(rows, kFloatBlock, block), count = part_begin(rows, kFloatBlock, block + 1) - from;
      for (int64_t tile = 0; tile < parts_of(count, kFloatTileRows); ++tile) {
        const int64_t r = part_begin(count, kFloatTileRows, tile);
        body(from + r, part_begin(count, kFloatTileRows, tile + 1) - r);
      }
    }
  }

  // x holds the columns [begin, end) of a tile.
  void put(const float* x, int64_t x_stride, int64_t row, int64_t height, int64_t begin, int64_t end) const {
    kernels().pack_rows(x, x_stride, height, end - begin, data + row * k + begin * height);
  }
};

constexpr int64_t kFewRows = 4;  // these are read as they are

// Memory for rows of k numbers as tiles of floats.
inline PackedRows packed_rows(int64_t rows, int64_t k, RowMemory& memory) {
  return {rows > kFewRows && kernels().pack_rows ? memory.floats.array<float>(size_t(rows * k)) : nullptr, rows, k};
}

inline int64_t planes_of(const LinearWeights& weights) { return weights.quantizes() ? weights.planes() : 1; }

// Whether weights are multiplied with bytes. Tiles take bfloat16 instead, but for activations of two bytes.
inline bool needs_bytes(const LinearWeights& weights) {
  return weights.quantizes() && (!kernels().has_tiles || planes_of(weights) > 1);
}
inline bool needs_words(const LinearWeights& weights) {
  return kernels().has_tiles && (weights.has_format(Format::BF16) || (weights.quantizes() && !needs_bytes(weights)));
}
inline bool needs_floats(const LinearWeights& weights) {
  return weights.has_format(Format::F32) || weights.has_format(Format::F16) || (weights.has_format(Format::BF16) && !kernels().has_tiles);
}

// The rows of a product in the forms that its weights need.
struct Inputs {
  Activations plain, quantized;

  Inputs(Rows x, int64_t k) : plain{x.data, x.stride, x.count, k, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}, quantized(plain) {}
  void set(const QuantizedRows& rows) {
    quantized.rows = rows.rows;
    quantized.q = rows.bytes, quantized.scale = rows.scale, quantized.sum = rows.sum, quantized.isum = rows.isum, quantized.half_isum = rows.half_isum;
    quantized.half_sum = rows.half_sum;
  }

  // Rows [begin, end) of those that are packed: a whole block.
  Activations block(int64_t begin, int64_t end) const {
    Activations rows = plain;
    rows.x += begin * plain.x_stride, rows.rows = end - begin, rows.packed += begin * plain.k;
    return rows;
  }
  const Activations& of(Format format) const { return format >= Format::Q8_0 && quantized.q ? quantized : plain; }
};

// Some columns of all rows between two products, in the forms that the second product reads.
struct Middle {
  Rows floats;  // where weights are multiplied with floats
  bool has_floats, has_words, has_bytes;
  RoundedRows words;
  QuantizedRows bytes;
  PackedRows packed{};

  void put(const float* x, int64_t row, int64_t begin, int64_t end) const {
    if (has_floats && !packed.data) std::memcpy(floats.row(row) + begin, x, size_t(end - begin) * sizeof(float));
    if (has_words) words.put(x, row, begin, end);
    if (has_bytes) bytes.put(x, row, begin, end);
  }

  // x holds the columns [begin, end) of all rows.
  void put_packed(const float* x, int64_t stride, int64_t begin, int64_t end) const {
    if (packed.data)
      packed.each_tile([&](int64_t row, int64_t height) { packed.put(x + row * stride, stride, row, height, begin, end); });
  }

  Inputs inputs() const {
    Inputs inputs(floats, floats.width);
    inputs.plain.packed = packed.data;
    if (has_words) inputs.plain.bf16 = words.words;
    if (has_bytes) inputs.set(bytes);
    return inputs;
  }
};

constexpr int64_t kGatedColumns = 128;  // of gate and of up in a piece of work: their products stay in the cache of one core

// Columns [begin, end) of act(gate x) * (up x), whole quant blocks of them; `pair` is gate and up in one piece.
void gate_columns(Member& m, const Inputs& inputs, const LinearWeights& pair, Activation activation, int64_t begin, int64_t end,
                  const Middle& target);

}  // namespace bifolio
