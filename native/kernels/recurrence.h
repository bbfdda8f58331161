// Recurrent layers: convolution, gates and the scan over a state, written once for every instruction set on sixteen lanes.
#pragma once

static void convolve_row(const ConvolutionRow& row) {
  map_row(row.size, row.out, [&](auto at) {
    V16 y = row.bias ? at(row.bias) : zero();
    for (int64_t tap = 0; tap < row.width; ++tap) {
      V16 x = row.inputs[tap] ? at(row.inputs[tap]) : zero();
      if (row.factors[tap]) x = mul(x, at(row.factors[tap]));
      y = fma(x, at(row.weight + tap * row.stride), y);
    }
    return row.gate ? mul(at(row.gate), y) : activate(y, Activation::Silu);
  });
}

static void unit_row(float* x, int64_t size, float eps, float scale) {
  const float squares = sum_row(x, size, [](V16 a) { return mul(a, a); });
  const V16 factor = broadcast(scale / std::sqrt(squares + eps));
  map_row(size, x, [&](auto at) { return mul(at(x), factor); });
}

static void decay_row(const float* x, const float* bias, const float* decay, int64_t size, float least, float most, float* steps,
                      float* decays) {
  map_row(size, steps, [&](auto at) { return exp(add(at(x), at(bias))); });
  for (int64_t i = 0; i < size; ++i) {
    const float sum = x[i] + bias[i], step = sum > 20.0f ? sum : ::log1pf(steps[i]);  // softplus
    steps[i] = step < least ? least : step > most ? most : step;
  }
  map_row(size, decays, [&](auto at) { return exp(mul(at(steps), at(decay))); });
}

static void bounded_decay_row(const float* x, const float* bias, const float* decay, int64_t size, float bound, float* decays) {
  const V16 one = broadcast(1.0f), least = broadcast(-bound);
  map_row(size, decays, [&](auto at) { return exp(div(least, add(one, exp(mul(at(decay), add(at(x), at(bias))))))); });
}

static void exp_row(const float* x, const float* factor, int64_t size, float* out) {
  map_row(size, out, [&](auto at) { return exp(mul(at(x), at(factor))); });
}

static void sigmoid_row(const float* x, int64_t size, float* out) {
  map_row(size, out, [&](auto at) {
    return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), at(x)))));
  });
}

// C times sixteen columns of a state, or as many as there are (C = 1).
template <int C, bool Part>
struct StateColumns {
  int64_t count;

  V16 get(const float* p, int c) const {
    if constexpr (Part) return load_part(p, count);
    return load(p + 16 * c);
  }
  void put(float* p, int c, V16 a) const {
    if constexpr (Part) {
      store_part(p, a, count);
    } else {
      store(p + 16 * c, a);
    }
  }

  // sums = key^T S; with decays, those of the rows of S first
  void multiply(const float* state, int64_t stride, const float* key, const float* decays, int64_t rows, V16 sums[C]) const {
    _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) sums[c] = zero();
    for (int64_t i = 0; i < rows; ++i) {
      const V16 factor = broadcast(decays ? key[i] * decays[i] : key[i]);
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) sums[c] = fma(factor, get(state + i * stride, c), sums[c]);
    }
  }

  // One pass over the state: to = fma(key, change, decay * from);  y = query^T to;  sums = next^T to, for the key of the next token
  // if it has one. The rows of another state are prefetched meanwhile, if there is one. Keyed: each row of a state has its decay, and
  // the next key is multiplied with the decays of its token.
  struct Pass {
    const float* from;
    int64_t from_stride;
    float* to;
    int64_t to_stride;
    float decay;
    const float *key, *query, *next, *ahead;  // next and ahead may be null
    const float *decays, *next_decays;        // keyed: of the rows
  };
  template <bool Next, bool Ahead, bool Keyed>
  void update(const HeadScan& scan, const Pass& pass, const V16 change[C], V16 y[C], V16 sums[C]) const {
    V16 shrink = broadcast(pass.decay);
    _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) y[c] = sums[c] = zero();
    for (int64_t i = 0; i < scan.key_size; ++i) {
      if constexpr (Ahead)
        _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) __builtin_prefetch(pass.ahead + i * scan.value_size + 16 * c);
      const float following = !Next ? 0.0f : Keyed ? pass.next[i] * pass.next_decays[i] : pass.next[i];
      const V16 k = broadcast(pass.key[i]), q = broadcast(pass.query[i]), n = broadcast(following);
      if constexpr (Keyed) shrink = broadcast(pass.decays[i]);
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {
        const V16 s = fma(k, change[c], mul(shrink, get(pass.from + i * pass.from_stride, c)));
        put(pass.to + i * pass.to_stride, c, s);
        y[c] = fma(q, s, y[c]);
        if constexpr (Next) sums[c] = fma(n, s, sums[c]);
      }
    }
  }
  template <bool Keyed>
  void update(const HeadScan& scan, const Pass& pass, const V16 change[C], V16 y[C], V16 sums[C]) const {
    if (pass.ahead)
      return pass.next ? update<true, true, Keyed>(scan, pass, change, y, sums) : update<false, true, Keyed>(scan, pass, change, y, sums);
    pass.next ? update<true, false, Keyed>(scan, pass, change, y, sums) : update<false, false, Keyed>(scan, pass, change, y, sums);
  }

  // The pass over the state that ends a token begins the next one: one pass for each token.
  template <bool Keyed>
  void scan(const HeadScan& s) const {
    constexpr int64_t width = C * 16;
    const bool continues = s.states && s.read > 0;
    const float* from = continues ? s.states + s.read * s.state_stride + s.column : s.tile;
    int64_t from_stride = continues ? s.value_size : width;
    if (!continues) std::memset(s.tile, 0, size_t(s.key_size * width) * sizeof(float));
    V16 sums[C] = {}, change[C], y[C];
    if (s.delta) multiply(from, from_stride, s.keys, Keyed ? s.decays : nullptr, s.key_size, sums);
    for (int64_t t = 0; t < s.tokens; ++t) {
      const float *key = s.keys + t * s.stride, *query = s.queries + t * s.stride;
      const float* decays = s.decays + t * s.gate_stride;
      const float decay = Keyed ? 1.0f : decays[0];  // of the sums
      const V16 rate = broadcast(s.rates[t * s.gate_stride]);
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {
        const V16 value = get(s.values + t * s.stride + s.column, c);
        change[c] = mul(rate, s.delta ? sub(value, mul(broadcast(decay), sums[c])) : value);
      }
      const bool kept = s.states && s.writes[t] > 0;
      float* to = kept ? s.states + s.writes[t] * s.state_stride + s.column : s.tile;
      const int64_t to_stride = kept ? s.value_size : width;
      const float *next = s.delta && t + 1 < s.tokens ? key + s.stride : nullptr, *ahead = t == 0 ? s.ahead : nullptr;
      update<Keyed>(s, {from, from_stride, to, to_stride, decay, key, query, next, ahead, decays, decays + s.gate_stride}, change, y, sums);
      _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) put(s.out + t * s.out_stride + s.column, c, y[c]);
      from = to, from_stride = to_stride;
    }
  }
  void scan(const HeadScan& s) const { s.keyed ? scan<true>(s) : scan<false>(s); }
};

static void scan_columns(const HeadScan& scan) {
  HeadScan part = scan;
  const int64_t end = scan.column + scan.columns;
  if (scan.columns == 32) return StateColumns<2, false>{32}.scan(scan);
  for (; part.column + 16 <= end; part.column += 16) StateColumns<1, false>{16}.scan(part);
  if (part.column < end) StateColumns<1, true>{end - part.column}.scan(part);
}
