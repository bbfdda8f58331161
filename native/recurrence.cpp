#include "recurrence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa.h"
#include "rwkv.h"

namespace bifolio {
namespace {

constexpr float kUnitEps = 1e-6f;  // of the norms of queries and keys in the delta rule

// One call: the operands, and the rows between the phases. Each phase is one loop over units that write disjoint places.
class Recurring {
 public:
  Recurring(Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out, Workspace& workspace)
      : x_(x), w_(weights), use_(use), layer_(layer), out_(out) {
    sequence_of_.resize(size_t(x.count));
    for (int64_t i = 0; i < use.num_sequences; ++i)
      for (int64_t token = use.starts[i]; token < use.starts[i + 1]; ++token) sequence_of_[size_t(token)] = int32_t(i);
    if (w_.only_convolves()) return;
    stride_ = round_up(w_.channels, 16);
    mixed_ = workspace.convolved.array<float>(size_t(x.count * stride_));
    gate_stride_ = w_.steps() + w_.heads;
    gates_ = workspace.gates.array<float>(size_t(x.count * gate_stride_));
  }

  void run(Member& m) {
    convolve(m);
    if (!w_.only_convolves()) {
      scan(m);
      each_row(m, x_.count, 8 * out_.width, [&](int64_t token) { finish(token); });
    }
    if (layer_) m.split(use_.num_sequences, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) write_windows(i);
    });
  }

 private:
  // -- columns of an input row ----------------------------------------------------------------------------------------------
  bool has_keys_last() const { return w_.kind == RecurrenceKind::Mamba || w_.kind == RecurrenceKind::Lightning; }
  int64_t first_channel() const { return has_keys_last() ? w_.inner() : 0; }
  const float* channels(int64_t token) const { return x_.row(token) + first_channel(); }
  const float* gate(int64_t token) const { return x_.row(token) + (w_.delta() ? w_.channels : 0); }  // z
  const float* head_gates(int64_t token) const { return x_.row(token) + w_.channels + w_.inner(); }  // beta and a, or dt

  // -- convolution ----------------------------------------------------------------------------------------------------------
  const float* window(int64_t sequence) const {
    const int32_t state = use_.reads[sequence];
    return layer_ && state > 0 ? layer_->windows + state * (w_.width - 1) * w_.channels : nullptr;
  }

  // Channel `channel` of the input `back` tokens before `token`: in the batch, in the state, or null.
  void find_input(int64_t token, int64_t back, int64_t channel, const float*& input, const float*& factor) const {
    const int64_t sequence = sequence_of_[size_t(token)], at = token - back, before = use_.starts[sequence] - at;
    input = factor = nullptr;
    if (before <= 0) {
      input = channels(at) + channel;
      if (w_.kind == RecurrenceKind::Conv) factor = input + 2 * w_.channels;
    } else if (const float* stored = window(sequence)) {
      input = stored + (w_.width - 1 - before) * w_.channels + channel;
    }
  }

  void convolve_part(int64_t token, int64_t begin, int64_t size, float* out) const {
    ConvolutionRow row{};
    row.width = w_.width, row.size = size, row.weight = w_.conv_weight + begin, row.stride = w_.channels;
    row.bias = w_.conv_bias ? w_.conv_bias + begin : nullptr;
    row.gate = w_.kind == RecurrenceKind::Conv ? x_.row(token) + w_.channels + begin : w_.open ? w_.open + begin : nullptr;
    row.out = out;
    for (int64_t tap = 0; tap < w_.width; ++tap) find_input(token, w_.width - 1 - tap, begin, row.inputs[tap], row.factors[tap]);
    kernels().convolve_row(row);
  }

  // Units of a token: pieces of channels (conv); or the vectors of its groups and heads, and its gates, in pieces if they are keyed.
  void convolve(Member& m) const {
    if (w_.only_convolves()) {
      constexpr int64_t piece = 512;
      const int64_t pieces = (w_.channels + piece - 1) / piece;
      m.split(x_.count * pieces, 8, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const int64_t token = unit / pieces, channel = unit % pieces * piece;
          convolve_part(token, channel, std::min(piece, w_.channels - channel), out_.row(token) + channel);
        }
      });
      return;
    }
    const int64_t units = 2 * w_.groups + w_.heads + (w_.keyed() ? w_.heads : 1), average = w_.channels / units + 1;
    m.split(x_.count * units, std::max<int64_t>(1, 2048 / average), [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) convolve_unit(unit / units, unit % units);
    });
  }

  void convolve_unit(int64_t token, int64_t unit) const {
    const int64_t gates = unit - 2 * w_.groups - w_.heads;
    if (gates >= 0) return w_.keyed() ? find_keyed_gates(token, gates) : find_gates(token);
    const bool delta = w_.delta(), is_key = unit < 2 * w_.groups;
    const int64_t value = unit - 2 * w_.groups;
    const int64_t begin = is_key ? (delta ? 0 : w_.inner()) + unit * w_.key_size : (delta ? 2 * w_.keys() : 0) + value * w_.value_size;
    float* out = mixed(token) + begin;
    convolve_part(token, begin, is_key ? w_.key_size : w_.value_size, out);
    if (!delta || !is_key) return;
    kernels().unit_row(out, w_.key_size, kUnitEps, unit < w_.groups ? 1.0f / std::sqrt(float(w_.key_size)) : 1.0f);
  }

  float* mixed(int64_t token) const { return mixed_ + token * stride_; }
  float* decays(int64_t token) const { return gates_ + token * gate_stride_; }
  float* rates(int64_t token) const { return decays(token) + w_.steps(); }

  void find_gates(int64_t token) const {
    if (w_.kind == RecurrenceKind::Lightning) {
      std::fill_n(rates(token), w_.heads, 1.0f);
      return kernels().exp_row(rates(token), w_.decay, w_.heads, decays(token));
    }
    const float* given = head_gates(token);
    if (w_.kind == RecurrenceKind::Mamba) {
      kernels().decay_row(given, w_.bias, w_.decay, w_.heads, w_.least_step, w_.most_step, rates(token), decays(token));
      return;
    }
    kernels().decay_row(given + w_.heads, w_.bias, w_.decay, w_.heads, 0.0f, INFINITY, rates(token), decays(token));
    find_rates(given, w_.heads, rates(token));
  }

  // The rate of a head, and the decays of its keys; the steps give way to them.
  void find_keyed_gates(int64_t token, int64_t head) const {
    const float* given = head_gates(token);
    const int64_t first = head * w_.key_size;
    float* own = decays(token) + first;
    const float *steps = given + w_.heads + first, *bias = w_.bias + first, *decay = w_.decay + first;
    if (w_.decay_bound > 0.0f) {
      kernels().bounded_decay_row(steps, bias, decay, w_.key_size, w_.decay_bound, own);
    } else {
      kernels().decay_row(steps, bias, decay, w_.key_size, 0.0f, INFINITY, own, own);
    }
    find_rates(given + head, 1, rates(token) + head);
  }

  void find_rates(const float* given, int64_t count, float* rates) const {
    kernels().sigmoid_row(given, count, rates);
    for (int64_t i = 0; i < count; ++i) rates[i] *= w_.rate_scale;
  }

  // -- the state ------------------------------------------------------------------------------------------------------------
  int64_t state_size() const { return w_.key_size * w_.value_size; }

  void scan(Member& m) const {
    const int64_t tiles = (w_.value_size + kStateColumns - 1) / kStateColumns, per_sequence = w_.heads * tiles;
    const int64_t work = std::max<int64_t>(1, x_.count / std::max<int64_t>(1, use_.num_sequences)) * w_.key_size * kStateColumns;
    const int64_t units = use_.num_sequences * per_sequence;
    // Some heads in one piece, where there are many: the state of a unit is prefetched by the unit before it.
    const int64_t piece = std::max<int64_t>({1, 16384 / work, std::min(65536 / work, units / (4 * m.size))});
    m.split(units, piece, [&](int64_t begin, int64_t end) {
      float* tile = m.scratch().array<float>(size_t(w_.key_size * kStateColumns));
      for (int64_t unit = begin; unit < end; ++unit) {
        const auto head = [&](int64_t i) { return i % per_sequence / tiles; };
        const auto column = [&](int64_t i) { return i % tiles * kStateColumns; };
        const int64_t next = unit + 1 < end ? unit + 1 : unit;
        scan_unit(unit / per_sequence, head(unit), column(unit), tile, stored(next / per_sequence, head(next), column(next)));
      }
    });
  }

  // The columns of a state that a sequence continues; null: it has none.
  const float* stored(int64_t sequence, int64_t head, int64_t column) const {
    if (!layer_ || use_.reads[sequence] <= 0) return nullptr;
    return layer_->states + (use_.reads[sequence] * w_.heads + head) * state_size() + column;
  }

  void scan_unit(int64_t sequence, int64_t head, int64_t column, float* tile, const float* ahead) const {
    const int64_t first = use_.starts[sequence], tokens = use_.starts[sequence + 1] - first;
    if (tokens == 0) return;
    const bool delta = w_.delta();
    const int64_t group = w_.group(head) * w_.key_size, keys = w_.keys(), inner = w_.inner();
    const float* row = mixed(first);
    HeadScan scan{};
    scan.delta = delta, scan.keyed = w_.keyed(), scan.tokens = tokens, scan.key_size = w_.key_size, scan.value_size = w_.value_size;
    scan.queries = row + (delta ? 0 : inner + keys) + group;
    scan.keys = row + (delta ? keys : inner) + group;
    scan.values = row + (delta ? 2 * keys : 0) + head * w_.value_size;
    scan.stride = stride_;
    scan.decays = decays(first) + head * (w_.steps() / w_.heads), scan.rates = rates(first) + head, scan.gate_stride = gate_stride_;
    scan.states = layer_ ? layer_->states + head * state_size() : nullptr, scan.state_stride = w_.heads * state_size();
    scan.read = use_.reads[sequence], scan.writes = use_.writes + first;
    scan.column = column, scan.columns = std::min(kStateColumns, w_.value_size - column);
    scan.out = out_.row(first) + head * w_.value_size, scan.out_stride = out_.stride;
    scan.tile = tile, scan.ahead = ahead;
    kernels().scan_columns(scan);
  }

  // -- the output -----------------------------------------------------------------------------------------------------------
  void finish(int64_t token) const {
    const KernelTable& isa = kernels();
    float* y = out_.row(token);
    const int64_t size = out_.width;
    if (w_.skip)
      for (int64_t head = 0, i = 0; head < w_.heads; ++head)
        for (int64_t end = i + w_.value_size; i < end; ++i) y[i] += w_.skip[head] * mixed(token)[i];
    if (!w_.norm_first || !w_.norm) close_gate(token, y);
    if (!w_.norm) return;
    const int64_t parts = w_.delta() ? w_.heads : w_.norm_groups, part = size / parts;
    NormWeights norm = *w_.norm;
    norm.size = part;
    for (int64_t i = 0; i < parts; ++i) {
      if (w_.norm->size == size) norm.weight = w_.norm->weight + i * part;
      isa.norm_row(y + i * part, norm, y + i * part);
    }
    if (w_.norm_first) close_gate(token, y);
  }

  void close_gate(int64_t token, float* y) const {
    if (w_.keyed() || w_.kind == RecurrenceKind::Lightning) return kernels().gate_row(gate(token), y, out_.width, y);
    kernels().act_mul_row(gate(token), y, out_.width, Activation::Silu, y);
  }

  // The window after a token, for each write of a sequence. The window that is read may be one of those written: it is the last.
  void write_windows(int64_t sequence) const {
    int64_t own = -1;
    for (int64_t token = use_.starts[sequence]; token < use_.starts[sequence + 1]; ++token) {
      if (use_.writes[token] <= 0) continue;
      if (use_.writes[token] == use_.reads[sequence]) {
        own = token;
      } else {
        write_window(token);
      }
    }
    if (own >= 0) write_window(own);
  }

  void write_window(int64_t token) const {
    float* target = layer_->windows + use_.writes[token] * (w_.width - 1) * w_.channels;
    for (int64_t row = 0; row + 1 < w_.width; ++row, target += w_.channels) {  // ascending: a window may move inside itself
      const float *input, *factor;
      find_input(token, w_.width - 2 - row, 0, input, factor);
      if (!input) {
        std::memset(target, 0, size_t(w_.channels) * sizeof(float));
      } else if (factor) {
        for (int64_t i = 0; i < w_.channels; ++i) target[i] = input[i] * factor[i];
      } else {
        std::memmove(target, input, size_t(w_.channels) * sizeof(float));
      }
    }
  }

  Rows x_;
  const RecurrenceWeights& w_;
  const StateUse& use_;
  const StateLayer* layer_;
  Rows out_;
  int64_t stride_ = 0, gate_stride_ = 0;
  float *mixed_ = nullptr, *gates_ = nullptr;
  std::vector<int32_t> sequence_of_;  // [t]
};

}  // namespace

void recur(Member& m, Rows x, const RecurrenceWeights& weights, const StateUse& use, const StateLayer* layer, Rows out,
           Workspace& workspace) {
  if (weights.kind == RecurrenceKind::Shift) return shift_tokens(m, x, weights, use, layer, out);
  if (weights.kind == RecurrenceKind::Rwkv) return rwkv(m, x, weights, use, layer, out);
  Recurring(x, weights, use, layer, out, workspace).run(m);
}

}  // namespace bifolio
