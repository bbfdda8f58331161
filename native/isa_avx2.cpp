// x86 with AVX2, FMA and F16C (since 2013).
#include <immintrin.h>

#include "blocks.h"
#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx2.h"

#define BIFOLIO_FLOAT_ROWS 6
#define BIFOLIO_FEW_ROWS_BLOCKS 32  // they and sixteen rows fit into 32 KB, the first cache level of most desktops
#define BIFOLIO_OWN_EXPAND
#include "kernels/elementwise.h"
#include "kernels/packing.h"
#include "kernels/recurrence.h"
#include "kernels/rwkv.h"
#include "kernels/matmul_float.h"

#include "kernels/avx2_dots.h"
#include "kernels/avx2_expand.h"
#include "kernels/matmul_int.h"
#include "kernels/x86_attention.h"
#include "kernels/index_scores.h"

int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 19;
  __m256 sums[10] = {};
  __m256i totals[10] = {};
  const __m256 factor = _mm256_set1_ps(0.5f);
  const __m256i ones = _mm256_set1_epi8(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 10
    for (int j = 0; j < 10; ++j) {
      if (bytes) {
        totals[j] = _mm256_add_epi32(totals[j], dot_unsigned(_mm256_xor_si256(ones, totals[j]), ones));
        asm volatile("" : "+x"(totals[j]));
      } else {
        sums[j] = _mm256_fmadd_ps(sums[j], factor, factor);
        asm volatile("" : "+x"(sums[j]));
      }
    }
  }
  return rounds * 10 * (bytes ? 64 : 16);
}

int score() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? 10 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAvx2Kernels = BIFOLIO_KERNEL_TABLE("avx2", false, matmul, attend_part);

}  // namespace bifolio
