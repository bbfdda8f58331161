// What Python sees: packed weights, every verb on numpy arrays, and recorded programs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "isa.h"
#include "limits.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace bifolio {
namespace {

template <class T, class... Extra>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu, Extra...>;
using Matrix = Array<float, nb::ndim<2>>;
using Vector = Array<const float, nb::ndim<1>>;
using Ints = Array<const int32_t, nb::ndim<1>>;
using Longs = Array<const int64_t, nb::ndim<1>>;
using Bytes = Array<const uint8_t, nb::ndim<2>>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

Rows rows_of(const Matrix& array) {
  return {array.data(), int64_t(array.shape(0)), int64_t(array.shape(1)), int64_t(array.shape(1))};
}

void run_team(const std::function<void(Member&)>& work) {
  nb::gil_scoped_release release;
  Pool::instance().run(work);
}

// Norm weights that keep their arrays alive.
struct NormHolder {
  NormHolder(Vector weight, std::optional<Vector> bias, float eps, bool centered)
      : weight(weight), bias(bias), norm{weight.data(), bias ? bias->data() : nullptr, int64_t(weight.shape(0)), eps, centered} {
    require(!bias || bias->shape(0) == weight.shape(0), "a norm's bias must be as long as its weight");
  }
  Vector weight;
  std::optional<Vector> bias;
  NormWeights norm;
};

struct TableHolder {
  TableHolder(int format, Bytes bytes, int64_t width)
      : bytes(bytes), table{Format(format), bytes.data(), int64_t(bytes.shape(0)), width, bytes.shape(1)} {
    require(format >= 0 && format <= 5 && source_row_bytes(Format(format), width) == bytes.shape(1),
            "the bytes of a table do not fit its format and width");
  }
  Bytes bytes;
  EmbeddingTable table;
};

// Python owns what comes back.
LinearWeights* make_linear(const std::vector<std::pair<int, Bytes>>& parts, int64_t k, std::optional<Vector> bias,
                           int planes) {
  require(planes == 1 || planes == 2, "activations have one plane or two");
  require(!parts.empty(), "a linear layer needs at least one part");
  std::vector<SourceRows> sources;
  int64_t n = 0;
  for (const auto& [format, bytes] : parts) {
    require(format >= 0 && format <= 5, "unknown format");
    require(k > 0 && source_row_bytes(Format(format), k) == bytes.shape(1) && (format < 3 || k % kBlock == 0),
            "the bytes of a weight do not fit its format and width");
    sources.push_back({Format(format), bytes.data(), int64_t(bytes.shape(0)), bytes.shape(1)});
    n += int64_t(bytes.shape(0));
  }
  require(!bias || int64_t(bias->shape(0)) == n, "a bias must have one number for each output");
  const float* bias_data = bias ? bias->data() : nullptr;
  nb::gil_scoped_release release;
  return new LinearWeights(sources, k, bias_data, planes);
}

// The K/V arrays of all layers.
struct CacheHolder {
  CacheHolder(nb::list keys, nb::list values, int kv_type, int64_t head_dim) {
    using Blocks = nb::ndarray<nb::c_contig, nb::device::cpu, nb::ndim<4>>;
    require(keys.size() == values.size(), "as many keys as values are needed");
    static const size_t element_bytes[] = {4, 2, 2, 1};
    const size_t row_bytes = kv_type == 3 ? size_t(head_dim + head_dim / kBlock * 2) : size_t(head_dim) * element_bytes[kv_type];
    for (size_t i = 0; i < keys.size(); ++i) {
      auto key = nb::cast<Blocks>(keys[i]), value = nb::cast<Blocks>(values[i]);
      require(key.itemsize() * key.shape(3) == row_bytes && value.nbytes() == key.nbytes(), "the K/V arrays do not fit their type");
      layers.push_back({KvType(kv_type), static_cast<uint8_t*>(key.data()), static_cast<uint8_t*>(value.data()),
                        int64_t(key.shape(2)), int64_t(key.shape(1)), head_dim, row_bytes});
      num_blocks = int64_t(key.shape(0));
      arrays.append(keys[i]);
      arrays.append(values[i]);
    }
  }
  nb::list arrays;
  std::vector<KvLayer> layers;
  int64_t num_blocks = 0;
};

AttentionConstants constants(int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window, bool interleaved,
                             const NormHolder* query_norm, const NormHolder* key_norm) {
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && heads / kv_heads <= kMaxRows, "query heads must be a multiple of kv heads, at most 128 times");
  return {heads, kv_heads, dim, scale, window, interleaved, query_norm ? &query_norm->norm : nullptr, key_norm ? &key_norm->norm : nullptr};
}

using Tables = Array<const int32_t, nb::ndim<2>>;

// (token_start, query_starts, context_lens, block_tables), checked against the cache: kernels trust it.
Segment segment_of(const nb::tuple& fields, int64_t num_tokens, const CacheHolder& cache, std::vector<Ints>& arrays,
                   std::vector<Tables>& all_tables) {
  const auto starts = nb::cast<Ints>(fields[1]), lens = nb::cast<Ints>(fields[2]);
  const auto tables = nb::cast<Tables>(fields[3]);
  arrays.insert(arrays.end(), {starts, lens});
  all_tables.push_back(tables);
  const Segment s{nb::cast<int64_t>(fields[0]), int64_t(lens.shape(0)), starts.data(), lens.data(), tables.data(),
                  int64_t(tables.shape(1))};
  const int64_t block_size = cache.layers.empty() ? 1 : cache.layers[0].block_size;
  require(starts.shape(0) == lens.shape(0) + 1 && tables.shape(0) == lens.shape(0), "a segment's arrays disagree");
  require(s.token_start >= 0 && starts.data()[0] == 0 && s.token_start + starts.data()[s.num_sequences] <= num_tokens,
          "a segment does not fit the batch");
  for (int64_t i = 0; i < s.num_sequences; ++i) {
    const int64_t queries = s.query_starts[i + 1] - s.query_starts[i];
    require(queries >= 0 && s.context_lens[i] >= queries && s.context_lens[i] <= s.table_stride * block_size,
            "a sequence's context does not fit its block table");
    for (int64_t b = 0; b * block_size < s.context_lens[i]; ++b) {
      const int64_t block = s.block_tables[i * s.table_stride + b];
      require(block >= 0 && block < cache.num_blocks, "a block table names a block that does not exist");
    }
  }
  return s;
}

// `tables` keeps alive what the queries point at.
std::vector<Query> queries_of(const nb::list& segments, int64_t num_tokens, const CacheHolder& cache, bool share,
                              std::vector<Tables>& tables) {
  std::vector<Segment> parsed;
  std::vector<Ints> arrays;
  for (nb::handle item : segments) parsed.push_back(segment_of(nb::cast<nb::tuple>(item), num_tokens, cache, arrays, tables));
  return order_queries(parsed, cache.layers.empty() ? 1 : cache.layers[0].block_size, share);
}

void check_range(const int32_t* values, size_t count, int64_t limit, const char* message) {
  for (size_t i = 0; i < count; ++i) require(values[i] >= 0 && values[i] < limit, message);
}

void check_slots(const Longs& slots, const CacheHolder& cache) {
  const int64_t limit = cache.layers.empty() ? 0 : cache.num_blocks * cache.layers[0].block_size;
  for (size_t i = 0; i < slots.shape(0); ++i) require(slots.data()[i] >= 0 && slots.data()[i] < limit, "a slot lies outside the cache");
}

// A program that keeps alive what its operations point at.
struct ProgramHolder {
  Program program;
  nb::list keep;
  int64_t vocab_rows = 0, position_rows = 0, num_layers = 0;
};

std::map<std::string, double> run_program(ProgramHolder& self, const CacheHolder& cache, Ints ids, Ints positions, Longs slots,
                 std::optional<Ints> logit_rows, nb::list segments, bool share, Matrix logits, bool profile) {
  const int64_t tokens = int64_t(ids.shape(0));
  require(int64_t(positions.shape(0)) == tokens && int64_t(slots.shape(0)) == tokens, "ids, positions and slots must be equally long");
  require(int64_t(cache.layers.size()) >= self.num_layers, "the cache has too few layers for this network");
  check_range(ids.data(), ids.shape(0), self.vocab_rows, "a token id lies outside the vocabulary");
  check_range(positions.data(), positions.shape(0), self.position_rows, "a position lies outside the model's positions");
  check_slots(slots, cache);
  if (logit_rows) check_range(logit_rows->data(), logit_rows->shape(0), tokens, "logit_rows names a token that is not in the batch");
  Step step{tokens, ids.data(), positions.data(), slots.data(), logit_rows ? logit_rows->data() : nullptr,
            logit_rows ? int64_t(logit_rows->shape(0)) : tokens, {}, &cache.layers, logits.data()};
  require(int64_t(logits.shape(0)) == step.num_logit_rows && int64_t(logits.shape(1)) == self.program.vocab_size(), "logits has the wrong shape");
  std::vector<Tables> tables;
  step.queries = queries_of(segments, tokens, cache, share, tables);
  nb::gil_scoped_release release;
  if (profile) return self.program.profile(step);
  self.program.run(step);
  return {};
}

Workspace& workspace() {
  static Workspace space;  // only used inside Pool::run, which admits one caller at a time
  return space;
}

void bind_verbs(nb::module_& m) {
  m.def("embed", [](const TableHolder& table, Ints ids, float scale, Matrix out) {
    check_range(ids.data(), ids.shape(0), table.table.rows, "an id lies outside the table");
    run_team([&](Member& t) { embed(t, table.table, ids.data(), scale, rows_of(out)); });
  });
  m.def("norm", [](Matrix x, const NormHolder& norm_weights, Matrix out) {
    run_team([&](Member& t) { norm(t, rows_of(x), norm_weights.norm, rows_of(out)); });
  });
  m.def("add", [](Matrix x, Matrix y, Matrix out) { run_team([&](Member& t) { add(t, rows_of(x), rows_of(y), rows_of(out)); }); });
  m.def("add_norm", [](Matrix x, Matrix delta, const NormHolder& weights, Matrix sum, Matrix normed) {
    run_team([&](Member& t) { add_norm(t, rows_of(x), rows_of(delta), weights.norm, rows_of(sum), rows_of(normed)); });
  });
  m.def("linear", [](Matrix x, const LinearWeights& weights, Matrix out) {
    require(int64_t(x.shape(1)) == weights.in_features(), "the input is not as wide as the weights");
    run_team([&](Member& t) { linear(t, rows_of(x), weights, rows_of(out), workspace()); });
  });
  m.def("act", [](Matrix x, int activation, Matrix out) { run_team([&](Member& t) { act(t, rows_of(x), Activation(activation), rows_of(out)); }); });
  m.def("act_mul", [](Matrix x, int activation, Matrix out) {
    run_team([&](Member& t) { act_mul(t, rows_of(x), Activation(activation), rows_of(out)); });
  });
  m.def("softcap", [](Matrix x, float cap) { run_team([&](Member& t) { softcap(t, rows_of(x), cap); }); });
  m.def("rotation", [](Vector frequencies, float scale, Ints positions, Matrix cosine, Matrix sine) {
    run_team([&](Member& t) { rotation(t, frequencies.data(), scale, positions.data(), rows_of(cosine), rows_of(sine)); });
  });
  m.def("rope_and_write", [](Matrix qkv, const AttentionConstants& shape, std::optional<Matrix> cosine, std::optional<Matrix> sine,
                             const CacheHolder* cache, int64_t layer, std::optional<Longs> slots) {
    if (cache) check_slots(*slots, *cache);
    Rows turns[2] = {};
    if (cosine) turns[0] = rows_of(*cosine), turns[1] = rows_of(*sine);
    run_team([&](Member& t) {
      rope_and_write(t, rows_of(qkv), shape, cosine ? &turns[0] : nullptr, &turns[1],
                     cache ? &cache->layers.at(size_t(layer)) : nullptr, cache ? slots->data() : nullptr);
    });
  }, "qkv"_a, "shape"_a, "cosine"_a.none(), "sine"_a.none(), "cache"_a.none(), "layer"_a, "slots"_a.none());
  m.def("attend", [](Matrix query, const AttentionConstants& shape, nb::list segments, bool share,
                     const CacheHolder& cache, int64_t layer, Matrix out) {
    std::vector<Tables> tables;
    const std::vector<Query> queries = queries_of(segments, int64_t(query.shape(0)), cache, share, tables);
    run_team([&](Member& t) { attend(t, rows_of(query), shape, queries, cache.layers.at(size_t(layer)), rows_of(out), workspace()); });
  });
  m.def("argmax", [](Matrix x, Array<int64_t, nb::ndim<1>> out) {
    run_team([&](Member& t) {
      t.split(int64_t(x.shape(0)), 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) out.data()[row] = kernels().argmax_row(rows_of(x).row(row), int64_t(x.shape(1)));
      });
    });
  });
}

void bind_program(nb::module_& m) {
  nb::class_<ProgramHolder>(m, "Program")
      .def(nb::init<>())
      .def("embed", [](ProgramHolder& self, nb::object table, float scale, bool of_positions) {
        self.keep.append(table);
        const EmbeddingTable& rows = nb::cast<TableHolder&>(table).table;
        (of_positions ? self.position_rows : self.vocab_rows) = rows.rows;
        return self.program.embed(rows, scale, of_positions);
      })
      .def("norm", [](ProgramHolder& self, int x, nb::object weights) {
        self.keep.append(weights);
        return self.program.norm(x, nb::cast<NormHolder&>(weights).norm);
      })
      .def("add", [](ProgramHolder& self, int x, int y) { return self.program.add(x, y); })
      .def("add_norm", [](ProgramHolder& self, int x, int delta, nb::object weights) {
        self.keep.append(weights);
        return self.program.add_norm(x, delta, nb::cast<NormHolder&>(weights).norm);
      })
      .def("linear", [](ProgramHolder& self, int x, nb::object weights) {
        self.keep.append(weights);
        return self.program.linear(x, nb::cast<LinearWeights&>(weights));
      })
      .def("rotation", [](ProgramHolder& self, Vector frequencies, float scale) {
        return self.program.rotation(std::vector<float>(frequencies.data(), frequencies.data() + frequencies.shape(0)), scale);
      })
      .def("rope_and_write", [](ProgramHolder& self, int qkv, int64_t layer, nb::object shape, int cosine, int sine) {
        self.keep.append(shape);
        self.num_layers = std::max(self.num_layers, layer + 1);
        return self.program.rope_and_write(qkv, layer, nb::cast<AttentionConstants&>(shape), cosine, sine);
      })
      .def("attend", [](ProgramHolder& self, int qkv, int64_t layer, nb::object shape) {
        self.keep.append(shape);
        return self.program.attend(qkv, layer, nb::cast<AttentionConstants&>(shape));
      })
      .def("act", [](ProgramHolder& self, int x, int activation) { return self.program.act(x, Activation(activation)); })
      .def("act_mul", [](ProgramHolder& self, int x, int activation) { return self.program.act_mul(x, Activation(activation)); })
      .def("take", [](ProgramHolder& self, int x) { return self.program.take(x); })
      .def("logits", [](ProgramHolder& self, int x, nb::object head, float softcap) {
        self.keep.append(head);
        if (!self.position_rows) self.position_rows = INT32_MAX;
        self.program.logits(x, nb::cast<LinearWeights&>(head), softcap);
      })
      .def("run", &run_program, "cache"_a, "ids"_a, "positions"_a, "slots"_a, "logit_rows"_a.none(), "segments"_a, "share"_a, "logits"_a,
           "profile"_a = false)
      .def_prop_ro("vocab_size", [](const ProgramHolder& self) { return self.program.vocab_size(); })
      .def_prop_ro("scratch_bytes", [](const ProgramHolder& self) { return self.program.scratch_bytes(); });
}

}  // namespace
}  // namespace bifolio

NB_MODULE(_native, m) {
  using namespace bifolio;
  nb::set_leak_warnings(false);
  nb::class_<NormHolder>(m, "Norm").def(nb::init<Vector, std::optional<Vector>, float, bool>(), "weight"_a, "bias"_a.none(), "eps"_a, "centered"_a);
  nb::class_<TableHolder>(m, "Table")
      .def(nb::init<int, Bytes, int64_t>(), "format"_a, "bytes"_a, "width"_a)
      .def_prop_ro("width", [](const TableHolder& self) { return self.table.width; });
  nb::class_<LinearWeights>(m, "Linear")
      .def_prop_ro("out_features", &LinearWeights::out_features)
      .def_prop_ro("in_features", &LinearWeights::in_features)
      .def_prop_ro("num_bytes", &LinearWeights::num_bytes);
  m.def("make_linear", &make_linear, nb::rv_policy::take_ownership, "parts"_a, "k"_a, "bias"_a.none(), "planes"_a = 1);
  nb::class_<CacheHolder>(m, "Cache").def(nb::init<nb::list, nb::list, int, int64_t>(), "keys"_a, "values"_a, "kv_type"_a, "head_dim"_a);
  nb::class_<AttentionConstants>(m, "AttentionShape")
      .def("__init__", [](AttentionConstants* self, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window,
                          bool interleaved, const NormHolder* query_norm, const NormHolder* key_norm) {
        new (self) AttentionConstants(constants(heads, kv_heads, dim, scale, window, interleaved, query_norm, key_norm));
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
         nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>());
  bind_verbs(m);
  bind_program(m);
  m.def("shared_tokens", &shared_tokens);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("available_isas", &available_isas);
  m.def("set_isa", &set_isa);
  m.def("read_bandwidth", &read_bandwidth, nb::call_guard<nb::gil_scoped_release>());
  m.def("product_rate", &product_rate, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_num_threads", [](int count) { nb::gil_scoped_release release; Pool::instance().set_num_threads(count); });
  m.def("num_threads", [] { nb::gil_scoped_release release; return Pool::instance().num_threads(); });
}
