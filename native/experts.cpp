#include "experts.h"

#include <cmath>

#include "product_rows.h"

namespace bifolio {
namespace {

constexpr int64_t kGroupRows = 512;  // of one expert that are multiplied together

float sigmoid1(float x) { return 1.0f / (1.0f + std::exp(-x)); }

void score_row(const float* logits, const RouterConstants& router, float* scores) {
  const int64_t count = router.num_experts;
  if (router.sigmoid) {
    for (int64_t e = 0; e < count; ++e) scores[e] = sigmoid1(logits[e]);
    return;
  }
  const float highest = *std::max_element(logits, logits + count);
  float total = 0.0f;
  for (int64_t e = 0; e < count; ++e) total += scores[e] = std::exp(logits[e] - highest);
  for (int64_t e = 0; e < count; ++e) scores[e] /= total;
}

// The first of the largest values that are not yet taken; marks it.
int64_t take_best(const float* values, int64_t count, uint8_t* taken) {
  int64_t best = 0;
  while (taken[best]) ++best;
  for (int64_t i = best + 1; i < count; ++i)
    if (!taken[i] && values[i] > values[best]) best = i;
  taken[best] = 1;
  return best;
}

// Marks the experts of all groups but the best as taken.
void drop_groups(const float* ranked, const RouterConstants& router, float* best, uint8_t* taken) {
  const int64_t size = router.num_experts / router.num_groups;
  std::vector<uint8_t> seen(static_cast<size_t>(size)), kept(static_cast<size_t>(router.num_groups));
  for (int64_t group = 0; group < router.num_groups; ++group) {
    std::fill(seen.begin(), seen.end(), uint8_t(0));
    best[group] = 0.0f;
    for (int64_t i = 0; i < router.group_best; ++i)
      best[group] += ranked[group * size + take_best(ranked + group * size, size, seen.data())];
  }
  for (int64_t i = 0; i < router.top_groups; ++i) take_best(best, router.num_groups, kept.data());
  for (int64_t e = 0; e < router.num_experts; ++e) taken[e] = !kept[size_t(e / size)];
}

// Each choice has the share of its logit in a softmax over the logits that are left and close to it.
void mix_sparsely(const float* logits, const RouterConstants& router, float* left, int32_t* experts, float* weights) {
  const int64_t count = router.num_experts;
  std::copy(logits, logits + count, left);
  for (int64_t i = 0; i < router.top_k; ++i) {
    const int64_t best = std::max_element(left, left + count) - left;
    float total = 0.0f;
    for (int64_t e = 0; e < count; ++e) {
      const bool is_far = (left[best] - logits[e]) / std::max(std::fabs(logits[e]), left[best]) > router.band;
      if (!is_far) total += std::exp(left[e] - left[best]);  // 0 for those that are taken
    }
    experts[i] = int32_t(best), weights[i] = router.scale / total;
    left[best] = -INFINITY;
  }
}

void route_row(const float* logits, const RouterConstants& router, float* routing, Scratch& scratch) {
  const int64_t count = router.num_experts;
  auto* scores = scratch.array<float>(size_t(3 * count + (count + 3) / 4));
  float *ranked = scores + count, *best = ranked + count;
  auto* taken = reinterpret_cast<uint8_t*>(best + count);
  if (router.band > 0.0f)
    return mix_sparsely(logits, router, scores, reinterpret_cast<int32_t*>(routing), routing + router.top_k);
  score_row(logits, router, scores);
  for (int64_t e = 0; e < count; ++e) ranked[e] = router.bias ? scores[e] + router.bias[e] : scores[e];
  std::memset(taken, 0, size_t(count));
  if (router.top_groups < router.num_groups) drop_groups(ranked, router, best, taken);
  auto* experts = reinterpret_cast<int32_t*>(routing);
  float *weights = routing + router.top_k, total = 0.0f;
  for (int64_t i = 0; i < router.top_k; ++i) {
    experts[i] = int32_t(take_best(ranked, count, taken));
    total += weights[i] = scores[experts[i]];
  }
  const float factor = router.renormalise ? router.scale / (total + 1e-20f) : router.scale;
  for (int64_t i = 0; i < router.top_k; ++i) weights[i] *= router.expert_scales ? factor * router.expert_scales[experts[i]] : factor;
}

// Rows of one expert, in the forms that its two products read.
struct Group {
  const LinearWeights *up, *down;
  int64_t first, count;  // places in the order by expert
  Middle input, hidden;

  Inputs inputs() const { return input.inputs(); }
};

// The (token, choice) pairs ordered by expert, those of one expert by token.
struct Order {
  std::vector<int32_t> pair_at, place_of;  // by place, and by pair
  std::vector<int64_t> ends;               // of each expert's places

  Order(Rows routing, int64_t top_k, int64_t num_experts)
      : pair_at(size_t(routing.count * top_k)), place_of(pair_at.size()), ends(size_t(num_experts)) {
    const auto expert_of = [&](int64_t pair) { return reinterpret_cast<const int32_t*>(routing.row(pair / top_k))[pair % top_k]; };
    const auto pairs = int64_t(pair_at.size());
    for (int64_t pair = 0; pair < pairs; ++pair) ++ends[size_t(expert_of(pair))];
    for (size_t e = 1; e < ends.size(); ++e) ends[e] += ends[e - 1];
    std::vector<int64_t> next(ends.size());
    for (size_t e = 1; e < ends.size(); ++e) next[e] = ends[e - 1];
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t place = next[size_t(expert_of(pair))]++;
      pair_at[size_t(place)] = int32_t(pair), place_of[size_t(pair)] = int32_t(place);
    }
  }
};

// Memory for the rows of all groups in one form after the other.
struct FormSizes {
  int64_t bytes = 0, scales = 0, words = 0;

  // Places for `count` rows of k numbers, where `next` multiplies them.
  Middle place(const LinearWeights& next, Rows floats, RowMemory* memory) {
    const int64_t count = floats.count, k = floats.width;
    const bool has_words = needs_words(next), has_bytes = needs_bytes(next);
    Middle rows{floats, needs_floats(next), has_words, has_bytes, RoundedRows{nullptr, KParts(1), 1, 1}, QuantizedRows{}};
    if (memory && has_words) rows.words = rounded_rows_at(memory->words.array<uint16_t>(0) + words, count, k);
    if (memory && has_bytes)
      rows.bytes = quantized_rows_at(memory->bytes.array<int8_t>(0) + bytes, memory->scales.array<float>(0) + scales, count, k, next);
    if (has_words) words += round_up(rounded_words(count, k), 64);
    if (has_bytes) bytes += round_up(count * k, 64), scales += round_up(quantized_scales(count, k), 16);
    return rows;
  }

  void allocate(RowMemory& memory) const {
    memory.bytes.bytes(size_t(bytes));
    memory.scales.bytes(size_t(scales) * sizeof(float));
    memory.words.bytes(size_t(words) * sizeof(uint16_t));
  }
};

Rows some_rows(Rows x, int64_t begin, int64_t count) { return {x.row(begin), count, x.width, x.stride}; }

std::vector<Group> make_groups(const Order& order, const ExpertWeights& experts, Rows inputs, Rows hidden, Workspace& workspace) {
  std::vector<Group> groups;
  FormSizes input_sizes, hidden_sizes;
  const auto place = [&](Group& group, bool allocated) {
    group.input = input_sizes.place(*group.up, some_rows(inputs, group.first, group.count), allocated ? &workspace.input : nullptr);
    group.hidden = hidden_sizes.place(*group.down, some_rows(hidden, group.first, group.count), allocated ? &workspace.middle : nullptr);
  };
  const Middle none{{}, false, false, false, RoundedRows{nullptr, KParts(1), 1, 1}, QuantizedRows{}};
  int64_t first = 0;
  for (size_t e = 0; e < order.ends.size(); ++e)
    for (; first < order.ends[e];) {
      const int64_t count = std::min(kGroupRows, order.ends[e] - first);
      groups.push_back({experts.up[e], experts.down[e], first, count, none, none});
      place(groups.back(), false);
      first += count;
    }
  input_sizes.allocate(workspace.input);
  hidden_sizes.allocate(workspace.middle);
  input_sizes = hidden_sizes = FormSizes();
  for (Group& group : groups) place(group, true);
  return groups;
}

// Calls body(group, unit) for the units [0, units) of every group, shared by all threads.
template <class Body>
void each_unit(Member& m, const std::vector<Group>& groups, int64_t units, Body body) {
  m.split(int64_t(groups.size()) * units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(groups[size_t(i / units)], i % units);
  });
}

// Both products of all groups, where gate and up of an expert lie in one piece.
void multiply_groups(Member& m, Rows x, int64_t top_k, const Order& order, const ExpertWeights& experts, Rows inputs, Rows hidden, Rows outputs,
                     Workspace& workspace) {
  const std::vector<Group> groups = make_groups(order, experts, inputs, hidden, workspace);
  m.split(int64_t(groups.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const Group& group = groups[size_t(g)];
      for (int64_t i = 0; i < group.count; ++i)
        group.input.put(x.row(order.pair_at[size_t(group.first + i)] / top_k), i, 0, x.width);
    }
  });
  const auto count = int64_t(groups.size());
  const int64_t width = hidden.width, even = width * count / (4 * m.size) / kQuantBlock * kQuantBlock;
  const int64_t columns = std::max(kQuantBlock, std::min(even, kGatedColumns));
  each_unit(m, groups, (width + columns - 1) / columns, [&](const Group& group, int64_t unit) {
    gate_columns(m, group.inputs(), *group.up, experts.activation, unit * columns, std::min((unit + 1) * columns, width), group.hidden);
  });
  const int64_t panels = experts.down[0]->pieces()[0].matrix.num_panels;
  const int64_t pieces = std::max<int64_t>(1, 8 * m.size / count), most = round_up((panels + pieces - 1) / pieces, 2);
  each_unit(m, groups, (panels + most - 1) / most, [&](const Group& group, int64_t unit) {
    const PackedMatrix& matrix = group.down->pieces()[0].matrix;
    kernels().matmul(matrix, group.hidden.inputs().of(matrix.format), group.down->bias(), outputs.row(group.first), outputs.stride,
                     unit * most, std::min((unit + 1) * most, panels), m.scratch().bytes(matmul_scratch_bytes()));
  });
}

// The adapters of the rows of one expert.
struct AdaptedExperts {
  const AdapterUse* use;  // null: none
  int64_t site;

  // Whether an adapter of the batch changes these experts.
  bool any() const {
    return use && std::any_of(use->loaded.begin(), use->loaded.end(), [&](const AdapterWeights* each) { return each->experts_of(site) != nullptr; });
  }
  // y += up (down x) for the rows at the places from `first` on, by the product of the expert that `side` names.
  void add(Member& m, Rows y, Rows x, const Order& order, int64_t top_k, int64_t first, size_t expert, std::vector<LowRank> ExpertAdapter::*side,
           Workspace& workspace) const {
    if (!use) return;
    adapt(m, y, x, adapted_rows(y.count, [&](int64_t row) -> const std::vector<LowRank>* {
      const AdapterWeights* adapter = use->of(order.pair_at[size_t(first + row)] / top_k);
      const auto* experts = adapter ? adapter->experts_of(site) : nullptr;
      return experts && expert < experts->size() && !((*experts)[expert].*side).empty() ? &((*experts)[expert].*side) : nullptr;
    }), workspace);
  }
};

// The same, one expert after the other with the products of dense layers.
void multiply_each(Member& m, Rows x, int64_t top_k, const Order& order, const ExpertWeights& experts, Rows inputs, Rows hidden, Rows outputs,
                   Workspace& workspace, const AdaptedExperts& adapted) {
  each_row(m, inputs.count, inputs.width, [&](int64_t place) {
    std::memcpy(inputs.row(place), x.row(order.pair_at[size_t(place)] / top_k), size_t(x.width) * sizeof(float));
  });
  int64_t first = 0;
  for (size_t e = 0; e < order.ends.size(); first = order.ends[e++]) {
    const int64_t count = order.ends[e] - first;
    if (count == 0) continue;
    const int64_t outputs_of_up = experts.up[e]->out_features(), width = round_up(outputs_of_up, 16);
    const Rows products{workspace.products.array<float>(size_t(count * width)), count, outputs_of_up, width};
    linear(m, some_rows(inputs, first, count), *experts.up[e], products, workspace);
    adapted.add(m, products, some_rows(inputs, first, count), order, top_k, first, e, &ExpertAdapter::up, workspace);
    (experts.has_gates() ? act_mul : act)(m, products, experts.activation, some_rows(hidden, first, count));
    linear(m, some_rows(hidden, first, count), *experts.down[e], some_rows(outputs, first, count), workspace);
    adapted.add(m, some_rows(outputs, first, count), some_rows(hidden, first, count), order, top_k, first, e, &ExpertAdapter::down, workspace);
  }
}

}  // namespace

void route(Member& m, Rows logits, const RouterConstants& router, Rows routing) {
  each_row(m, logits.count, 16 * logits.width, [&](int64_t row) { route_row(logits.row(row), router, routing.row(row), m.scratch()); });
}

void mix_experts(Member& m, Rows x, Rows routing, int64_t top_k, const ExpertWeights& experts, Rows out, Workspace& workspace,
                 const AdapterUse* adapters, int64_t site) {
  if (x.count == 0) return;
  const Order order(routing, top_k, int64_t(experts.up.size()));
  const int64_t pairs = x.count * top_k;
  const auto rows = [&](Scratch& memory, int64_t width) {
    const int64_t stride = round_up(width, 16);
    return Rows{memory.array<float>(size_t(pairs * stride)), pairs, width, stride};
  };
  const Rows inputs = rows(workspace.gathered, x.width), hidden = rows(workspace.hidden, experts.down[0]->in_features());
  const Rows outputs = rows(workspace.outputs, out.width);
  const AdaptedExperts adapted{adapters, site};
  if (experts.is_gated && !adapted.any()) multiply_groups(m, x, top_k, order, experts, inputs, hidden, outputs, workspace);
  else multiply_each(m, x, top_k, order, experts, inputs, hidden, outputs, workspace, adapted);
  each_row(m, x.count, out.width * top_k, [&](int64_t token) {
    const float* weights = routing.row(token) + top_k;
    float* sum = out.row(token);
    for (int64_t choice = 0; choice < top_k; ++choice) {
      const float *y = outputs.row(order.place_of[size_t(token * top_k + choice)]), weight = weights[choice];
      if (choice == 0)
        for (int64_t i = 0; i < out.width; ++i) sum[i] = weight * y[i];
      else
        for (int64_t i = 0; i < out.width; ++i) sum[i] += weight * y[i];
    }
  });
}

}  // namespace bifolio
