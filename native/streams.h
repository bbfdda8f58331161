// Operations on several residual streams of a token.
//
// The streams of a token lie side by side in one row: |<- stream 0 ->|<- stream 1 ->| ... |, each `size` numbers.
#pragma once

#include "ops.h"

namespace bifolio {

// out_i = sum over j of coefficients[i * streams + j] * x_j
void mix_streams(Member& m, Rows x, Rows coefficients, int64_t streams, Rows out);

// out_i = x_i + coefficients[i] * y; a stride of 0: the same coefficients for all rows
void add_to_streams(Member& m, Rows x, Rows y, Rows coefficients, Rows out);

// The streams of y, scaled to the root mean square of x.
void match_streams(Member& m, Rows x, Rows y, Rows out);

}  // namespace bifolio
