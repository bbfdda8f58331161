// The operations of a network, one function each: it checks its registers, allots the result, and records the computation.
// Attention, latents, experts and recurrences are in files of their own (module_*.cpp).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

constexpr int64_t kMaxTapWidth = 1 << 24;
constexpr float kLeastMeanSquare = 1e-5f;  // LEAST_MEAN_SQUARE of kernels/operations.py

void copy_row(const float* from, int64_t count, float* to) { std::memcpy(to, from, size_t(count) * sizeof(float)); }

// -- the inputs of a network ------------------------------------------------------------------------------------------------

// source: 0 token ids, 1 positions, 2 types of tokens, which are the multiples of kLongRope in positions.
// is_partial: ids past the last row read row 0.
Register embed(ProgramHolder& self, const TableHolder& holder, float scale, int source, bool is_partial) {
  require_finite("scale", scale);
  require_between("source", source, 0, 2);
  const EmbeddingTable table = self.hold(holder).table;
  int64_t& rows = source == 0 ? self.vocab_rows : source == 1 ? self.position_rows : self.type_rows;
  rows = std::min(rows, is_partial ? INT32_MAX : table.rows);
  return self.record("embed", {}, self.program.new_register(table.width), [=](const Call& c) {
    const int32_t* ids = source == 0 ? c.step.token_ids : c.step.positions;
    const Rows out = c.out();
    each_row(c.m, out.count, out.width, [&](int64_t row) {
      const int64_t own = source == 0 ? ids[row] : source == 1 ? ids[row] % kLongRope : ids[row] / kLongRope;
      const int64_t id = own < table.rows ? own : 0;
      float* target = out.row(row);
      dequantize_row(table.format, table.data + size_t(id) * table.row_bytes, table.width, target);
      if (scale != 1.0f)
        for (int64_t i = 0; i < table.width; ++i) target[i] *= scale;
    });
  });
}

// two_sets: frequencies [2, width], the second for positions from kLongRope on, which count from there.
std::pair<Register, Register> rotation(ProgramHolder& self, nb::handle frequency_array, float scale, bool two_sets) {
  const Vector given = vector("frequencies", frequency_array);
  require_frequencies(given);
  require(!two_sets || given.shape(0) % 2 == 0, "frequencies has ", given.shape(0), " elements and must hold two equal sets");
  require_finite("scale", scale);
  self.position_rows = std::min<int64_t>(self.position_rows, INT32_MAX);
  const std::vector<float> frequencies(given.data(), given.data() + given.shape(0));
  const int64_t width = int64_t(frequencies.size()) / (two_sets ? 2 : 1);
  const Register cosine = self.program.new_register(width), sine = self.program.new_register(width);
  self.program.record("rotation", {}, {cosine, sine}, [=](const Call& c) {
    each_row(c.m, c.step.num_tokens, 64 * width, [&](int64_t row) {
      const int32_t place = c.step.positions[row];
      const float* own = frequencies.data() + (two_sets && place >= kLongRope ? width : 0);
      float *cosines = c.out(0).row(row), *sines = c.out(1).row(row);
      for (int64_t i = 0; i < width; ++i) {
        const float angle = float(place % kLongRope) * own[i];
        cosines[i] = std::cos(angle) * scale;
        sines[i] = std::sin(angle) * scale;
      }
    });
  });
  return {cosine, sine};
}

Register given(ProgramHolder& self, int64_t width) {
  require_between("width", width, 1, kMaxTapWidth);
  ++self.num_given;
  return self.program.given(width);
}

// -- rows ---------------------------------------------------------------------------------------------------------------------

void norm_row(const NormWeights& weights, const float* x, int64_t width, float* out) {
  for (int64_t at = 0; at < width; at += weights.size) kernels().norm_row(x + at, weights, out + at);
}

Register norm(ProgramHolder& self, Register x, const NormHolder& weights) {
  self.require_register("x", x);
  require_multiple("x", self.program.width(x), "the length of the weight", weights.norm.size);
  return self.record("norm", {x}, self.program.like(x), [weights = self.hold(weights).norm](const Call& c) {
    const Rows in = c.in(), out = c.out();
    each_row(c.m, in.count, in.width, [&](int64_t row) { norm_row(weights, in.row(row), in.width, out.row(row)); });
  });
}

// (x + y) * scale
Register add(ProgramHolder& self, Register x, Register y, float scale) {
  self.require_alike("x", x, "y", y);
  require_finite("scale", scale);
  return self.record("add", {x, y}, self.program.like(x), [=](const Call& c) {
    const Rows a = c.in(0), b = c.in(1), out = c.out();
    each_row(c.m, out.count, out.width, [&](int64_t row) {
      float* sum = out.row(row);
      kernels().add_row(a.row(row), b.row(row), a.width, sum);
      if (scale != 1.0f)
        for (int64_t i = 0; i < a.width; ++i) sum[i] *= scale;
    });
  });
}

std::pair<Register, Register> add_norm(ProgramHolder& self, Register x, Register delta, const NormHolder& weights) {
  self.require_alike("x", x, "delta", delta);
  require_multiple("x", self.program.width(x), "the length of the weight", weights.norm.size);
  const Register sum = self.program.like(x), normed = self.program.like(x);
  self.program.record("add_norm", {x, delta}, {sum, normed}, [weights = self.hold(weights).norm](const Call& c) {
    const Rows a = c.in(0), b = c.in(1), sum = c.out(0), normed = c.out(1);
    each_row(c.m, a.count, a.width, [&](int64_t row) {
      kernels().add_row(a.row(row), b.row(row), a.width, sum.row(row));
      norm_row(weights, sum.row(row), a.width, normed.row(row));
    });
  });
  return {sum, normed};
}

Register act(ProgramHolder& self, Register x, int code) {
  self.require_register("x", x);
  const Activation activation = activation_of(code);
  const Register out = self.program.like(x);
  Program::Operation& operation = self.program.record("act", {x}, {out}, [=](const Call& c) { act(c.m, c.in(), activation, c.out()); });
  if (activation != Activation::Tanh && activation != Activation::Sigmoid) operation.activation = activation;
  return out;
}

// Above 0: positive * x^2 + linear * x; else negative * (e^min(x, most) - 1 - x) + linear * x.
Register xielu(ProgramHolder& self, Register x, float positive, float negative, float linear, float most) {
  self.require_register("x", x);
  for (const float value : {positive, negative, linear, most}) require_finite("a coefficient", value);
  return self.record("xielu", {x}, self.program.like(x), [=](const Call& c) {
    const Rows in = c.in(), out = c.out();
    each_row(c.m, in.count, 32 * in.width, [&](int64_t row) {
      const float* source = in.row(row);
      float* target = out.row(row);
      for (int64_t i = 0; i < in.width; ++i) {
        const float v = source[i];
        target[i] = linear * v + (v > 0.0f ? positive * v * v : negative * (std::expm1(std::min(v, most)) - v));
      }
    });
  });
}

// Each column between its bounds.
Register clamp(ProgramHolder& self, Register x, nb::handle least_array, nb::handle most_array) {
  self.require_register("x", x);
  const Vector lower = vector("least", least_array), upper = vector("most", most_array);
  const int64_t width = self.program.width(x);
  require_length("least", lower, width);
  require_length("most", upper, width);
  for (int64_t i = 0; i < width; ++i)
    require(lower.data()[i] <= upper.data()[i], "least is ", lower.data()[i], " in column ", i, " and most is ", upper.data()[i]);
  const std::vector<float> least(lower.data(), lower.data() + width), most(upper.data(), upper.data() + width);
  return self.record("clamp", {x}, self.program.like(x), [=](const Call& c) {
    const Rows in = c.in(), out = c.out();
    each_row(c.m, in.count, in.width, [&](int64_t row) {
      const float* __restrict source = in.row(row);
      float* __restrict target = out.row(row);
      for (int64_t i = 0; i < in.width; ++i) target[i] = std::min(std::max(source[i], least[i]), most[i]);
    });
  });
}

// act(max(gate - least, 0)) * up, where `least` is the mean of the gates plus `cutoff` standard deviations.
void sparse_act_mul_row(const float* gate, int64_t width, float cutoff, Activation activation, float* out) {
  double sum = 0.0, spread = 0.0;
  for (int64_t i = 0; i < width; ++i) sum += double(gate[i]);
  const double mean = sum / double(width);
  for (int64_t i = 0; i < width; ++i) spread += (double(gate[i]) - mean) * (double(gate[i]) - mean);
  const float least = float(mean + std::sqrt(spread / double(width)) * double(cutoff));
  for (int64_t i = 0; i < width; ++i) out[i] = std::max(gate[i] - least, 0.0f);
  kernels().act_mul_row(out, gate + width, width, activation, out);
}

// Gate and up lie side by side in a row of x.
Register act_mul(ProgramHolder& self, Register x, int code, std::optional<float> cutoff) {
  self.require_register("x", x);
  require_gate_and_up("x", self.program.width(x));
  const Activation activation = activation_of(code, true);
  const Register out = self.program.like(x, self.program.width(x) / 2);
  if (cutoff) {
    require_finite("cutoff", *cutoff);
    return self.record("act_mul", {x}, out, [=](const Call& c) {
      const Rows in = c.in(), out = c.out();
      each_row(c.m, in.count, 8 * out.width, [&](int64_t row) { sparse_act_mul_row(in.row(row), out.width, *cutoff, activation, out.row(row)); });
    });
  }
  self.program.record("act_mul", {x}, {out}, [=](const Call& c) { act_mul(c.m, c.in(), activation, c.out()); }).activation = activation;
  return out;
}

// sigmoid(logits) * x, for one logit of each of the equal parts of a row.
Register gate(ProgramHolder& self, Register x, Register logits) {
  self.require_rows_alike("x", x, "logits", logits);
  require_parts(self.program.width(x), self.program.width(logits));
  return self.record("gate", {x, logits}, self.program.like(x), [](const Call& c) {
    const Rows in = c.in(0), logits = c.in(1), out = c.out();
    const int64_t size = in.width / logits.width;
    each_row(c.m, in.count, in.width, [&](int64_t row) {
      const float *values = in.row(row), *each = logits.row(row);
      float* gated = out.row(row);
      if (size == 1) return kernels().gate_row(each, values, in.width, gated);
      for (int64_t part = 0; part < logits.width; ++part, values += size, gated += size) {
        const float factor = 1.0f / (1.0f + std::exp(-each[part]));
        for (int64_t i = 0; i < size; ++i) gated[i] = factor * values[i];
      }
    });
  });
}

// The columns [start, stop) of each part, side by side, times as many factors (None: 1).
Register join_columns(ProgramHolder& self, const std::vector<Register>& parts, const std::vector<int64_t>& starts,
                      const std::vector<int64_t>& stops, nb::handle factor_array) {
  require(!parts.empty() && starts.size() == parts.size() && stops.size() == parts.size(), "parts, starts and stops have ", parts.size(),
          ", ", starts.size(), " and ", stops.size(), " elements and must have the same number, at least 1");
  int64_t sum = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    self.require_tokens("a part", parts[i]);
    require_between("a start", starts[i], 0, self.program.width(parts[i]) - 1);
    require_between("a stop", stops[i], starts[i] + 1, self.program.width(parts[i]));
    sum += stops[i] - starts[i];
  }
  std::vector<float> factors;
  if (!factor_array.is_none()) {
    const Vector given = vector("factors", factor_array);
    require_length("factors", given, sum);
    factors.assign(given.data(), given.data() + sum);
  }
  return self.record("join_columns", parts, self.program.new_register(sum), [=](const Call& c) {
    const Rows out = c.out();
    each_row(c.m, out.count, out.width, [&](int64_t row) {
      float *joined = out.row(row), *target = joined;
      for (size_t i = 0; i < starts.size(); target += stops[i] - starts[i], ++i) copy_row(c.in(i).row(row) + starts[i], stops[i] - starts[i], target);
      for (size_t i = 0; i < factors.size(); ++i) joined[i] *= factors[i];
    });
  });
}

// -- products -------------------------------------------------------------------------------------------------------------------

Register linear(ProgramHolder& self, Register x, const LinearWeights& weights) {
  self.require_register("x", x, weights.in_features());
  const Register out = self.program.like(x, weights.out_features());
  const auto work = [&weights](const Call& c) { linear(c.m, c.in(), weights, c.out(), c.workspace); };
  self.program.record("linear", {x}, {out}, work).weights = &self.hold(weights);
  return out;
}

// `site`: of the adapters of the head; -1: they do not change it.
Register logits(ProgramHolder& self, Register x, const LinearWeights& head, float softcap, int64_t site) {
  self.require_register("x", x, head.in_features());
  require(std::isfinite(softcap) && softcap >= 0.0f, "softcap is ", softcap, " and must be a finite number of at least 0 (0: none)");
  require_between("site", site, -1, kMaxSites - 1);
  if (site >= 0) self.adapted.push_back({site, head.in_features(), head.out_features()});
  self.hold(head);
  const bool of_logit_rows = self.program.of_logit_rows(x);
  return self.record("logits", {x}, self.program.like(x, head.out_features()), [=, &head](const Call& c) {
    const Rows out = c.out();
    linear(c.m, c.in(), head, out, c.workspace);
    if (site >= 0) add_changes(c, out, c.in(), site, of_logit_rows);
    if (softcap != 0.0f) each_row(c.m, out.count, out.width, [&](int64_t row) { kernels().softcap_row(out.row(row), out.width, softcap); });
  });
}

// -- ranks of tensor parallelism ------------------------------------------------------------------------------------------------

Register all_gather(ProgramHolder& self, Register x, RanksHolder& ranks, const std::vector<int64_t>& widths) {
  self.require_register("x", x);
  const Register out = self.program.like(x, ranks.require_widths(widths, self.program.width(x)));
  self.hold(ranks);
  return self.record("all_gather", {x}, out, [=, &ranks](const Call& c) { ranks.memory.gather(c.in(), widths, c.out()); });
}

Register all_reduce(ProgramHolder& self, Register x, RanksHolder& ranks) {
  self.require_register("x", x);
  RanksHolder::require_sum(self.program.width(x));
  self.hold(ranks);
  return self.record("all_reduce", {x}, x, [&ranks](const Call& c) { ranks.memory.reduce(c.in()); });  // in place
}

// -- residual streams, side by side in a row: |<- stream 0 ->|<- stream 1 ->| ... |, each `size` numbers ------------------------

// out_i = sum over j of coefficients[i * streams + j] * x_j
Register mix_streams(ProgramHolder& self, Register x, Register coefficients, int64_t streams) {
  self.require_rows_alike("x", x, "coefficients", coefficients);
  require_between("streams", streams, 1, kMaxHeads);
  require_multiple("x", self.program.width(x), "the number of streams", streams);
  require_multiple("coefficients", self.program.width(coefficients), "the number of streams", streams);
  const int64_t size = self.program.width(x) / streams, count = self.program.width(coefficients) / streams;
  return self.record("mix_streams", {x, coefficients}, self.program.like(x, count * size), [=](const Call& c) {
    each_row(c.m, c.in().count, streams * count * size, [&](int64_t row) {
      const float* source = c.in(0).row(row);
      for (int64_t i = 0; i < count; ++i) {
        const float* factors = c.in(1).row(row) + i * streams;
        float* target = c.out().row(row) + i * size;
        for (int64_t j = 0; j < streams; ++j) {
          const float factor = factors[j], *own = source + j * size;
          if (j == 0)
            for (int64_t k = 0; k < size; ++k) target[k] = factor * own[k];
          else
            for (int64_t k = 0; k < size; ++k) target[k] += factor * own[k];
        }
      }
    });
  });
}

// out_i = x_i + coefficients[i] * y, by coefficients of each row, or of all rows
Register add_to_streams(ProgramHolder& self, Register x, Register y, const std::variant<Register, std::vector<float>>& coefficients) {
  self.require_rows_alike("x", x, "y", y);
  const int64_t size = self.program.width(y), streams = self.program.width(x) / size;
  require_multiple("x", self.program.width(x), "the width of y", size);
  const auto* of_rows = std::get_if<Register>(&coefficients);
  std::vector<Register> reads = {x, y};
  std::vector<float> of_all;
  if (of_rows) {
    self.require_rows_alike("x", x, "coefficients", *of_rows);
    reads.push_back(*of_rows);
  } else {
    of_all = std::get<std::vector<float>>(coefficients);
  }
  const int64_t count = of_rows ? self.program.width(*of_rows) : int64_t(of_all.size());
  require(count == streams, "coefficients is ", count, " wide and must be ", streams, " wide");
  return self.record("add_to_streams", reads, self.program.like(x), [=](const Call& c) {
    each_row(c.m, c.in().count, 2 * c.in().width, [&](int64_t row) {
      const float *factors = of_all.empty() ? c.in(2).row(row) : of_all.data(), *change = c.in(1).row(row);
      for (int64_t i = 0; i < streams; ++i) {
        const float factor = factors[i], *source = c.in(0).row(row) + i * size;
        float* target = c.out().row(row) + i * size;
        for (int64_t k = 0; k < size; ++k) target[k] = source[k] + factor * change[k];
      }
    });
  });
}

float mean_square(const float* x, int64_t size) {
  double total = 0.0;
  for (int64_t i = 0; i < size; ++i) total += double(x[i]) * double(x[i]);
  return float(total / double(size));
}

// The streams of y, scaled to the root mean square of x.
Register match_streams(ProgramHolder& self, Register x, Register y) {
  self.require_rows_alike("x", x, "y", y);
  const int64_t size = self.program.width(x);
  require_multiple("y", self.program.width(y), "the width of x", size);
  return self.record("match_streams", {x, y}, self.program.like(y), [=](const Call& c) {
    const Rows wanted = c.in(0), in = c.in(1), out = c.out();
    each_row(c.m, in.count, 2 * in.width, [&](int64_t row) {
      const float root = std::sqrt(mean_square(wanted.row(row), size));
      for (int64_t at = 0; at < in.width; at += size) {
        const float* source = in.row(row) + at;
        float* target = out.row(row) + at;
        const float factor = root / std::sqrt(std::max(mean_square(source, size), kLeastMeanSquare));
        for (int64_t k = 0; k < size; ++k) target[k] = source[k] * factor;
      }
    });
  });
}

// -- the outputs of a network ---------------------------------------------------------------------------------------------------

// The rows of logit_rows.
Register take(ProgramHolder& self, Register x) {
  self.require_tokens("x", x);
  return self.record("take", {x}, self.program.new_register(self.program.width(x), true), [](const Call& c) {
    const Rows in = c.in(), out = c.out();
    const int32_t* rows = c.step.logit_rows;
    each_row(c.m, out.count, out.width, [&](int64_t row) { copy_row(in.row(rows ? rows[row] : row), out.width, out.row(row)); });
  });
}

// Copies the rows to the columns from `column` on of the caller's array, if it passes one.
void tap(ProgramHolder& self, Register x, int64_t column) {
  self.require_tokens("x", x);
  require_between("column", column, 0, kMaxTapWidth);
  self.taps_width = std::max(self.taps_width, column + self.program.width(x));
  self.program.record("tap", {x}, {}, [=](const Call& c) {
    const Rows in = c.in();
    if (!c.step.taps) return;
    each_row(c.m, in.count, in.width, [&](int64_t row) { copy_row(in.row(row), in.width, c.step.taps + row * c.step.taps_width + column); });
  });
}

}  // namespace

void bind_operations(ProgramClass& program) {
  program.def("embed", recording(&embed), "table"_a, "scale"_a, "source"_a, "is_partial"_a = false)
      .def("rotation", recording(&rotation), array("frequencies"), "scale"_a, "two_sets"_a = false)
      .def("given", recording(&given), "width"_a)
      .def("norm", recording(&norm), "x"_a, "weights"_a)
      .def("add", recording(&add), "x"_a, "y"_a, "scale"_a = 1.0f)
      .def("add_norm", recording(&add_norm), "x"_a, "delta"_a, "weights"_a)
      .def("act", recording(&act), "x"_a, "activation"_a)
      .def("xielu", recording(&xielu), "x"_a, "positive"_a, "negative"_a, "linear"_a, "most"_a)
      .def("clamp", recording(&clamp), "x"_a, array("least"), array("most"))
      .def("act_mul", recording(&act_mul), "x"_a, "activation"_a, "cutoff"_a.none() = nb::none())
      .def("gate", recording(&gate), "x"_a, "logits"_a)
      .def("join_columns", recording(&join_columns), "parts"_a, "starts"_a, "stops"_a, array("factors") = nb::none())
      .def("linear", recording(&linear), "x"_a, "weights"_a)
      .def("logits", recording(&logits), "x"_a, "head"_a, "softcap"_a, "site"_a = -1)
      .def("all_gather", recording(&all_gather), "x"_a, "ranks"_a, "widths"_a)
      .def("all_reduce", recording(&all_reduce), "x"_a, "ranks"_a)
      .def("mix_streams", recording(&mix_streams), "x"_a, "coefficients"_a, "streams"_a)
      .def("add_to_streams", recording(&add_to_streams), "x"_a, "y"_a, "coefficients"_a)
      .def("match_streams", recording(&match_streams), "x"_a, "y"_a)
      .def("take", recording(&take), "x"_a)
      .def("tap", recording(&tap), "x"_a, "column"_a);
}

}  // namespace bifolio
