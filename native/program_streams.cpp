// Recording of the operations of streams.h.
#include "program.h"
#include "streams.h"

namespace bifolio {

Program::Register Program::mix_streams(Register x, Register coefficients, int64_t streams) {
  const Register out = like(x, width(coefficients) / streams * (width(x) / streams));
  record("mix_streams", {x, coefficients}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::mix_streams(m, rows(x, step), rows(coefficients, step), streams, rows(out, step));
  });
  return out;
}

Program::Register Program::add_to_streams(Register x, Register y, Register coefficients) {
  const Register out = like(x, width(x));
  record("add_to_streams", {x, y, coefficients}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::add_to_streams(m, rows(x, step), rows(y, step), rows(coefficients, step), rows(out, step));
  });
  return out;
}

Program::Register Program::add_to_streams(Register x, Register y, const std::vector<float>& coefficients) {
  const Register out = like(x, width(x));
  record("add_to_streams", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    const Rows all{const_cast<float*>(coefficients.data()), rows(x, step).count, int64_t(coefficients.size()), 0};  // read only
    bifolio::add_to_streams(m, rows(x, step), rows(y, step), all, rows(out, step));
  });
  return out;
}

Program::Register Program::match_streams(Register x, Register y) {
  const Register out = like(x, width(y));
  record("match_streams", {x, y}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::match_streams(m, rows(x, step), rows(y, step), rows(out, step));
  });
  return out;
}

}  // namespace bifolio
