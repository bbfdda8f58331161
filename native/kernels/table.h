// The table that an instruction set exports, after its namespace holds all kernels.
#pragma once

#define BIFOLIO_KERNEL_TABLE(NAME, HAS_TILES, MATMUL, ATTEND)                                                          \
  {                                                                                                                    \
    NAME, score, HAS_TILES, norm_row, add_row, act_row, act_mul_row, gate_row, softcap_row, weights_row,                   \
        quantize_row, round_row, MATMUL, store_kv_row, ATTEND, peak_loop, convolve_row, unit_row, decay_row,              \
        bounded_decay_row, sigmoid_row, exp_row, scan_columns, mix_row, rwkv_head, merge_span, score_index, kPackRows,    \
        kDecoders, pack_blocks                                                                                         \
  }
