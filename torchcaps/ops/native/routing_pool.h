// The routing pool, forward and backward: the children's own poses are votes for one parent. ops/pool.py has the
// algorithm and its gradients.
//
// The poses of a sample are copied to the cache, widened to T, with the children in the lanes; everything else reads
// them there. The backward pass computes the iterations again, which takes less time than to store their results.
#pragma once
#include <limits>
#include <type_traits>

#include "shards.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// Reads N numbers; X is T, or the bits of a bfloat16.
template <class T, int N, class X>
INLINE Vec<T, N> widen(const X* x) {
  if constexpr (sizeof(X) == sizeof(T)) {
    return read<T, N>(x);
  } else {
    const Vec<uint32_t, N> bits = __builtin_convertvector(read<uint16_t, N>(x), Vec<uint32_t, N>) << 16;
    Vec<T, N> v;
    memcpy(&v, &bits, sizeof(v));
    return v;
  }
}
// Writes N numbers; bfloat16 is rounded to the nearest, ties to even.
template <class T, int N, class X>
INLINE void round_to(X* x, Vec<T, N> v) {
  if constexpr (sizeof(X) == sizeof(T)) {
    write<T, N>(x, v);
  } else {
    Vec<uint32_t, N> bits;
    memcpy(&bits, &v, sizeof(v));
    bits = v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;  // NaN stays NaN
    write<uint16_t, N>(x, __builtin_convertvector(bits >> 16, Vec<uint16_t, N>));
  }
}

template <class T, int L, class X>
class RoutingPool {
 public:
  using V = Vec<T, L>;
  static constexpr int TILE = 8;  // features that are summed over the children together

  explicit RoutingPool(const PoolProblem& a)
      : a(a), steps(a.iterations), blocks((a.children + L - 1) / L), columns((a.features + TILE - 1) / TILE * TILE),
        stride(columns + 1) {  // blocks a multiple of 4096 bytes apart would share few places of the nearest cache
    u = arena.get<V>(blocks * stride);
    for (V** x : {&present, &shrink, &dots}) *x = arena.get<V>(blocks);
    coefficients = arena.get<V>((steps + 1) * blocks);
    for (V** x : {&logits, &of_dots}) *x = arena.get<V>(steps * blocks);
    for (T** x : {&parent, &query}) *x = arena.get<T>(steps * columns);
    for (T** x : {&total, &of_query, &added}) *x = arena.get<T>(columns);
    of_total = arena.get<T>((steps + 1) * columns);
    inverse = arena.get<T>(steps);
  }

  void forward(int64_t sample) {
    iterate(sample, true);
    T* out = static_cast<T*>(a.total) + sample * a.features;
    for (int64_t f = 0; f < a.features; f++) out[f] = total[f];
  }

  // Writes the gradient of the poses, and returns that of the sharpness.
  double backward(int64_t sample) {
    iterate(sample, false);
    double of_sharpness = 0;
    T* g = of_total + steps * columns;  // gradient of the last sum
    for (int64_t f = 0; f < a.features; f++) g[f] = static_cast<const T*>(a.grad)[sample * a.features + f];
    for (int64_t f = 0; f < columns; f++) of_query[f] = 0;
    for (int64_t t = steps - 1; t >= 0; t--, g -= columns) {
      const V* c = coefficients + (t + 1) * blocks;
      dots_with(g, dots);
      V mean = {};
      for (int64_t b = 0; b < blocks; b++) mean += c[b] * dots[b];
      const T m = sum_of_lanes<T, L>(mean);
      V* d = of_dots + t * blocks;
      for (int64_t b = 0; b < blocks; b++) d[b] = c[b] * (dots[b] - m) * shrink[b];
      sum_over_children(d, added);
      T along = 0;
      const T *v = parent + t * columns, scale = static_cast<T>(a.sharpness) * inverse[t];
      for (int64_t f = 0; f < columns; f++) along += (of_query[f] += added[f]) * v[f];
      for (int64_t f = 0; f < columns; f++) g[f - columns] = (of_query[f] - v[f] * along) * scale;
      of_sharpness += along;
    }
    if (!a.grad_poses) return of_sharpness;
    for (int64_t b = 0; b < blocks; b++) {  // replaces the poses by their gradients
      V *x = u + b * stride, back = {};
      for (int64_t t = 0; t < steps; t++) back -= of_dots[t * blocks + b] * logits[t * blocks + b] * shrink[b];
      for (int64_t f = 0; f < a.features; f++) x[f] = (steps ? back * x[f] : V{}) + coefficients[b] * of_total[f];
      for (int64_t t = 0; t < steps; t++) {
        const V c = coefficients[(t + 1) * blocks + b], d = of_dots[t * blocks + b];
        const T *q = query + t * columns, *of_sum = of_total + (t + 1) * columns;
        for (int64_t f = 0; f < a.features; f++) x[f] += c * of_sum[f] + d * q[f];
      }
    }
    copy(static_cast<X*>(a.grad_poses), sample, a.grad_strides);
    return of_sharpness;
  }

  Arena arena;

 private:
  // Computes all iterations, with or without the last sum.
  void iterate(int64_t sample, bool last_sum) {
    for (int64_t f = 0; f < columns; f++) u[(blocks - 1) * stride + f] = V{};  // lanes beyond the children
    copy(static_cast<const X*>(a.poses), sample, a.strides);
    if (a.present || number == 0) {
      number = 0;
      for (int64_t i = 0; i < a.children; i++) {
        const bool here = !a.present || a.present[sample * a.children + i];
        present[i / L][i % L] = here;
        number += here;
      }
    }
    for (int64_t b = 0; b < blocks; b++) {
      coefficients[b] = present[b] / number;
      V square = {};
      for (int64_t f = 0; steps && f < columns; f++) square += u[b * stride + f] * u[b * stride + f];
      shrink[b] = square == T(0) ? splat<T, L>(1) : 1 / root<T, L>(square);
    }
    sum_over_children(coefficients, total);
    for (int64_t t = 0; t < steps; t++) {
      T square = 0;
      for (int64_t f = 0; f < columns; f++) square += total[f] * total[f];
      inverse[t] = 1 / std::sqrt(square);
      if (inverse[t] == T(INFINITY)) inverse[t] = 1;
      T *v = parent + t * columns, *q = query + t * columns;
      for (int64_t f = 0; f < columns; f++) {
        v[f] = total[f] * inverse[t];
        q[f] = (t ? q[f - columns] : 0) + static_cast<T>(a.sharpness) * v[f];
      }
      logits_and_softmax(t);
      if (last_sum || t + 1 < steps) sum_over_children(coefficients + (t + 1) * blocks, total);
    }
  }

  void logits_and_softmax(int64_t t) {
    constexpr T LOWEST = std::numeric_limits<T>::lowest();  // not -inf: 0 * -inf is NaN in the backward pass
    V *l = logits + t * blocks, *c = coefficients + (t + 1) * blocks;
    dots_with(query + t * columns, l);
    V most = splat<T, L>(LOWEST), sums = {};
    for (int64_t b = 0; b < blocks; b++) {
      l[b] = present[b] > T(0) ? l[b] * shrink[b] : splat<T, L>(LOWEST);
      most = larger<T, L>(l[b], most);
    }
    T largest;
    join_lanes<Largest, T, L, 1>(&most, &largest);
    for (int64_t b = 0; b < blocks; b++) sums += c[b] = exp_of<L>(l[b] - largest);
    const T scale = 1 / sum_of_lanes<T, L>(sums);
    for (int64_t b = 0; b < blocks; b++) c[b] *= scale;
  }

  // Products of a vector of features with all children.
  void dots_with(const T* x, V* out) const {
    for (int64_t b = 0; b < blocks; b++) {
      V even = {}, odd = {};
      const V* own = u + b * stride;
      for (int64_t f = 0; f < columns; f += 2) even += x[f] * own[f], odd += x[f + 1] * own[f + 1];
      out[b] = even + odd;
    }
  }
  void sum_over_children(const V* weight, T* out) const {
    for (int64_t f = 0; f < columns; f += TILE) {
      V sums[TILE] = {};
      for (int64_t b = 0; b < blocks; b++)
#pragma GCC unroll 8
        for (int i = 0; i < TILE; i++) sums[i] += weight[b] * u[b * stride + f + i];
      join_lanes<Sum, T, L, TILE>(sums, out + f);
    }
  }

  // Copies the poses of a sample to `u`; or from `u`, if Y is not const.
  template <class Y>
  void copy(Y* x, int64_t sample, const int64_t* strides) {
    x += sample / a.groups * strides[0] + sample % a.groups * strides[1];
    if (strides[3] == 1) return rows(x, strides);
    strides[2] == 1 ? squares<L>(x, strides) : squares<1>(x, strides);
  }
  // Children are innermost in memory.
  template <class Y>
  void rows(Y* x, const int64_t* strides) {
    for (int64_t f = 0; f < a.features; f++, x += strides[2])
      in_blocks<L>(a.children, [&](auto n, int64_t i) INLINED {
        constexpr int N = decltype(n)::value;
        if constexpr (std::is_const_v<Y>) {
          write<T, N>(lane(i, f), widen<T, N>(x + i));
        } else {
          round_to<T, N>(x + i, read<T, N>(lane(i, f)));
        }
      });
  }
  // Features are innermost in memory: N features of N children at a time.
  template <int MOST, class Y>
  void squares(Y* x, const int64_t* strides) {
    in_blocks<MOST>(a.features, [&](auto n, int64_t f) INLINED {
      constexpr int N = decltype(n)::value;
      for (int64_t i = 0; i < a.children; i += N) {
        Y* at = x + i * strides[3] + f * strides[2];
        Vec<T, N> v[N] = {};
        if constexpr (std::is_const_v<Y>) {
#pragma GCC unroll 16
          for (int k = 0; k < N; k++)
            if (i + k < a.children) v[k] = widen<T, N>(at + k * strides[3]);
          transpose<T, N>(v);
#pragma GCC unroll 16
          for (int k = 0; k < N; k++) write<T, N>(lane(i, f + k), v[k]);
        } else {
#pragma GCC unroll 16
          for (int k = 0; k < N; k++) v[k] = read<T, N>(lane(i, f + k));
          transpose<T, N>(v);
#pragma GCC unroll 16
          for (int k = 0; k < N; k++)
            if (i + k < a.children) round_to<T, N>(at + k * strides[3], v[k]);
        }
      }
    });
  }
  INLINE T* lane(int64_t i, int64_t f) const { return reinterpret_cast<T*>(u + i / L * stride + f) + i % L; }

  const PoolProblem& a;
  const int64_t steps, blocks, columns, stride;
  T number = 0;  // of children that are present
  V *u, *present, *shrink, *dots, *coefficients, *logits, *of_dots;
  T *parent, *query, *total, *of_query, *added, *of_total, *inverse;
};

template <class T, class X>
struct PoolCall {
  const PoolProblem& a;
  Watch& watch;
  int shards;
  double* of_sharpness;  // of each sample

  static void shard(void* context, int number) {
    const PoolCall& call = *static_cast<PoolCall*>(context);
    const int64_t samples = call.a.batch * call.a.groups, end = samples * (number + 1) / call.shards;
    RoutingPool<T, VECTOR_BYTES / sizeof(T), X> pool(call.a);
    if (pool.arena.failed) return call.watch.stop(NO_MEMORY);
    for (int64_t s = samples * number / call.shards; s < end && !call.watch.stopped(); s++) {
      if (!call.a.grad) {
        pool.forward(s);
      } else {
        call.of_sharpness[s] = pool.backward(s);
      }
    }
  }
};

template <class T, class X>
void pool(const PoolProblem& a, Watch& watch) {
  const int64_t samples = a.batch * a.groups, work = samples * a.features * a.children * (a.iterations + 1) * 4;
  Arena arena;
  double* of_sharpness = arena.get<double>(samples);
  if (arena.failed) return watch.stop(NO_MEMORY);
  const int shards = static_cast<int>(most(1, least(least(a.threads, samples), work >> 19)));
  PoolCall<T, X> call{a, watch, shards, of_sharpness};
  in_parallel(shards, call.shard, &call);
  for (int64_t s = 0; a.grad_sharpness && s < samples; s++) *a.grad_sharpness += of_sharpness[s];
}

}  // namespace

// `bytes` is the size of a number of the poses; those of 2 bytes are bfloat16.
int routing_pool(int64_t bytes, const PoolProblem& a) {
  Watch watch(a.interrupted);
  if (bytes == 8) pool<double, double>(a, watch);
  if (bytes == 4) pool<float, float>(a, watch);
  if (bytes == 2) pool<float, uint16_t>(a, watch);
  return watch.status();
}

}  // namespace INSTRUCTIONS
}  // namespace torchcaps
