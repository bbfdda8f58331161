// Recurrent layers: the part between the input and the output projection, for nine kinds of layers.
#pragma once

#include "ops.h"

namespace bifolio {

enum class RecurrenceKind : int32_t { Conv = 0, Delta = 1, Mamba = 2, Selective = 3, Lightning = 4, Lru = 5, Keyed = 6, Shift = 7, Rwkv = 8 };

// The columns of an input row, and the computation, are described in kernels/operands.py (Recurrence).
struct RecurrenceWeights {
  RecurrenceKind kind;
  int64_t width, channels, heads, groups, key_size, value_size;
  const float* conv_weight;  // [width][channels]
  const float* conv_bias;    // [channels], may be null
  const float* open;         // [channels]  ones, the gate of a convolution without activation (lru); null elsewhere
  const float* decay;        // [heads]; selective: [key_size][value_size]; lru: [channels]; keyed: [heads][key_size]
  const float* bias;         // [heads]; lru: [2 * channels]; keyed: [heads][key_size]
  const float* skip;         // [heads], may be null; selective: [value_size]
  const NormWeights* norm;   // may be null
  bool norm_first;
  int64_t norm_groups;
  float least_step, most_step;  // limits of dt
  float rate_scale;             // of the delta rule
  float decay_bound;            // keyed: most of -log of a decay; 0: none
  bool tiled;  // head h is in group h % groups, not h / (heads / groups)
  const float* factors;   // shift: [mixes][channels]; rwkv: [3][heads][key_size]
  int64_t mixes, column;  // shift: rows of `factors`, and the first column in a window
  int64_t window;         // shift: numbers of a window
  bool mixes_values;      // rwkv

  int64_t keys() const { return groups * key_size; }
  int64_t inner() const { return heads * value_size; }
  bool keyed() const { return kind == RecurrenceKind::Keyed; }
  bool delta() const { return kind == RecurrenceKind::Delta || keyed(); }
  int64_t steps() const { return heads * (keyed() ? key_size : 1); }  // of a token: each gives a decay
  bool by_channel() const { return kind == RecurrenceKind::Selective || kind == RecurrenceKind::Lru; }
  bool only_convolves() const { return kind == RecurrenceKind::Conv || by_channel(); }
  int64_t in_features() const {
    if (by_channel() || kind == RecurrenceKind::Shift) return channels;
    if (kind == RecurrenceKind::Conv) return 3 * channels;
    if (kind == RecurrenceKind::Rwkv) return 4 * keys() + (mixes_values ? 4 : 2) * inner();
    const int64_t gates = delta() ? heads + steps() : kind == RecurrenceKind::Mamba ? heads : 0;
    return 2 * (inner() + keys()) + gates;
  }
  int64_t out_features() const {
    return kind == RecurrenceKind::Shift ? mixes * channels : only_convolves() ? channels : inner();
  }
  int64_t scan_features() const { return 3 * channels + (kind == RecurrenceKind::Selective ? 2 * key_size : 0); }  // of the input of scan
  int64_t group(int64_t head) const { return tiled ? head % groups : head / (heads / groups); }
};

// The states of one layer: windows [states][width - 1][channels], the oldest token first, and [states][heads][key_size][value_size].
struct StateLayer {
  float* windows;
  float* states;
};

// The states that a batch continues and writes; see StateUse in kernels/interface.py.
struct StateUse {
  int64_t num_sequences;
  const int32_t* starts;  // [s + 1]
  const int32_t* reads;   // [s]
  const int32_t* writes;  // [t]  -1: none
};

// layer: null: every sequence continues the empty state, and none is written.
void recur(Member& m, Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out,
           Workspace& workspace);

// The scan of a layer by channel, behind its convolution, from rows |z|x|dt|b|c| (selective) or |x|r|i| (lru).
void scan(Member& m, Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out);

}  // namespace bifolio
