#include "program.h"

#include <time.h>

#include <algorithm>
#include <numeric>

namespace bifolio {

Program::Register Program::new_value(int64_t width, bool of_logit_rows) {
  values_.push_back({width, of_logit_rows});
  return Register(values_.size() - 1);
}

Program::Operation& Program::record(const char* name, std::vector<Register> reads, std::vector<Register> writes, Work work) {
  operations_.push_back({name, std::move(reads), std::move(writes), std::move(work)});
  return operations_.back();
}

Rows Program::rows(Register value, const Step& step) const {
  const Value& v = values_[size_t(value)];
  const int64_t count = v.of_logit_rows ? step.num_logit_rows : step.num_tokens;
  const int64_t stride = round_up(v.width, 16);
  return {buffers_[size_t(v.buffer)]->array<float>(0), count, v.width, stride};
}

Program::Register Program::embed(const EmbeddingTable& table, float scale, bool of_positions) {
  const Register out = new_value(table.width, false);
  record("embed", {}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::embed(m, table, of_positions ? step.positions : step.token_ids, scale, rows(out, step));
  });
  return out;
}

Program::Register Program::norm(Register x, const NormWeights& weights) {
  const Register out = like(x, width(x));
  record("norm", {x}, {out}, [=, this](Member& m, const Step& step) { bifolio::norm(m, rows(x, step), weights, rows(out, step)); });
  return out;
}

Program::Register Program::add(Register x, Register y, float scale) {
  const Register out = like(x, values_[size_t(x)].width);
  record("add", {x, y}, {out}, [=, this](Member& m, const Step& step) { bifolio::add(m, rows(x, step), rows(y, step), scale, rows(out, step)); });
  return out;
}

std::pair<Program::Register, Program::Register> Program::add_norm(Register x, Register delta, const NormWeights& weights) {
  const Register sum = like(x, weights.size), normed = like(x, weights.size);
  record("add_norm", {x, delta}, {sum, normed}, [=, this](Member& m, const Step& step) {
    bifolio::add_norm(m, rows(x, step), rows(delta, step), weights, rows(sum, step), rows(normed, step));
  });
  return {sum, normed};
}

Program::Register Program::linear(Register x, const LinearWeights& weights) {
  const Register out = like(x, weights.out_features());
  record("linear", {x}, {out}, [=, this, &weights](Member& m, const Step& step) {
    bifolio::linear(m, rows(x, step), weights, rows(out, step), workspace_);
  }).weights = &weights;
  return out;
}

std::pair<Program::Register, Program::Register> Program::rotation(const std::vector<float>& frequencies, float scale, bool two_sets) {
  const int64_t width = int64_t(frequencies.size()) / (two_sets ? 2 : 1);
  const Register cosine = new_value(width, false), sine = new_value(width, false);
  record("rotation", {}, {cosine, sine}, [=, this](Member& m, const Step& step) {
    bifolio::rotation(m, frequencies.data(), two_sets, scale, step.positions, rows(cosine, step), rows(sine, step));
  });
  return {cosine, sine};
}

Program::Register Program::rope_and_write(Register qkv, int64_t layer, const AttentionConstants& shape, Register cosine,
                                          Register sine) {
  std::vector<Register> reads = {qkv};
  if (cosine >= 0) reads.insert(reads.end(), {cosine, sine});
  record("rope_and_write", reads, {qkv}, [=, this](Member& m, const Step& step) {
    Rows turns[2] = {};
    if (cosine >= 0) turns[0] = rows(cosine, step), turns[1] = rows(sine, step);
    bifolio::rope_and_write(m, rows(qkv, step), shape, cosine >= 0 ? &turns[0] : nullptr, &turns[1],
                            &(*step.layers)[size_t(layer)], step.slots);
  });
  return qkv;
}

Program::Register Program::attend(Register qkv, int64_t layer, const AttentionConstants& shape) {
  const Register out = like(qkv, shape.query_width());
  record("attend", {qkv}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::attend(m, rows(qkv, step), shape, step.queries, (*step.layers)[size_t(layer)], rows(out, step), workspace_);
  });
  return out;
}

Program::Register Program::act(Register x, Activation activation) {
  const Register out = like(x, values_[size_t(x)].width);
  record("act", {x}, {out}, [=, this](Member& m, const Step& step) { bifolio::act(m, rows(x, step), activation, rows(out, step)); });
  return out;
}

Program::Register Program::act_mul(Register x, Activation activation, std::optional<float> cutoff) {
  const Register out = like(x, values_[size_t(x)].width / 2);
  if (cutoff) {
    record("act_mul", {x}, {out}, [=, this](Member& m, const Step& step) {
      bifolio::sparse_act_mul(m, rows(x, step), *cutoff, activation, rows(out, step));
    });
    return out;
  }
  record("act_mul", {x}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::act_mul(m, rows(x, step), activation, rows(out, step));
  }).activation = activation;
  return out;
}

Program::Register Program::all_gather(Register x, RankMemory& ranks, const std::vector<int64_t>& widths) {
  const Register out = like(x, std::accumulate(widths.begin(), widths.end(), int64_t(0)));
  record("all_gather", {x}, {out}, [=, this, &ranks](Member&, const Step& step) { ranks.gather(rows(x, step), widths, rows(out, step)); });
  return out;
}

Program::Register Program::all_reduce(Register x, RankMemory& ranks) {
  record("all_reduce", {x}, {x}, [=, this, &ranks](Member&, const Step& step) { ranks.reduce(rows(x, step)); });
  return x;
}

Program::Register Program::head_linear(Register x, const std::vector<const LinearWeights*>& heads, int64_t start) {
  const Register out = like(x, int64_t(heads.size()) * heads[0]->out_features());
  record("head_linear", {x}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::head_linear(m, rows(x, step), heads, start, rows(out, step), workspace_);
  });
  return out;
}

Program::Register Program::join_latent(Register query, Register absorbed, Register latent, const NormWeights& norm, int64_t rope) {
  const int64_t heads = width(absorbed) / norm.size;
  const Register out = like(query, (heads + 2) * (norm.size + rope));
  record("join_latent", {query, absorbed, latent}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::join_latent(m, rows(query, step), rows(absorbed, step), rows(latent, step), norm, rope, rows(out, step));
  });
  return out;
}

Program::Register Program::join_columns(const std::vector<Columns>& parts, const float* factors) {
  int64_t sum = 0;
  std::vector<Register> reads;
  for (const Columns& part : parts) {
    sum += part.stop - part.start;
    reads.push_back(part.x);
  }
  const Register out = like(parts[0].x, sum);
  record("join_columns", reads, {out}, [=, this](Member& m, const Step& step) {
    int64_t target = 0;
    for (const Columns& part : parts) {
      copy_columns(m, rows(part.x, step), part.start, part.stop - part.start, rows(out, step), target, factors ? factors + target : nullptr);
      target += part.stop - part.start;
    }
  });
  return out;
}

Program::Register Program::gate(Register x, Register logits) {
  const Register out = like(x, width(x));
  record("gate", {x, logits}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::gate(m, rows(x, step), rows(logits, step), rows(out, step));
  });
  return out;
}

Program::Register Program::route(Register logits, const RouterConstants& router) {
  const Register out = like(logits, router.routing_width());
  record("route", {logits}, {out}, [=, this](Member& m, const Step& step) {
    bifolio::route(m, rows(logits, step), router, rows(out, step));
  });
  return out;
}

Program::Register Program::mix_experts(Register x, Register routing, const ExpertWeights& experts) {
  const Register out = like(x, experts.out_features());
  record("experts", {x, routing}, {out}, [=, this, &experts](Member& m, const Step& step) {
    bifolio::mix_experts(m, rows(x, step), rows(routing, step), width(routing) / 2, experts, rows(out, step), workspace_);
  });
  return out;
}

Program::Register Program::recur(Register x, int64_t layer, const RecurrenceWeights& weights) {
  const Register out = like(x, weights.out_features());
  record("recur", {x}, {out}, [=, this, &weights](Member& m, const Step& step) {
    bifolio::recur(m, rows(x, step), weights, step.states, &(*step.state_layers)[size_t(layer)], rows(out, step), workspace_);
  });
  return out;
}

Program::Register Program::take(Register x) {
  const Register out = new_value(values_[size_t(x)].width, true);
  record("take", {x}, {out}, [=, this](Member& m, const Step& step) { bifolio::take(m, rows(x, step), step.logit_rows, rows(out, step)); });
  return out;
}

Program::Register Program::given(int64_t width) {
  const Register out = new_value(width, false);
  record("given", {}, {out}, [=, this](Member& m, const Step& step) {
    const Rows source{const_cast<float*>(step.given), step.num_tokens, width, width};  // read only
    bifolio::take(m, source, nullptr, rows(out, step));
  });
  return out;
}

void Program::tap(Register x, int64_t column) {
  record("tap", {x}, {}, [=, this](Member& m, const Step& step) {
    if (!step.taps) return;
    const Rows source = rows(x, step);
    bifolio::take(m, source, nullptr, {step.taps + column, source.count, source.width, step.taps_width});
  });
}

void Program::logits(Register x, const LinearWeights& head, float softcap) {
  vocab_size_ = head.out_features();
  record("logits", {x}, {}, [=, this, &head](Member& m, const Step& step) {
    const Rows out{step.logits, step.num_logit_rows, vocab_size_, vocab_size_};
    bifolio::linear(m, rows(x, step), head, out, workspace_);
    if (softcap != 0.0f) bifolio::softcap(m, out, softcap);
  });
  join_gated();
  assign_buffers();
}

// Whether a product, act_mul and another product follow each other, and no other operation reads the values between them.
bool Program::is_gated(size_t first) const {
  if (first + 2 >= operations_.size()) return false;
  const Operation &pair = operations_[first], &gate = operations_[first + 1], &last = operations_[first + 2];
  if (!pair.weights || !gate.activation || !last.weights) return false;
  if (gate.reads != pair.writes || last.reads != gate.writes) return false;
  const auto readers = [&](Register value) {
    return std::count_if(operations_.begin(), operations_.end(), [&](const Operation& operation) {
      return std::count(operation.reads.begin(), operation.reads.end(), value) > 0;
    });
  };
  return readers(gate.reads[0]) == 1 && readers(last.reads[0]) == 1;
}

// Three such operations become one, which keeps the values between them in a near cache when there are many rows.
void Program::join_gated() {
  for (size_t i = 0; i < operations_.size(); ++i) {
    if (!is_gated(i)) continue;
    const Operation pair = operations_[i], gate = operations_[i + 1], last = operations_[i + 2];
    const auto work = [=, this](Member& m, const Step& step) {
      const Rows x = rows(pair.reads[0], step);
      if (can_gate(*pair.weights, *last.weights, x.count)) {
        gated_linear(m, x, *pair.weights, *gate.activation, *last.weights, rows(gate.writes[0], step), rows(last.writes[0], step), workspace_);
      } else {
        pair.work(m, step), gate.work(m, step), last.work(m, step);
      }
    };
    operations_[i] = {"gated", pair.reads, {pair.writes[0], gate.writes[0], last.writes[0]}, work};
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
      if (v.buffer >= 0) continue;  // rotated in place
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
      if (values_[size_t(value)].last_use == int(i)) free_buffers.push_back(values_[size_t(value)].buffer);
  }
  for (size_t i = 0; i < buffer_widths_.size(); ++i) buffers_.push_back(std::make_unique<Scratch>());
}

size_t Program::scratch_bytes() const {
  size_t bytes = 0;
  for (int64_t width : buffer_widths_) bytes += size_t(width * allocated_rows_) * sizeof(float);
  return bytes;
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
  pool.run([&](Member& member) {
    for (const Operation& operation : operations_) operation.work(member, step);
  });
}

std::map<std::string, double> Program::profile(Pool& pool, const Step& step) {
  const auto now = [] {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  std::lock_guard lock(mutex_);
  allocate(step);
  std::map<std::string, double> seconds;
  pool.run([&](Member& member) {
    for (const Operation& operation : operations_) {
      const double begin = now();
      operation.work(member, step);
      seconds[operation.name] += now() - begin;
    }
  });
  return seconds;
}

}  // namespace bifolio
