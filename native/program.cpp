#include "program.h"

#include <time.h>

#include <algorithm>

namespace bifolio {

Program::Register Program::new_register(int64_t width, bool of_logit_rows) {
  values_.push_back({width, of_logit_rows});
  return Register(values_.size() - 1);
}

void Program::bind(Register x) {
  values_[size_t(x)].array = int(arrays_.size());
  arrays_.push_back(x);
}

Program::Register Program::given(int64_t width) {
  const Register out = new_register(width);
  bind(out);
  return out;
}

Program::Operation& Program::record(const char* name, std::vector<Register> reads, std::vector<Register> writes, Work work) {
  operations_.push_back({name, std::move(reads), std::move(writes), std::move(work), num_recorded_++, nullptr, {}});
  return operations_.back();
}

Rows Program::rows(Register value, const Step& step) const {
  const Value& v = values_[size_t(value)];
  const int64_t count = v.of_logit_rows ? step.num_logit_rows : step.num_tokens;
  if (v.array >= 0) return {step.arrays[size_t(v.array)], count, v.width, v.width};
  return {buffers_[size_t(v.buffer)]->array<float>(0), count, v.width, round_up(v.width, 16)};
}

void Program::finish(const std::vector<Register>& results) {
  for (Register result : results) bind(result);
  join_activated();
  assign_buffers();
  is_complete_ = true;
}

// Whether a product, its gates or activation, and another product follow each other, and nothing else reads the values between them.
bool Program::is_activated(size_t first) const {
  if (first + 2 >= operations_.size()) return false;
  const Operation &pair = operations_[first], &gate = operations_[first + 1], &last = operations_[first + 2];
  if (!pair.weights || !gate.activation || !last.weights) return false;
  if (gate.reads != pair.writes || last.reads != gate.writes) return false;
  const auto readers = [&](Register value) {
    return std::count_if(operations_.begin(), operations_.end(), [&](const Operation& operation) {
      return std::count(operation.reads.begin(), operation.reads.end(), value) > 0;
    });
  };
  const auto is_between = [&](Register value) { return readers(value) == 1 && array(value) < 0; };
  return is_between(gate.reads[0]) && is_between(last.reads[0]);
}

// Three such operations become one, which keeps the values between them in a near cache when there are many rows.
void Program::join_activated() {
  for (size_t i = 0; i < operations_.size(); ++i) {
    if (!is_activated(i)) continue;
    const Operation pair = operations_[i], gate = operations_[i + 1], last = operations_[i + 2];
    const auto work = [=, this](const Call& c) {
      if (can_activate(*pair.weights, *last.weights, c.in().count)) {
        activated_linear(c.m, c.in(), *pair.weights, *gate.activation, *last.weights, c.out(1), c.out(2), c.workspace);
      } else {
        for (const Operation* each : {&pair, &gate, &last}) run(*each, c.m, c.step);
      }
    };
    operations_[i] = {"activated", pair.reads, {pair.writes[0], gate.writes[0], last.writes[0]}, work, pair.index, nullptr, {}};
    operations_.erase(operations_.begin() + std::ptrdiff_t(i) + 1, operations_.begin() + std::ptrdiff_t(i) + 3);
  }
}

// Values share a buffer when the last use of one comes before the other is written.
void Program::assign_buffers() {
  for (size_t i = 0; i < operations_.size(); ++i)
    for (const auto& list : {operations_[i].reads, operations_[i].writes})
      for (Register value : list) values_[size_t(value)].last_use = int(i);
  std::vector<int> free_buffers;
  for (size_t i = 0; i < operations_.size(); ++i) {
    for (Register value : operations_[i].writes) {
      Value& v = values_[size_t(value)];
      if (v.buffer >= 0 || v.array >= 0) continue;  // changed in place, or in an array of the caller
      if (free_buffers.empty()) {
        free_buffers.push_back(int(buffer_widths_.size()));
        buffer_widths_.push_back(0);
      }
      // the free buffer whose width is closest, so that narrow values do not occupy wide buffers
      auto best = std::min_element(free_buffers.begin(), free_buffers.end(), [&](int a, int b) {
        return std::abs(buffer_widths_[size_t(a)] - v.width) < std::abs(buffer_widths_[size_t(b)] - v.width);
      });
      v.buffer = *best;
      free_buffers.erase(best);
      buffer_widths_[size_t(v.buffer)] = std::max(buffer_widths_[size_t(v.buffer)], round_up(v.width, 16));
    }
    std::vector<Register> ended = operations_[i].reads;
    ended.insert(ended.end(), operations_[i].writes.begin(), operations_[i].writes.end());
    std::sort(ended.begin(), ended.end());
    ended.erase(std::unique(ended.begin(), ended.end()), ended.end());
    for (Register value : ended)
      if (values_[size_t(value)].last_use == int(i) && values_[size_t(value)].array < 0) free_buffers.push_back(values_[size_t(value)].buffer);
  }
  for (size_t i = 0; i < buffer_widths_.size(); ++i) buffers_.push_back(std::make_unique<Scratch>());
}

void Program::allocate(const Step& step) {
  const int64_t needed = std::max(step.num_tokens, step.num_logit_rows);
  if (needed > allocated_rows_) {
    allocated_rows_ = needed;
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i]->bytes(size_t(buffer_widths_[i] * needed) * sizeof(float));
  }
}

void Program::run(Pool& pool, const Step& step) {
  std::lock_guard lock(mutex_);
  allocate(step);
  pool.run([&](Member& m) {
    for (const Operation& operation : operations_) run(operation, m, step);
  });
}

std::vector<double> Program::profile(Pool& pool, const Step& step) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  std::lock_guard lock(mutex_);
  allocate(step);
  std::vector<double> seconds(num_recorded_);
  pool.run([&](Member& m) {
    for (const Operation& operation : operations_) {
      const double begin = now();
      run(operation, m, step);
      seconds[operation.index] += now() - begin;
    }
  });
  return seconds;
}

}  // namespace bifolio
