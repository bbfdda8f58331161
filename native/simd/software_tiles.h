// Tile registers in plain C++: what runs on AMX can be tested, also under sanitizers, on machines that have none.
#pragma once

#include "tile_config.h"

static thread_local TileConfig tile_config;
static thread_local uint8_t tile_bytes[8][16][64];

static void configure(const TileConfig& config) {
  tile_config = config;
  std::memset(tile_bytes, 0, sizeof tile_bytes);
}

static inline void finish_writes() {}

static inline void _tile_zero(int tile) { std::memset(tile_bytes[tile], 0, sizeof tile_bytes[tile]); }

static inline void _tile_loadd(int tile, const void* source, int64_t stride) {
  for (int64_t row = 0; row < tile_config.rows[tile]; ++row)
    std::memcpy(tile_bytes[tile][row], static_cast<const uint8_t*>(source) + row * stride, tile_config.row_bytes[tile]);
}

static inline void _tile_stored(int tile, void* target, int64_t stride) {
  for (int64_t row = 0; row < tile_config.rows[tile]; ++row)
    std::memcpy(static_cast<uint8_t*>(target) + row * stride, tile_bytes[tile][row], tile_config.row_bytes[tile]);
}

// sums += rows * weights, four bytes or two bfloat16 of k side by side in a column of the weights.
template <class Number, class Multiply>
static inline void multiply_tiles(int sums, int rows, int weights, Multiply multiply) {
  for (int m = 0; m < tile_config.rows[rows]; ++m)
    for (int n = 0; n < 16; ++n) {
      Number total;
      std::memcpy(&total, tile_bytes[sums][m] + n * 4, 4);
      total = multiply(tile_bytes[rows][m], weights, n, total);
      std::memcpy(tile_bytes[sums][m] + n * 4, &total, 4);
    }
}

static inline void _tile_dpbssd(int sums, int rows, int weights) {
  const int depth = tile_config.row_bytes[rows];
  multiply_tiles<int32_t>(sums, rows, weights, [&](const uint8_t* row, int tile, int column, int32_t total) {
    for (int k = 0; k < depth; ++k) total += int8_t(row[k]) * int8_t(tile_bytes[tile][k / 4][column * 4 + k % 4]);
    return total;
  });
}

static inline float from_bf16(const uint8_t* p) {
  const uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline void _tile_dpbf16ps(int sums, int rows, int weights) {
  const int pairs = tile_config.row_bytes[rows] / 4;
  multiply_tiles<float>(sums, rows, weights, [&](const uint8_t* row, int tile, int column, float total) {
    float even = 0.0f, odd = 0.0f;
    for (int k = 0; k < pairs; ++k) {
      even = std::fma(from_bf16(row + k * 4), from_bf16(tile_bytes[tile][k] + column * 4), even);
      odd = std::fma(from_bf16(row + k * 4 + 2), from_bf16(tile_bytes[tile][k] + column * 4 + 2), odd);
    }
    return total + (even + odd);
  });
}

static inline void _tile_release() { configure(TileConfig{}); }

static inline V16 from_ints(const int32_t* p) {
  float values[kPanel];
  for (int i = 0; i < kPanel; ++i) values[i] = float(p[i]);
  return load(values);
}
