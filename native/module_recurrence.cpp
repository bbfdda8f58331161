// Recurrent layers and their states as Python hands them over, and their operation.
#include <cmath>

#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

constexpr int64_t kMaxStateSize = 1 << 12;  // of keys and of values

const float* optional_vector(const char* name, nb::handle value, int64_t length, std::vector<Vector>& keep) {
  if (value.is_none()) return nullptr;
  const Vector& array = keep.emplace_back(vector(name, value));
  require_length(name, array, length);
  return array.data();
}

const float* needed_vector(const char* name, nb::handle value, int64_t length, std::vector<Vector>& keep) {
  require(!value.is_none(), name, " is None and must have ", length, " elements");
  return optional_vector(name, value, length, keep);
}

Register record_recur(ProgramHolder& self, Register x, int64_t layer, const RecurrenceHolder& holder) {
  const RecurrenceWeights& weights = self.hold(holder).weights;
  self.require_register("x", x, weights.in_features());
  self.require_tokens("x", x);
  require_between("layer", layer, 0, kMaxLayers);
  self.recurrences.emplace_back(layer, &weights);
  return self.record("recur", {x}, self.program.like(x, weights.out_features()), [=, &weights](const Call& c) {
    const StateLayer* own = c.step.state_layers ? &(*c.step.state_layers)[size_t(layer)] : nullptr;
    recur(c.m, c.in(), weights, c.step.states, own, c.out(), c.workspace);
  });
}

Register record_scan(ProgramHolder& self, Register x, int64_t layer, const RecurrenceHolder& holder) {
  const RecurrenceWeights& weights = self.hold(holder).weights;
  require(weights.by_channel(), "scan takes a recurrence by channel");
  self.require_register("x", x, weights.scan_features());
  self.require_tokens("x", x);
  require_between("layer", layer, 0, kMaxLayers);
  self.recurrences.emplace_back(layer, &weights);
  return self.record("scan", {x}, self.program.like(x, weights.channels), [=, &weights](const Call& c) {
    const StateLayer* own = c.step.state_layers ? &(*c.step.state_layers)[size_t(layer)] : nullptr;
    scan(c.m, c.in(), weights, c.step.states, own, c.out());
  });
}

}  // namespace

RecurrenceHolder::RecurrenceHolder(int kind, int64_t width, int64_t channels, int64_t heads, int64_t groups, int64_t key_size,
                                   int64_t value_size, nb::handle weight_array, nb::handle conv_bias, nb::handle decay, nb::handle bias,
                                   nb::handle skip, const NormHolder* norm, bool norm_first, int64_t norm_groups, float least_step,
                                   float most_step, bool tiled, float rate_scale, float decay_bound)
    : weights{} {
  require_between("kind", kind, 0, 6);
  require_between("width", width, 1, kMaxTaps);
  require_between("channels", channels, 1, kMaxWidth / 3);
  const Input given = input("conv_weight", weight_array);
  require_shape("conv_weight", given, channels, width);
  RecurrenceWeights& w = weights;
  w.kind = RecurrenceKind(kind), w.width = width, w.channels = channels;
  conv_weight.resize(size_t(width * channels));
  for (int64_t channel = 0; channel < channels; ++channel)
    for (int64_t tap = 0; tap < width; ++tap) conv_weight[size_t(tap * channels + channel)] = given.data()[channel * width + tap];
  vectors.reserve(4);
  w.conv_weight = conv_weight.data();
  w.conv_bias = optional_vector("conv_bias", conv_bias, channels, vectors);
  if (w.kind == RecurrenceKind::Conv) return;
  require_between("heads", heads, 1, kMaxHeads);
  require_between("groups", groups, 1, heads);
  require(heads % groups == 0, "heads is ", heads, " and must be a multiple of groups, ", groups);
  require_between("key_size", key_size, 1, kMaxStateSize);
  if (w.kind == RecurrenceKind::Selective) {
    require(heads == 1 && value_size == channels, "a selective recurrence must have one head of as many values as channels");
    require_between("the width of a row", 3 * channels + 2 * key_size, 1, kMaxWidth);
    w.heads = w.groups = 1, w.key_size = key_size, w.value_size = value_size;
    w.decay = needed_vector("decay", decay, key_size * channels, vectors);
    w.skip = needed_vector("skip", skip, channels, vectors);
    return;
  }
  if (w.kind == RecurrenceKind::Lru) {
    require(heads == 1 && key_size == 1 && value_size == channels, "a linear unit must have one head of as many values as channels, and one key");
    w.heads = w.groups = 1, w.key_size = 1, w.value_size = value_size;
    w.decay = needed_vector("decay", decay, channels, vectors);
    w.bias = needed_vector("bias", bias, 2 * channels, vectors);
    open.assign(size_t(channels), 1.0f);
    w.open = open.data();
    return;
  }
  require_between("value_size", value_size, 1, kMaxStateSize);
  w.heads = heads, w.groups = groups, w.key_size = key_size, w.value_size = value_size, w.tiled = tiled;
  require(channels == 2 * w.keys() + w.inner(), "channels is ", channels, " and must be ", 2 * w.keys() + w.inner(),
          ": those of two keys for each group and of a value for each head");
  require_between("the width of a row", w.in_features(), 1, kMaxWidth);
  w.decay = needed_vector("decay", decay, heads, vectors);
  if (w.kind != RecurrenceKind::Lightning) w.bias = needed_vector("bias", bias, w.steps(), vectors);
  if (w.keyed()) {
    for (int64_t step = 0; step < w.steps(); ++step) decays.push_back(w.decay[step / key_size]);
    w.decay = decays.data();
  }
  w.skip = optional_vector("skip", skip, heads, vectors);
  require(!w.skip || w.kind == RecurrenceKind::Mamba, "skip must be None for the delta rule and for lightning attention");
  require(least_step >= 0.0f && least_step <= most_step, "the limits of steps are ", least_step, " and ", most_step,
          ": the first must be at least 0 and not above the second");
  require_between("norm_groups", norm_groups, 1, heads);
  require(w.inner() % norm_groups == 0, "norm_groups is ", norm_groups, " and must divide ", w.inner(), ", the outputs of a token");
  if (norm) {
    const int64_t size = w.delta() ? value_size : w.inner();
    require(norm->norm.size == size, "norm has ", norm->norm.size, " elements and must have ", size);
    require(!norm->norm.bias && !norm->norm.centered, "norm must be an RMS norm without a bias");
    w.norm = &norm->norm;
  }
  require(std::isfinite(rate_scale) && rate_scale > 0.0f, "rate_scale is ", rate_scale, " and must be a positive number");
  require(std::isfinite(decay_bound) && decay_bound >= 0.0f, "decay_bound is ", decay_bound, " and must be a number of at least 0");
  require(decay_bound == 0.0f || w.keyed(), "decay_bound must be 0 for recurrences that are not keyed");
  w.rate_scale = rate_scale, w.decay_bound = decay_bound;
  w.norm_first = norm_first, w.norm_groups = norm_groups, w.least_step = least_step, w.most_step = most_step;
}

// A mix of each token with the one before it, for each row of the factors.
RecurrenceHolder* make_shift(nb::handle factor_array, int64_t column, int64_t window) {
  const Input factors = input("factors", factor_array);
  auto made = std::make_unique<RecurrenceHolder>();
  RecurrenceWeights& w = made->weights;
  w.kind = RecurrenceKind::Shift, w.width = 2, w.mixes = rows_in(factors), w.channels = width_of(factors);
  require_between("the number of mixes", w.mixes, 1, 64);
  require_between("the width of a row", w.mixes * w.channels, 1, kMaxWidth);
  require_between("window", window, w.channels, kMaxWidth);
  require_between("column", column, 0, window - w.channels);
  w.column = column, w.window = window;
  made->conv_weight.assign(factors.data(), factors.data() + w.mixes * w.channels);
  w.factors = made->conv_weight.data();
  return made.release();
}

RecurrenceHolder* make_rwkv(int64_t heads, int64_t key_size, int64_t value_size, int64_t channels, nb::handle factors, const NormHolder* norm,
                            bool mixes_values) {
  require_between("heads", heads, 1, kMaxHeads);
  require_between("key_size", key_size, 1, kMaxStateSize);
  require_between("value_size", value_size, 1, kMaxStateSize);
  require_between("channels", channels, 1, kMaxWidth);
  auto made = std::make_unique<RecurrenceHolder>();
  RecurrenceWeights& w = made->weights;
  w.kind = RecurrenceKind::Rwkv, w.width = 2, w.channels = channels, w.mixes_values = mixes_values;
  w.heads = w.groups = heads, w.key_size = key_size, w.value_size = value_size;
  require_between("the width of a row", w.in_features(), 1, kMaxWidth);
  w.factors = needed_vector("factors", factors, 3 * w.keys(), made->vectors);
  if (norm) {
    require(norm->norm.size == w.inner(), "norm has ", norm->norm.size, " elements and must have ", w.inner());
    require(norm->norm.centered, "norm must be a layer norm");
    w.norm = &norm->norm;
  }
  return made.release();
}

StatesHolder::StatesHolder(nb::list window_arrays, nb::list state_arrays) {
  require(window_arrays.size() > 0, "windows has no layers and must have at least one");
  require(window_arrays.size() == state_arrays.size(), "states has ", state_arrays.size(), " layers and must have ", window_arrays.size(),
          ", as windows has");
  for (size_t i = 0; i < window_arrays.size(); ++i) {
    const auto& window = windows.emplace_back(array_of<float, 3>("windows", window_arrays[i]));
    const auto& state = states.emplace_back(array_of<float, 4>("states", state_arrays[i]));
    if (i == 0) num_states = int64_t(window.shape(0));
    require(num_states > 0 && int64_t(window.shape(0)) == num_states && int64_t(state.shape(0)) == num_states,
            "every layer must have as many states, at least one; layer ", i, " has ", window.shape(0), " windows and ", state.shape(0),
            " states, and layer 0 has ", num_states);
    layers.push_back({window.data(), state.data()});
  }
}

void StatesHolder::require_layer(int64_t index, const RecurrenceWeights& w) const {
  require_between("layer", index, 0, int64_t(layers.size()) - 1);
  const auto& window = windows[size_t(index)];
  if (w.kind == RecurrenceKind::Shift) {
    require(int64_t(window.shape(1)) == 1 && int64_t(window.shape(2)) == w.window, "the windows of layer ", index, " have the shape (",
            window.shape(1), ", ", window.shape(2), ") and must have the shape (1, ", w.window, ")");
    return;
  }
  require(int64_t(window.shape(1)) == w.width - 1 && int64_t(window.shape(2)) == w.channels, "the windows of layer ", index, " have the shape (",
          window.shape(1), ", ", window.shape(2), ") and must have the shape (", w.width - 1, ", ", w.channels, ")");
  const auto& state = states[size_t(index)];
  require(int64_t(state.shape(1)) == w.heads && int64_t(state.shape(2)) == w.key_size && int64_t(state.shape(3)) == w.value_size,
          "the states of layer ", index, " have the shape (", state.shape(1), ", ", state.shape(2), ", ", state.shape(3),
          ") and must have the shape (", w.heads, ", ", w.key_size, ", ", w.value_size, ")");
}

StateArrays::StateArrays(nb::handle start_array, nb::handle read_array, nb::handle write_array, int64_t num_tokens, int64_t num_states)
    : starts(ints("starts", start_array)), reads(ints("reads", read_array)), writes(ints("writes", write_array)) {
  require(num_tokens <= INT32_MAX, "the batch has ", num_tokens, " tokens and must have at most ", INT32_MAX);
  const int64_t count = int64_t(reads.shape(0));
  require_length("starts", starts, count + 1);
  require_length("writes", writes, num_tokens);
  require(starts.data()[0] == 0 && starts.data()[count] == num_tokens, "starts must begin with 0 and end with ", num_tokens,
          ", the number of tokens");
  for (int64_t i = 0; i < count; ++i)
    require(starts.data()[i] <= starts.data()[i + 1], "starts must not decrease, but [", i, "] is ", starts.data()[i], " and [", i + 1, "] is ",
            starts.data()[i + 1]);
  if (num_states == 0) return;
  require_elements("reads", reads.data(), reads.shape(0), num_states, "the states");
  std::vector<int32_t> writers(size_t(num_states), -1);  // the sequence that writes each state
  for (int64_t i = 0; i < count; ++i)
    for (int64_t token = starts.data()[i]; token < starts.data()[i + 1]; ++token) {
      const int64_t target = writes.data()[token];
      if (target == -1) continue;
      require(target > 0 && target < num_states, "writes[", token, "] is ", target, ", which lies outside the states that are written (1 to ",
              num_states - 1, ", or -1: none)");
      require(writers[size_t(target)] < 0, "writes[", token, "] is ", target, ", which is written twice in one batch");
      writers[size_t(target)] = int32_t(i);
    }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t writer = writers[size_t(reads.data()[i])];
    require(writer < 0 || writer == i, "reads[", i, "] is ", reads.data()[i], ", which sequence ", writer, " of the batch writes");
  }
}

void bind_recurrence(nb::module_& m, ProgramClass& program) {
  nb::class_<RecurrenceHolder>(m, "Recurrence")
      .def(nb::init<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, nb::handle, nb::handle, nb::handle, nb::handle, nb::handle,
                    const NormHolder*, bool, int64_t, float, float, bool, float, float>(),
           "kind"_a, "width"_a, "channels"_a, "heads"_a, "groups"_a, "key_size"_a, "value_size"_a, array("conv_weight"), array("conv_bias"),
           array("decay"), array("bias"), array("skip"), "norm"_a.none(), "norm_first"_a, "norm_groups"_a, "least_step"_a, "most_step"_a,
           "tiled"_a, "rate_scale"_a, "decay_bound"_a, nb::keep_alive<1, 14>())
      .def_static("shift", &make_shift, array("factors"), "column"_a, "window"_a, nb::rv_policy::take_ownership)
      .def_static("rwkv", &make_rwkv, "heads"_a, "key_size"_a, "value_size"_a, "channels"_a, array("factors"), "norm"_a.none(),
                  "mixes_values"_a, nb::rv_policy::take_ownership, nb::keep_alive<0, 6>());
  nb::class_<StatesHolder>(m, "States").def(nb::init<nb::list, nb::list>(), "windows"_a, "states"_a);
  program.def("recur", recording(&record_recur), "x"_a, "layer"_a, "recurrence"_a);
  program.def("scan", recording(&record_scan), "x"_a, "layer"_a, "recurrence"_a);
}

}  // namespace bifolio
