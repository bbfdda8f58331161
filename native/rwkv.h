// Recurrent layers of RWKV-7: mixes of each token with the one before it, and the states of the heads.
#pragma once

#include "recurrence.h"

namespace bifolio {

void shift_tokens(Member& m, Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out);
void rwkv(Member& m, Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out);

}  // namespace bifolio
