// How attention is cut into units of work. A unit is some queries, one kv head, and one or all spans of their context:
//
//   by queries   (queries, kv head): the unit visits all its spans and merges as it goes
//   by spans     split-KV, (queries, kv head, span): the unit leaves a partial state, and the states of all spans are merged
//                in order after a barrier
//
// The phase of the queries selects the plan:
//
//   PREFILL      by queries, in units of as many rows as the kernels take: a tile of the context is read once for all of
//                them. Where that leaves threads idle, as a short prompt behind a long cached prefix does, the context is
//                split, too: with fewer than four units for each thread, or with fewer than eight that do not come out
//                even, so that threads have no unit for more than a sixteenth of the time.
//   DECODE       by spans where some context has more than one and sequences are few: a single query reads each tile, and one
//                long context must keep all threads busy. By queries from eight units for each thread on.
//
// Queries of several sequences come into one unit where their contexts begin with the same blocks, which are then read
// once for all of them. Queries of different phases never do. Each query visits its positions in the same order in every
// plan, so the results are the same bit for bit.
#pragma once

#include "ops.h"

namespace bifolio {

struct AttentionUnit {
  int32_t first, count;  // queries
  int32_t kv_head;
  int32_t span;  // -1: all of them
};

struct AttentionPlan {
  std::vector<AttentionUnit> units;
  bool by_spans = false;
  int64_t max_spans = 1;       // of a query, from position 0 on
  size_t partial_floats = 0;   // that the partial states of all queries take; 0: not by spans
};

// The first position that a query at `position` sees.
inline int64_t window_begin(const AttentionConstants& shape, int64_t position) {
  if (shape.window && shape.in_chunks) return position - position % shape.window;
  return shape.window && position >= shape.window ? position + 1 - shape.window : 0;
}

// One past the last position that a query sees.
inline int64_t window_end(const AttentionConstants& shape, const Query& query) {
  if (!shape.bidirectional) return shape.causal ? query.position + 1 : query.end;
  return shape.window && query.position + shape.window < query.length ? query.position + shape.window : query.length;
}

// Floats of the partial state of a (query, head, span): maximum, total, and the mixed values.
inline int64_t partial_state(const AttentionConstants& shape) { return round_up(shape.head_dim, 16) + 2; }

// The plan for all queries of one phase.
AttentionPlan plan_attention(Phase phase, const std::vector<Query>& queries, const AttentionConstants& shape, int num_threads);

}  // namespace bifolio
