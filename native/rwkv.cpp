#include "rwkv.h"

#include <algorithm>
#include <cstring>

#include "isa.h"

namespace bifolio {
namespace {

constexpr int64_t kChannels = 256;  // of one unit of a shift

// Some channels of the tokens of a sequence, in order: the window that is read may be one of those written.
void shift_sequence(Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out, int64_t sequence,
                    int64_t begin, int64_t count) {
  const int32_t read = use.reads[sequence];
  const int64_t at = w.column + begin;
  const float* before = layer && read > 0 ? layer->windows + read * w.window + at : nullptr;
  for (int64_t token = use.starts[sequence]; token < use.starts[sequence + 1]; ++token) {
    const float* own = x.row(token) + begin;
    for (int64_t mix = 0; mix < w.mixes; ++mix)
      kernels().mix_row(own, before, w.factors + mix * w.channels + begin, count, out.row(token) + mix * w.channels + begin);
    if (layer && use.writes[token] > 0)
      std::memcpy(layer->windows + use.writes[token] * w.window + at, own, size_t(count) * sizeof(float));
    before = own;
  }
}

void scan_head(Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out, int64_t sequence, int64_t head,
               float* scratch) {
  const int64_t first = use.starts[sequence], keys = head * w.key_size, values = head * w.value_size, inner = w.inner();
  const int64_t all = w.heads * w.key_size, size = w.key_size * w.value_size;
  RwkvHead h{};
  h.tokens = use.starts[sequence + 1] - first, h.key_size = w.key_size, h.value_size = w.value_size;
  if (h.tokens == 0) return;
  h.row = x.row(first), h.stride = x.stride;
  h.query = keys, h.decay = all + keys, h.key = 2 * all + keys, h.value = 3 * all + values, h.rate = 3 * all + inner + keys;
  h.gate = 4 * all + inner + values, h.amount = h.gate + inner, h.first = h.amount + inner, h.mixes = w.mixes_values;
  for (int64_t i = 0; i < 3; ++i) h.factors[i] = w.factors + i * all + keys;
  if (w.norm) {
    h.norm = *w.norm, h.norm.size = w.value_size, h.norm.weight += values;
    if (h.norm.bias) h.norm.bias += values;
  }
  h.states = layer ? layer->states + head * size : nullptr, h.state_stride = w.heads * size;
  h.read = use.reads[sequence], h.writes = use.writes + first;
  h.out = out.row(first) + values, h.out_stride = out.stride, h.scratch = scratch;
  kernels().rwkv_head(h);
}

}  // namespace

void shift_tokens(Member& m, Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out) {
  const int64_t pieces = (w.channels + kChannels - 1) / kChannels;
  const int64_t tokens = std::max<int64_t>(1, x.count / std::max<int64_t>(1, use.num_sequences));
  m.split(use.num_sequences * pieces, std::max<int64_t>(1, 8192 / (kChannels * w.mixes * tokens)), [&](int64_t first, int64_t last) {
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t begin = unit % pieces * kChannels;
      shift_sequence(x, w, use, layer, out, unit / pieces, begin, std::min(kChannels, w.channels - begin));
    }
  });
}

void rwkv(Member& m, Rows x, const RecurrenceWeights& w, const StateUse& use, const StateLayer* layer, Rows out) {
  const int64_t units = use.num_sequences * w.heads, size = w.key_size * w.value_size;
  const int64_t work = std::max<int64_t>(1, x.count / std::max<int64_t>(1, use.num_sequences)) * size;
  const int64_t piece = std::max<int64_t>(1, std::min<int64_t>(16384 / work, units / (2 * m.size)));
  m.split(units, piece, [&](int64_t first, int64_t last) {
    float* scratch = m.scratch().array<float>(size_t(size + 4 * round_up(w.key_size, 16) + 2 * round_up(w.value_size, 16)));
    for (int64_t unit = first; unit < last; ++unit) scan_head(x, w, use, layer, out, unit / w.heads, unit % w.heads, scratch);
  });
}

}  // namespace bifolio
