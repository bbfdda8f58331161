// Plain C++ for any processor.
#include "blocks.h"
#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/generic.h"

#include "kernels/elementwise.h"
#include "kernels/packing.h"
#include "kernels/recurrence.h"
#include "kernels/rwkv.h"
#include "kernels/matmul_float.h"

template <int Bits, bool Signed, int R>
static inline void block_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t*, V16 sums[R]) {
  for (int r = 0; r < R; ++r) {
    int32_t totals[16] = {};
    for (int e = 0; e < kQuantBlock; ++e) {
      const int32_t value = x[r * stride + e];
      for (int column = 0; column < kPanel; ++column) {
        int32_t weight;
        if constexpr (Bits == 8) {
          weight = int8_t(w[(e / 4) * 64 + column * 4 + e % 4]);
        } else {
          const uint8_t pair = w[(e % 16 / 4) * 64 + column * 4 + e % 4];
          const int32_t nibble = e < 16 ? pair & 15 : pair >> 4;
          weight = Signed ? (nibble ^ 8) - 8 : nibble;
        }
        totals[column] += value * weight;
      }
    }
    for (int column = 0; column < kPanel; ++column) sums[r].v[0].v[column] = float(totals[column]);
  }
}

template <bool, int R>
static inline void half_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t*, V16 sums[R]) {
  for (int r = 0; r < R; ++r) {
    int32_t totals[16] = {};
    for (int e = 0; e < 16; ++e)
      for (int column = 0; column < kPanel; ++column) totals[column] += int32_t(x[r * stride + e]) * int8_t(w[e / 4 * 64 + column * 4 + e % 4]);
    for (int column = 0; column < kPanel; ++column) sums[r].v[0].v[column] = float(totals[column]);
  }
}

#include "kernels/matmul_int.h"
#include "kernels/attention.h"
#include "kernels/index_scores.h"
#ifdef BIFOLIO_SOFTWARE_TILES
#include "simd/software_tiles.h"
#include "kernels/matmul_tiles.h"
#include "kernels/matmul_few_on_tiles.h"
#include "kernels/attention_tiles.h"
#include "kernels/attention_few_on_tiles.h"
#endif

int64_t peak_loop(bool) {  // plain C++ has no peak of its own: the compiler decides
  V16 sums[4] = {zero(), zero(), zero(), zero()};
  const V16 factor = broadcast(0.5f);
  constexpr int64_t rounds = 1 << 18;
  for (int64_t i = 0; i < rounds; ++i) {
    for (V16& sum : sums) sum = fma(sum, factor, factor);
    asm volatile("" : : "r"(sums) : "memory");
  }
  return rounds * 4 * 16 * 2;
}

int score() { return 1; }

}  // namespace

#include "kernels/table.h"
const KernelTable kGenericKernels = BIFOLIO_KERNEL_TABLE("generic", false, matmul, attend_part);
#ifdef BIFOLIO_SOFTWARE_TILES
const KernelTable kTileKernels = BIFOLIO_KERNEL_TABLE("tiles", true, matmul_tiles, attend_part_on_tiles);
#endif

size_t matmul_scratch_bytes() { return 640 * 1024; }  // most of it is touched by tiles alone

// The largest scratch of any attention kernel; see FloatScratch, IntScratch and TileScratch.
size_t attention_scratch_bytes(int64_t head_dim) {
  const int64_t padded = round_up(head_dim, 32);
  const int64_t tile = 4 * kTile * padded, queries = kMaxRows * padded, scales = 4 * padded / kQuantBlock * kMaxRows;
  return size_t(kMaxRows * kTile + tile + queries + scales) * sizeof(float);
}

}  // namespace bifolio
