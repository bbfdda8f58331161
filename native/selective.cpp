// The scans of layers with a state for each channel: of [key_size] with steps, inputs and outputs that depend on the token
// (selective, Mamba), or of one number with two gates that do (lru).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "recurrence.h"

namespace bifolio {
namespace {

constexpr int64_t kChannels = 128;  // of one unit: their states stay in the cache of a core

// The channels [begin, begin + count) of one sequence, token by token.
void scan_selective(Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out, int64_t sequence,
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

// 1 - e^x for x <= 0, without cancellation near 0; `power` is e^x.
inline float below_one(float x, float power) {
  const float near = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))));
  return x > -0.25f ? near : 1.0f - power;
}

void scan_units(Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out, int64_t sequence,
                int64_t begin, int64_t count, float* state) {
  float *steps = state + kChannels, *decays = steps + kChannels, *inputs = decays + kChannels;
  const float *own_decay = w.decay + begin, *bias = w.bias + begin;
  const int32_t read = use.reads[sequence];
  const bool continues = layer && read > 0;
  if (continues) std::memcpy(state, layer->states + read * w.channels + begin, size_t(count) * sizeof(float));
  for (int64_t token = use.starts[sequence]; token < use.starts[sequence + 1]; ++token) {
    const float *value = x.row(token) + begin, *recurrent = value + w.channels, *entering = recurrent + w.channels;
    for (int64_t i = 0; i < count; ++i) steps[i] = recurrent[i] + bias[i], inputs[i] = entering[i] + bias[w.channels + i];
    kernels().sigmoid_row(steps, count, steps);
    kernels().exp_row(steps, own_decay, count, decays);
    kernels().gate_row(inputs, value, count, inputs);
    if (!continues && token == use.starts[sequence]) {
      std::memcpy(state, inputs, size_t(count) * sizeof(float));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const float left = below_one(2 * steps[i] * own_decay[i], decays[i] * decays[i]);
        state[i] = decays[i] * state[i] + std::sqrt(left) * inputs[i];
      }
    }
    std::memcpy(out.row(token) + begin, state, size_t(count) * sizeof(float));
    if (layer && use.writes[token] > 0)
      std::memcpy(layer->states + use.writes[token] * w.channels + begin, state, size_t(count) * sizeof(float));
  }
}

}  // namespace

void scan(Member& m, Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out) {
  const int64_t pieces = (w.channels + kChannels - 1) / kChannels;
  m.split(use.num_sequences * pieces, 1, [&](int64_t first, int64_t last) {
    float* state = m.scratch().array<float>(size_t((w.key_size + 4) * kChannels));
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit % pieces * kChannels;
      (w.kind == RecurrenceKind::Lru ? scan_units : scan_selective)(x, w, use, layer, out, unit / pieces, begin, std::min(kChannels, w.channels - begin), state);
    }
  });
}

}  // namespace bifolio
