// The operations of streams.h: by themselves on numpy arrays, and recorded in a program.
#include "streams.h"

#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

using Register = Program::Register;

// -- sizes that fit together -------------------------------------------------------------------------------------------------

void require_multiple(const char* name, int64_t width, const char* of, int64_t size) {
  require(size > 0 && width > 0 && width % size == 0, name, " is ", width, " wide and must be a multiple of ", of, ", ", size);
}

void require_part(const char* name, int64_t width, int64_t start, int64_t count) {
  require_between("start", start, 0, width);
  require(count > 0 && count <= width - start, name, " has ", width - start, " columns from start on and must have ", count);
}

// Rows of `coefficients` hold those of all results.
void require_mix(int64_t x_width, int64_t coefficients_width, int64_t streams) {
  require_between("streams", streams, 1, kMaxHeads);
  require_multiple("x", x_width, "the number of streams", streams);
  require_multiple("coefficients", coefficients_width, "the number of streams", streams);
}

// -- on arrays ---------------------------------------------------------------------------------------------------------------

void add_scaled_rows(nb::handle x_array, nb::handle y_array, float scale, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_columns("x", x);
  require_finite("scale", scale);
  require_shape("y", y, rows_in(x), width_of(x));
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  require_same_or_apart("out", rows_of(out), "y", rows_of(y));
  run_team(pool, [&](Member& t) { add_scaled(t, rows_of(x), rows_of(y), scale, rows_of(out)); });
}

void embed_known_rows(const TableHolder& table, nb::handle ids_array, float scale, nb::handle out_array, PoolHolder* pool) {
  const Ints ids = ints("ids", ids_array);
  const Output out = output("out", out_array);
  require_finite("scale", scale);
  require_shape("out", out, int64_t(ids.shape(0)), table.table.width);
  require_elements("ids", ids.data(), ids.shape(0), INT32_MAX, "the vocabulary");
  run_team(pool, [&](Member& t) { embed_known(t, table.table, ids.data(), scale, rows_of(out)); });
}

void norm_group_rows(nb::handle x_array, const NormHolder& weights, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  require_multiple("x", width_of(x), "the length of the weight", weights.norm.size);
  require_shape("out", out, rows_in(x), width_of(x));
  require_same_or_apart("out", rows_of(out), "x", rows_of(x));
  run_team(pool, [&](Member& t) { norm_groups(t, rows_of(x), weights.norm, rows_of(out)); });
}

void act_gate_rows(nb::handle x_array, nb::handle input_array, int64_t start, int code, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), inputs = input("inputs", input_array);
  const Output out = output("out", out_array);
  const Activation activation = activation_of(code, true);
  require_part("inputs", width_of(inputs), start, width_of(x));
  require_shape("inputs", inputs, rows_in(x), width_of(inputs));
  require_shape("out", out, rows_in(x), width_of(x));
  require_apart("out", rows_of(out), "x", rows_of(x));
  require_apart("out", rows_of(out), "inputs", rows_of(inputs));
  run_team(pool, [&](Member& t) { act_gate(t, rows_of(x), rows_of(inputs), start, activation, rows_of(out)); });
}

void sparse_act_mul_rows(nb::handle x_array, float deviations, int code, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array);
  const Output out = output("out", out_array);
  const Activation activation = activation_of(code, true);
  require_finite("deviations", deviations);
  require_gate_and_up("x", width_of(x));
  require_shape("out", out, rows_in(x), width_of(x) / 2);
  require_apart("out", rows_of(out), "x", rows_of(x));
  run_team(pool, [&](Member& t) { sparse_act_mul(t, rows_of(x), deviations, activation, rows_of(out)); });
}

void mix_stream_rows(nb::handle x_array, nb::handle coefficient_array, int64_t streams, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), coefficients = input("coefficients", coefficient_array);
  const Output out = output("out", out_array);
  require_mix(width_of(x), width_of(coefficients), streams);
  require_shape("coefficients", coefficients, rows_in(x), width_of(coefficients));
  require_shape("out", out, rows_in(x), width_of(coefficients) / streams * (width_of(x) / streams));
  require_apart("out", rows_of(out), "x", rows_of(x));
  require_apart("out", rows_of(out), "coefficients", rows_of(coefficients));
  run_team(pool, [&](Member& t) { mix_streams(t, rows_of(x), rows_of(coefficients), streams, rows_of(out)); });
}

void correct_stream_rows(nb::handle x_array, nb::handle y_array, nb::handle coefficient_array, int64_t active, nb::handle out_array,
                         PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array), coefficients = input("coefficients", coefficient_array);
  const Output out = output("out", out_array);
  require_multiple("x", width_of(x), "the width of y", width_of(y));
  require_shape("y", y, rows_in(x), width_of(y));
  require_shape("coefficients", coefficients, rows_in(x), width_of(x) / width_of(y));
  require_between("active", active, 0, width_of(x) / width_of(y) - 1);
  require_shape("out", out, rows_in(x), width_of(x));
  for (const Rows& rows : {rows_of(x), rows_of(y), rows_of(coefficients)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { correct_streams(t, rows_of(x), rows_of(y), rows_of(coefficients), active, rows_of(out)); });
}

void add_to_stream_rows(nb::handle x_array, nb::handle y_array, int64_t first, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_multiple("x", width_of(x), "the width of y", width_of(y));
  require_shape("y", y, rows_in(x), width_of(y));
  require_between("first", first, 0, width_of(x) / width_of(y));
  require_shape("out", out, rows_in(x), width_of(x));
  for (const Rows& rows : {rows_of(x), rows_of(y)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { add_to_streams(t, rows_of(x), rows_of(y), first, rows_of(out)); });
}

void spread_stream_rows(nb::handle x_array, nb::handle y_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_multiple("y", width_of(y), "the width of x", width_of(x));
  require_shape("y", y, rows_in(x), width_of(y));
  require_shape("out", out, rows_in(x), width_of(x) + width_of(y));
  for (const Rows& rows : {rows_of(x), rows_of(y)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { spread_streams(t, rows_of(x), rows_of(y), rows_of(out)); });
}

void merge_stream_rows(nb::handle x_array, nb::handle y_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_multiple("y", width_of(y), "the width of x", width_of(x));
  require_shape("y", y, rows_in(x), width_of(y));
  require_shape("out", out, rows_in(x), width_of(x));
  for (const Rows& rows : {rows_of(x), rows_of(y)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { merge_streams(t, rows_of(x), rows_of(y), rows_of(out)); });
}

// -- recorded ----------------------------------------------------------------------------------------------------------------

void require_rows_alike(const ProgramHolder& self, const char* name, Register x, const char* other, Register y) {
  self.require_register(name, x);
  self.require_register(other, y);
  require(self.program.of_logit_rows(x) == self.program.of_logit_rows(y), name, " and ", other, " must have as many rows");
}

Register record_add_scaled(ProgramHolder& self, Register x, Register y, float scale) {
  self.require_open();
  self.require_alike("x", x, "y", y);
  require_finite("scale", scale);
  return self.program.add_scaled(x, y, scale);
}

Register record_embed_known(ProgramHolder& self, const TableHolder& table, float scale) {
  self.require_open();
  require_finite("scale", scale);
  self.keep.append(nb::find(table));
  return self.program.embed_known(table.table, scale);
}

Register record_norm_groups(ProgramHolder& self, Register x, const NormHolder& weights) {
  self.require_open();
  self.require_register("x", x);
  require_multiple("x", self.program.width(x), "the length of the weight", weights.norm.size);
  self.keep.append(nb::find(weights));
  return self.program.norm_groups(x, weights.norm);
}

Register record_columns(ProgramHolder& self, Register x, int64_t start, int64_t width, nb::handle factor_array) {
  self.require_open();
  self.require_register("x", x);
  require_part("x", self.program.width(x), start, width);
  if (factor_array.is_none()) return self.program.columns(x, start, width, nullptr);
  const Vector factors = vector("factors", factor_array);
  require_length("factors", factors, width);
  self.keep.append(factor_array);
  return self.program.columns(x, start, width, factors.data());
}

Register record_act_gate(ProgramHolder& self, Register x, Register inputs, int64_t start, int activation) {
  self.require_open();
  require_rows_alike(self, "x", x, "inputs", inputs);
  require_part("inputs", self.program.width(inputs), start, self.program.width(x));
  return self.program.act_gate(x, inputs, start, activation_of(activation, true));
}

Register record_sparse_act_mul(ProgramHolder& self, Register x, float deviations, int activation) {
  self.require_open();
  self.require_register("x", x);
  require_finite("deviations", deviations);
  require_gate_and_up("x", self.program.width(x));
  return self.program.sparse_act_mul(x, deviations, activation_of(activation, true));
}

Register record_mix_streams(ProgramHolder& self, Register x, Register coefficients, int64_t streams) {
  self.require_open();
  require_rows_alike(self, "x", x, "coefficients", coefficients);
  require_mix(self.program.width(x), self.program.width(coefficients), streams);
  return self.program.mix_streams(x, coefficients, streams);
}

Register record_correct_streams(ProgramHolder& self, Register x, Register y, Register coefficients, int64_t active) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  require_rows_alike(self, "x", x, "coefficients", coefficients);
  require_multiple("x", self.program.width(x), "the width of y", self.program.width(y));
  const int64_t streams = self.program.width(x) / self.program.width(y);
  self.require_register("coefficients", coefficients, streams);
  require_between("active", active, 0, streams - 1);
  return self.program.correct_streams(x, y, coefficients, active);
}

Register record_add_to_streams(ProgramHolder& self, Register x, Register y, int64_t first) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  require_multiple("x", self.program.width(x), "the width of y", self.program.width(y));
  require_between("first", first, 0, self.program.width(x) / self.program.width(y));
  return self.program.add_to_streams(x, y, first);
}

Register record_spread_streams(ProgramHolder& self, Register x, Register y) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  require_multiple("y", self.program.width(y), "the width of x", self.program.width(x));
  return self.program.spread_streams(x, y);
}

Register record_merge_streams(ProgramHolder& self, Register x, Register y) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  require_multiple("y", self.program.width(y), "the width of x", self.program.width(x));
  return self.program.merge_streams(x, y);
}

}  // namespace

void bind_stream_recording(nb::class_<ProgramHolder>& program) {
  program.def("add_scaled", &record_add_scaled, "x"_a, "y"_a, "scale"_a)
      .def("embed_known", &record_embed_known, "table"_a, "scale"_a)
      .def("norm_groups", &record_norm_groups, "x"_a, "weights"_a)
      .def("columns", &record_columns, "x"_a, "start"_a, "width"_a, array("factors") = nb::none())
      .def("act_gate", &record_act_gate, "x"_a, "inputs"_a, "start"_a, "activation"_a)
      .def("sparse_act_mul", &record_sparse_act_mul, "x"_a, "deviations"_a, "activation"_a)
      .def("mix_streams", &record_mix_streams, "x"_a, "coefficients"_a, "streams"_a)
      .def("correct_streams", &record_correct_streams, "x"_a, "y"_a, "coefficients"_a, "active"_a)
      .def("add_to_streams", &record_add_to_streams, "x"_a, "y"_a, "first"_a)
      .def("spread_streams", &record_spread_streams, "x"_a, "y"_a)
      .def("merge_streams", &record_merge_streams, "x"_a, "y"_a);
}

void bind_streams(nb::module_& m) {
  m.def("add_scaled", &add_scaled_rows, array("x"), array("y"), "scale"_a, array("out"), pool_argument());
  m.def("embed_known", &embed_known_rows, "table"_a, array("ids"), "scale"_a, array("out"), pool_argument());
  m.def("norm_groups", &norm_group_rows, array("x"), "weights"_a, array("out"), pool_argument());
  m.def("act_gate", &act_gate_rows, array("x"), array("inputs"), "start"_a, "activation"_a, array("out"), pool_argument());
  m.def("sparse_act_mul", &sparse_act_mul_rows, array("x"), "deviations"_a, "activation"_a, array("out"), pool_argument());
  m.def("mix_streams", &mix_stream_rows, array("x"), array("coefficients"), "streams"_a, array("out"), pool_argument());
  m.def("correct_streams", &correct_stream_rows, array("x"), array("y"), array("coefficients"), "active"_a, array("out"), pool_argument());
  m.def("add_to_streams", &add_to_stream_rows, array("x"), array("y"), "first"_a, array("out"), pool_argument());
  m.def("spread_streams", &spread_stream_rows, array("x"), array("y"), array("out"), pool_argument());
  m.def("merge_streams", &merge_stream_rows, array("x"), array("y"), array("out"), pool_argument());
}

}  // namespace bifolio
