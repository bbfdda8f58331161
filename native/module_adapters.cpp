// Adapters as Python hands them over, and their operation.
#include "module_program.h"

#include <atomic>
#include <cstring>

using namespace nanobind::literals;

namespace bifolio {
namespace {

const LinearWeights& dense_weights(const char* name, nb::handle value) {
  const LinearWeights* weights = nullptr;
  require(nb::try_cast(value, weights) && weights, name, " must be weights made by make_linear");
  require(weights->pieces().size() == 1 && weights->pieces().front().matrix.format <= Format::F16, name,
          " must be one matrix in F32 or F16");
  return *weights;
}

void require_entry(const char* name, nb::handle entry, size_t size) {
  require(nb::isinstance<nb::tuple>(entry) && nb::len(entry) == size, name, " must hold tuples of ", size, " elements");
  for (size_t i = 0; i + 2 < size; ++i) require(PyLong_Check(nb::handle(entry[i]).ptr()), name, " must hold tuples that begin with numbers");
}

// The parts of an adapter in Python: (table, down), where down is None for a table in place of the base's.
TableChange table_change(const nb::tuple& entry) {
  const TableHolder *rows = nullptr, *down = nullptr;
  require(nb::try_cast(entry[0], rows) && rows, "the table of an embedding must be a Table");
  if (entry[1].is_none()) return {rows->table, {}};
  require(nb::try_cast(entry[1], down) && down, "down of an embedding must be a Table, or None");
  require(down->table.row_bytes == size_t(down->table.width) * sizeof(float), "down of an embedding must be in F32");
  require(down->table.rows == rows->table.width, "down of an embedding has ", down->table.rows, " rows and must have ", rows->table.width);
  return {rows->table, down->table};
}

// The embeddings of tokens with an adapter, changed in place; `scale` as that of embed.
Register adapt_embedding(ProgramHolder& self, Register x, float scale) {
  self.require_tokens("x", x);
  require_finite("scale", scale);
  self.adapted_tables.push_back(self.program.width(x));
  return self.record("adapt_embedding", {x}, x, [=](const Call& c) {
    const AdapterUse* use = c.step.adapters;
    if (!use || std::none_of(use->loaded.begin(), use->loaded.end(), [](const AdapterWeights* each) { return !each->embedding.empty(); })) return;
    const Rows rows = c.in();
    each_row(c.m, rows.count, 16 * rows.width, [&](int64_t row) {
      if (const AdapterWeights* adapter = use->of(row))
        change_embedding(rows.row(row), c.step.token_ids[row], adapter->embedding, scale, c.m.scratch());
    });
  });
}

// y += up (down x) for the rows of tokens with an adapter, in place.
Register adapt(ProgramHolder& self, Register y, Register x, int64_t site) {
  self.require_rows_alike("y", y, "x", x);
  require(x != y, "y is register ", y, " and must be another than x");
  require_between("site", site, 0, kMaxSites - 1);
  self.adapted.push_back({site, self.program.width(x), self.program.width(y)});
  const bool of_logit_rows = self.program.of_logit_rows(y);
  return self.record("adapt", {y, x}, y, [=](const Call& c) { add_changes(c, c.in(0), c.in(1), site, of_logit_rows); });
}

void require_fit(const char* kind, int64_t site, const LowRank& part, int64_t inputs, int64_t outputs) {
  if (part.whole) {
    require(part.column == 0 && part.outputs() == outputs && part.inputs() == inputs, "an adapter has a matrix of ", part.outputs(), " x ",
            part.inputs(), " at ", kind, " ", site, " and must have ", outputs, " x ", inputs);
    return;
  }
  require(part.inputs() == inputs, "an adapter has ", part.inputs(), " inputs at ", kind, " ", site, " and must have ", inputs);
  require(part.column + part.outputs() <= outputs, "an adapter ends at column ", part.column + part.outputs(), " of ", kind, " ",
          site, ", which has ", outputs);
}

}  // namespace

void add_changes(const Call& c, Rows y, Rows x, int64_t site, bool of_logit_rows) {
  const AdapterUse* use = c.step.adapters;
  if (!use) return;
  const int32_t* tokens = of_logit_rows ? c.step.logit_rows : nullptr;
  adapt(c.m, y, x, adapted_rows(y.count, [=](int64_t row) {
    const AdapterWeights* adapter = use->of(tokens ? tokens[row] : row);
    return adapter ? adapter->product(site) : nullptr;
  }), c.workspace);
}

// (site, column, down, up), where an expert's have (site, expert, is_down, column, down, up).
// down is None: up takes the place of the base's matrix.
LowRank AdapterHolder::low_rank(const nb::tuple& entry, size_t at) {
  LowRank part{nb::cast<int64_t>(entry[at])};
  require_between("a column", part.column, 0, kMaxWidth);
  if (entry[at + 1].is_none()) {
    require(nb::try_cast(entry[at + 2], part.whole) && part.whole, "up must be weights made by make_linear");
    keep.append(entry[at + 2]);
    return part;
  }
  const LinearWeights &down = dense_weights("down", entry[at + 1]), &up = dense_weights("up", entry[at + 2]);
  require(up.in_features() == down.out_features(), "up has ", up.in_features(), " inputs and must have ", down.out_features(),
          ", the outputs of down");
  part.down = down.pieces().front().matrix, part.up = up.pieces().front().matrix, part.bias = up.bias();
  return part;
}

void AdapterHolder::join() {
  std::vector<LowRank*> parts;
  for (auto& own : weights.products)
    for (LowRank& part : own) parts.push_back(&part);
  for (auto& every : weights.experts)
    for (ExpertAdapter& own : every)
      for (auto* side : {&own.up, &own.down})
        for (LowRank& part : *side) parts.push_back(&part);
  const auto bytes_of = [](const PackedMatrix& matrix) { return matrix.panel_bytes * size_t(matrix.num_panels); };
  const auto bias_bytes = [](const LowRank& part) { return part.bias ? size_t(round_up(part.up.n * 4, 64)) : 0; };
  size_t size = 64;
  for (const LowRank* part : parts)
    if (!part->whole) size += bytes_of(part->down) + bytes_of(part->up) + bias_bytes(*part);
  memory = std::make_unique<HugeBuffer>(size);
  uint8_t* at = memory->data();
  for (LowRank* part : parts) {
    if (part->whole) continue;
    for (PackedMatrix* matrix : {&part->down, &part->up}) {
      std::memcpy(at, matrix->data, bytes_of(*matrix));
      matrix->data = at, at += bytes_of(*matrix);
    }
    if (!part->bias) continue;
    std::memcpy(at, part->bias, size_t(part->up.n) * sizeof(float));
    part->bias = reinterpret_cast<const float*>(at), at += bias_bytes(*part);
  }
}

AdapterHolder::AdapterHolder(nb::list products, nb::list experts, nb::list embedding) {
  static std::atomic<uint64_t> last{0};
  number = ++last;
  for (nb::handle each : products) {
    require_entry("products", each, 4);
    const auto entry = nb::borrow<nb::tuple>(each);
    const auto site = nb::cast<int64_t>(entry[0]);
    require_between("a site", site, 0, kMaxSites - 1);
    weights.products.resize(std::max(weights.products.size(), size_t(site) + 1));
    weights.products[size_t(site)].push_back(low_rank(entry, 1));
  }
  for (nb::handle each : experts) {
    require_entry("experts", each, 6);
    const auto entry = nb::borrow<nb::tuple>(each);
    const auto site = nb::cast<int64_t>(entry[0]), expert = nb::cast<int64_t>(entry[1]);
    require_between("a site", site, 0, kMaxSites - 1);
    require_between("an expert", expert, 0, kMaxExperts - 1);
    weights.experts.resize(std::max(weights.experts.size(), size_t(site) + 1));
    auto& own = weights.experts[size_t(site)];
    own.resize(std::max(own.size(), size_t(expert) + 1));
    (nb::cast<int64_t>(entry[2]) ? own[size_t(expert)].down : own[size_t(expert)].up).push_back(low_rank(entry, 3));
  }
  for (nb::handle each : embedding) {
    require(nb::isinstance<nb::tuple>(each) && nb::len(each) == 2, "embedding must hold tuples of 2 elements");
    weights.embedding.push_back(table_change(nb::borrow<nb::tuple>(each)));
  }
  for (auto& parts : weights.products) set_waves(parts);
  for (auto& every : weights.experts)
    for (ExpertAdapter& own : every) set_waves(own.up), set_waves(own.down);
  keep.append(embedding);
  join();
}

void ProgramHolder::require_adapter(const AdapterHolder& adapter) {
  if (fitting.count(adapter.number)) return;
  for (const auto& [site, inputs, outputs] : adapted)
    if (const auto* parts = adapter.weights.product(site))
      for (const LowRank& part : *parts) require_fit("site", site, part, inputs, outputs);
  for (const int64_t width : adapted_tables)
    for (const TableChange& each : adapter.weights.embedding) {
      const int64_t own = each.down.data ? each.down.width : each.rows.width;
      require(own == width, "an adapter has embeddings of ", own, " values and must have ", width);
    }
  for (const auto& [site, experts] : adapted_experts)
    if (const auto* own = adapter.weights.experts_of(site)) {
      require(own->size() <= experts->up.size(), "an adapter has ", own->size(), " experts at site ", site, " and must have at most ", experts->up.size());
      for (const ExpertAdapter& each : *own) {
        for (const LowRank& part : each.up) require_fit("the experts of site", site, part, experts->in_features(), experts->up[0]->out_features());
        for (const LowRank& part : each.down) require_fit("the experts of site", site, part, experts->down[0]->in_features(), experts->out_features());
      }
    }
  fitting.insert(adapter.number);
}

void bind_adapters(nb::module_& m, ProgramClass& program) {
  nb::class_<AdapterHolder>(m, "Adapter").def(nb::init<nb::list, nb::list, nb::list>(), "products"_a, "experts"_a = nb::list(),
                                             "embedding"_a = nb::list());
  program.def("adapt_embedding", recording(&adapt_embedding), "x"_a, "scale"_a);
  program.def("adapt", recording(&adapt), "y"_a, "x"_a, "site"_a);
}

}  // namespace bifolio
