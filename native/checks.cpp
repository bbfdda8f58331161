#include "checks.h"

namespace bifolio {
namespace {

std::string dtype_name(nb::dlpack::dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  if (dtype.code == uint8_t(Code::Bool)) return "bool";
  const char* kind = dtype.code == uint8_t(Code::Int)      ? "int"
                     : dtype.code == uint8_t(Code::UInt)   ? "uint"
                     : dtype.code == uint8_t(Code::Float)  ? "float"
                     : dtype.code == uint8_t(Code::Bfloat) ? "bfloat"
                                                           : "complex";
  return kind + std::to_string(dtype.bits);
}

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
  int64_t stride = 1;
  for (size_t i = array.ndim(); i-- > 0; stride *= int64_t(array.shape(i)))
    if (array.shape(i) != 1 && array.stride(i) != stride) return false;
  return true;
}

// "a read-only float64 array of shape (3, 4) that is not C-contiguous"
std::string describe(nb::handle value) {
  nb::ndarray<nb::ro> array;
  if (value.is_none()) return "None";
  if (!nb::try_cast(value, array, false)) return std::string("an object of type ") + Py_TYPE(value.ptr())->tp_name;
  nb::ndarray<> writable;
  std::ostringstream text;
  text << (nb::try_cast(value, writable, false) ? "a " : "a read-only ") << dtype_name(array.dtype()) << " array of shape (";
  for (size_t i = 0; i < array.ndim(); ++i) text << (i ? ", " : "") << array.shape(i);
  text << (array.ndim() == 1 ? ",)" : ")");
  if (array.device_type() != nb::device::cpu::value) text << " on another device";
  if (!is_contiguous(array)) text << " that is not C-contiguous";
  return text.str();
}

[[noreturn]] void refuse_array(const char* name, nb::handle value, const std::string& dtype, int num_dims, bool writable) {
  refuse(name, " must be a ", writable ? "writable " : "", "C-contiguous ", dtype, " array of ", num_dims,
         num_dims == 1 ? " dimension" : " dimensions", " on the CPU, not ", describe(value));
}

bool overlap(Rows a, Rows b) {
  const float *a_end = a.data + a.count * a.stride, *b_end = b.data + b.count * b.stride;
  return a.data < b_end && b.data < a_end && a.data < a_end && b.data < b_end;
}

}  // namespace

template <class T, int N>
Array<T, N> array_of(const char* name, nb::handle value) {
  using Number = std::conditional_t<std::is_void_v<T>, uint8_t, std::remove_const_t<T>>;
  Array<T, N> array;
  if (value.is_none() || !nb::try_cast(value, array, false))
    refuse_array(name, value, std::is_void_v<T> ? "" : dtype_name(nb::dtype<Number>()), N, !std::is_const_v<T>);
  require(reinterpret_cast<uintptr_t>(array.data()) % alignof(Number) == 0, name, " must be aligned to ", alignof(Number), " bytes");
  return array;
}

template Array<const float, 1> array_of<const float, 1>(const char*, nb::handle);
template Array<const float, 2> array_of<const float, 2>(const char*, nb::handle);
template Array<float, 2> array_of<float, 2>(const char*, nb::handle);
template Array<const int32_t, 1> array_of<const int32_t, 1>(const char*, nb::handle);
template Array<const int32_t, 2> array_of<const int32_t, 2>(const char*, nb::handle);
template Array<const int64_t, 1> array_of<const int64_t, 1>(const char*, nb::handle);
template Array<int64_t, 1> array_of<int64_t, 1>(const char*, nb::handle);
template Array<int64_t, 2> array_of<int64_t, 2>(const char*, nb::handle);
template Array<const uint64_t, 1> array_of<const uint64_t, 1>(const char*, nb::handle);
template Array<uint64_t, 1> array_of<uint64_t, 1>(const char*, nb::handle);
template Array<const uint8_t, 1> array_of<const uint8_t, 1>(const char*, nb::handle);
template Array<const uint8_t, 2> array_of<const uint8_t, 2>(const char*, nb::handle);
template Array<uint8_t, 2> array_of<uint8_t, 2>(const char*, nb::handle);
template Array<uint8_t, 1> array_of<uint8_t, 1>(const char*, nb::handle);
template Array<const uint8_t, 3> array_of<const uint8_t, 3>(const char*, nb::handle);
template Array<uint8_t, 3> array_of<uint8_t, 3>(const char*, nb::handle);
template Array<void, 4> array_of<void, 4>(const char*, nb::handle);
template Array<float, 3> array_of<float, 3>(const char*, nb::handle);
template Array<float, 4> array_of<float, 4>(const char*, nb::handle);

void require_apart(const char* name, Rows a, const char* other, Rows b) {
  require(!overlap(a, b), name, " and ", other, " overlap in memory and must be separate arrays");
}

void require_same_or_apart(const char* name, Rows a, const char* other, Rows b) {
  require(a.data == b.data || !overlap(a, b), name, " and ", other, " overlap in memory and must be the same array or separate ones");
}

void require_between(const char* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, name, " is ", value, " and must be between ", least, " and ", most);
}

void require_gate_and_up(const char* name, int64_t width) {
  require(width > 0 && width % 2 == 0, name, " is ", width, " wide and must have an even width: gate and up side by side");
}

void require_parts(int64_t width, int64_t logits) {
  require(logits > 0 && width % logits == 0, "logits is ", logits, " wide and must divide the ", width, " columns of x");
}

void require_multiple(const char* name, int64_t width, const char* of, int64_t size) {
  require(size > 0 && width > 0 && width % size == 0, name, " is ", width, " wide and must be a multiple of ", of, ", ", size);
}

void require_finite(const char* name, float value) {
  require(std::isfinite(value), name, " is ", value, " and must be a finite number");
}

void require_frequencies(const Vector& frequencies) {
  require_between("the length of frequencies", int64_t(frequencies.shape(0)), 1, kMaxHeadDim);
  for (size_t i = 0; i < frequencies.shape(0); ++i)
    require(std::isfinite(frequencies.data()[i]), "frequencies[", i, "] is ", frequencies.data()[i], " and must be a finite number");
}

FileFormat format_of(const char* name, int code) {
  const int last = int(FileFormat::Count) - 1;
  require(code >= 0 && code <= last, name, " is ", code, " and must be the code of a format (0 to ", last, ")");
  require(!needs_grid(FileFormat(code)), name, " is ", file_block(FileFormat(code)).name, ", whose grid must be set first");
  return FileFormat(code);
}

Activation activation_of(int code, bool gated) {
  if (!gated && (code == int(Activation::Tanh) || code == int(Activation::Sigmoid))) return Activation(code);
  if (code == int(Activation::Relu)) return Activation::Relu;
  if (gated && code == int(Activation::SiluClamped)) return Activation::SiluClamped;
  const int last = int(gated ? Activation::SwigluClamped : Activation::Relu2);
  require(code >= 0 && code <= last, "activation is ", code, " and must be the code of an activation (0 to ", last, ")");
  return Activation(code);
}

}  // namespace bifolio
