// The parts of the extension module: the classes that Python holds, and the functions that bind each part.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checks.h"
#include "experts.h"
#include "ranks.h"
#include "recurrence.h"

namespace bifolio {

// -- classes; each keeps alive the arrays it points into ------------------------------------------------------------------

// The threads of an engine.
struct PoolHolder {
  explicit PoolHolder(int64_t count);  // 0: one for each physical core
  Pool pool;
};

Pool& team_of(PoolHolder* pool);  // null: the pool of the process

struct NormHolder {
  NormHolder(nb::handle weight, nb::handle bias, float eps, bool centered);
  Vector weight;
  Vector bias;  // not valid: none
  NormWeights norm;
};

struct TableHolder {
  TableHolder(int format, nb::handle bytes, int64_t width);
  Bytes bytes;
  EmbeddingTable table;
};

// The K/V arrays of all layers: equally many blocks of as many tokens; heads may differ between layers.
struct CacheHolder {
  CacheHolder(nb::list keys, nb::list values, int kv_type, const std::vector<int64_t>& head_dims);

  int64_t num_slots() const { return num_blocks * layers[0].block_size; }
  const KvLayer& layer(int64_t index) const { return layers[size_t(index)]; }
  // The layer exists and has the heads of the shape.
  void require_layer(int64_t index, const AttentionConstants& shape) const;

  std::vector<KvArray> arrays;
  std::vector<KvLayer> layers;
  int64_t num_blocks = 0;
};

struct RouterHolder {
  RouterHolder(int64_t num_experts, int64_t top_k, bool sigmoid, bool renormalise, float scale, nb::handle bias, int64_t num_groups,
               int64_t top_groups, int64_t group_best, nb::handle expert_scales, float band);
  Vector bias;  // not valid: none
  Vector expert_scales;  // not valid: none
  RouterConstants router;
};

struct ExpertsHolder {
  ExpertsHolder(nb::list up, nb::list down, int activation);
  nb::list keep;
  ExpertWeights experts;
};

// One matrix for each head, of equal sizes.
struct HeadsHolder {
  explicit HeadsHolder(nb::list linears);
  nb::list keep;
  std::vector<const LinearWeights*> linears;

  int64_t in_features() const { return linears[0]->in_features(); }
  int64_t out_features() const { return linears[0]->out_features() * int64_t(linears.size()); }
  // Rows of x are `width` wide: each head has as many columns, `start` and the inputs among them.
  void require_input(const char* name, int64_t width, int64_t start) const;
};

struct RecurrenceHolder {
  RecurrenceHolder(int kind, int64_t width, int64_t channels, int64_t heads, int64_t groups, int64_t key_size, int64_t value_size,
                   nb::handle conv_weight, nb::handle conv_bias, nb::handle decay, nb::handle bias, nb::handle skip, const NormHolder* norm,
                   bool norm_first, int64_t norm_groups, float least_step, float most_step, bool tiled, float rate_scale,
                   float decay_bound);
  RecurrenceHolder() : weights{} {}
  std::vector<Vector> vectors;     // that the weights point into
  std::vector<float> conv_weight;  // [width][channels]
  std::vector<float> decays;       // keyed: that of its head for each key
  std::vector<float> open;         // [channels]  ones, of a convolution without activation
  RecurrenceWeights weights;
};

// The states of all recurrent layers: equally many in each.
struct StatesHolder {
  StatesHolder(nb::list windows, nb::list states);
  // The layer exists and has the sizes of the recurrence.
  void require_layer(int64_t index, const RecurrenceWeights& weights) const;

  std::vector<Array<float, 3>> windows;
  std::vector<Array<float, 4>> states;
  std::vector<StateLayer> layers;
  int64_t num_states = 0;
};

// The arrays of a StateUse, checked against the batch and the number of states; 0: the batch has no storage of states.
struct StateArrays {
  StateArrays(nb::handle starts, nb::handle reads, nb::handle writes, int64_t num_tokens, int64_t num_states);
  Ints starts, reads, writes;
  StateUse use() const { return {int64_t(reads.shape(0)), starts.data(), reads.data(), writes.data()}; }
};

// Python owns the result. `is_mapped`: all parts lie in read-only maps of files, whose pages are dropped once they are packed.
LinearWeights* make_linear(const nb::list& parts, int64_t k, nb::handle bias, int planes, bool is_mapped, PoolHolder* pool);
AttentionConstants make_shape(int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window, bool interleaved,
                              const NormHolder* query_norm, const NormHolder* key_norm, bool norm_after_rope, float softcap,
                              float temperature, int64_t temperature_period);

// One adapter; its number is never used again.
struct AdapterHolder {
  AdapterHolder(nb::list products, nb::list experts, nb::list embedding);
  LowRank low_rank(const nb::tuple& entry, size_t at);
  void join();  // copies all low-rank matrices to one piece of memory, in their order
  nb::list keep;
  AdapterWeights weights;
  std::unique_ptr<HugeBuffer> memory;
  uint64_t number;
};

// The memory of the ranks of tensor parallelism.
struct RanksHolder {
  RanksHolder(nb::handle memory, int rank, int size);
  int64_t require_widths(const std::vector<int64_t>& widths, int64_t own) const;  // returns their sum
  static void require_sum(int64_t width);

  Array<uint8_t, 1> bytes;
  RankMemory memory;
};

// -- segments of a batch --------------------------------------------------------------------------------------------------

// The segments (phase, token_start, query_starts, context_lens, block_tables, causal), checked against the batch and the cache.
// They must cover the tokens [0, num_tokens) in order. `tables` keeps alive the block tables that the queries point into.
Queries queries_of(const nb::list& segments, int64_t num_tokens, const CacheHolder& cache, bool share, std::vector<Tables>& tables);

// The bytes of a matrix hold whole rows of `width` numbers.
FileFormat require_rows(const char* name, int code, const Bytes& bytes, const char* width_name, int64_t width);

// -- bindings -------------------------------------------------------------------------------------------------------------

// An array argument. None is let through to the checks, so that their error names the argument.
inline auto array(const char* name) { return nb::arg(name).none(); }

// The pool of an operation; None, the default, is that of the process.
inline auto pool_argument() { return nb::arg("pool").none() = nb::none(); }

void bind_classes(nb::module_& m);
void bind_formats(nb::module_& m);
void bind_tokens(nb::module_& m);
void bind_program(nb::module_& m);  // and its operations: module_program.h
void bind_ranks(nb::module_& m);
void bind_host(nb::module_& m);

}  // namespace bifolio
