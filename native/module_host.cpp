// Experts in the memory of the host, called by the stream of a device: a function and its argument, without Python.
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>

#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

// Room for the rows of experts; all layers of a device share it, since its stream runs them one after another.
struct HostRoom {
  Workspace workspace;
  std::mutex mutex;
  std::atomic<bool> is_idle{false};  // calls write zeros: steps that are run only to be captured
};

// The experts of some rows. A row of `inputs` holds x, the numbers of the experts as int32, and their weights.
struct ExpertCall {
  ExpertCall(const ExpertsHolder& holder, HostRoom& room, nb::handle inputs, nb::handle outputs, PoolHolder* pool);

  static void call(void* self) { static_cast<ExpertCall*>(self)->run(); }  // no exception may reach the device's stream
  void run() noexcept;
  void check_routing();

  const ExpertWeights& experts;
  HostRoom& room;
  Output inputs_array, outputs_array;
  int64_t top_k;
  Rows x, routing, out;
  Pool& pool;
};

ExpertCall::ExpertCall(const ExpertsHolder& holder, HostRoom& room, nb::handle inputs, nb::handle outputs, PoolHolder* pool)
    : experts(holder.experts), room(room), inputs_array(output("inputs", inputs)), outputs_array(output("outputs", outputs)),
      top_k((width_of(inputs_array) - experts.in_features()) / 2), x(rows_of(inputs_array)), routing(x), out(rows_of(outputs_array)),
      pool(team_of(pool)) {
  require(top_k > 0 && x.width == experts.in_features() + 2 * top_k, "inputs is ", x.width, " wide and must be ", experts.in_features(),
          " wide, and twice the number of experts of a row wider");
  require_between("the number of experts of a row", top_k, 1, int64_t(experts.up.size()));
  require_shape("outputs", outputs_array, x.count, experts.out_features());
  require_apart("inputs", x, "outputs", out);
  x.width = experts.in_features();
  routing.data += x.width, routing.width = 2 * top_k;
}

// A number that no expert has comes from logits without order, and gives a row without a number.
void ExpertCall::check_routing() {
  for (int64_t row = 0; row < routing.count; ++row)
    for (int64_t choice = 0; choice < top_k; ++choice) {
      float& number = routing.row(row)[choice];
      const auto expert = std::bit_cast<int32_t>(number);
      if (expert >= 0 && expert < int64_t(experts.up.size())) continue;
      number = std::bit_cast<float>(int32_t(0));
      routing.row(row)[top_k + choice] = std::numeric_limits<float>::quiet_NaN();
    }
}

void ExpertCall::run() noexcept {
  const auto fill = [&](float value) { std::fill(out.data, out.data + out.count * out.stride, value); };
  if (room.is_idle) return fill(0.0f);
  try {
    std::lock_guard lock(room.mutex);
    check_routing();
    pool.run([&](Member& m) { mix_experts(m, x, routing, top_k, experts, out, room.workspace); });
  } catch (...) {  // of memory: the logits of these rows become NaN, and their requests end with an error
    fill(std::numeric_limits<float>::quiet_NaN());
  }
}

}  // namespace

void bind_host(nb::module_& m) {
  nb::class_<HostRoom>(m, "HostRoom").def(nb::init<>()).def_prop_rw(
      "is_idle", [](const HostRoom& self) { return self.is_idle.load(); }, [](HostRoom& self, bool value) { self.is_idle = value; });
  nb::class_<ExpertCall>(m, "ExpertCall")
      .def(nb::init<const ExpertsHolder&, HostRoom&, nb::handle, nb::handle, PoolHolder*>(), "experts"_a, "room"_a, array("inputs"),
           array("outputs"), pool_argument(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>())
      .def_prop_ro("function", [](const ExpertCall&) { return reinterpret_cast<uintptr_t>(&ExpertCall::call); })
      .def_prop_ro("argument", [](const ExpertCall& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def("run", [](ExpertCall& self) {
        nb::gil_scoped_release release;
        self.run();
      });
}

}  // namespace bifolio
