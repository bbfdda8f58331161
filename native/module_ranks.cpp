// The memory that the ranks of tensor parallelism share, as Python holds it.
#include <nanobind/stl/vector.h>

#include "module.h"

using namespace nanobind::literals;

namespace bifolio {

RanksHolder::RanksHolder(nb::handle array, int rank, int size)
    : bytes(array_of<uint8_t, 1>("memory", array)), memory(bytes.data(), rank, size) {
  require_between("size", size, 1, RankMemory::kMaxRanks);
  require_between("rank", rank, 0, size - 1);
  require(bytes.shape(0) >= RankMemory::num_bytes(size), "memory has ", bytes.shape(0), " bytes and must have ", RankMemory::num_bytes(size));
  require(reinterpret_cast<uintptr_t>(bytes.data()) % RankMemory::kLine == 0, "memory must be aligned to ", RankMemory::kLine, " bytes");
}

int64_t RanksHolder::require_widths(const std::vector<int64_t>& widths, int64_t own) const {
  require(int(widths.size()) == memory.size(), "widths has ", widths.size(), " elements and must have ", memory.size());
  int64_t sum = 0;
  for (int64_t width : widths) {
    require_between("a width", width, 1, int64_t(RankMemory::kCapacity / sizeof(float)));
    sum += width;
  }
  require(widths[size_t(memory.rank())] == own, "x is ", own, " wide and must be ", widths[size_t(memory.rank())], " wide");
  return sum;
}

void RanksHolder::require_sum(int64_t width) {
  require_between("the width of x", width, 1, int64_t(RankMemory::kCapacity / sizeof(float)));
}

namespace {

void gather(RanksHolder& self, nb::handle x_array, const std::vector<int64_t>& widths, nb::handle out_array) {
  const Input x = input("x", x_array);
  const int64_t sum = self.require_widths(widths, width_of(x));
  Rows out{};
  Output target;
  if (!out_array.is_none()) {
    target = output("out", out_array);
    require_shape("out", target, rows_in(x), sum);
    require_apart("out", rows_of(target), "x", rows_of(x));
    out = rows_of(target);
  }
  nb::gil_scoped_release release;
  self.memory.gather(rows_of(x), widths, out);
}

void reduce(RanksHolder& self, nb::handle x_array) {
  const Output x = output("x", x_array);
  RanksHolder::require_sum(width_of(x));
  nb::gil_scoped_release release;
  self.memory.reduce(rows_of(x));
}

void require_signal(int signal) { require_between("signal", signal, 0, RankMemory::kSignals - 1); }

}  // namespace

void bind_ranks(nb::module_& m) {
  m.def("rank_memory_bytes", [](int64_t size) {
    require_between("size", size, 1, RankMemory::kMaxRanks);
    return RankMemory::num_bytes(int(size));
  }, "size"_a);
  nb::class_<RanksHolder>(m, "Ranks")
      .def(nb::init<nb::handle, int, int>(), array("memory"), "rank"_a, "size"_a)
      .def("gather", &gather, array("x"), "widths"_a, array("out"))
      .def("reduce", &reduce, array("x"))
      .def("post", [](RanksHolder& self, int signal, uint32_t value) {
        require_signal(signal);
        self.memory.post(signal, value);
      }, "signal"_a, "value"_a)
      .def("read", [](RanksHolder& self, int signal) {
        require_signal(signal);
        return self.memory.read(signal);
      }, "signal"_a)
      .def("wait", [](RanksHolder& self, int signal, uint32_t value, double seconds) {
        require_signal(signal);
        nb::gil_scoped_release release;
        return self.memory.wait(signal, value, seconds);
      }, "signal"_a, "value"_a, "seconds"_a)
      .def_prop_rw("fault", [](RanksHolder& self) { return self.memory.fault(); },
                   [](RanksHolder& self, uint32_t value) { self.memory.set_fault(value); })
      .def_prop_rw("count", [](const RanksHolder& self) { return self.memory.count(); },
                   [](RanksHolder& self, uint32_t value) { self.memory.set_count(value); });
}

}  // namespace bifolio
