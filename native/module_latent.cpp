// Attention over cached latents: products by head, and the rows that join their results.
#include "module.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

void head_linear_rows(nb::handle x_array, const HeadsHolder& heads, int64_t start, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  heads.require_input("x", width_of(x), start);
  require_shape("out", out, rows_in(x), heads.out_features());
  require_apart("out", rows_of(out), "x", rows_of(x));
  nb::gil_scoped_release release;
  team_of(pool).run([&](Member& t) { head_linear(t, rows_of(x), heads.linears, start, rows_of(out), workspace_of(pool)); });
}

void join_latent_rows(nb::handle query_array, nb::handle absorbed_array, nb::handle latent_array, const NormHolder& norm, int64_t rope,
                      nb::handle out_array, PoolHolder* pool) {
  const Input query = input("query", query_array), absorbed = input("absorbed", absorbed_array), latent = input("latent", latent_array);
  const Output out = output("out", out_array);
  require_latent(width_of(query), width_of(absorbed), width_of(latent), norm, rope);
  require_shape("absorbed", absorbed, rows_in(query), width_of(absorbed));
  require_shape("latent", latent, rows_in(query), width_of(latent));
  require_shape("out", out, rows_in(query), (width_of(absorbed) / norm.norm.size + 2) * (norm.norm.size + rope));
  for (const Rows& rows : {rows_of(query), rows_of(absorbed), rows_of(latent)}) require_apart("out", rows_of(out), "an input", rows);
  nb::gil_scoped_release release;
  team_of(pool).run([&](Member& t) {
    join_latent(t, rows_of(query), rows_of(absorbed), rows_of(latent), norm.norm, rope, rows_of(out));
  });
}

}  // namespace

HeadsHolder::HeadsHolder(nb::list values) {
  require_between("the number of heads", int64_t(values.size()), 1, kMaxHeads);
  for (size_t i = 0; i < values.size(); ++i) {
    const LinearWeights* linear = nullptr;
    require(nb::try_cast(values[i], linear) && linear, "linears must hold weights made by make_linear");
    linears.push_back(linear);
    require(linear->in_features() == in_features() && linear->out_features() == linears[0]->out_features(), "linears[", i, "] is ",
            linear->out_features(), " by ", linear->in_features(), " and must be ", linears[0]->out_features(), " by ", in_features(),
            ", as linears[0] is");
  }
  keep.append(values);
}

void HeadsHolder::require_input(const char* name, int64_t width, int64_t start) const {
  const auto count = int64_t(linears.size());
  require(width % count == 0, name, " is ", width, " wide and must be a multiple of the ", count, " heads wide");
  require_between("start", start, 0, width / count);
  require(width / count - start >= in_features(), name, " has ", width / count - start, " columns of a head from start on and must have ",
          in_features());
}

void require_latent(int64_t query_width, int64_t absorbed_width, int64_t latent_width, const NormHolder& norm, int64_t rope) {
  const int64_t size = norm.norm.size;
  require_between("rope", rope, 1, kMaxHeadDim);
  require(absorbed_width > 0 && absorbed_width % size == 0, "absorbed is ", absorbed_width, " wide and must be a multiple of the latent's size, ", size);
  require(latent_width == size + rope, "latent is ", latent_width, " wide and must be ", size + rope, " wide");
  const int64_t heads = absorbed_width / size;
  require(query_width % heads == 0 && query_width / heads >= rope, "query is ", query_width, " wide and must have at least ", rope,
          " columns for each of ", heads, " heads");
}

void bind_latent(nb::module_& m) {
  nb::class_<HeadsHolder>(m, "Heads").def(nb::init<nb::list>(), "linears"_a);
  m.def("head_linear", &head_linear_rows, array("x"), "heads"_a, "start"_a, array("out"), pool_argument());
  m.def("join_latent", &join_latent_rows, array("query"), array("absorbed"), array("latent"), "norm"_a, "rope"_a, array("out"), pool_argument());
}

}  // namespace bifolio
