// Tile registers in plain C++: the code of AMX can be tested, also under sanitizers, on machines without AMX.
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

static inline float from_bf16(const uint8_t* p) {
  const uint32_t bits = uint32_t(p[0]) << 16 | uint32_t(p[1]) << 24;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// sums += rows * weights, two numbers of k side by side in a column of the weights.
static inline void _tile_dpbf16ps(int sums, int rows, int weights) {
  const int pairs = tile_config.row_bytes[rows] / 4;
  for (int m = 0; m < tile_config.rows[rows]; ++m)
    for (int n = 0; n < 16; ++n) {
      float total, even = 0.0f, odd = 0.0f;
      for (int k = 0; k < pairs; ++k) {
        const uint8_t *row = tile_bytes[rows][m] + k * 4, *weight = tile_bytes[weights][k] + n * 4;
        even = std::fma(from_bf16(row), from_bf16(weight), even);
        odd = std::fma(from_bf16(row + 2), from_bf16(weight + 2), odd);
      }
      std::memcpy(&total, tile_bytes[sums][m] + n * 4, 4);
      total += even + odd;
      std::memcpy(tile_bytes[sums][m] + n * 4, &total, 4);
    }
}

static inline void _tile_release() { configure(TileConfig{}); }
