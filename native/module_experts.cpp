// Routers and experts as Python hands them over, and their operations on numpy arrays.
#include "isa.h"
#include "module.h"
#include "product_rows.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

constexpr int64_t kMaxExperts = 1 << 16;

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

void route_rows(nb::handle logit_array, const RouterHolder& router, nb::handle routing_array, PoolHolder* pool) {
  const Input logits = input("logits", logit_array);
  const Output routing = output("routing", routing_array);
  require_width("logits", logits, router.router.num_experts);
  require_shape("routing", routing, rows_in(logits), router.router.routing_width());
  require_apart("routing", rows_of(routing), "logits", rows_of(logits));
  nb::gil_scoped_release release;
  team_of(pool).run([&](Member& t) { route(t, rows_of(logits), router.router, rows_of(routing)); });
}

void mix_expert_rows(nb::handle x_array, nb::handle routing_array, const ExpertsHolder& experts, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), routing = input("routing", routing_array);
  const Output out = output("out", out_array);
  const auto num_experts = int64_t(experts.experts.up.size());
  require_width("x", x, experts.experts.in_features());
  require(width_of(routing) > 0 && width_of(routing) % 2 == 0, "routing is ", width_of(routing), " wide and must have an even width: experts and weights");
  require_shape("routing", routing, rows_in(x), width_of(routing));
  require_shape("out", out, rows_in(x), experts.experts.out_features());
  require_apart("out", rows_of(out), "x", rows_of(x));
  const int64_t top_k = width_of(routing) / 2;
  for (int64_t row = 0; row < rows_in(x); ++row)
    require_elements("routing", reinterpret_cast<const int32_t*>(rows_of(routing).row(row)), size_t(top_k), num_experts, "the experts");
  nb::gil_scoped_release release;
  team_of(pool).run([&](Member& t) {
    mix_experts(t, rows_of(x), rows_of(routing), top_k, experts.experts, rows_of(out), workspace_of(pool));
  });
}

void gate_rows(nb::handle x_array, nb::handle logit_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), logits = input("logits", logit_array);
  const Output out = output("out", out_array);
  require_columns("x", x);
  require_shape("logits", logits, rows_in(x), width_of(logits));
  require_parts(width_of(x), width_of(logits));
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  require_apart("out", rows_of(out), "logits", rows_of(logits));
  nb::gil_scoped_release release;
  team_of(pool).run([&](Member& t) { gate(t, rows_of(x), rows_of(logits), rows_of(out)); });
}

}  // namespace

RouterHolder::RouterHolder(int64_t num_experts, int64_t top_k, bool sigmoid, bool renormalise, float scale, nb::handle bias_array,
                           int64_t num_groups, int64_t top_groups, int64_t group_best, nb::handle scale_array)
    : router{} {
  require_between("num_experts", num_experts, 1, kMaxExperts);
  require_between("num_groups", num_groups, 1, num_experts);
  require_between("top_groups", top_groups, 1, num_groups);
  require(num_experts % num_groups == 0, "num_experts is ", num_experts, " and must be a multiple of num_groups, ", num_groups);
  require_between("group_best", group_best, 1, num_experts / num_groups);
  require_between("top_k", top_k, 1, num_experts / num_groups * top_groups);
  require_finite("scale", scale);
  if (!bias_array.is_none()) {
    bias = vector("bias", bias_array);
    require_length("bias", bias, num_experts);
  }
  if (!scale_array.is_none()) {
    expert_scales = vector("expert_scales", scale_array);
    require_length("expert_scales", expert_scales, num_experts);
  }
  router = {num_experts, top_k, sigmoid, renormalise, scale, bias.is_valid() ? bias.data() : nullptr, num_groups, top_groups, group_best,
            expert_scales.is_valid() ? expert_scales.data() : nullptr};
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

void bind_experts(nb::module_& m) {
  nb::class_<RouterHolder>(m, "Router")
      .def(nb::init<int64_t, int64_t, bool, bool, float, nb::handle, int64_t, int64_t, int64_t, nb::handle>(), "num_experts"_a, "top_k"_a, "sigmoid"_a,
           "renormalise"_a, "scale"_a, array("bias"), "num_groups"_a, "top_groups"_a, "group_best"_a,
           array("expert_scales") = nb::none());
  nb::class_<ExpertsHolder>(m, "Experts").def(nb::init<nb::list, nb::list, int>(), "up"_a, "down"_a, "activation"_a);
  m.def("route", &route_rows, array("logits"), "router"_a, array("routing"), pool_argument());
  m.def("mix_experts", &mix_expert_rows, array("x"), array("routing"), "experts"_a, array("out"), pool_argument());
  m.def("gate", &gate_rows, array("x"), array("logits"), array("out"), pool_argument());
}

}  // namespace bifolio
