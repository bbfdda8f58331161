// The extension module `_native`: its classes, operations and programs, and the settings of the whole process.
#include "module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "limits.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

constexpr int64_t kLeastRead = 4096, kMostRead = int64_t(1) << 36;  // bytes of a measurement of read_bandwidth

// ArgumentError becomes bifolio.errors.KernelArgumentError, or ValueError where that cannot be imported.
void bind_error() {
  PyObject* type = PyExc_ValueError;
  try {
    type = nb::module_::import_("bifolio.errors").attr("KernelArgumentError").inc_ref().ptr();
  } catch (nb::python_error&) {
  }
  nb::register_exception_translator(
      [](const std::exception_ptr& error, void* type) {
        try {
          std::rethrow_exception(error);
        } catch (const ArgumentError& argument) {
          PyErr_SetString(static_cast<PyObject*>(type), argument.what());
        }
      },
      type);
}

// Weights of logits, for sampling: see kernels/weights.py.
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

void bind_settings(nb::module_& m) {
  m.def("weights", &weights_rows, array("x"), array("highest"), array("warmth"), array("out"));
  m.def("shared_tokens", &shared_tokens);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", [](const std::string& name) {
    nb::gil_scoped_release release;
    Pool::run_alone([&] { set_isa(name); });
  }, "name"_a);
  nb::class_<PoolHolder>(m, "Pool").def(nb::init<int64_t>(), "count"_a).def_prop_ro("num_threads", [](PoolHolder& self) {
    nb::gil_scoped_release release;
    return self.pool.num_threads();
  });
  m.def("num_threads", [] {
    nb::gil_scoped_release release;
    return Pool::instance().num_threads();
  });
  m.def("set_num_threads", [](int64_t count) {
    require_between("count", count, 0, Pool::kMaxThreads);
    nb::gil_scoped_release release;
    Pool::instance().set_num_threads(int(count));
  }, "count"_a);
  m.def("read_bandwidth", [](int64_t bytes, PoolHolder* pool) {
    require_between("bytes", bytes, kLeastRead, kMostRead);
    nb::gil_scoped_release release;
    return read_bandwidth(team_of(pool), size_t(bytes));
  }, "bytes"_a, pool_argument());
  m.def("product_rate", [](bool bytes, PoolHolder* pool) {
    nb::gil_scoped_release release;
    return product_rate(team_of(pool), bytes);
  }, "bytes"_a, pool_argument());
}

}  // namespace

PoolHolder::PoolHolder(int64_t count) : pool((require_between("count", count, 0, Pool::kMaxThreads), int(count))) {}

Pool& team_of(PoolHolder* pool) { return pool ? pool->pool : Pool::instance(); }

}  // namespace bifolio

NB_MODULE(_native, m) {
  nanobind::set_leak_warnings(false);
  bifolio::bind_error();
  bifolio::bind_classes(m);
  bifolio::bind_formats(m);
  bifolio::bind_tokens(m);
  bifolio::bind_program(m);
  bifolio::bind_ranks(m);
  bifolio::bind_host(m);
  bifolio::bind_settings(m);
}
