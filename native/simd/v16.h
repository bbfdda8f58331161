// Sixteen lanes made of an instruction set's registers. A register `Reg` has, in each of simd/*.h:
//
//   reg_broadcast, reg_load, reg_store, reg_load_bf16, reg_store_bf16
//   reg_load_bf16_pairs   pairs of bfloat16 side by side: the first and the second of each
//   add, sub, mul, div, fma (a * b + c), abs, copy_sign
//   max, min              with a NaN: NaN if it is the second, else unspecified
//   power_of_two(t)       2^n for t = n + 1.5 * 2^23, whole n in [-126, 127]: n stands in the last bits of t
//   zero_where_below(x, limit, a)   a, but 0 where x < limit
//
// and for all sixteen lanes load_f16, load_u8 (bytes as floats), store_f16, reduce_add (a tree: 8+8, 4+4, 2+2, 1+1), reduce_max, and store_i8:
// the whole numbers n in [-127, 127] of t = n + 1.5 * 2^23 as bytes, returning their sum. Sixteen bytes, one for each lane, are a `Bytes16`:
// load_bytes, bits_of(a, shift, mask) = a >> shift & mask, nibbles_of(word) (lane i: bits 4 * i on), to_floats.
#pragma once

struct V16 {
  Reg v[kRegs];
};

constexpr int kRegLanes = 16 / kRegs;

#define EACH_REG _Pragma("GCC unroll 4") for (int i = 0; i < kRegs; ++i)

template <class V>
static inline V constant(float x);
template <>
inline Reg constant<Reg>(float x) { return reg_broadcast(x); }
template <>
inline V16 constant<V16>(float x) { V16 r; EACH_REG r.v[i] = reg_broadcast(x); return r; }

static inline V16 broadcast(float x) { return constant<V16>(x); }
static inline V16 zero() { return constant<V16>(0.0f); }
static inline V16 load(const float* p) { V16 r; EACH_REG r.v[i] = reg_load(p + kRegLanes * i); return r; }
static inline void store(float* p, V16 a) { EACH_REG reg_store(p + kRegLanes * i, a.v[i]); }
static inline V16 load_bf16(const uint16_t* p) { V16 r; EACH_REG r.v[i] = reg_load_bf16(p + kRegLanes * i); return r; }
static inline void store_bf16(uint16_t* p, V16 a) { EACH_REG reg_store_bf16(p + kRegLanes * i, a.v[i]); }
static inline void load_bf16_pairs(const uint16_t* p, V16& first, V16& second) {
  EACH_REG reg_load_bf16_pairs(p + 2 * kRegLanes * i, first.v[i], second.v[i]);
}
static inline V16 add(V16 a, V16 b) { EACH_REG a.v[i] = add(a.v[i], b.v[i]); return a; }
static inline V16 sub(V16 a, V16 b) { EACH_REG a.v[i] = sub(a.v[i], b.v[i]); return a; }
static inline V16 mul(V16 a, V16 b) { EACH_REG a.v[i] = mul(a.v[i], b.v[i]); return a; }
static inline V16 div(V16 a, V16 b) { EACH_REG a.v[i] = div(a.v[i], b.v[i]); return a; }
static inline V16 fma(V16 a, V16 b, V16 c) { EACH_REG c.v[i] = fma(a.v[i], b.v[i], c.v[i]); return c; }
static inline V16 max(V16 a, V16 b) { EACH_REG a.v[i] = max(a.v[i], b.v[i]); return a; }
static inline V16 abs(V16 a) { EACH_REG a.v[i] = abs(a.v[i]); return a; }
