// Attention over cached latents: products by head, and the rows that join their results.
#include <cstring>

#include "isa.h"
#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

// One product for each head: head h reads the columns [h * step + start, ...) of x, and writes its outputs one after the other.
Register head_linear(ProgramHolder& self, Register x, const HeadsHolder& heads, int64_t start) {
  self.require_register("x", x);
  heads.require_input("x", self.program.width(x), start);
  const Register out = self.program.like(x, self.hold(heads).out_features());
  return self.record("head_linear", {x}, out, [=, linears = heads.linears](const Call& c) {
    const Rows in = c.in(), out = c.out();
    const auto count = int64_t(linears.size());
    const int64_t step = in.width / count, size = out.width / count;
    for (int64_t h = 0; h < count; ++h) {
      const LinearWeights& weights = *linears[size_t(h)];
      const Rows own{in.data + h * step + start, in.count, weights.in_features(), in.stride};
      linear(c.m, own, weights, {out.data + h * size, out.count, size, out.stride}, c.workspace);
    }
  });
}

// Sizes of join_latent that fit together.
void require_latent(int64_t query_width, int64_t absorbed_width, int64_t latent_width, int64_t size, int64_t rope) {
  require_between("rope", rope, 1, kMaxHeadDim);
  require(absorbed_width > 0 && absorbed_width % size == 0, "absorbed is ", absorbed_width, " wide and must be a multiple of the latent's size, ", size);
  require(latent_width == size + rope, "latent is ", latent_width, " wide and must be ", size + rope, " wide");
  const int64_t heads = absorbed_width / size;
  require(query_width % heads == 0 && query_width / heads >= rope, "query is ", query_width, " wide and must have at least ", rope,
          " columns for each of ", heads, " heads");
}

// Queries, key and value of attention over cached latents. A head of `query` is [nope | rope], of `absorbed` nope as a latent; a
// row of `latent` is [latent | rope]. A head of the result is [rope | latent], the latent of keys and values normed.
Register join_latent(ProgramHolder& self, Register query, Register absorbed, Register latent, const NormHolder& holder, int64_t rope) {
  self.require_tokens("query", query);
  self.require_tokens("absorbed", absorbed);
  self.require_tokens("latent", latent);
  const NormWeights norm = self.hold(holder).norm;
  const int64_t size = norm.size, dim = rope + size, heads = self.program.width(absorbed) / size;
  require_latent(self.program.width(query), self.program.width(absorbed), self.program.width(latent), size, rope);
  const Register out = self.program.like(query, (heads + 2) * dim);
  return self.record("join_latent", {query, absorbed, latent}, out, [=](const Call& c) {
    const Rows query = c.in(0), absorbed = c.in(1), latent = c.in(2), out = c.out();
    const int64_t step = query.width / heads;
    const auto copy = [](const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); };
    each_row(c.m, query.count, out.width, [&](int64_t row) {
      for (int64_t h = 0; h < heads; ++h) {
        float* head = out.row(row) + h * dim;
        copy(query.row(row) + (h + 1) * step - rope, rope, head);
        copy(absorbed.row(row) + h * size, size, head + rope);
      }
      float *key = out.row(row) + heads * dim, *value = key + dim;
      copy(latent.row(row) + size, rope, key);
      kernels().norm_row(latent.row(row), norm, key + rope);
      copy(key, dim, value);
    });
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

void bind_latent(nb::module_& m, ProgramClass& program) {
  nb::class_<HeadsHolder>(m, "Heads").def(nb::init<nb::list>(), "linears"_a);
  program.def("head_linear", recording(&head_linear), "x"_a, "heads"_a, "start"_a)
      .def("join_latent", recording(&join_latent), "query"_a, "absorbed"_a, "latent"_a, "norm"_a, "rope"_a);
}

}  // namespace bifolio
