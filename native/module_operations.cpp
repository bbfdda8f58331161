// Every operation of the network by itself, on numpy arrays.
#include <nanobind/stl/optional.h>

#include "isa.h"
#include "module.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

void embed_rows(const TableHolder& table, nb::handle ids_array, float scale, nb::handle out_array, bool is_partial, PoolHolder* pool) {
  const Ints ids = ints("ids", ids_array);
  const Output out = output("out", out_array);
  require_finite("scale", scale);
  require_shape("out", out, int64_t(ids.shape(0)), table.table.width);
  require_elements("ids", ids.data(), ids.shape(0), is_partial ? INT32_MAX : table.table.rows, "the table");
  run_team(pool, [&](Member& t) { embed(t, table.table, ids.data(), scale, rows_of(out)); });
}

void norm_rows(nb::handle x_array, const NormHolder& weights, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  require_multiple("x", width_of(x), "the length of the weight", weights.norm.size);
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  run_team(pool, [&](Member& t) { norm(t, rows_of(x), weights.norm, rows_of(out)); });
}

void add_rows(nb::handle x_array, nb::handle y_array, nb::handle out_array, float scale, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_columns("x", x);
  require_shape("y", y, rows_in(x), width_of(x));
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  require_same_or_apart("out", rows_of(out), "y", rows_of(y));
  require_finite("scale", scale);
  run_team(pool, [&](Member& t) { add(t, rows_of(x), rows_of(y), scale, rows_of(out)); });
}

void add_norm_rows(nb::handle x_array, nb::handle delta_array, const NormHolder& weights, nb::handle sum_array, nb::handle normed_array, PoolHolder* pool) {
  const Input x = input("x", x_array), delta = input("delta", delta_array);
  const Output sum = output("sum", sum_array), normed = output("normed", normed_array);
  require_width("x", x, weights.norm.size);
  require_shape("delta", delta, rows_in(x), width_of(x));
  require_shape("sum", sum, rows_in(x), width_of(x));
  require_shape("normed", normed, rows_in(x), width_of(x));
  for (const Output& out : {sum, normed}) {
    require_same_or_apart("an output", rows_of(out), "x", rows_of(x));
    require_same_or_apart("an output", rows_of(out), "delta", rows_of(delta));
  }
  require_apart("sum", rows_of(sum), "normed", rows_of(normed));
  run_team(pool, [&](Member& t) { add_norm(t, rows_of(x), rows_of(delta), weights.norm, rows_of(sum), rows_of(normed)); });
}

void linear_rows(nb::handle x_array, const LinearWeights& weights, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  require_width("x", x, weights.in_features());
  require_shape("out", out, rows_in(x), weights.out_features());
  require_apart("out", rows_of(out), "x", rows_of(x));
  run_team(pool, [&](Member& t) { linear(t, rows_of(x), weights, rows_of(out), workspace_of(pool)); });
}

void act_rows(nb::handle x_array, int code, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  const Activation activation = activation_of(code);
  require_columns("x", x);
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  run_team(pool, [&](Member& t) { act(t, rows_of(x), activation, rows_of(out)); });
}

void act_mul_rows(nb::handle x_array, int code, nb::handle out_array, std::optional<float> cutoff, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  const Activation activation = activation_of(code, true);
  require_columns("x", x);
  require_gate_and_up("x", width_of(x));
  require_shape("out", out, rows_in(x), width_of(x) / 2);
  require_apart("out", rows_of(out), "x", rows_of(x));
  if (cutoff) require_finite("cutoff", *cutoff);
  run_team(pool, [&](Member& t) {
    if (cutoff) sparse_act_mul(t, rows_of(x), *cutoff, activation, rows_of(out));
    else act_mul(t, rows_of(x), activation, rows_of(out));
  });
}

void softcap_rows(nb::handle x_array, float cap, PoolHolder* pool) {
  const Output x = output("x", x_array);
  require_columns("x", x);
  require(std::isfinite(cap) && cap > 0.0f, "cap is ", cap, " and must be a finite number above 0");
  run_team(pool, [&](Member& t) { softcap(t, rows_of(x), cap); });
}

void rotation_rows(nb::handle frequency_array, float scale, nb::handle position_array, nb::handle cosine_array, nb::handle sine_array, PoolHolder* pool) {
  const Vector frequencies = vector("frequencies", frequency_array);
  const Ints positions = ints("positions", position_array);
  const Output cosine = output("cosine", cosine_array), sine = output("sine", sine_array);
  const int64_t tokens = int64_t(positions.shape(0)), width = int64_t(cosine.shape(1));
  const bool two_sets = int64_t(frequencies.shape(0)) == 2 * width;
  require_frequencies(frequencies);
  require(two_sets || int64_t(frequencies.shape(0)) == width, "frequencies has ", frequencies.shape(0), " elements and must have ",
          width, ", the width of cosine, or twice as many");
  require_finite("scale", scale);
  require_shape("cosine", cosine, tokens, width);
  require_shape("sine", sine, tokens, width);
  require_apart("cosine", rows_of(cosine), "sine", rows_of(sine));
  require_elements("positions", positions.data(), positions.shape(0), INT32_MAX, "the positions");
  run_team(pool, [&](Member& t) { rotation(t, frequencies.data(), two_sets, scale, positions.data(), rows_of(cosine), rows_of(sine)); });
}

void rope_and_write_rows(nb::handle qkv_array, const AttentionConstants& shape, nb::handle cosine_array, nb::handle sine_array,
                         const CacheHolder* cache, int64_t layer, nb::handle slot_array, PoolHolder* pool) {
  const Output qkv = output("qkv", qkv_array);
  require_width("qkv", qkv, shape.qkv_width());
  require(cosine_array.is_none() == sine_array.is_none(), "cosine and sine must both be given or both be None");
  Input cosine, sine;
  Rows turns[2] = {};
  if (!cosine_array.is_none()) {
    cosine = input("cosine", cosine_array), sine = input("sine", sine_array);
    require_between("the width of cosine", width_of(cosine), 1, shape.head_dim / 2);
    require_shape("cosine", cosine, rows_in(qkv), width_of(cosine));
    require_shape("sine", sine, rows_in(qkv), width_of(cosine));
    turns[0] = rows_of(cosine), turns[1] = rows_of(sine);
    for (const Rows& turn : turns) require_apart("qkv", rows_of(qkv), "the rotation", turn);
  }
  require((cache == nullptr) == slot_array.is_none(), "cache and slots must both be given or both be None");
  Longs slots;
  if (cache) {
    cache->require_layer(layer, shape);
    slots = longs("slots", slot_array);
    require_length("slots", slots, rows_in(qkv));
    require_elements("slots", slots.data(), slots.shape(0), cache->num_slots(), "the cache");
  }
  run_team(pool, [&](Member& t) {
    rope_and_write(t, rows_of(qkv), shape, turns[0].data ? &turns[0] : nullptr, &turns[1], cache ? &cache->layer(layer) : nullptr,
                   cache ? slots.data() : nullptr);
  });
}

void attend_rows(nb::handle query_array, const AttentionConstants& shape, const nb::list& segments, bool share, const CacheHolder& cache,
                 int64_t layer, nb::handle out_array, PoolHolder* pool) {
  const Input query = input("query", query_array);
  const Output out = output("out", out_array);
  require_width("query", query, shape.query_width());
  require_shape("out", out, rows_in(query), width_of(query));
  require_apart("out", rows_of(out), "query", rows_of(query));
  cache.require_layer(layer, shape);
  std::vector<Tables> tables;
  const Queries queries = queries_of(segments, rows_in(query), cache, share, tables);
  run_team(pool, [&](Member& t) { attend(t, rows_of(query), shape, queries, cache.layer(layer), rows_of(out), workspace_of(pool)); });
}

void argmax_rows(nb::handle x_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const auto out = array_of<int64_t, 1>("out", out_array);
  require_columns("x", x);
  require_length("out", out, rows_in(x));
  run_team(pool, [&](Member& t) {
    t.split(rows_in(x), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) out.data()[row] = kernels().argmax_row(rows_of(x).row(row), width_of(x));
    });
  });
}

void weights_rows(nb::handle x_array, nb::handle highest_array, nb::handle warmth_array, nb::handle out_array) {
  const Input x = input("x", x_array);
  const Vector highest = vector("highest", highest_array), warmth = vector("warmth", warmth_array);
  const auto out = array_of<int64_t, 2>("out", out_array);
  require_columns("x", x);
  require_length("highest", highest, rows_in(x));
  require_length("warmth", warmth, rows_in(x));
  require(int64_t(out.shape(0)) == rows_in(x) && int64_t(out.shape(1)) == width_of(x), "out is ", out.shape(0), " by ",
          out.shape(1), " and must be ", rows_in(x), " by ", width_of(x));
  // On the calling thread: sampling belongs to no kernel set, and must not start threads beside those of an engine.
  nb::gil_scoped_release release;
  for (int64_t row = 0; row < rows_in(x); ++row)
    kernels().weights_row(rows_of(x).row(row), width_of(x), highest.data()[row], warmth.data()[row], out.data() + row * width_of(x));
}

}  // namespace

void bind_operations(nb::module_& m) {
  m.def("embed", &embed_rows, "table"_a, array("ids"), "scale"_a, array("out"), "is_partial"_a = false, pool_argument());
  m.def("norm", &norm_rows, array("x"), "weights"_a, array("out"), pool_argument());
  m.def("add", &add_rows, array("x"), array("y"), array("out"), "scale"_a = 1.0f, pool_argument());
  m.def("add_norm", &add_norm_rows, array("x"), array("delta"), "weights"_a, array("sum"), array("normed"), pool_argument());
  m.def("linear", &linear_rows, array("x"), "weights"_a, array("out"), pool_argument());
  m.def("act", &act_rows, array("x"), "activation"_a, array("out"), pool_argument());
  m.def("act_mul", &act_mul_rows, array("x"), "activation"_a, array("out"), "cutoff"_a.none() = nb::none(), pool_argument());
  m.def("softcap", &softcap_rows, array("x"), "cap"_a, pool_argument());
  m.def("rotation", &rotation_rows, array("frequencies"), "scale"_a, array("positions"), array("cosine"), array("sine"), pool_argument());
  m.def("rope_and_write", &rope_and_write_rows, array("qkv"), "shape"_a, array("cosine"), array("sine"), "cache"_a.none(), "layer"_a,
        array("slots"), pool_argument());
  m.def("attend", &attend_rows, array("query"), "shape"_a, "segments"_a, "share"_a, "cache"_a, "layer"_a, array("out"), pool_argument());
  m.def("argmax", &argmax_rows, array("x"), array("out"), pool_argument());
  m.def("weights", &weights_rows, array("x"), array("highest"), array("warmth"), array("out"));
}

}  // namespace bifolio
