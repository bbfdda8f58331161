// x86 with AVX-512 and the AMX tiles of bfloat16.
//
// Products with BF16 and quantised weights and attention over bf16 caches run on tiles for any number of rows, so that a row
// does not depend on the others. Their arithmetic is that of the tile instructions: for 32 values of k, sixteen pairs of products are
// accumulated in float32 in two sums, even and odd k, which are added to the result. Activations, and over bf16 caches
// queries and the weights of attention, are rounded to bfloat16. Everything else gives the same bits as the other instruction
// sets, also quantised weights with activations of two bytes: sums of bytes are exact.
//
// Tiles of bytes would take half as many products, but a scale per block of 32 leaves no use for their depth of 64, and
// scaling each block's sums costs more than widening its weights once for all rows.
#include <cpuid.h>
#include <immintrin.h>

#include "blocks.h"
#include "contracts.h"
#include "platform.h"

namespace bifolio {
namespace {

#include "simd/avx512.h"

#define BIFOLIO_OWN_FLOAT_TILE
#define BIFOLIO_FOUR_REGISTERS
#define BIFOLIO_INT_ROWS 8
#define BIFOLIO_OWN_QUANTIZE
#define BIFOLIO_OWN_EXPAND
#include "kernels/elementwise.h"
#include "kernels/packing.h"
#include "kernels/recurrence.h"
#include "kernels/rwkv.h"
#include "kernels/avx512_quantize.h"
#include "kernels/matmul_float.h"
#include "kernels/vnni.h"
#include "kernels/avx512_expand.h"

#include "simd/tile_config.h"

// The compiler does not know that tile instructions read memory: earlier stores must be complete.
static inline void finish_writes() { asm volatile("" ::: "memory"); }

static void configure(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

#include "kernels/matmul_int.h"

#include "kernels/avx512_widen.h"
#include "kernels/matmul_tiles.h"
#include "kernels/matmul_few_on_tiles.h"
#include "kernels/x86_attention.h"
#include "kernels/index_scores.h"
#define BIFOLIO_OWN_TILE_ATTENTION
#include "kernels/attention_tiles.h"
#include "kernels/attention_few_on_tiles.h"
#include "kernels/avx512_tile_attention.h"

int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 17;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  configure(config);
  alignas(64) uint8_t numbers[2048];  // not zeros, which cost less power and may be multiplied faster; 0.5 to 2 as bfloat16
  for (int i = 0; i < 2048; i += 2) numbers[i] = uint8_t(i * 73 >> 3), numbers[i + 1] = i % 6 ? 0x3f : 0xbf;
  finish_writes();
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_loadd(4, numbers, 64); _tile_loadd(5, numbers + 1024, 64);
  _tile_loadd(6, numbers + 512, 64); _tile_loadd(7, numbers + 256, 64);
  for (int64_t i = 0; i < rounds; ++i) {
    if (bytes) {
      _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
  return rounds * 4 * 16 * 16 * (bytes ? 128 : 64);
}

int score() {
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!avx512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((d & bf16) == 0 || (d & tile) == 0 || (d & int8) == 0) return 0;
  static const bool allowed = platform::allow_tiles();
  return allowed ? 30 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAmxKernels = BIFOLIO_KERNEL_TABLE("amx", true, matmul_tiles, attend_part_on_tiles);

}  // namespace bifolio
