// Vectors of L numbers (lanes), and functions of them: shuffles, sums over lanes, exp, square root. Included by
// shards.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#define INLINED __attribute__((always_inline))
#define INLINE inline INLINED
// For functions that are long enough: inlined into one another, they would share 16 registers.
#define SEPARATE __attribute__((noinline))

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

template <class T, int L>
struct VectorOf {
  typedef T type __attribute__((vector_size(L * sizeof(T))));
};
template <class T, int L>
using Vec = typename VectorOf<T, L>::type;

template <int... I>
struct Indices {};
template <int N, int... I>
struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I>
struct UpTo<0, I...> {
  using type = Indices<I...>;
};

template <class T, int L>
INLINE Vec<T, L> splat(T x) {
  return x - Vec<T, L>{};
}

template <class T, int L>
INLINE Vec<T, L> read(const T* x) {
  Vec<T, L> v;
  memcpy(&v, x, sizeof(v));
  return v;
}
template <class T, int L>
INLINE void write(T* x, Vec<T, L> v) {
  memcpy(x, &v, sizeof(v));
}

template <class T, int L>
INLINE Vec<T, L> larger(Vec<T, L> a, Vec<T, L> b) {
  return a > b ? a : b;
}

struct Sum {
  template <class V>
  INLINE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Largest {
  template <class V>
  INLINE V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

// Swaps the odd blocks of B lanes of a with the even blocks of b.
template <class T, int L, int B, int... I>
INLINE void exchange(Vec<T, L>& a, Vec<T, L>& b, Indices<I...>) {
  const Vec<T, L> first = __builtin_shufflevector(a, b, ((I / B) % 2 ? L + I - B : I)...);
  b = __builtin_shufflevector(a, b, ((I / B) % 2 ? L + I : I + B)...);
  a = first;
}
// Joins the lanes of each block of N lanes: those of x[i] become lane i of the block of x[0]. The rest is overwritten.
template <class Join, class T, int L, int N, int B = 1>
INLINE void fold(Vec<T, L>* x) {
  if constexpr (B < N) {
#pragma GCC unroll 16
    for (int i = 0; i < N / B; i += 2) {
      exchange<T, L, B>(x[i], x[i + 1], typename UpTo<L>::type());
      x[i / 2] = Join()(x[i], x[i + 1]);
    }
    fold<Join, T, L, N, 2 * B>(x);
  }
}
template <class Join, class T, int L, int... I>
INLINE Vec<T, L / 2> join_halves(Vec<T, L> x, Indices<I...>) {
  return Join()(__builtin_shufflevector(x, x, I...), __builtin_shufflevector(x, x, (L / 2 + I)...));
}
template <class Join, class T, int L, int N>
INLINE Vec<T, N> narrow(Vec<T, L> x) {
  if constexpr (L == N) {
    return x;
  } else {
    return narrow<Join, T, L / 2, N>(join_halves<Join, T, L>(x, typename UpTo<L / 2>::type()));
  }
}
// Joins the lanes of x[i] into out[i], for i < N. x is overwritten.
template <class Join, class T, int L, int N>
INLINE void join_lanes(Vec<T, L>* x, T* out) {
  constexpr int G = N < L ? N : L;
  if constexpr (G > 1 && (G & (G - 1)) == 0 && N % G == 0) {
#pragma GCC unroll 8
    for (int i = 0; i < N; i += G) {
      fold<Join, T, L, G>(x + i);
      write<T, G>(out + i, narrow<Join, T, L, G>(x[i]));
    }
  } else {
    for (int i = 0; i < N; i++) {
      const Vec<T, 2> two = narrow<Join, T, L, 2>(x[i]);
      out[i] = Join()(two[0], two[1]);
    }
  }
}
template <class T, int L>
INLINE T sum_of_lanes(Vec<T, L> x) {
  T sum;
  join_lanes<Sum, T, L, 1>(&x, &sum);
  return sum;
}
// Returns whether a is larger than b in any lane.
template <class T, int L>
INLINE bool any_larger(Vec<T, L> a, Vec<T, L> b) {
  const auto larger = a > b;
  Vec<int64_t, L * static_cast<int>(sizeof(T)) / 8> bits;
  memcpy(&bits, &larger, sizeof(bits));
  return sum_of_lanes<int64_t, L * static_cast<int>(sizeof(T)) / 8>(bits & 0x100000001) != 0;
}

// Repeats lane i of each block of N lanes in all lanes of the block, for each i < N: the opposite of fold.
template <class T, int L, int N, int I, int... LANE>
INLINE Vec<T, L> spread_lane(Vec<T, L> x, Indices<LANE...>) {
  return __builtin_shufflevector(x, x, (LANE / N * N + I)...);
}
template <class T, int L, int N, int... I>
INLINE void spread(Vec<T, L> x, Vec<T, L>* out, Indices<I...>) {
  ((out[I] = spread_lane<T, L, N, I>(x, typename UpTo<L>::type())), ...);
}

// Moves x[i][j] to x[j][i].
template <class T, int L, int B = 1>
INLINE void transpose(Vec<T, L>* x) {
  if constexpr (B < L) {
#pragma GCC unroll 16
    for (int i = 0; i < L; i++)
      if (i / B % 2 == 0) exchange<T, L, B>(x[i], x[i + B], typename UpTo<L>::type());
    transpose<T, L, 2 * B>(x);
  }
}
// Returns e^x for x <= 0, to an ulp; 0 where the result would be subnormal. NaN stays NaN. e^x = 2^n e^f with an
// integer n and |f| <= ln(2) / 2, where the error of the polynomial is at most 3e-9.
template <int L>
INLINE Vec<float, L> exp_of(Vec<float, L> x) {
  using V = Vec<float, L>;
  using I = Vec<int32_t, L>;
  constexpr float ROUND = 12582912 + 127;  // 1.5 * 2^23: n ends up in the last bits, as the exponent of 2^n
  const V t = x * 1.44269504f + ROUND, n = t - ROUND;
  const V f = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  V p = f * 1.3814539917e-3f + 8.3687451512e-3f;
  p = p * f + 4.1668390791e-2f;
  p = p * f + 1.6666520399e-1f;
  p = p * f + 4.9999993432e-1f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  I exponent;
  memcpy(&exponent, &t, sizeof(t));
  exponent <<= 23;
  V scale;
  memcpy(&scale, &exponent, sizeof(t));
  return x < -87.33654f ? V{} : p * scale;  // there p is meaningless
}
template <int L>
INLINE Vec<double, L> exp_of(Vec<double, L> x) {
  for (int i = 0; i < L; i++) x[i] = __builtin_exp(x[i]);
  return x;
}

template <class T, int L>
INLINE Vec<T, L> root(Vec<T, L> x) {
  for (int i = 0; i < L; i++) x[i] = sizeof(T) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return x;
}

// Replaces 0 by 1, for divisors. Numbers below 1e-30 count as 0.
template <class T, int L>
INLINE Vec<T, L> nonzero(Vec<T, L> x) {
  const Vec<T, L> one = splat<T, L>(1);
  return ((x < T(1e-30)) & (x > T(-1e-30))) ? one : x;
}

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
