// Recording of the operations of streams.h.
#include "program.h"
#include "streams.h"

namespace bifolio {

Program::Register Program::add_scaled(Register x, Register y, float scale) {
  const Register out = like(x, width(x));
  record("add_scaled", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::add_scaled(m, rows(x, step), rows(y, step), scale, rows(out, step));
  });
  return out;
}

Program::Register Program::embed_known(const EmbeddingTable& table, float scale) {
  const Register out = new_value(table.width, false);
  record("embed", {}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::embed_known(m, table, step.token_ids, scale, rows(out, step));
  });
  return out;
}

Program::Register Program::norm_groups(Register x, const NormWeights& weights) {
  const Register out = like(x, width(x));
  record("norm", {x}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::norm_groups(m, rows(x, step), weights, rows(out, step));
  });
  return out;
}

Program::Register Program::columns(Register x, int64_t start, int64_t width, const float* factors) {
  const Register out = like(x, width);
  record("columns", {x}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::columns(m, rows(x, step), start, factors, rows(out, step));
  });
  return out;
}

Program::Register Program::act_gate(Register x, Register inputs, int64_t start, Activation activation) {
  const Register out = like(x, width(x));
  record("act_gate", {x, inputs}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::act_gate(m, rows(x, step), rows(inputs, step), start, activation, rows(out, step));
  });
  return out;
}

Program::Register Program::sparse_act_mul(Register x, float deviations, Activation activation) {
  const Register out = like(x, width(x) / 2);
  record("sparse_act_mul", {x}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::sparse_act_mul(m, rows(x, step), deviations, activation, rows(out, step));
  });
  return out;
}

Program::Register Program::mix_streams(Register x, Register coefficients, int64_t streams) {
  const Register out = like(x, width(coefficients) / streams * (width(x) / streams));
  record("mix_streams", {x, coefficients}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::mix_streams(m, rows(x, step), rows(coefficients, step), streams, rows(out, step));
  });
  return out;
}

Program::Register Program::correct_streams(Register x, Register y, Register coefficients, int64_t active) {
  const Register out = like(x, width(x));
  record("correct_streams", {x, y, coefficients}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::correct_streams(m, rows(x, step), rows(y, step), rows(coefficients, step), active, rows(out, step));
  });
  return out;
}

Program::Register Program::add_to_streams(Register x, Register y, int64_t first) {
  const Register out = like(x, width(x));
  record("add_to_streams", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::add_to_streams(m, rows(x, step), rows(y, step), first, rows(out, step));
  });
  return out;
}

Program::Register Program::spread_streams(Register x, Register y) {
  const Register out = like(x, width(x) + width(y));
  record("spread_streams", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::spread_streams(m, rows(x, step), rows(y, step), rows(out, step));
  });
  return out;
}

Program::Register Program::merge_streams(Register x, Register y) {
  const Register out = like(x, width(x));
  record("merge_streams", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::merge_streams(m, rows(x, step), rows(y, step), rows(out, step));
  });
  return out;
}

}  // namespace bifolio
