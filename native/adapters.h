// Low-rank adapters: for each adapted product two thin matrices, whose product with the rows of a token is added to its output.
#pragma once

#include "ops.h"

namespace bifolio {

// Adds up (down x) + bias to the columns from `column` on; or `whole` x takes the place of all columns.
struct LowRank {
  int64_t column;
  PackedMatrix down{}, up{};             // [r, in], [columns, r]
  const float* bias = nullptr;           // [columns], null: none
  const LinearWeights* whole = nullptr;  // [columns, in], null: of low rank
  size_t wave = 0;  // parts that change the same columns are added one after the other, in the order of their waves

  int64_t inputs() const { return whole ? whole->in_features() : down.k; }
  int64_t outputs() const { return whole ? whole->out_features() : up.n; }
};

// The waves of the parts of one product: a part comes after all earlier ones whose columns overlap its own.
void set_waves(std::vector<LowRank>& parts);

// The change of an embedding: the row of a token times `down` is added. Without `down` the row takes the place of the base's.
struct TableChange {
  EmbeddingTable rows;  // [vocab, r]; [vocab, d]
  EmbeddingTable down;  // f32 [r, d]; no data: there is none
};

struct ExpertAdapter {
  std::vector<LowRank> up, down;  // of the two products of one expert
};

// One adapter. A site is the number of a product, or of the experts of a layer; those beyond the end are not adapted.
struct AdapterWeights {
  std::vector<std::vector<LowRank>> products;        // by site
  std::vector<std::vector<ExpertAdapter>> experts;   // by site, then by expert
  std::vector<TableChange> embedding;                // in this order

  const std::vector<LowRank>* product(int64_t site) const {
    return size_t(site) < products.size() && !products[size_t(site)].empty() ? &products[size_t(site)] : nullptr;
  }
  const std::vector<ExpertAdapter>* experts_of(int64_t site) const {
    return size_t(site) < experts.size() && !experts[size_t(site)].empty() ? &experts[size_t(site)] : nullptr;
  }
};

// The adapters of a batch.
struct AdapterUse {
  std::vector<const AdapterWeights*> loaded;
  const int32_t* rows;  // [t]  index into `loaded`, -1: none

  const AdapterWeights* of(int64_t token) const { return rows[token] < 0 ? nullptr : loaded[size_t(rows[token])]; }
};

// Neighbouring rows of one adapter.
struct AdaptedRows {
  const std::vector<LowRank>* parts;
  int64_t first, count;
};

// The runs of rows [0, count) with the same parts; parts_of(row) is null for rows without an adapter.
template <class PartsOf>
std::vector<AdaptedRows> adapted_rows(int64_t count, PartsOf parts_of) {
  std::vector<AdaptedRows> runs;
  for (int64_t row = 0; row < count; ++row) {
    const std::vector<LowRank>* parts = parts_of(row);
    if (!parts) continue;
    const bool continues = !runs.empty() && runs.back().parts == parts && runs.back().first + runs.back().count == row;
    if (continues) ++runs.back().count;
    else runs.push_back({parts, row, 1});
  }
  return runs;
}

// The rows of runs whose products have matrices of their own: y = up x.
void replace_rows(Member& m, Rows y, Rows x, const std::vector<AdaptedRows>& runs, Workspace& workspace);

// The embedding of a token with the changes of its adapter; `scale` multiplies those of the table.
void change_embedding(float* row, int64_t token_id, const std::vector<TableChange>& changes, float scale, Scratch& memory);

// y += up (down x) for the rows of each run. A row's result depends on the row and its adapter alone: both sums are chains of fma
// in the order of float weights.
void adapt(Member& m, Rows y, Rows x, const std::vector<AdaptedRows>& runs, Workspace& workspace);

}  // namespace bifolio
