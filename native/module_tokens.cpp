// Pairs of tokens that join into a third: the merges of a vocabulary that comes with scores alone.
#include <string_view>
#include <unordered_map>

#include "module.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

std::string_view utf8(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (!data) throw nb::python_error();
  return {data, size_t(size)};
}

// For each token that `order` numbers, every way to cut it into two others of these, the longest left part first.
nb::list join_pairs(const nb::list& tokens, nb::handle order_array) {
  const Ints order = array_of<const int32_t, 1>("order", order_array);
  const size_t count = order.shape(0);
  std::unordered_map<std::string_view, PyObject*> known;
  known.reserve(2 * count);
  for (size_t i = 0; i < count; ++i) {
    require_between("a number in order", order.data()[i], 0, int64_t(tokens.size()) - 1);
    PyObject* token = PyList_GET_ITEM(tokens.ptr(), order.data()[i]);
    require(PyUnicode_Check(token), "tokens must be strings");
    known.emplace(utf8(token), token);
  }
  nb::list pairs;
  for (size_t i = 0; i < count; ++i) {
    const std::string_view text = utf8(PyList_GET_ITEM(tokens.ptr(), order.data()[i]));
    for (size_t cut = text.size(); cut-- > 1;) {
      if ((uint8_t(text[cut]) & 0xc0) == 0x80) continue;  // inside of a character
      const auto left = known.find(text.substr(0, cut));
      if (left == known.end()) continue;
      const auto right = known.find(text.substr(cut));
      if (right != known.end()) pairs.append(nb::make_tuple(nb::handle(left->second), nb::handle(right->second)));
    }
  }
  return pairs;
}

}  // namespace

void bind_tokens(nb::module_& m) { m.def("join_pairs", &join_pairs, "tokens"_a, array("order")); }

}  // namespace bifolio
