// x86 with AVX-512 (F, BW, VL, DQ) and VNNI.
#include <immintrin.h>

#include "blocks.h"
#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx512.h"

#define BIFOLIO_OWN_FLOAT_TILE
#define BIFOLIO_FOUR_REGISTERS
#define BIFOLIO_INT_ROWS 8
#define BIFOLIO_AVX512_INT_TILE
#define BIFOLIO_FEW_ROWS_BLOCKS 32  // half of the first cache level of many servers
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
#include "kernels/matmul_int.h"
#include "kernels/x86_attention.h"
#include "kernels/index_scores.h"

int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 19;
  __m512 sums[12] = {};
  __m512i totals[12] = {};
  const __m512 factor = _mm512_set1_ps(0.5f);
  const __m512i ones = _mm512_set1_epi8(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      if (bytes) {
        totals[j] = _mm512_dpbusd_epi32(totals[j], ones, ones);
        asm volatile("" : "+v"(totals[j]));
      } else {
        sums[j] = _mm512_fmadd_ps(sums[j], factor, factor);
        asm volatile("" : "+v"(sums[j]));
      }
    }
  }
  return rounds * 12 * (bytes ? 128 : 32);
}

int score() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  return usable ? 20 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAvx512Kernels = BIFOLIO_KERNEL_TABLE("avx512", false, matmul, attend_part);

}  // namespace bifolio
