// Routers and experts as Python hands them over, and their operations.
#include "experts.h"

#include "module_program.h"
#include "product_rows.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

// gate_columns takes gate and up in one piece, in whole quant blocks, and activations of one byte.
bool can_gate_columns(const LinearWeights& up, const LinearWeights& down) {
  return up.pieces().size() == 1 && down.pieces().size() == 1 && down.in_features() % kQuantBlock == 0 && planes_of(up) == 1 && planes_of(down) == 1;
}

void require_expert(size_t index, const LinearWeights& up, const LinearWeights& down, const LinearWeights& first, int64_t outputs) {
  require(up.in_features() == first.in_features() && up.out_features() == first.out_features(), "up[", index, "] is ", up.out_features(), " by ",
          up.in_features(), " and must be ", first.out_features(), " by ", first.in_features(), ", as up[0] is");
  require(up.out_features() == 2 * down.in_features() || up.out_features() == down.in_features(), "up[", index, "] has ", up.out_features(),
          " outputs and must have ", 2 * down.in_features(), ": gate and up for the inputs of down, or half as many without gates");
  require(down.out_features() == outputs, "down[", index, "] has ", down.out_features(), " outputs and must have ", outputs,
          ", as down[0] has");
}

Register record_route(ProgramHolder& self, Register logits, const RouterHolder& holder) {
  const RouterConstants router = self.hold(holder).router;
  self.require_register("logits", logits, router.num_experts);
  const Register routing = self.program.like(logits, router.routing_width());
  self.routings[routing] = router.num_experts;
  return self.record("route", {logits}, routing, [=](const Call& c) { route(c.m, c.in(), router, c.out()); });
}

// The routing is of route, or rows of the caller whose experts are checked when the program runs.
// `site`: of the adapters of these experts; -1: they have none.
Register record_mix_experts(ProgramHolder& self, Register x, Register routing, const ExpertsHolder& holder, int64_t site) {
  const ExpertWeights& experts = self.hold(holder).experts;
  const auto num_experts = int64_t(experts.up.size());
  self.require_register("x", x, experts.in_features());
  self.require_rows_alike("x", x, "routing", routing);
  require_between("site", site, -1, kMaxSites - 1);
  if (site >= 0) self.require_tokens("x", x), self.adapted_experts.emplace_back(site, &experts);
  const int64_t width = self.program.width(routing);
  const auto found = self.routings.find(routing);
  if (found != self.routings.end()) {
    require(found->second == num_experts, "experts holds ", num_experts, " experts and must hold ", found->second, ", as the router has");
  } else {
    require(self.program.array(routing) >= 0, "routing is register ", routing, " and must be one that route or given returned");
    require(width % 2 == 0, "routing is ", width, " wide and must have an even width: experts and weights");
    self.given_routings.emplace_back(routing, num_experts);
  }
  return self.record("mix_experts", {x, routing}, self.program.like(x, experts.out_features()), [=, &experts](const Call& c) {
    mix_experts(c.m, c.in(0), c.in(1), width / 2, experts, c.out(), c.workspace, site < 0 ? nullptr : c.step.adapters, site);
  });
}

}  // namespace

RouterHolder::RouterHolder(int64_t num_experts, int64_t top_k, bool sigmoid, bool renormalise, float scale, nb::handle bias_array,
                           int64_t num_groups, int64_t top_groups, int64_t group_best, nb::handle scale_array, float band)
    : router{} {
  require_between("num_experts", num_experts, 1, kMaxExperts);
  require_between("num_groups", num_groups, 1, num_experts);
  require_between("top_groups", top_groups, 1, num_groups);
  require(num_experts % num_groups == 0, "num_experts is ", num_experts, " and must be a multiple of num_groups, ", num_groups);
  require_between("group_best", group_best, 1, num_experts / num_groups);
  require_between("top_k", top_k, 1, num_experts / num_groups * top_groups);
  require_finite("scale", scale);
  require(std::isfinite(band) && band >= 0.0f, "band is ", band, " and must be a finite number of at least 0 (0: off)");
  if (!bias_array.is_none()) {
    bias = vector("bias", bias_array);
    require_length("bias", bias, num_experts);
  }
  if (!scale_array.is_none()) {
    expert_scales = vector("expert_scales", scale_array);
    require_length("expert_scales", expert_scales, num_experts);
  }
  router = {num_experts, top_k, sigmoid, renormalise, scale, bias.is_valid() ? bias.data() : nullptr, num_groups, top_groups, group_best,
            expert_scales.is_valid() ? expert_scales.data() : nullptr, band};
}

ExpertsHolder::ExpertsHolder(nb::list up, nb::list down, int activation) : experts{} {
  require(up.size() > 0 && up.size() == down.size(), "up and down must hold as many matrices, at least one");
  require_between("the number of experts", int64_t(up.size()), 1, kMaxExperts);
  experts.is_gated = true;
  for (size_t i = 0; i < up.size(); ++i) {
    const LinearWeights *first = nullptr, *last = nullptr;
    require(nb::try_cast(up[i], first) && nb::try_cast(down[i], last) && first && last, "up and down must hold weights made by make_linear");
    experts.up.push_back(first), experts.down.push_back(last);
    require_expert(i, *first, *last, *experts.up[0], experts.out_features());
    experts.is_gated = experts.is_gated && experts.has_gates() && can_gate_columns(*first, *last);
  }
  experts.activation = activation_of(activation, experts.has_gates());
  keep.append(up), keep.append(down);
}

void bind_experts(nb::module_& m, ProgramClass& program) {
  nb::class_<RouterHolder>(m, "Router")
      .def(nb::init<int64_t, int64_t, bool, bool, float, nb::handle, int64_t, int64_t, int64_t, nb::handle, float>(), "num_experts"_a, "top_k"_a, "sigmoid"_a,
           "renormalise"_a, "scale"_a, array("bias"), "num_groups"_a, "top_groups"_a, "group_best"_a,
           array("expert_scales") = nb::none(), "band"_a = 0.0f);
  nb::class_<ExpertsHolder>(m, "Experts").def(nb::init<nb::list, nb::list, int>(), "up"_a, "down"_a, "activation"_a);
  program.def("route", recording(&record_route), "logits"_a, "router"_a)
      .def("mix_experts", recording(&record_mix_experts), "x"_a, "routing"_a, "experts"_a, "site"_a = -1);
}

}  // namespace bifolio
