// Operations on several residual streams of a token, on inputs of its layers, and on sparse activations.
//
// The streams of a token lie side by side in one row: |<- stream 0 ->|<- stream 1 ->| ... |, each `size` numbers.
#pragma once

#include "ops.h"

namespace bifolio {

// (x + y) * scale
void add_scaled(Member& m, Rows x, Rows y, float scale, Rows out);

// Rows of a table; ids past its last row read row 0.
void embed_known(Member& m, const EmbeddingTable& table, const int32_t* ids, float scale, Rows out);

// The norm of each group of weights.size columns.
void norm_groups(Member& m, Rows x, const NormWeights& weights, Rows out);

// The columns [start, start + out.width) of x, times `factors` if it is not null.
void columns(Member& m, Rows x, int64_t start, const float* factors, Rows out);

// act(x) times the columns of `inputs` from `start` on.
void act_gate(Member& m, Rows x, Rows inputs, int64_t start, Activation activation, Rows out);

// act(max(gate - cutoff, 0)) * up, where the cutoff of a row is the mean of its gates plus `deviations` standard deviations.
void sparse_act_mul(Member& m, Rows x, float deviations, Activation activation, Rows out);

// out_i = sum over j of coefficients[i * streams + j] * x_j
void mix_streams(Member& m, Rows x, Rows coefficients, int64_t streams, Rows out);

// out_i = x_i + coefficients[i] * (y - x_active)
void correct_streams(Member& m, Rows x, Rows y, Rows coefficients, int64_t active, Rows out);

// out_i = x_i + y for the streams from `first` on; the others are copied.
void add_to_streams(Member& m, Rows x, Rows y, int64_t first, Rows out);

// x, and the streams of y scaled to the root mean square of x, side by side.
void spread_streams(Member& m, Rows x, Rows y, Rows out);

// The mean of x and of the streams of y scaled to the root mean square of x.
void merge_streams(Member& m, Rows x, Rows y, Rows out);

}  // namespace bifolio
