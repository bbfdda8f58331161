// Weights, shapes and caches as Python hands them over.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "module.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

// How the numbers of a cache are held in an array.
struct KvNumbers {
  const char* name;
  nb::dlpack::dtype dtype, other;
};

KvNumbers kv_numbers(KvType type) {
  const auto words = nb::dtype<uint16_t>();
  const nb::dlpack::dtype halves{uint8_t(nb::dlpack::dtype_code::Float), 16, 1}, brains{uint8_t(nb::dlpack::dtype_code::Bfloat), 16, 1};
  switch (type) {
    case KvType::F32: return {"float32", nb::dtype<float>(), nb::dtype<float>()};
    case KvType::F16: return {"float16", halves, halves};
    case KvType::BF16: return {"uint16", words, brains};
    case KvType::Q8_0: return {"uint8", nb::dtype<uint8_t>(), nb::dtype<uint8_t>()};
  }
  refuse("kv_type is ", int(type), " and must be the code of a type of caches (0 to 3)");
}

KvArray kv_array(const char* list, size_t layer, nb::handle value, const KvNumbers& numbers) {
  const std::string name = std::string(list).append("[").append(std::to_string(layer)).append("]");
  const KvArray array = array_of<void, 4>(name.c_str(), value);
  require(array.dtype() == numbers.dtype || array.dtype() == numbers.other, name, " must be an array of ", numbers.name,
          " for this kv_type");
  require(reinterpret_cast<uintptr_t>(array.data()) % array.itemsize() == 0, name, " must be aligned to ", array.itemsize(), " bytes");
  for (size_t i = 0; i < 4; ++i) require(array.shape(i) > 0, name, " has no elements along dimension ", i, " and must have at least one");
  return array;
}

void require_same_size(const char* list, size_t layer, size_t dimension, const KvArray& array, const char* other, const KvArray& first) {
  require(array.shape(dimension) == first.shape(dimension), list, "[", layer, "] has ", array.shape(dimension),
          " elements along dimension ", dimension, " and must have ", first.shape(dimension), ", as ", other, " has");
}

}  // namespace

NormHolder::NormHolder(nb::handle weight_array, nb::handle bias_array, float eps, bool centered)
    : weight(vector("weight", weight_array)), norm{} {
  if (!bias_array.is_none()) bias = vector("bias", bias_array);
  const int64_t size = int64_t(weight.shape(0));
  require_between("the length of weight", size, 1, kMaxWidth);
  if (bias.is_valid()) require_length("bias", bias, size);
  require(std::isfinite(eps) && eps >= 0.0f, "eps is ", eps, " and must be a finite number of at least 0");
  norm = {weight.data(), bias.is_valid() ? bias.data() : nullptr, size, eps, centered};
}

TableHolder::TableHolder(int format, nb::handle array, int64_t width) : bytes(array_of<const uint8_t, 2>("bytes", array)), table{} {
  table = {require_rows("bytes", format, bytes, "width", width), bytes.data(), rows_in(bytes), width, bytes.shape(1)};
}

CacheHolder::CacheHolder(nb::list keys, nb::list values, int kv_type, const std::vector<int64_t>& head_dims) {
  const KvType type{kv_type};
  const KvNumbers numbers = kv_numbers(type);
  require(keys.size() > 0, "keys has no layers and must have at least one");
  require(keys.size() == values.size(), "values has ", values.size(), " layers and must have ", keys.size(), ", as keys has");
  require(head_dims.size() == keys.size(), "head_dims has ", head_dims.size(), " entries and must have ", keys.size(), ", one for each layer");
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t head_dim = head_dims[i];
    require_between("head_dim", head_dim, 1, kMaxHeadDim);
    require(type != KvType::Q8_0 || head_dim % kQuantBlock == 0, "head_dim is ", head_dim, " and must be a multiple of ", kQuantBlock,
            " for a cache of q8_0");
    const int64_t row_elements = type == KvType::Q8_0 ? head_dim + head_dim / kQuantBlock * 2 : head_dim;
    const KvArray key = kv_array("keys", i, keys[i], numbers), value = kv_array("values", i, values[i], numbers);
    require(int64_t(key.shape(3)) == row_elements, "keys[", i, "] has rows of ", key.shape(3), " elements and must have rows of ",
            row_elements, " for head_dim ", head_dim);
    arrays.insert(arrays.end(), {key, value});
    for (size_t dimension : {0, 2}) require_same_size("keys", i, dimension, key, "keys[0]", arrays[0]);
    for (size_t dimension : {0, 1, 2, 3}) require_same_size("values", i, dimension, value, "its keys", key);
    layers.push_back({type, static_cast<uint8_t*>(key.data()), static_cast<uint8_t*>(value.data()), int64_t(key.shape(2)),
                      int64_t(key.shape(1)), head_dim, size_t(row_elements) * key.itemsize()});
  }
  num_blocks = int64_t(arrays[0].shape(0));
}

void CacheHolder::require_layer(int64_t index, const AttentionConstants& shape) const {
  require_between("layer", index, 0, int64_t(layers.size()) - 1);
  const KvLayer& kv = layer(index);
  require(shape.num_kv_heads == kv.num_kv_heads, "the shape has ", shape.num_kv_heads, " kv heads and must have ", kv.num_kv_heads,
          ", as the cache has");
  require(shape.head_dim == kv.head_dim, "the shape has a head_dim of ", shape.head_dim, " and must have ", kv.head_dim,
          ", as the cache has");
}

LinearWeights* make_linear(const nb::list& parts, int64_t k, nb::handle bias_array, int planes, bool is_mapped, PoolHolder* pool) {
  require_between("planes", planes, 1, 2);
  require(parts.size() > 0, "parts is empty and must have at least one matrix");
  std::vector<Bytes> arrays;  // alive until the weights are packed
  std::vector<SourceRows> sources;
  int64_t n = 0;
  for (nb::handle part : parts) {
    int code = 0;
    require(nb::isinstance<nb::tuple>(part) && nb::len(part) == 2 && nb::try_cast(part[0], code),
            "parts must hold pairs (format, bytes)");
    const Bytes& bytes = arrays.emplace_back(array_of<const uint8_t, 2>("the bytes of a part", part[1]));
    const FileFormat format = require_rows("the bytes of a part", code, bytes, "k", k);
    sources.push_back({format, bytes.data(), rows_in(bytes), bytes.shape(1), is_mapped});
    n += rows_in(bytes);
  }
  require_between("the number of outputs", n, 1, kMaxWidth);
  const Vector bias = bias_array.is_none() ? Vector() : vector("bias", bias_array);
  if (bias.is_valid()) require_length("bias", bias, n);
  nb::gil_scoped_release release;
  return new LinearWeights(sources, k, bias.is_valid() ? bias.data() : nullptr, planes, team_of(pool));
}

AttentionConstants make_shape(int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window, bool interleaved,
                              const NormHolder* query_norm, const NormHolder* key_norm, bool norm_after_rope, float softcap,
                              float temperature, int64_t temperature_period) {
  require_between("heads", heads, 1, kMaxHeads);
  require_between("kv_heads", kv_heads, 1, kMaxHeads);
  require_between("head_dim", dim, 1, kMaxHeadDim);
  require(heads % kv_heads == 0 && heads / kv_heads <= kMaxRows, "heads is ", heads, " and must be a multiple of kv_heads, ", kv_heads,
          ", at most ", kMaxRows, " times as many");
  require_finite("scale", scale);
  require(window >= 0, "window is ", window, " and must be at least 0 (0: none)");
  require(std::isfinite(softcap) && softcap >= 0.0f, "softcap is ", softcap, " and must be a finite number of at least 0 (0: none)");
  require_finite("temperature", temperature);
  require(temperature_period > 0, "temperature_period is ", temperature_period, " and must be at least 1");
  const auto require_size = [&](const char* name, const NormHolder* norm, int64_t all) {
    require(!norm || norm->norm.size == dim || norm->norm.size == all, name, " has ", norm ? norm->norm.size : 0,
            " elements and must have ", dim, ", the head_dim, or ", all, " for all heads");
  };
  require_size("query_norm", query_norm, heads * dim);
  require_size("key_norm", key_norm, kv_heads * dim);
  return {heads, kv_heads, dim, scale, window, interleaved, query_norm ? &query_norm->norm : nullptr,
          key_norm ? &key_norm->norm : nullptr, norm_after_rope, softcap, temperature, temperature_period};
}

void bind_classes(nb::module_& m) {
  nb::class_<NormHolder>(m, "Norm")
      .def(nb::init<nb::handle, nb::handle, float, bool>(), array("weight"), array("bias"), "eps"_a, "centered"_a);
  nb::class_<TableHolder>(m, "Table")
      .def(nb::init<int, nb::handle, int64_t>(), "format"_a, array("bytes"), "width"_a)
      .def_prop_ro("width", [](const TableHolder& self) { return self.table.width; });
  nb::class_<LinearWeights>(m, "Linear")
      .def_prop_ro("out_features", &LinearWeights::out_features)
      .def_prop_ro("in_features", &LinearWeights::in_features)
      .def_prop_ro("num_bytes", &LinearWeights::num_bytes);
  m.def("make_linear", &make_linear, nb::rv_policy::take_ownership, "parts"_a, "k"_a, array("bias"), "planes"_a = 1,
        "is_mapped"_a = false, pool_argument());
  nb::class_<CacheHolder>(m, "Cache")
      .def(nb::init<nb::list, nb::list, int, const std::vector<int64_t>&>(), "keys"_a, "values"_a, "kv_type"_a, "head_dims"_a);
  nb::class_<AttentionConstants>(m, "AttentionShape")
      .def("__init__", [](AttentionConstants* self, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t window,
                          bool interleaved, const NormHolder* query_norm, const NormHolder* key_norm, bool norm_after_rope, float softcap,
                          float temperature, int64_t temperature_period) {
        new (self) AttentionConstants(make_shape(heads, kv_heads, dim, scale, window, interleaved, query_norm, key_norm,
                                                 norm_after_rope, softcap, temperature, temperature_period));
      }, "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "interleaved"_a, "query_norm"_a.none(), "key_norm"_a.none(),
         "norm_after_rope"_a = false, "softcap"_a = 0.0f, "temperature"_a = 0.0f, "temperature_period"_a = 1, nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>())
      .def("with_value_norm", [](const AttentionConstants& self, const NormHolder& norm) {
        AttentionConstants copy = self;
        require(norm.norm.size == self.head_dim, "value_norm has ", norm.norm.size, " elements and must have ", self.head_dim, ", the head_dim");
        copy.value_norm = &norm.norm;
        return copy;
      }, "norm"_a, nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>())
      .def("of_queries", [](const AttentionConstants& self) {
        AttentionConstants copy = self;
        copy.queries_only = true;
        return copy;
      }, nb::keep_alive<0, 1>())
      .def("of_chunks", [](const AttentionConstants& self) {
        AttentionConstants copy = self;
        require(self.window > 0, "window is ", self.window, " and must be at least 1: the size of the chunks");
        copy.in_chunks = true;
        return copy;
      }, nb::keep_alive<0, 1>())
      .def("counting_from", [](const AttentionConstants& self, int64_t start) {
        AttentionConstants copy = self;
        require(start >= 0 && start <= INT32_MAX, "start is ", start, " and must be at least 0");
        copy.temperature_start = start;
        return copy;
      }, "start"_a, nb::keep_alive<0, 1>())
      .def("with_slopes", [](const AttentionConstants& self, nb::handle slope_array) {
        AttentionConstants copy = self;
        const Vector slopes = vector("slopes", slope_array);
        require_length("slopes", slopes, self.num_heads);
        copy.slopes = slopes.data();
        return copy;
      }, array("slopes"), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>())
      .def("with_sinks", [](const AttentionConstants& self, nb::handle sink_array) {
        AttentionConstants copy = self;
        const Vector sinks = vector("sinks", sink_array);
        require_length("sinks", sinks, self.num_heads);
        copy.sinks = sinks.data();
        return copy;
      }, array("sinks"), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>())
      .def("choosing", [](const AttentionConstants& self, int64_t top_k) {
        AttentionConstants copy = self;
        require_between("top_k", top_k, 1, kMaxChoice);
        copy.top_k = top_k;
        return copy;
      }, "top_k"_a, nb::keep_alive<0, 1>())
      .def("both_ways", [](const AttentionConstants& self) {
        AttentionConstants copy = self;
        copy.bidirectional = true;
        return copy;
      }, nb::keep_alive<0, 1>())
      .def("of_earlier", [](const AttentionConstants& self) {
        AttentionConstants copy = self;
        copy.causal = true;
        return copy;
      }, nb::keep_alive<0, 1>())
      .def("with_bias", [](const AttentionConstants& self, nb::handle bias_array) {
        AttentionConstants copy = self;
        const Input bias = array_of<const float, 2>("bias", bias_array);
        require(rows_in(bias) == self.num_heads, "bias has ", rows_in(bias), " rows and must have ", self.num_heads, ", one for each head");
        require(width_of(bias) % 2 == 1, "bias has rows of ", width_of(bias), " elements and must have an odd number, for distances of both signs");
        copy.bias = bias.data();
        copy.reach = width_of(bias) / 2;
        return copy;
      }, array("bias"), nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>());
}

}  // namespace bifolio
