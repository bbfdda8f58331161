// The scan of selective layers (Mamba): a state of [key_size] for each channel, whose step, input and output depend on the token.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "recurrence.h"

namespace bifolio {
namespace {

constexpr int64_t kChannels = 128;  // of one unit: their states stay in the cache of a core

// The channels [begin, begin + count) of one sequence, token by token.
void scan_channels(Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out, int64_t sequence,
                   int64_t begin, int64_t count, float* state) {
  const int64_t size = w.key_size * w.channels;
  float *steps = state + w.key_size * kChannels, *decays = steps + kChannels, *inputs = decays + kChannels, *none = inputs + kChannels;
  const int32_t read = use.reads[sequence];
  for (int64_t k = 0; k < w.key_size; ++k) {
    if (layer && read > 0) {
      std::memcpy(state + k * kChannels, layer->states + read * size + k * w.channels + begin, size_t(count) * sizeof(float));
    } else {
      std::fill_n(state + k * kChannels, count, 0.0f);
    }
  }
  std::fill_n(none, count, 0.0f);
  for (int64_t token = use.starts[sequence]; token < use.starts[sequence + 1]; ++token) {
    const float *row = x.row(token), *value = row + w.channels + begin, *step = value + w.channels;
    const float *b = row + 3 * w.channels, *c = b + w.key_size;
    float* y = out.row(token) + begin;
    for (int64_t i = 0; i < count; ++i) y[i] = w.skip[begin + i] * value[i];
    kernels().decay_row(step, none, w.decay + begin, count, 0.0f, INFINITY, steps, decays);
    for (int64_t i = 0; i < count; ++i) inputs[i] = steps[i] * value[i];
    for (int64_t k = 0; k < w.key_size; ++k) {
      if (k > 0) kernels().exp_row(steps, w.decay + k * w.channels + begin, count, decays);
      float* __restrict own = state + k * kChannels;
      const float input = b[k], output = c[k];
      for (int64_t i = 0; i < count; ++i) {
        own[i] = decays[i] * own[i] + input * inputs[i];
        y[i] += output * own[i];
      }
    }
    kernels().act_mul_row(row + begin, y, count, Activation::Silu, y);
    if (!layer || use.writes[token] <= 0) continue;
    float* target = layer->states + use.writes[token] * size + begin;
    for (int64_t k = 0; k < w.key_size; ++k) std::memcpy(target + k * w.channels, state + k * kChannels, size_t(count) * sizeof(float));
  }
}

}  // namespace

void scan(Member& m, Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out) {
  const int64_t pieces = (w.channels + kChannels - 1) / kChannels;
  m.split(use.num_sequences * pieces, 1, [&](int64_t first, int64_t last) {
    float* state = m.scratch().array<float>(size_t((w.key_size + 4) * kChannels));
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit % pieces * kChannels;
      scan_channels(x, w, use, layer, out, unit / pieces, begin, std::min(kChannels, w.channels - begin), state);
    }
  });
}

}  // namespace bifolio
