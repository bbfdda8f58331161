// The operations of streams.h: by themselves on numpy arrays, and recorded in a program.
#include "streams.h"

#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

using Register = Program::Register;
using Coefficients = std::vector<float>;  // of all rows

// Rows of `coefficients` hold those of all results.
void require_mix(int64_t x_width, int64_t coefficients_width, int64_t streams) {
  require_between("streams", streams, 1, kMaxHeads);
  require_multiple("x", x_width, "the number of streams", streams);
  require_multiple("coefficients", coefficients_width, "the number of streams", streams);
}

void require_coefficients(int64_t count, int64_t x_width, int64_t y_width) {
  require_multiple("x", x_width, "the width of y", y_width);
  require(count == x_width / y_width, "coefficients is ", count, " wide and must be ", x_width / y_width, " wide");
}

// -- on arrays ---------------------------------------------------------------------------------------------------------------

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

void add_to_stream_rows(nb::handle x_array, nb::handle y_array, nb::handle coefficient_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array), coefficients = input("coefficients", coefficient_array);
  const Output out = output("out", out_array);
  require_coefficients(width_of(coefficients), width_of(x), width_of(y));
  require_shape("y", y, rows_in(x), width_of(y));
  require_shape("coefficients", coefficients, rows_in(x), width_of(coefficients));
  require_shape("out", out, rows_in(x), width_of(x));
  for (const Rows& rows : {rows_of(x), rows_of(y), rows_of(coefficients)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { add_to_streams(t, rows_of(x), rows_of(y), rows_of(coefficients), rows_of(out)); });
}

void match_stream_rows(nb::handle x_array, nb::handle y_array, nb::handle out_array, PoolHolder* pool) {
  const Input x = input("x", x_array), y = input("y", y_array);
  const Output out = output("out", out_array);
  require_multiple("y", width_of(y), "the width of x", width_of(x));
  require_shape("y", y, rows_in(x), width_of(y));
  require_shape("out", out, rows_in(x), width_of(y));
  for (const Rows& rows : {rows_of(x), rows_of(y)}) require_apart("out", rows_of(out), "an input", rows);
  run_team(pool, [&](Member& t) { match_streams(t, rows_of(x), rows_of(y), rows_of(out)); });
}

// -- recorded ----------------------------------------------------------------------------------------------------------------

void require_rows_alike(const ProgramHolder& self, const char* name, Register x, const char* other, Register y) {
  self.require_register(name, x);
  self.require_register(other, y);
  require(self.program.of_logit_rows(x) == self.program.of_logit_rows(y), name, " and ", other, " must have as many rows");
}

Register record_mix_streams(ProgramHolder& self, Register x, Register coefficients, int64_t streams) {
  self.require_open();
  require_rows_alike(self, "x", x, "coefficients", coefficients);
  require_mix(self.program.width(x), self.program.width(coefficients), streams);
  return self.program.mix_streams(x, coefficients, streams);
}

Register record_add_to_streams(ProgramHolder& self, Register x, Register y, const std::variant<Register, Coefficients>& coefficients) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  if (const auto* all = std::get_if<Coefficients>(&coefficients)) {
    require_coefficients(int64_t(all->size()), self.program.width(x), self.program.width(y));
    return self.program.add_to_streams(x, y, *all);
  }
  const Register own = std::get<Register>(coefficients);
  require_rows_alike(self, "x", x, "coefficients", own);
  require_coefficients(self.program.width(own), self.program.width(x), self.program.width(y));
  return self.program.add_to_streams(x, y, own);
}

Register record_match_streams(ProgramHolder& self, Register x, Register y) {
  self.require_open();
  require_rows_alike(self, "x", x, "y", y);
  require_multiple("y", self.program.width(y), "the width of x", self.program.width(x));
  return self.program.match_streams(x, y);
}

}  // namespace

void bind_stream_recording(nb::class_<ProgramHolder>& program) {
  program.def("mix_streams", &record_mix_streams, "x"_a, "coefficients"_a, "streams"_a)
      .def("add_to_streams", &record_add_to_streams, "x"_a, "y"_a, "coefficients"_a)
      .def("match_streams", &record_match_streams, "x"_a, "y"_a);
}

void bind_streams(nb::module_& m) {
  m.def("mix_streams", &mix_stream_rows, array("x"), array("coefficients"), "streams"_a, array("out"), pool_argument());
  m.def("add_to_streams", &add_to_stream_rows, array("x"), array("y"), array("coefficients"), array("out"), pool_argument());
  m.def("match_streams", &match_stream_rows, array("x"), array("y"), array("out"), pool_argument());
}

}  // namespace bifolio
