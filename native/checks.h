// Checks of the arguments that Python hands over, made before the kernels touch memory: the kernels themselves check
// nothing. A failed check throws ArgumentError, which names the argument, the size it has and the size it must have.
//
// Arrays are never converted: a converted copy of an output would lose the results, and a converted id could wrap.
// Scalars and objects of the wrong Python type never get here: the binding raises TypeError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <sstream>

#include "argument_error.h"
#include "ops.h"

namespace bifolio {

namespace nb = nanobind;

constexpr int64_t kMaxHeads = 1 << 16, kMaxHeadDim = 1 << 12, kMaxLayers = 1 << 16;  // so that products of them stay exact
constexpr int64_t kMaxExperts = 1 << 16, kMaxSites = 1 << 20, kMaxChoice = 1 << 24;
constexpr int64_t kMaxWidth = INT32_MAX;             // numbers of a matrix row

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw ArgumentError(message.str());
}

// The message is put together only if the condition fails.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] refuse(parts...);
}

// -- arrays -------------------------------------------------------------------------------------------------------------

template <class T, int N>
struct ArrayType {
  using Type = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
};
template <int N>
struct ArrayType<void, N> {
  using Type = nb::ndarray<nb::ndim<N>, nb::c_contig, nb::device::cpu>;
};
template <class T, int N>
using Array = typename ArrayType<T, N>::Type;

using Input = Array<const float, 2>;
using Output = Array<float, 2>;
using Vector = Array<const float, 1>;
using Ints = Array<const int32_t, 1>;
using Longs = Array<const int64_t, 1>;
using Bytes = Array<const uint8_t, 2>;
using Tables = Array<const int32_t, 2>;
using KvArray = Array<void, 4>;

// The array as it is, or an error that says how it differs. T is const for arrays that are only read, void for any type.
template <class T, int N>
Array<T, N> array_of(const char* name, nb::handle value);

inline Input input(const char* name, nb::handle value) { return array_of<const float, 2>(name, value); }
inline Output output(const char* name, nb::handle value) { return array_of<float, 2>(name, value); }
inline Vector vector(const char* name, nb::handle value) { return array_of<const float, 1>(name, value); }
inline Ints ints(const char* name, nb::handle value) { return array_of<const int32_t, 1>(name, value); }
inline Longs longs(const char* name, nb::handle value) { return array_of<const int64_t, 1>(name, value); }

// -- shapes -------------------------------------------------------------------------------------------------------------

template <class A>
int64_t rows_in(const A& matrix) { return int64_t(matrix.shape(0)); }
template <class A>
int64_t width_of(const A& matrix) { return int64_t(matrix.shape(1)); }

template <class A>
Rows rows_of(const A& matrix) {
  return {const_cast<float*>(matrix.data()), rows_in(matrix), width_of(matrix), width_of(matrix)};
}

template <class A>
void require_length(const char* name, const A& array, int64_t length) {
  require(int64_t(array.shape(0)) == length, name, " has ", array.shape(0), " elements and must have ", length);
}

template <class A>
void require_shape(const char* name, const A& matrix, int64_t rows, int64_t width) {
  require(rows_in(matrix) == rows && width_of(matrix) == width, name, " has the shape (", rows_in(matrix), ", ", width_of(matrix),
          ") and must have the shape (", rows, ", ", width, ")");
}

template <class A>
void require_width(const char* name, const A& matrix, int64_t width) {
  require(width_of(matrix) == width, name, " is ", width_of(matrix), " wide and must be ", width, " wide");
}

template <class A>
void require_columns(const char* name, const A& matrix) {
  require(width_of(matrix) > 0, name, " has no columns and must have at least one");
}

// Two matrices that must not overlap: an operation writes one of them while it still reads or writes the other.
void require_apart(const char* name, Rows a, const char* other, Rows b);
// The same, but an operation that works element by element may write where it reads.
void require_same_or_apart(const char* name, Rows a, const char* other, Rows b);

// -- numbers ------------------------------------------------------------------------------------------------------------

void require_between(const char* name, int64_t value, int64_t least, int64_t most);
void require_finite(const char* name, float value);
void require_multiple(const char* name, int64_t width, const char* of, int64_t size);  // a row of whole parts
void require_gate_and_up(const char* name, int64_t width);  // both halves of a row
void require_parts(int64_t width, int64_t logits);  // equal parts of a row, one for each logit
void require_frequencies(const Vector& frequencies);  // of a rotation
FileFormat format_of(const char* name, int code);
Activation activation_of(int code, bool gated = false);  // gated: one of gate and up

// Every element is at least 0 and below `limit`; `of` describes the limit: "table of 50 rows".
template <class T>
void require_elements(const char* name, const T* values, size_t count, int64_t limit, const char* of) {
  for (size_t i = 0; i < count; ++i)
    require(values[i] >= 0 && values[i] < limit, name, "[", i, "] is ", values[i], ", which lies outside ", of, " (0 to ", limit - 1, ")");
}

}  // namespace bifolio
