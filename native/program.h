// A network recorded once as a list of operations and replayed for any batch in one call.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "experts.h"
#include "ranks.h"
#include "recurrence.h"

namespace bifolio {

// One forward pass: the inputs of the recorded operations when they run.
struct Step {
  int64_t num_tokens;
  const int32_t* token_ids;   // [t]
  const int32_t* positions;   // [t]
  const int64_t* slots;       // [t]  block * block_size + offset in the cache
  const int32_t* logit_rows;  // [r], null: all tokens
  int64_t num_logit_rows;
  Queries queries;
  const std::vector<KvLayer>* layers;
  float* logits;  // [r, vocab]
  const std::vector<StateLayer>* state_layers = nullptr;  // of recurrent layers
  StateUse states{};
  const float* given = nullptr;  // [t, width of the given register]
  float* taps = nullptr;  // [t, taps_width], null: taps are not read
  int64_t taps_width = 0;
};

class Program {
 public:
  using Register = int;  // rows of floats between two operations

  Register embed(const EmbeddingTable& table, float scale, bool of_positions);
  Register norm(Register x, const NormWeights& weights);
  Register add(Register x, Register y, float scale);
  std::pair<Register, Register> add_norm(Register x, Register delta, const NormWeights& weights);
  Register linear(Register x, const LinearWeights& weights);
  std::pair<Register, Register> rotation(const std::vector<float>& frequencies, float scale, bool two_sets);
  // Returns the same register: queries and keys are rotated in place. Registers -1: no rotation.
  Register rope_and_write(Register qkv, int64_t layer, const AttentionConstants& shape, Register cosine, Register sine);
  Register attend(Register qkv, int64_t layer, const AttentionConstants& shape);
  Register act(Register x, Activation activation);
  Register act_mul(Register x, Activation activation, std::optional<float> cutoff);
  Register head_linear(Register x, const std::vector<const LinearWeights*>& heads, int64_t start);
  Register join_latent(Register query, Register absorbed, Register latent, const NormWeights& norm, int64_t rope);
  struct Columns {  // [start, stop) of a register
    Register x;
    int64_t start, stop;
  };
  // The columns side by side, times as many factors (null: 1); at least one part.
  Register join_columns(const std::vector<Columns>& parts, const float* factors);
  Register gate(Register x, Register logits);
  Register route(Register logits, const RouterConstants& router);  // rows of experts and weights: see route
  Register mix_experts(Register x, Register routing, const ExpertWeights& experts);
  Register recur(Register x, int64_t layer, const RecurrenceWeights& weights);
  Register all_gather(Register x, RankMemory& ranks, const std::vector<int64_t>& widths);
  Register all_reduce(Register x, RankMemory& ranks);  // returns the same register
  // The operations of streams.h.
  Register mix_streams(Register x, Register coefficients, int64_t streams);
  Register add_to_streams(Register x, Register y, Register coefficients);
  Register add_to_streams(Register x, Register y, const std::vector<float>& coefficients);
  Register match_streams(Register x, Register y);
  Register take(Register x);  // the rows of logit_rows
  Register given(int64_t width);  // rows that the caller passes with the batch
  void tap(Register x, int64_t column);  // copies the rows to the columns from `column` on of the caller's array, if it passes one
  void logits(Register x, const LinearWeights& head, float softcap);

  // The registers recorded so far are [0, num_registers()).
  Register num_registers() const { return Register(values_.size()); }
  int64_t width(Register x) const { return values_[size_t(x)].width; }
  bool of_logit_rows(Register x) const { return values_[size_t(x)].of_logit_rows; }
  bool is_complete() const { return vocab_size_ > 0; }  // logits, the last operation, has been recorded

  // Only for complete programs. One caller at a time: others wait.
  void run(Pool& pool, const Step& step);
  // The same, measured: seconds of processor time of the calling thread in all operations of each name.
  std::map<std::string, double> profile(Pool& pool, const Step& step);
  int64_t vocab_size() const { return vocab_size_; }
  size_t scratch_bytes() const;

 private:
  struct Value {
    int64_t width;
    bool of_logit_rows;  // as many rows as there are logits, not tokens
    int last_use = -1;
    int buffer = -1;
  };
  using Work = std::function<void(Member&, const Step&)>;
  struct Operation {
    const char* name;
    std::vector<Register> reads, writes;
    Work work;
    const LinearWeights* weights = nullptr;  // of a product
    std::optional<Activation> activation;  // of act_mul without a cutoff
  };

  Register new_value(int64_t width, bool of_logit_rows);
  Register like(Register x, int64_t width) { return new_value(width, values_[size_t(x)].of_logit_rows); }
  Operation& record(const char* name, std::vector<Register> reads, std::vector<Register> writes, Work work);
  bool is_gated(size_t first) const;
  void join_gated();
  void assign_buffers();
  void allocate(const Step& step);
  Rows rows(Register value, const Step& step) const;

  std::vector<Value> values_;
  std::vector<Operation> operations_;
  std::vector<int64_t> buffer_widths_;
  std::vector<std::unique_ptr<Scratch>> buffers_;
  int64_t allocated_rows_ = 0;
  int64_t vocab_size_ = 0;
  Workspace workspace_;
  std::mutex mutex_;  // held while the buffers are in use
};

}  // namespace bifolio
