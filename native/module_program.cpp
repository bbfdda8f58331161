// Recording a program and running it. Recording checks registers and widths; running checks the arrays of one batch, in
// time proportional to its tokens and the blocks it names.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

using Register = Program::Register;
constexpr int64_t kMaxTapWidth = 1 << 24;

Register record_embed(ProgramHolder& self, const TableHolder& table, float scale, bool of_positions, bool is_partial) {
  self.require_open();
  require_finite("scale", scale);
  self.keep.append(nb::find(table));
  int64_t& rows = of_positions ? self.position_rows : self.vocab_rows;
  if (!is_partial) rows = std::min(rows, table.table.rows);
  return self.program.embed(table.table, scale, of_positions);
}

Register record_norm(ProgramHolder& self, Register x, const NormHolder& weights) {
  self.require_open();
  self.require_register("x", x);
  require_multiple("x", self.program.width(x), "the length of the weight", weights.norm.size);
  self.keep.append(nb::find(weights));
  return self.program.norm(x, weights.norm);
}

Register record_add(ProgramHolder& self, Register x, Register y, float scale) {
  self.require_open();
  self.require_alike("x", x, "y", y);
  require_finite("scale", scale);
  return self.program.add(x, y, scale);
}

std::pair<Register, Register> record_add_norm(ProgramHolder& self, Register x, Register delta, const NormHolder& weights) {
  self.require_open();
  self.require_register("x", x, weights.norm.size);
  self.require_alike("x", x, "delta", delta);
  self.keep.append(nb::find(weights));
  return self.program.add_norm(x, delta, weights.norm);
}

Register record_linear(ProgramHolder& self, Register x, const LinearWeights& weights) {
  self.require_open();
  self.require_register("x", x, weights.in_features());
  self.keep.append(nb::find(weights));
  return self.program.linear(x, weights);
}

std::pair<Register, Register> record_rotation(ProgramHolder& self, nb::handle frequency_array, float scale, bool two_sets) {
  self.require_open();
  const Vector frequencies = vector("frequencies", frequency_array);
  require_frequencies(frequencies);
  require(!two_sets || frequencies.shape(0) % 2 == 0, "frequencies has ", frequencies.shape(0), " elements and must hold two equal sets");
  require_finite("scale", scale);
  return self.program.rotation(std::vector<float>(frequencies.data(), frequencies.data() + frequencies.shape(0)), scale, two_sets);
}

Register record_rope_and_write(ProgramHolder& self, Register qkv, int64_t layer, const AttentionConstants& shape, Register cosine,
                               Register sine) {
  self.require_open();
  self.require_register("qkv", qkv, shape.qkv_width());
  self.require_tokens("qkv", qkv);
  require((cosine == -1) == (sine == -1), "cosine and sine must both be registers or both be -1");
  if (cosine != -1) {
    self.require_alike("cosine", cosine, "sine", sine);
    self.require_tokens("cosine", cosine);
    require_between("the width of cosine", self.program.width(cosine), 1, shape.head_dim / 2);
  }
  self.add_attention(layer, shape);
  return self.program.rope_and_write(qkv, layer, shape, cosine, sine);
}

Register record_attend(ProgramHolder& self, Register qkv, int64_t layer, const AttentionConstants& shape) {
  self.require_open();
  self.require_register("qkv", qkv, shape.qkv_width());
  self.require_tokens("qkv", qkv);
  self.add_attention(layer, shape);
  return self.program.attend(qkv, layer, shape);
}

Register record_act(ProgramHolder& self, Register x, int activation) {
  self.require_open();
  self.require_register("x", x);
  return self.program.act(x, activation_of(activation));
}

Register record_act_mul(ProgramHolder& self, Register x, int activation, std::optional<float> cutoff) {
  self.require_open();
  self.require_register("x", x);
  require_gate_and_up("x", self.program.width(x));
  if (cutoff) require_finite("cutoff", *cutoff);
  return self.program.act_mul(x, activation_of(activation, true), cutoff);
}

Register record_head_linear(ProgramHolder& self, Register x, const HeadsHolder& heads, int64_t start) {
  self.require_open();
  self.require_register("x", x);
  heads.require_input("x", self.program.width(x), start);
  self.keep.append(nb::find(heads));
  return self.program.head_linear(x, heads.linears, start);
}

Register record_join_latent(ProgramHolder& self, Register query, Register absorbed, Register latent, const NormHolder& norm, int64_t rope) {
  self.require_open();
  for (const auto& [name, value] : {std::pair("query", query), std::pair("absorbed", absorbed), std::pair("latent", latent)}) {
    self.require_register(name, value);
    self.require_tokens(name, value);
  }
  require_latent(self.program.width(query), self.program.width(absorbed), self.program.width(latent), norm, rope);
  self.keep.append(nb::find(norm));
  return self.program.join_latent(query, absorbed, latent, norm.norm, rope);
}

Register record_join_columns(ProgramHolder& self, const std::vector<Register>& parts, const std::vector<int64_t>& starts,
                             const std::vector<int64_t>& stops, nb::handle factor_array) {
  self.require_open();
  require(!parts.empty() && starts.size() == parts.size() && stops.size() == parts.size(), "parts, starts and stops have ", parts.size(),
          ", ", starts.size(), " and ", stops.size(), " elements and must have the same number, at least 1");
  std::vector<Program::Columns> columns;
  for (size_t i = 0; i < parts.size(); ++i) {
    self.require_register("a part", parts[i]);
    self.require_tokens("a part", parts[i]);
    require_between("a start", starts[i], 0, self.program.width(parts[i]) - 1);
    require_between("a stop", stops[i], starts[i] + 1, self.program.width(parts[i]));
    columns.push_back({parts[i], starts[i], stops[i]});
  }
  if (factor_array.is_none()) return self.program.join_columns(columns, nullptr);
  const Vector factors = vector("factors", factor_array);
  int64_t sum = 0;
  for (const Program::Columns& part : columns) sum += part.stop - part.start;
  require_length("factors", factors, sum);
  self.keep.append(factor_array);
  return self.program.join_columns(columns, factors.data());
}

Register record_gate(ProgramHolder& self, Register x, Register logits) {
  self.require_open();
  self.require_register("x", x);
  self.require_register("logits", logits);
  require_parts(self.program.width(x), self.program.width(logits));
  require(self.program.of_logit_rows(x) == self.program.of_logit_rows(logits), "x and logits must have as many rows");
  return self.program.gate(x, logits);
}

Register record_route(ProgramHolder& self, Register logits, const RouterHolder& router) {
  self.require_open();
  self.require_register("logits", logits, router.router.num_experts);
  self.keep.append(nb::find(router));
  const Register routing = self.program.route(logits, router.router);
  self.routings[routing] = router.router.num_experts;
  return routing;
}

Register record_mix_experts(ProgramHolder& self, Register x, Register routing, const ExpertsHolder& experts) {
  self.require_open();
  self.require_register("x", x, experts.experts.in_features());
  self.require_register("routing", routing);
  const auto found = self.routings.find(routing);
  require(found != self.routings.end(), "routing is register ", routing, " and must be one that route returned");
  require(found->second == int64_t(experts.experts.up.size()), "experts holds ", experts.experts.up.size(), " experts and must hold ",
          found->second, ", as the router has");
  require(self.program.of_logit_rows(x) == self.program.of_logit_rows(routing), "x and routing must have as many rows");
  self.keep.append(nb::find(experts));
  return self.program.mix_experts(x, routing, experts.experts);
}

Register record_recur(ProgramHolder& self, Register x, int64_t layer, const RecurrenceHolder& recurrence) {
  self.require_open();
  self.require_register("x", x, recurrence.weights.in_features());
  self.require_tokens("x", x);
  require_between("layer", layer, 0, kMaxLayers);
  self.keep.append(nb::find(recurrence));
  self.recurrences.emplace_back(layer, &recurrence.weights);
  return self.program.recur(x, layer, recurrence.weights);
}

Register record_all_gather(ProgramHolder& self, Register x, RanksHolder& ranks, const std::vector<int64_t>& widths) {
  self.require_open();
  self.require_register("x", x);
  ranks.require_widths(widths, self.program.width(x));
  self.keep.append(nb::find(ranks));
  return self.program.all_gather(x, ranks.memory, widths);
}

Register record_all_reduce(ProgramHolder& self, Register x, RanksHolder& ranks) {
  self.require_open();
  self.require_register("x", x);
  RanksHolder::require_sum(self.program.width(x));
  self.keep.append(nb::find(ranks));
  return self.program.all_reduce(x, ranks.memory);
}

Register record_take(ProgramHolder& self, Register x) {
  self.require_open();
  self.require_register("x", x);
  self.require_tokens("x", x);
  return self.program.take(x);
}

Register record_given(ProgramHolder& self, int64_t width) {
  self.require_open();
  require_between("width", width, 1, kMaxTapWidth);
  require(self.given_width == 0, "the program reads given rows already: record given once");
  self.given_width = width;
  return self.program.given(width);
}

void record_tap(ProgramHolder& self, Register x, int64_t column) {
  self.require_open();
  self.require_register("x", x);
  self.require_tokens("x", x);
  require_between("column", column, 0, kMaxTapWidth);
  self.taps_width = std::max(self.taps_width, column + self.program.width(x));
  self.program.tap(x, column);
}

void record_logits(ProgramHolder& self, Register x, const LinearWeights& head, float softcap) {
  self.require_open();
  self.require_register("x", x, head.in_features());
  require(self.program.of_logit_rows(x), "x has one row for each token and must have one for each logit row: record take before logits");
  require(std::isfinite(softcap) && softcap >= 0.0f, "softcap is ", softcap, " and must be a finite number of at least 0 (0: none)");
  self.keep.append(nb::find(head));
  self.program.logits(x, head, softcap);
}

std::map<std::string, double> run_program(ProgramHolder& self, const CacheHolder& cache, nb::handle id_array, nb::handle position_array,
                                          nb::handle slot_array, nb::handle row_array, const nb::list& segments, bool share,
                                          nb::handle logit_array, bool profile, nb::handle given_array, nb::handle tap_array,
                                          PoolHolder* pool_holder, const StatesHolder* states, nb::handle start_array,
                                          nb::handle read_array, nb::handle write_array) {
  require(self.program.is_complete(), "the program is not complete: record logits before it is run");
  const Ints ids = ints("ids", id_array), positions = ints("positions", position_array);
  const Longs slots = longs("slots", slot_array);
  const Ints logit_rows = row_array.is_none() ? Ints() : ints("logit_rows", row_array);  // not valid: all tokens
  const Output logits = output("logits", logit_array);
  const int64_t tokens = int64_t(ids.shape(0)), num_logit_rows = logit_rows.is_valid() ? int64_t(logit_rows.shape(0)) : tokens;
  require(tokens > 0, "ids is empty and must have at least one token");
  require_length("positions", positions, tokens);
  require_length("slots", slots, tokens);
  require_shape("logits", logits, num_logit_rows, self.program.vocab_size());
  require_elements("ids", ids.data(), ids.shape(0), self.vocab_rows, "the vocabulary");
  require_elements("positions", positions.data(), positions.shape(0), self.position_rows, "the positions of the model");
  require_elements("slots", slots.data(), slots.shape(0), cache.num_slots(), "the cache");
  if (logit_rows.is_valid()) require_elements("logit_rows", logit_rows.data(), logit_rows.shape(0), tokens, "the batch");
  for (const auto& [layer, shape] : self.attentions) cache.require_layer(layer, shape);
  require(states || self.recurrences.empty(), "states is None and must be given: the program has recurrent layers");
  for (const auto& [layer, weights] : self.recurrences) states->require_layer(layer, *weights);
  std::vector<Tables> tables;
  Step step{tokens, ids.data(), positions.data(), slots.data(), logit_rows.is_valid() ? logit_rows.data() : nullptr, num_logit_rows,
            queries_of(segments, tokens, cache, share, tables), &cache.layers, logits.data()};
  std::optional<StateArrays> use;
  if (!self.recurrences.empty()) {
    use.emplace(start_array, read_array, write_array, tokens, states->num_states);
    step.states = use->use(), step.state_layers = &states->layers;
  }
  require((self.given_width > 0) == !given_array.is_none(), "given is for programs that record given, and only for those");
  Input given;
  if (!given_array.is_none()) {
    given = input("given", given_array);
    require_shape("given", given, tokens, self.given_width);
    step.given = given.data();
  }
  Output taps;
  if (!tap_array.is_none()) {
    taps = output("taps", tap_array);
    require(self.taps_width > 0, "taps is for programs that record tap");
    require_shape("taps", taps, tokens, self.taps_width);
    step.taps = taps.data(), step.taps_width = self.taps_width;
  }
  nb::gil_scoped_release release;
  Pool& pool = team_of(pool_holder);
  if (profile) return self.program.profile(pool, step);
  self.program.run(pool, step);
  return {};
}

}  // namespace

void bind_program(nb::module_& m) {
  nb::class_<ProgramHolder> program(m, "Program");
  program.def(nb::init<>())
      .def("embed", &record_embed, "table"_a, "scale"_a, "of_positions"_a, "is_partial"_a = false)
      .def("norm", &record_norm, "x"_a, "weights"_a)
      .def("add", &record_add, "x"_a, "y"_a, "scale"_a = 1.0f)
      .def("add_norm", &record_add_norm, "x"_a, "delta"_a, "weights"_a)
      .def("linear", &record_linear, "x"_a, "weights"_a)
      .def("rotation", &record_rotation, array("frequencies"), "scale"_a, "two_sets"_a = false)
      .def("rope_and_write", &record_rope_and_write, "qkv"_a, "layer"_a, "shape"_a, "cosine"_a, "sine"_a)
      .def("attend", &record_attend, "qkv"_a, "layer"_a, "shape"_a)
      .def("act", &record_act, "x"_a, "activation"_a)
      .def("act_mul", &record_act_mul, "x"_a, "activation"_a, "cutoff"_a.none() = nb::none())
      .def("all_gather", &record_all_gather, "x"_a, "ranks"_a, "widths"_a)
      .def("all_reduce", &record_all_reduce, "x"_a, "ranks"_a)
      .def("head_linear", &record_head_linear, "x"_a, "heads"_a, "start"_a)
      .def("join_latent", &record_join_latent, "query"_a, "absorbed"_a, "latent"_a, "norm"_a, "rope"_a)
      .def("join_columns", &record_join_columns, "parts"_a, "starts"_a, "stops"_a, array("factors") = nb::none())
      .def("gate", &record_gate, "x"_a, "logits"_a)
      .def("route", &record_route, "logits"_a, "router"_a)
      .def("mix_experts", &record_mix_experts, "x"_a, "routing"_a, "experts"_a)
      .def("recur", &record_recur, "x"_a, "layer"_a, "recurrence"_a)
      .def("take", &record_take, "x"_a)
      .def("given", &record_given, "width"_a)
      .def("tap", &record_tap, "x"_a, "column"_a)
      .def("logits", &record_logits, "x"_a, "head"_a, "softcap"_a)
      .def("run", &run_program, "cache"_a, array("ids"), array("positions"), array("slots"), array("logit_rows"), "segments"_a, "share"_a,
           array("logits"), "profile"_a = false, array("given") = nb::none(), array("taps") = nb::none(), pool_argument(),
           "states"_a.none() = nb::none(), "starts"_a.none() = nb::none(), "reads"_a.none() = nb::none(), "writes"_a.none() = nb::none())
      .def("width", [](const ProgramHolder& self, Register x) {
        self.require_register("x", x);
        return self.program.width(x);
      }, "x"_a)
      .def_prop_ro("vocab_size", [](const ProgramHolder& self) { return self.program.vocab_size(); })
      .def_prop_ro("scratch_bytes", [](const ProgramHolder& self) { return self.program.scratch_bytes(); });
  bind_stream_recording(program);
}

}  // namespace bifolio
