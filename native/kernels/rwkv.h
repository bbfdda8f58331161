// Recurrent layers of RWKV-7, written once for every instruction set on sixteen lanes.
#pragma once

static inline V16 logistic(V16 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

static void mix_row(const float* x, const float* before, const float* factors, int64_t size, float* out) {
  map_row(size, out, [&](auto at) {
    const V16 own = at(x);
    return fma(at(factors), sub(before ? at(before) : zero(), own), own);
  });
}

// The vectors of a head that its state and a token give.
struct RwkvVectors {
  float *decay, *removed, *back, *added, *value, *y;
  float bonus;
};

static void find_vectors(const RwkvHead& h, const float* row, RwkvVectors& v) {
  const float *query = row + h.query, *key = row + h.key;
  const V16 one = broadcast(1.0f);
  map_row(h.key_size, v.back, [&](auto at) { return logistic(at(row + h.rate)); });
  map_row(h.key_size, v.removed, [&](auto at) { return mul(at(key), at(h.factors[0])); });
  const float length = std::sqrt(sum_row(v.removed, h.key_size, [](V16 a) { return mul(a, a); }));
  const V16 shorter = broadcast(1.0f / (length > kLeastLength ? length : kLeastLength));
  map_row(h.key_size, v.removed, [&](auto at) { return mul(at(v.removed), shorter); });
  map_row(h.key_size, v.added, [&](auto at) { return fma(mul(sub(at(v.back), one), at(h.factors[1])), at(key), at(key)); });
  map_row(h.key_size, v.back, [&](auto at) { return mul(at(v.back), at(v.removed)); });
  map_row(h.key_size, v.decay, [&](auto at) { return mul(mul(at(query), at(v.added)), at(h.factors[2])); });
  v.bonus = sum_row(v.decay, h.key_size, [](V16 a) { return a; });
  map_row(h.key_size, v.decay, [&](auto at) { return exp(mul(broadcast(kSlowest), logistic(at(row + h.decay)))); });
  map_row(h.value_size, v.value, [&](auto at) {
    const V16 own = at(row + h.value);
    return h.mixes ? fma(logistic(at(row + h.amount)), sub(at(row + h.first), own), own) : own;
  });
}

// S = decay * S - back (removed^T S) + added value^T;  y = query^T S
template <int C, bool Part>
static void update_columns(const RwkvHead& h, const RwkvVectors& v, const float* query, const float* from, float* to, int64_t column,
                           int64_t count) {
  const StateColumns<C, Part> lanes{count};
  V16 known[C], value[C], y[C];
  lanes.multiply(from + column, h.value_size, v.removed, nullptr, h.key_size, known);
  _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) value[c] = lanes.get(v.value + column, c), y[c] = zero();
  for (int64_t i = 0; i < h.key_size; ++i) {
    const V16 kept = broadcast(v.decay[i]), back = broadcast(-v.back[i]), added = broadcast(v.added[i]), q = broadcast(query[i]);
    const int64_t row = i * h.value_size + column;
    _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) {
      const V16 s = fma(added, value[c], fma(back, known[c], mul(kept, lanes.get(from + row, c))));
      lanes.put(to + row, c, s);
      y[c] = fma(q, s, y[c]);
    }
  }
  _Pragma("GCC unroll 4") for (int c = 0; c < C; ++c) lanes.put(v.y + column, c, y[c]);
}

static void rwkv_head(const RwkvHead& h) {
  const int64_t keys = (h.key_size + 15) / 16 * 16, values = (h.value_size + 15) / 16 * 16;
  float* at = h.scratch;
  RwkvVectors v{at, at + keys, at + 2 * keys, at + 3 * keys, at + 4 * keys, at + 4 * keys + values, 0.0f};
  float* tile = v.y + values;
  const bool continues = h.states && h.read > 0;
  const float* from = continues ? h.states + h.read * h.state_stride : tile;
  if (!continues) std::memset(tile, 0, size_t(h.key_size * h.value_size) * sizeof(float));
  for (int64_t t = 0; t < h.tokens; ++t) {
    const float* row = h.row + t * h.stride;
    find_vectors(h, row, v);
    float* to = h.states && h.writes[t] > 0 ? h.states + h.writes[t] * h.state_stride : tile;
    int64_t column = 0;
    for (; column + 32 <= h.value_size; column += 32) update_columns<2, false>(h, v, row + h.query, from, to, column, 32);
    for (; column + 16 <= h.value_size; column += 16) update_columns<1, false>(h, v, row + h.query, from, to, column, 16);
    if (column < h.value_size) update_columns<1, true>(h, v, row + h.query, from, to, column, h.value_size - column);
    from = to;
    if (h.norm.weight) norm_row(v.y, h.norm, v.y);
    const V16 bonus = broadcast(v.bonus);
    map_row(h.value_size, h.out + t * h.out_stride, [&](auto lanes) {
      return mul(fma(bonus, lanes(v.value), lanes(v.y)), lanes(row + h.gate));
    });
  }
}
