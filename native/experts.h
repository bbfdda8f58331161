// Mixtures of experts: the choice of experts for each token, and the weighted sum of their MLPs.
#pragma once

#include "adapters.h"
#include "ops.h"

namespace bifolio {

// How a token chooses its experts from one logit for each.
struct RouterConstants {
  int64_t num_experts, top_k;
  bool sigmoid;  // of each logit; else a softmax over all
  bool renormalise;
  float scale;
  const float* bias;  // [num_experts], changes the choice but not the weights; may be null
  int64_t num_groups, top_groups, group_best;
  const float* expert_scales = nullptr;  // [num_experts], factors of the weights; may be null
  float band = 0.0f;  // sparse mixing: logits so far below the best, relative to their size, weigh nothing; 0: off

  int64_t routing_width() const { return 2 * top_k; }
};

// The MLPs of one layer, of equal sizes.
struct ExpertWeights {
  std::vector<const LinearWeights*> up, down;  // gate and up of each expert, or up alone, and down
  Activation activation;
  bool is_gated;  // all of them can be multiplied by gate_columns

  bool has_gates() const { return up[0]->out_features() != down[0]->in_features(); }
  int64_t in_features() const { return up[0]->in_features(); }
  int64_t out_features() const { return down[0]->out_features(); }
};

// A row of `routing`: the numbers of the chosen experts as int32, best first, then their weights.
void route(Member& m, Rows logits, const RouterConstants& router, Rows routing);

// out = the weighted sum of the outputs of each row's experts, in the order of the choice. Rows are grouped by expert; the
// weights of an expert are read once for (at most 512 of) its rows.
// `adapters`: of the experts at `site`; null: none.
void mix_experts(Member& m, Rows x, Rows routing, int64_t top_k, const ExpertWeights& experts, Rows out, Workspace& workspace,
                 const AdapterUse* adapters = nullptr, int64_t site = 0);

}  // namespace bifolio
