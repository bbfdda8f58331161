// Rows of floats, and the operations on them that have a file of their own; each is run by the whole team.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "contracts.h"
#include "matrix.h"
#include "pool.h"

namespace bifolio {

struct Rows {
  float* data;
  int64_t count;
  int64_t width;   // numbers of a row
  int64_t stride;  // from one row to the next
  float* row(int64_t index) const { return data + index * stride; }
};

struct EmbeddingTable {
  FileFormat format;
  const uint8_t* data;
  int64_t rows, width;
  size_t row_bytes;
};

struct AttentionConstants {
  int64_t num_heads, num_kv_heads, head_dim;
  float scale;
  int64_t window;  // 0: none
  bool interleaved;
  const NormWeights* query_norm;  // of head_dim: for each head; wider: one for all heads of a token
  const NormWeights* key_norm;
  bool norm_after_rope = false;
  float softcap = 0.0f;  // of scores; 0: off
  float temperature = 0.0f;  // queries at position p grow by 1 + temperature * log(1 + p / temperature_period); 0: not
  int64_t temperature_period = 1;
  const NormWeights* value_norm = nullptr;  // of head_dim; null: none
  bool queries_only = false;  // the keys and values are those of another layer: rows hold queries alone, none are written
  bool in_chunks = false;          // the window begins at a multiple of its size
  int64_t temperature_start = 0;   // of the positions that the temperature counts
  const float* slopes = nullptr;   // [num_heads] scores grow by slope * (position - position of the query); null: they do not
  const float* sinks = nullptr;  // [num_heads] score of a position without a value that every query sees; null: none
  bool bidirectional = false;    // a query sees the positions after it, too; a window reaches as far in both directions
  bool causal = false;           // a query sees no later position in segments that are not causal, either
  const float* bias = nullptr;   // [num_heads][2 * reach + 1] added to scores, by the position of the key minus that of the query; null: none
  int64_t reach = 0;             // larger distances have the bias of this one
  int64_t top_k = 0;             // positions that an indexer chooses for a query that sees more; 0: there is none

  float scale_at(int64_t position) const {
    return temperature == 0.0f ? scale : scale * (1.0f + temperature * std::log(float(1 + (position + temperature_start) / temperature_period)));
  }
  int64_t query_width() const { return num_heads * head_dim; }
  int64_t qkv_width() const { return (num_heads + (queries_only ? 0 : 2 * num_kv_heads)) * head_dim; }
};

// The phase of the queries of a segment: selects the plan of attention (attention_plan.h).
enum class Phase : int32_t {
  Prefill = 0,  // many queries of each sequence: bound by compute
  Decode = 1,   // one query of each sequence, and drafts: bound by bandwidth
};

// One segment of a batch: whole sequences of one phase, one after the other.
struct Segment {
  Phase phase;
  bool causal;  // false: every query sees the whole context of its sequence, from the start of its window on
  int64_t token_start;
  int64_t num_sequences;
  const int32_t* query_starts;  // [s + 1], from token_start
  const int32_t* context_lens;  // [s]
  const int32_t* block_tables;  // [s][table_stride]
  int64_t table_stride;
};

// One token that attends, and the place of its context.
struct Query {
  int64_t token;         // row of the batch
  int64_t position;      // in its context
  int64_t end;           // one past the last position that it sees
  const int32_t* table;  // blocks of its context
  int64_t shared;        // leading tokens that lie in the same blocks as those of the query before; INT64_MAX within a sequence
  int64_t length;        // of its context
  const int32_t* chosen = nullptr;  // positions that are its context, in order; null: all of the sequence
};

// The queries of all segments by phase, ordered so that contexts that begin with the same blocks are neighbours.
// share = false: as if no two contexts had a block in common.
struct Queries {
  Queries(const std::vector<Segment>& segments, int64_t block_size, bool share);
  Queries over(Rows chosen, int64_t top_k) const;  // those that see more than top_k positions: over the chosen ones alone
  std::vector<Query> prefill, decode;
};

// Memory that an operation needs while it runs, kept from one step to the next.
struct RowMemory {  // the rows of a product
  Scratch bytes, scales, words, floats;
};
struct Workspace {
  RowMemory input, middle;
  Scratch partials, residuals, planes;
  Scratch gathered, hidden, outputs, products;  // rows of experts
  Scratch convolved, gates;  // rows of recurrent layers
  Scratch low_rank;  // rows between the two products of adapters
};

void act(Member& m, Rows x, Activation activation, Rows out);
void act_mul(Member& m, Rows x, Activation activation, Rows out);  // of gate and up side by side
void linear(Member& m, Rows x, const LinearWeights& weights, Rows out, Workspace& workspace);

// out = last (act(gate x) * (up x)), where `pair` is gate and up one after the other: the same as linear, act_mul and linear. Or
// out = last (act(pair x)). `middle` has room for the rows between them. Only where can_activate is true.
void activated_linear(Member& m, Rows x, const LinearWeights& pair, Activation activation, const LinearWeights& last, Rows middle,
                      Rows out, Workspace& workspace);
bool can_activate(const LinearWeights& pair, const LinearWeights& last, int64_t rows);

// `qkv` holds rotated queries in its leading columns; the keys and values of all its tokens are already in `kv`.
void attend(Member& m, Rows qkv, const AttentionConstants& shape, const Queries& queries, const KvLayer& kv, Rows out,
            Workspace& workspace);

// The positions that the heads of an indexer choose for each query (choice.cpp), as i32[top_k] in a row of `out`, ascending: those of the
// largest scores (IndexRows), of equal ones the first. -1: the query sees no more than top_k positions.
void choose(Member& m, Rows query, Rows weights, const AttentionConstants& shape, const Queries& queries, const KvLayer& kv, Rows out,
            Workspace& workspace);
inline const int32_t* chosen_row(Rows chosen, int64_t row) { return reinterpret_cast<const int32_t*>(chosen.row(row)); }

// Tokens that attention did not have to read, since the start of the process: the tokens of a shared prefix count once for
// each sequence but the first, in every layer.
int64_t shared_tokens();

}  // namespace bifolio
