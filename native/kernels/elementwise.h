// Norms, activations, residual sums: row by row, written once for every instruction set on sixteen lanes.
#pragma once

static inline V16 load_part(const float* p, int64_t count) {  // the missing lanes are 0
  float lanes[16] = {};
  std::memcpy(lanes, p, size_t(count) * sizeof(float));
  return load(lanes);
}

static inline void store_part(float* p, V16 a, int64_t count) {
  float lanes[16];
  store(lanes, a);
  std::memcpy(p, lanes, size_t(count) * sizeof(float));
}

// out[i] = f(i, lanes) over `size` elements, the last ones by parts.
template <class F>
static inline void map_row(int64_t size, float* out, F f) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, f([i](const float* p) { return load(p + i); }));
  if (i < size) store_part(out + i, f([i, size](const float* p) { return load_part(p + i, size - i); }), size - i);
}

// The sum of f(x) over a row, element i in lane i mod 16. f(0) must be 0.
template <class F>
static inline float sum_row(const float* x, int64_t size, F f) {
  V16 sum = zero();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) sum = add(sum, f(load(x + i)));
  if (i < size) sum = add(sum, f(load_part(x + i, size - i)));
  return reduce_add(sum);
}

#ifdef BIFOLIO_FOUR_REGISTERS
#include "four_registers.h"
#endif

// x * factor to the nearest whole number, ties to even, as a float that has it in its last bits: 1.5 * 2^23 is added.
template <class V>
static inline V whole(V x, V factor) { return fma(x, factor, constant<V>(12582912.0f)); }

// The functions below work on one register, so that their many constants and intermediate values stay in registers, or on four at once
// where there are registers enough.

// e^x, error below 2 units in the last place; 0 below -86; NaN stays NaN.
template <class V>
static inline V exp(V x) {
  constexpr auto c = constant<V>;
  const V lowest = c(-86.0f);
  const V bounded = min(c(88.0f), max(lowest, x));
  const V t = whole(bounded, c(1.44269504f));
  const V n = sub(t, c(12582912.0f));
  V r = fma(n, c(-0.693359375f), bounded);
  r = fma(n, c(2.12194440e-4f), r);
  V p = c(1.9875691500e-4f);
  p = fma(p, r, c(1.3981999507e-3f));
  p = fma(p, r, c(8.3334519073e-3f));
  p = fma(p, r, c(4.1665795894e-2f));
  p = fma(p, r, c(1.6666665459e-1f));
  p = fma(p, r, c(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), c(1.0f));
  return zero_where_below(x, lowest, mul(p, power_of_two(t)));
}

static inline float exp1(float x) {
  float lanes[kRegLanes];
  reg_store(lanes, exp(reg_broadcast(x)));
  return lanes[0];
}

// (1 - e^-2x) / (1 + e^-2x), by its series near 0 where the difference would cancel.
static inline Reg tanh(Reg x) {
  constexpr auto c = constant<Reg>;
  const Reg a = min(c(10.0f), abs(x)), limit = c(0.125f);
  const Reg e = exp(mul(a, c(-2.0f)));
  const Reg far = div(sub(c(1.0f), e), add(c(1.0f), e));
  const Reg s = mul(a, a);
  Reg p = c(-17.0f / 315.0f);
  p = fma(p, s, c(2.0f / 15.0f));
  p = fma(p, s, c(-1.0f / 3.0f));
  const Reg near = fma(mul(p, s), a, a);
  const Reg only_near = sub(near, zero_where_below(a, limit, near));
  return copy_sign(add(zero_where_below(a, limit, far), only_near), x);
}

template <class V>
static inline V sigmoid(V x) {
  constexpr auto c = constant<V>;
  return div(c(1.0f), add(c(1.0f), exp(sub(c(0.0f), x))));
}

// The error function by Chebyshev's fitting, error below 1.2e-7 everywhere.
template <class V>
static inline V erf(V x) {
  constexpr auto c = constant<V>;
  static const float terms[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
  const V a = abs(x);
  const V t = div(c(1.0f), fma(a, c(0.5f), c(1.0f)));
  V p = c(terms[0]);
  for (int i = 1; i < 10; ++i) p = fma(p, t, c(terms[i]));
  const V tail = mul(t, exp(sub(p, mul(a, a))));
  return copy_sign(sub(c(1.0f), tail), x);
}

template <class V>
static inline V activate(V x, Activation activation) {
  constexpr auto c = constant<V>;
  if (activation == Activation::Silu) return mul(x, sigmoid(x));
  if (activation == Activation::Gelu) {
    const V half = mul(c(0.5f), x);
    return fma(half, erf(mul(x, c(0.70710678f))), half);
  }
  if (activation == Activation::Relu) return max(c(0.0f), x);
  if (activation == Activation::Relu2) {
    const V positive = max(c(0.0f), x);
    return mul(positive, positive);
  }
  // (1 + tanh(u)) / 2 is the logistic function of 2u
  const V cube = mul(mul(x, x), x);
  return mul(x, sigmoid(mul(c(2.0f * 0.79788456f), fma(cube, c(0.044715f), x))));
}

// Gate and up clamped; gate * sigmoid(slope * gate) * (up + 1).
static inline Reg clamped_swiglu(Reg gate, Reg up) {
  constexpr auto c = constant<Reg>;
  const Reg g = min(gate, c(kSwigluLimit)), u = min(max(up, c(-kSwigluLimit)), c(kSwigluLimit));
  return mul(mul(g, sigmoid(mul(c(kSwigluSlope), g))), add(u, c(1.0f)));
}

// Gate and up clamped; silu(gate) * up.
static inline Reg clamped_silu(Reg gate, Reg up) {
  constexpr auto c = constant<Reg>;
  const Reg g = min(gate, c(kSiluLimit)), u = min(max(up, c(-kSiluLimit)), c(kSiluLimit));
  return mul(mul(g, sigmoid(g)), u);
}

#ifndef BIFOLIO_OWN_EXP
static inline V16 exp(V16 x) { EACH_REG x.v[i] = exp(x.v[i]); return x; }
#endif
static inline V16 tanh(V16 x) { EACH_REG x.v[i] = tanh(x.v[i]); return x; }
static inline V16 activate(V16 x, Activation activation) {
#ifdef BIFOLIO_OWN_EXP
  if (activation == Activation::Silu) return mul(x, div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))));
#endif
  EACH_REG x.v[i] = activate(x.v[i], activation);
  return x;
}

static void norm_row(const float* x, const NormWeights& norm, float* y) {
  const int64_t size = norm.size;
  const float inverse_size = 1.0f / float(size);
  const float mean = norm.centered ? sum_row(x, size, [](V16 a) { return a; }) * inverse_size : 0.0f;
  float squares;
  if (norm.centered) {  // the padding of the last lanes must not count: x - mean would not be 0 there
    map_row(size, y, [&](auto at) { return sub(at(x), broadcast(mean)); });
    squares = sum_row(y, size, [](V16 a) { return mul(a, a); });
    x = y;
  } else {
    squares = sum_row(x, size, [](V16 a) { return mul(a, a); });
  }
  const V16 inverse = broadcast(1.0f / std::sqrt(squares * inverse_size + norm.eps));
  if (norm.bias) {
    map_row(size, y, [&](auto at) { return fma(mul(at(x), inverse), at(norm.weight), at(norm.bias)); });
  } else {
    map_row(size, y, [&](auto at) { return mul(mul(at(x), inverse), at(norm.weight)); });
  }
}

static void add_row(const float* x, const float* y, int64_t size, float* out) {
  map_row(size, out, [&](auto at) { return add(at(x), at(y)); });
}

static void act_row(const float* x, int64_t size, Activation activation, float* out) {
#ifdef BIFOLIO_FOUR_REGISTERS
  for (; size >= 4 * kRegLanes; size -= 4 * kRegLanes, x += 4 * kRegLanes, out += 4 * kRegLanes)
    store(out, activate(load_four(x), activation));
#endif
  map_row(size, out, [&](auto at) { return activate(at(x), activation); });
}

static void act_mul_row(const float* gate, const float* up, int64_t size, Activation activation, float* out) {
  if (activation == Activation::SwigluClamped) {
    map_row(size, out, [&](auto at) {
      V16 g = at(gate), u = at(up);
      EACH_REG g.v[i] = clamped_swiglu(g.v[i], u.v[i]);
      return g;
    });
    return;
  }
  if (activation == Activation::SiluClamped) {
    map_row(size, out, [&](auto at) {
      V16 g = at(gate), u = at(up);
      EACH_REG g.v[i] = clamped_silu(g.v[i], u.v[i]);
      return g;
    });
    return;
  }
  map_row(size, out, [&](auto at) { return mul(activate(at(gate), activation), at(up)); });
}

static void gate_row(const float* logits, const float* x, int64_t size, float* out) {
  map_row(size, out, [&](auto at) {
    V16 factor = at(logits);
    EACH_REG factor.v[i] = sigmoid(factor.v[i]);
    return mul(factor, at(x));
  });
}

static void softcap_row(float* x, int64_t size, float cap) {
  map_row(size, x, [&](auto at) { return mul(tanh(div(at(x), broadcast(cap))), broadcast(cap)); });
}

// Only operations that IEEE 754 defines to the last bit, in the order of kernels/weights.py: numpy, torch and Triton get
// the same integers. exp(x) = 2^n exp(r) with |r| <= log(2) / 2; exp(r) has 24 bits.
static void weights_row(const float* x, int64_t size, float highest, float warmth, int64_t* out) {
  for (int64_t i = 0; i < size; ++i) {
    const float cooled = (x[i] - highest) * warmth;
    const float value = cooled > -60.0f ? (cooled < 0.0f ? cooled : 0.0f) : -60.0f;
    const float n = std::floor(value * 1.44269504088896341f + 0.5f);
    const float r = (value - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t bits = int32_t(p * 16777216.0f), places = std::min(int32_t(-n), 63);
    out[i] = (int64_t(bits) << 16) >> places;
  }
}

// 32 numbers to bytes; returns the sum of the bytes. d is NaN when a number is NaN or infinite, so that the result is NaN, too.
static inline int32_t quantize_block(const float* x, int8_t* q, float& d) {
  const V16 low = load(x), high = load(x + 16);
  const float largest = reduce_max(max(abs(low), abs(high)));
  const float poison = reduce_add(fma(low, zero(), mul(high, zero())));  // 0, or NaN
  d = largest * (1.0f / 127.0f) + poison;
  if (!(largest > 0.0f) || poison != 0.0f) {
    std::memset(q, 0, kQuantBlock);
    return 0;
  }
  const V16 inverse = broadcast(127.0f / largest);
  return store_i8(q, whole(low, inverse)) + store_i8(q + 16, whole(high, inverse));
}

#ifndef BIFOLIO_OWN_QUANTIZE
static void quantize_row(const float* x, int64_t k, int8_t* q, float* scale, float* sum, int32_t* isum) {
  for (int64_t block = 0; block < k / kQuantBlock; ++block) {
    float d;
    const int32_t total = quantize_block(x + block * kQuantBlock, q + block * kQuantBlock, d);
    scale[block * kRowGroup] = d;
    sum[block * kRowGroup] = d * float(total);
    isum[block * kRowGroup] = total;
  }
}
#endif

static void round_row(const float* x, int64_t k, uint16_t* words, int64_t step) {
  for (; k >= kQuantBlock; k -= kQuantBlock, x += kQuantBlock, words += step) {
    store_bf16(words, load(x));
    store_bf16(words + 16, load(x + 16));
  }
  if (k == 0) return;
  float lanes[kQuantBlock] = {};
  std::memcpy(lanes, x, size_t(k) * sizeof(float));
  store_bf16(words, load(lanes));
  store_bf16(words + 16, load(lanes + 16));
}

static void store_kv_row(const float* x, int64_t size, KvType type, void* out) {
  if (type == KvType::F32) {
    std::memcpy(out, x, size_t(size) * sizeof(float));
    return;
  }
  if (type == KvType::Q8_0) {  // int8 values, then one f16 scale for each block of 32
    auto* q = static_cast<int8_t*>(out);
    auto* scales = reinterpret_cast<uint16_t*>(q + size);
    for (int64_t block = 0; block < size / kQuantBlock; ++block) {
      float d;
      quantize_block(x + block * kQuantBlock, q + block * kQuantBlock, d);
      scales[block] = float_to_half(d);
    }
    return;
  }
  auto* words = static_cast<uint16_t*>(out);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) type == KvType::F16 ? store_f16(words + i, load(x + i)) : store_bf16(words + i, load(x + i));
  if (i < size) {
    uint16_t lanes[16];
    const V16 rest = load_part(x + i, size - i);
    type == KvType::F16 ? store_f16(lanes, rest) : store_bf16(lanes, rest);
    std::memcpy(words + i, lanes, size_t(size - i) * 2);
  }
}
