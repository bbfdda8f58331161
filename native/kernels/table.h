// The table that an instruction set exports, after its namespace holds all kernels.
#pragma once

#define BIFOLIO_KERNEL_TABLE(NAME)                                                                              \
  {                                                                                                             \
    NAME, score, norm_row, add_row, act_row, act_mul_row, softcap_row, argmax_row, quantize_row, matmul, \
        store_kv_row, attend_span, merge_span                                                                   \
  }
