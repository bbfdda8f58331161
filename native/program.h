// Operations recorded once and replayed for any batch in one call: a whole network, or one operation alone.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "adapters.h"
#include "ops.h"
#include "recurrence.h"

namespace bifolio {

// One forward pass: the inputs of the recorded operations when they run. Those that no operation reads may be null.
struct Step {
  int64_t num_tokens = 0, num_logit_rows = 0;
  const int32_t* token_ids = nullptr;   // [t]
  const int32_t* positions = nullptr;   // [t]
  const int64_t* slots = nullptr;       // [t]  block * block_size + offset in the cache
  const int32_t* logit_rows = nullptr;  // [r], null: all tokens
  const Queries* queries = nullptr;
  const std::vector<KvLayer>* layers = nullptr;           // null: keys and values are not written
  const std::vector<StateLayer>* state_layers = nullptr;  // null: every sequence continues the empty state
  StateUse states{};
  const AdapterUse* adapters = nullptr;  // null: no token has one
  std::vector<float*> arrays;  // of the given registers, then of the results
  float* taps = nullptr;       // [t, taps_width], null: taps are not read
  int64_t taps_width = 0;
};

class Program {
 public:
  using Register = int;  // rows of floats between two operations
  struct Operation;

  // An operation while it runs.
  struct Call {
    Member& m;
    const Step& step;
    const Program& program;
    const Operation& operation;
    Workspace& workspace;
    Rows in(size_t i = 0) const { return program.rows(operation.reads[i], step); }
    Rows out(size_t i = 0) const { return program.rows(operation.writes[i], step); }
  };
  using Work = std::function<void(const Call&)>;
  struct Operation {
    const char* name;
    std::vector<Register> reads, writes;
    Work work;
    size_t index;                            // in the order of recording
    const LinearWeights* weights = nullptr;  // of a product
    std::optional<Activation> activation;    // of gate and up, or of one product
  };

  // -- recording ----------------------------------------------------------------------------------------------------------
  Register new_register(int64_t width, bool of_logit_rows = false);
  Register like(Register x, int64_t width) { return new_register(width, of_logit_rows(x)); }
  Register like(Register x) { return like(x, width(x)); }
  Register given(int64_t width);  // rows [t, width] of an array of the caller
  // The reference is valid until the next operation is recorded.
  Operation& record(const char* name, std::vector<Register> reads, std::vector<Register> writes, Work work);
  void finish(const std::vector<Register>& results);  // that are written to arrays of the caller

  // The registers recorded so far are [0, num_registers()).
  Register num_registers() const { return Register(values_.size()); }
  int64_t width(Register x) const { return values_[size_t(x)].width; }
  bool of_logit_rows(Register x) const { return values_[size_t(x)].of_logit_rows; }
  int array(Register x) const { return values_[size_t(x)].array; }  // -1: the register is in no array of the caller
  bool is_complete() const { return is_complete_; }
  const std::vector<Register>& arrays() const { return arrays_; }  // in the order of Step::arrays

  // -- running: only complete programs; one caller at a time, others wait ---------------------------------------------------
  void run(Pool& pool, const Step& step);
  std::vector<double> profile(Pool& pool, const Step& step);  // the same; seconds of each operation, in the order of recording

 private:
  struct Value {
    int64_t width;
    bool of_logit_rows;  // as many rows as there are logits, not tokens
    int array = -1;      // of the caller
    int last_use = -1;
    int buffer = -1;
  };

  void run(const Operation& operation, Member& m, const Step& step) { operation.work({m, step, *this, operation, workspace_}); }
  void bind(Register x);
  bool is_activated(size_t first) const;
  void join_activated();
  void assign_buffers();
  void allocate(const Step& step);
  Rows rows(Register value, const Step& step) const;

  std::vector<Value> values_;
  std::vector<Operation> operations_;
  std::vector<Register> arrays_;
  size_t num_recorded_ = 0;
  bool is_complete_ = false;
  std::vector<int64_t> buffer_widths_;
  std::vector<std::unique_ptr<Scratch>> buffers_;
  int64_t allocated_rows_ = 0;
  Workspace workspace_;
  std::mutex mutex_;  // held while the buffers are in use
};

}  // namespace bifolio
