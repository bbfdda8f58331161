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

// e^x, error below 2 units in the last place; 0 below -87; NaN stays NaN.
static inline V16 exp(V16 x) {
  const V16 lowest = broadcast(-87.0f);
  const V16 bounded = min(broadcast(88.0f), max(lowest, x));
  const V16 n = round(mul(bounded, broadcast(1.44269504f)));
  V16 r = fma(n, broadcast(-0.693359375f), bounded);
  r = fma(n, broadcast(2.12194440e-4f), r);
  V16 p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), broadcast(1.0f));
  return zero_where_below(x, lowest, mul(p, power_of_two(n)));
}

// (e^2x - 1) / (e^2x + 1), by its series near 0 where the difference would cancel.
static inline V16 tanh(V16 x) {
  const V16 a = min(abs(x), broadcast(10.0f));
  const V16 e = exp(mul(a, broadcast(-2.0f)));
  const V16 far = div(sub(broadcast(1.0f), e), add(broadcast(1.0f), e));
  const V16 s = mul(a, a);
  V16 p = broadcast(-1.0f / 315.0f * 17.0f);
  p = fma(p, s, broadcast(2.0f / 15.0f));
  p = fma(p, s, broadcast(-1.0f / 3.0f));
  const V16 near = fma(mul(p, s), a, a);
  const V16 limit = broadcast(0.125f);
  const V16 only_near = sub(near, zero_where_below(a, limit, near));
  return copy_sign(add(zero_where_below(a, limit, far), only_near), x);
}

static inline V16 sigmoid(V16 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

// The error function by Chebyshev's fitting, error below 1.2e-7 everywhere.
static inline V16 erf(V16 x) {
  static const float c[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                            -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
  const V16 a = abs(x);
  const V16 t = div(broadcast(1.0f), fma(a, broadcast(0.5f), broadcast(1.0f)));
  V16 p = broadcast(c[0]);
  for (int i = 1; i < 10; ++i) p = fma(p, t, broadcast(c[i]));
  const V16 tail = mul(t, exp(sub(p, mul(a, a))));
  return copy_sign(sub(broadcast(1.0f), tail), x);
}

static inline V16 activate(V16 x, Activation activation) {
  if (activation == Activation::Silu) return mul(x, sigmoid(x));
  if (activation == Activation::Gelu) {
    const V16 half = mul(broadcast(0.5f), x);
    return fma(half, erf(mul(x, broadcast(0.70710678f))), half);
  }
  // (1 + tanh(u)) / 2 is the logistic function of 2u
  const V16 cube = mul(mul(x, x), x);
  return mul(x, sigmoid(mul(broadcast(2.0f * 0.79788456f), fma(cube, broadcast(0.044715f), x))));
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
  map_row(size, out, [&](auto at) { return activate(at(x), activation); });
}

static void act_mul_row(const float* gate, const float* up, int64_t size, Activation activation, float* out) {
  map_row(size, out, [&](auto at) { return mul(activate(at(gate), activation), at(up)); });
}

static void softcap_row(float* x, int64_t size, float cap) {
  map_row(size, x, [&](auto at) { return mul(tanh(div(at(x), broadcast(cap))), broadcast(cap)); });
}

// The first of the largest; NaN is never the largest.
static int64_t argmax_row(const float* x, int64_t size) {
  V16 best = broadcast(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) best = max(load(x + i), best);
  float largest = reduce_max(best);
  if (largest != largest) largest = -INFINITY, i = 0;  // a NaN hides the others on some machines: look one by one
  for (; i < size; ++i) largest = x[i] > largest ? x[i] : largest;
  for (i = 0; i < size; ++i)
    if (x[i] == largest) return i;
  return 0;
}

static void quantize_row(const float* x, int64_t k, int8_t* q, float* scale, float* sum, int32_t* isum) {
  for (int64_t block = 0; block < k / kBlock; ++block) {
    const V16 low = load(x + block * kBlock), high = load(x + block * kBlock + 16);
    const float largest = reduce_max(max(abs(low), abs(high)));
    // 0, or NaN when the block holds a NaN or an infinity: a poisoned input must show in the output
    const float poison = reduce_add(fma(low, zero(), mul(high, zero())));
    const float d = largest * (1.0f / 127.0f) + poison;
    const bool usable = largest > 0.0f && poison == 0.0f;
    const V16 inverse = broadcast(usable ? 127.0f / largest : 0.0f);
    const V16 none = zero();
    int32_t total = store_i8(q + block * kBlock, usable ? round(mul(low, inverse)) : none);
    total += store_i8(q + block * kBlock + 16, usable ? round(mul(high, inverse)) : none);
    scale[block * kRowGroup] = d;
    sum[block * kRowGroup] = d * float(total);
    isum[block * kRowGroup] = total;
  }
}

static void store_kv_row(const float* x, int64_t size, KvType type, void* out) {
  if (type == KvType::F32) {
    std::memcpy(out, x, size_t(size) * sizeof(float));
    return;
  }
  if (type == KvType::Q8_0) {  // int8 values, then one f16 scale for each block of 32
    auto* q = static_cast<int8_t*>(out);
    auto* scales = reinterpret_cast<uint16_t*>(q + size);
    for (int64_t block = 0; block < size / kBlock; ++block) {
      const V16 low = load(x + block * kBlock), high = load(x + block * kBlock + 16);
      const float largest = reduce_max(max(abs(low), abs(high)));
      const V16 inverse = broadcast(largest > 0.0f ? 127.0f / largest : 0.0f);
      store_i8(q + block * kBlock, round(mul(low, inverse)));
      store_i8(q + block * kBlock + 16, round(mul(high, inverse)));
      scales[block] = float_to_half(largest * (1.0f / 127.0f));
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
