// Programs as Python records and runs them. Recording checks registers and widths; running checks the arrays of one batch, in
// time proportional to its tokens and the blocks it names.
#include "module_program.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

using namespace nanobind::literals;

namespace bifolio {
namespace {

void finish(ProgramHolder& self, const std::vector<Register>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    self.require_register("a result", results[i]);
    require(self.program.array(results[i]) < 0, "a result is register ", results[i], " and must be no given one");
    require(std::count(results.begin(), results.end(), results[i]) == 1, "a result is register ", results[i], " twice and must be one once");
  }
  self.program.finish(results);
}

// The arrays of a batch as Python passes them, checked against the program; alive until the step has run.
struct BatchArrays {
  Step step;
  Ints ids, positions, logit_rows;
  Longs slots;
  std::vector<Input> given;
  std::vector<Output> results;
  Output taps;
  std::vector<Tables> tables;
  std::optional<Queries> queries;
  std::optional<StateArrays> states;
  Ints adapter_rows;
  AdapterUse adapters;

  // Of each token. A program that reads them needs them; others take no notice.
  template <class A, class T>
  void set_tokens(const char* name, const A& array, const T*& target, bool is_read, int64_t limit, const char* of) {
    require(array.is_valid() || !is_read, name, " is None and must be an array: the program reads it");
    if (!array.is_valid()) return;
    require_length(name, array, step.num_tokens);
    require_elements(name, array.data(), array.shape(0), limit, of);
    target = array.data();
  }
};

// The number of tokens: of the ids, of the positions, or of the given rows.
int64_t count_tokens(const BatchArrays& batch) {
  if (batch.ids.is_valid()) {
    require(batch.ids.shape(0) > 0, "ids is empty and must have at least one token");
    return int64_t(batch.ids.shape(0));
  }
  if (batch.positions.is_valid()) return int64_t(batch.positions.shape(0));
  require(!batch.given.empty(), "ids is None and must be an array: the batch has no other rows");
  return rows_in(batch.given[0]);
}

void set_rows(const ProgramHolder& self, BatchArrays& batch, const nb::list& given, const nb::list& results) {
  const size_t num_results = self.program.arrays().size() - self.num_given;
  require(given.size() == self.num_given, "given has ", given.size(), " arrays and must have ", self.num_given, ", as the program reads");
  require(results.size() == num_results, "results has ", results.size(), " arrays and must have ", num_results, ", as the program returns");
  for (nb::handle rows : given) batch.given.push_back(input("given", rows));
  for (nb::handle rows : results) batch.results.push_back(output("results", rows));
}

void set_arrays(const ProgramHolder& self, BatchArrays& batch) {
  Step& step = batch.step;
  for (size_t i = 0; i < self.program.arrays().size(); ++i) {
    const Register x = self.program.arrays()[i];
    if (i < batch.given.size()) {
      require_shape("given", batch.given[i], step.num_tokens, self.program.width(x));
      step.arrays.push_back(const_cast<float*>(batch.given[i].data()));  // read, or changed in place
    } else {
      const Output& result = batch.results[i - batch.given.size()];
      require_shape("results", result, self.program.of_logit_rows(x) ? step.num_logit_rows : step.num_tokens, self.program.width(x));
      step.arrays.push_back(result.data());
    }
  }
  for (const auto& [routing, num_experts] : self.given_routings) {
    const Input& rows = batch.given[size_t(self.program.array(routing))];
    for (int64_t row = 0; row < rows_in(rows); ++row)
      require_elements("routing", reinterpret_cast<const int32_t*>(rows_of(rows).row(row)), size_t(width_of(rows) / 2), num_experts, "the experts");
  }
}

// Positions, and the types of tokens with them where the program reads types.
void set_positions(const ProgramHolder& self, BatchArrays& batch) {
  const bool are_typed = self.type_rows < INT64_MAX;
  const int64_t limit = are_typed ? std::min<int64_t>(INT32_MAX, self.type_rows * kLongRope) : self.position_rows;
  batch.set_tokens("positions", batch.positions, batch.step.positions, limit < INT64_MAX, limit, "the positions of the model");
  for (int64_t i = 0; are_typed && i < batch.step.num_tokens; ++i)
    require(batch.step.positions[i] % kLongRope < self.position_rows, "positions[", i, "] is ", batch.step.positions[i] % kLongRope,
            " and must be below ", self.position_rows, ", the positions of the model");
}

void set_cache(const ProgramHolder& self, BatchArrays& batch, const CacheHolder* cache, const nb::list& segments, bool share) {
  require(cache || !self.attends, "cache is None and must be given: the program attends");
  require(cache || !batch.slots.is_valid(), "slots is for batches with a cache and must be None");
  batch.set_tokens("slots", batch.slots, batch.step.slots, self.writes_cache && cache, cache ? cache->num_slots() : 0, "the cache");
  if (!cache) return;
  for (const auto& [layer, shape] : self.attentions) cache->require_layer(layer, shape);
  batch.step.layers = &cache->layers;
  if (self.attends) batch.step.queries = &batch.queries.emplace(queries_of(segments, batch.step.num_tokens, *cache, share, batch.tables));
  for (const Register chosen : self.given_choices)
    require_choices(*batch.queries, rows_of(batch.given[size_t(self.program.array(chosen))]));
}

void set_states(const ProgramHolder& self, BatchArrays& batch, const CacheHolder* cache, const StatesHolder* states, nb::handle starts,
                nb::handle reads, nb::handle writes) {
  if (self.recurrences.empty()) return;
  require(states || !cache, "states is None and must be given: the program has recurrent layers");
  batch.states.emplace(starts, reads, writes, batch.step.num_tokens, states ? states->num_states : 0);
  batch.step.states = batch.states->use();
  if (!states) return;
  for (const auto& [layer, weights] : self.recurrences) states->require_layer(layer, *weights);
  batch.step.state_layers = &states->layers;
}

// The adapter of each token.
void set_adapters(ProgramHolder& self, BatchArrays& batch, const nb::list& adapters, nb::handle rows) {
  if (rows.is_none()) return;
  batch.adapter_rows = ints("adapter_rows", rows);
  require_length("adapter_rows", batch.adapter_rows, batch.step.num_tokens);
  for (nb::handle each : adapters) {
    const AdapterHolder* adapter = nullptr;
    require(nb::try_cast(each, adapter) && adapter, "adapters must hold objects of Adapter");
    self.require_adapter(*adapter);
    batch.adapters.loaded.push_back(&adapter->weights);
  }
  const auto count = int32_t(batch.adapters.loaded.size());
  for (int64_t i = 0; i < batch.step.num_tokens; ++i)
    require(batch.adapter_rows.data()[i] >= -1 && batch.adapter_rows.data()[i] < count, "adapter_rows[", i, "] is ", batch.adapter_rows.data()[i],
            " and must be -1 or below ", count, ", the number of adapters");
  int64_t vocabulary = INT64_MAX;
  if (!self.adapted_tables.empty())
    for (const AdapterWeights* each : batch.adapters.loaded)
      for (const TableChange& change : each->embedding) vocabulary = std::min(vocabulary, change.rows.rows);
  if (vocabulary < INT64_MAX) {
    require(batch.step.token_ids, "ids is None and must be given: adapters change the embedding");
    require_elements("ids", batch.step.token_ids, size_t(batch.step.num_tokens), vocabulary, "the embedding of an adapter");
  }
  batch.adapters.rows = batch.adapter_rows.data();
  batch.step.adapters = &batch.adapters;
}

std::vector<double> run(ProgramHolder& self, const CacheHolder* cache, nb::handle ids, nb::handle positions, nb::handle slots,
                        nb::handle logit_rows, const nb::list& segments, bool share, const nb::list& given, const nb::list& results,
                        nb::handle taps, PoolHolder* pool, const StatesHolder* states, nb::handle starts, nb::handle reads,
                        nb::handle writes, bool profile, const nb::list& adapters, nb::handle adapter_rows) {
  require(self.program.is_complete(), "the program is not complete: record finish before it is run");
  BatchArrays batch;
  Step& step = batch.step;
  if (!ids.is_none()) batch.ids = ints("ids", ids);
  if (!positions.is_none()) batch.positions = ints("positions", positions);
  if (!slots.is_none()) batch.slots = longs("slots", slots);
  set_rows(self, batch, given, results);
  step.num_tokens = step.num_logit_rows = count_tokens(batch);
  batch.set_tokens("ids", batch.ids, step.token_ids, self.vocab_rows < INT64_MAX, self.vocab_rows, "the vocabulary");
  set_positions(self, batch);
  if (!logit_rows.is_none()) {
    batch.logit_rows = ints("logit_rows", logit_rows);
    require_elements("logit_rows", batch.logit_rows.data(), batch.logit_rows.shape(0), step.num_tokens, "the batch");
    step.logit_rows = batch.logit_rows.data(), step.num_logit_rows = int64_t(batch.logit_rows.shape(0));
  }
  set_arrays(self, batch);
  set_cache(self, batch, cache, segments, share);
  set_states(self, batch, cache, states, starts, reads, writes);
  set_adapters(self, batch, adapters, adapter_rows);
  if (!taps.is_none()) {
    batch.taps = output("taps", taps);
    require(self.taps_width > 0, "taps is for programs that record tap");
    require_shape("taps", batch.taps, step.num_tokens, self.taps_width);
    step.taps = batch.taps.data(), step.taps_width = self.taps_width;
  }
  nb::gil_scoped_release release;
  if (profile) return self.program.profile(team_of(pool), step);
  self.program.run(team_of(pool), step);
  return {};
}

}  // namespace

void bind_program(nb::module_& m) {
  ProgramClass program(m, "Program");
  program.def(nb::init<>())
      .def("finish", recording(&finish), "results"_a)
      .def("run", &run, "cache"_a.none() = nb::none(), array("ids") = nb::none(), array("positions") = nb::none(),
           array("slots") = nb::none(), array("logit_rows") = nb::none(), "segments"_a = nb::list(), "share"_a = true,
           "given"_a = nb::list(), "results"_a = nb::list(), array("taps") = nb::none(), pool_argument(), "states"_a.none() = nb::none(),
           array("starts") = nb::none(), array("reads") = nb::none(), array("writes") = nb::none(), "profile"_a = false, "adapters"_a = nb::list(), array("adapter_rows") = nb::none())
      .def("width", [](const ProgramHolder& self, Register x) {
        self.require_register("x", x);
        return self.program.width(x);
      }, "x"_a)
      .def("of_logit_rows", [](const ProgramHolder& self, Register x) {
        self.require_register("x", x);
        return self.program.of_logit_rows(x);
      }, "x"_a);
  bind_operations(program);
  bind_attention(program);
  bind_latent(m, program);
  bind_experts(m, program);
  bind_recurrence(m, program);
  bind_adapters(m, program);
}

}  // namespace bifolio
