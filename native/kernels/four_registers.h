// Four registers at once: each step of a long chain of operations is done for all four, so that none waits for the one before it.
#pragma once

struct Four {
  Reg v[4];
};

#define EACH_OF_FOUR _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i)

template <>
inline Four constant<Four>(float x) { Four r; EACH_OF_FOUR r.v[i] = reg_broadcast(x); return r; }
static inline Four load_four(const float* p) { Four r; EACH_OF_FOUR r.v[i] = reg_load(p + kRegLanes * i); return r; }
static inline void store(float* p, const Four& a) { EACH_OF_FOUR reg_store(p + kRegLanes * i, a.v[i]); }
static inline Four add(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = add(a.v[i], b.v[i]); return a; }
static inline Four sub(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = sub(a.v[i], b.v[i]); return a; }
static inline Four mul(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = mul(a.v[i], b.v[i]); return a; }
static inline Four div(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = div(a.v[i], b.v[i]); return a; }
static inline Four fma(const Four& a, const Four& b, Four c) { EACH_OF_FOUR c.v[i] = fma(a.v[i], b.v[i], c.v[i]); return c; }
static inline Four max(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = max(a.v[i], b.v[i]); return a; }
static inline Four min(Four a, const Four& b) { EACH_OF_FOUR a.v[i] = min(a.v[i], b.v[i]); return a; }
static inline Four abs(Four a) { EACH_OF_FOUR a.v[i] = abs(a.v[i]); return a; }
static inline Four power_of_two(Four t) { EACH_OF_FOUR t.v[i] = power_of_two(t.v[i]); return t; }
static inline Four copy_sign(Four a, const Four& sign) { EACH_OF_FOUR a.v[i] = copy_sign(a.v[i], sign.v[i]); return a; }
static inline Four zero_where_below(const Four& x, const Four& limit, Four a) {
  EACH_OF_FOUR a.v[i] = zero_where_below(x.v[i], limit.v[i], a.v[i]);
  return a;
}
