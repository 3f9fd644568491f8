// Mass, mean and variance of the votes of each parent, softmax over the parents, forward and backward.
#pragma once
#include "worker.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

enum Agreement { UNIFORM, DOT, GAUSSIAN };

// x += y by compensated summation (Kahan, 1965): plain sums of thousands of nearly equal numbers lose digits.
template <class V>
INLINE void add_exactly(V& x, V& lost, V y) {
  const V rest = y - lost, sum = x + rest;
  lost = (sum - x) - rest;
  x = sum;
}

// Totals of a sample: center and scatter (size each), and mass and benefit, each with its rounding error (tiles each).
// The mean of a chunk is subtracted from its votes before they are squared, and chunks are joined by the parallel
// formula of Chan, Golub and LeVeque (1979). So no digits are lost when the votes agree far from zero.
template <class T, int L, class S, Agreement A>
class Moments : public Worker<Moments<T, L, S, A>, T, L, S> {
 public:
  using Base = Worker<Moments<T, L, S, A>, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::arena, Base::votes, Base::chunk, Base::of_run, Base::M;

  Moments(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, size, tiles)),
        betas(arena, a, a.betas, nullptr, a.betas_groups, a.betas_parents, 1, 1, CHUNK) {}
  static int64_t size_of_total(const Problem&, int64_t size, int64_t tiles) { return 2 * size + 4 * tiles; }
  int64_t state_size() const { return A * size; }

  void make_room() {
    if (A != UNIFORM) target = arena.template get<V>(this->block * size);
    if (A == GAUSSIAN) {
      precision = arena.template get<V>(this->block * size);
      prior = arena.template get<V>(this->block * tiles);
    }
    for (int i = 0; i < M * CHUNK; i++) shares[i] = arena.template get<V>(tiles);
    if (A == UNIFORM) {
      uniform = arena.template get<V>(tiles);
      for (int64_t j = 0; !arena.failed && j < a.parents; j++) reinterpret_cast<T*>(uniform)[j] = T(1) / a.parents;
    }
  }
  void begin(int64_t s, int64_t sample) {
    const int64_t at = sample * a.parents, features_at = at * features;
    if (A != UNIFORM)
      pack<T, L>(static_cast<const T*>(a.target) + features_at, a.parents, features, 0, target + s * size);
    if (A == GAUSSIAN) {
      pack<T, L>(static_cast<const T*>(a.precision) + features_at, a.parents, features, 0, precision + s * size);
      pack<T, L>(static_cast<const T*>(a.prior) + at, a.parents, 1, -INFINITY, prior + s * tiles);
    }
  }
  void load_more(int c, int64_t type, int64_t place) { betas.load(c, type, place); }

  template <int N>
  INLINE void group(int64_t s) {
    for (int c = 0; c < chunk; c++) votes_and_logits<N>(s, c);
    coefficients<N>();
    for (int m = 0; m < N; m++) {
      for (int c = 0; this->gates && c < chunk; c++) {
        const T gate = this->gate(s + m, c);
        for (int64_t t = 0; t < tiles; t++) shares[m * CHUNK + c][t] *= gate;
      }
      V* total = of_run + (s + m) * total_size;
      if (chunk == CHUNK) {
        add<CHUNK>(m * CHUNK, 0, total);
      } else {
        for (int c = 0; c < chunk; c++) add<1>(m * CHUNK + c, c, total);
      }
    }
  }

  // Turns the logits in `shares` into coefficients.
  template <int N>
  INLINE void coefficients() {
    for (int m = 0; A != GAUSSIAN && m < N; m++)
      for (int c = 0; c < chunk; c++) {
        V* own = shares[m * CHUNK + c];
        const V* base = A == UNIFORM ? uniform : this->logit_base(c);
        for (int64_t t = 0; t < tiles; t++) own[t] = A == UNIFORM ? base[t] : own[t] + base[t];
      }
    if (A != UNIFORM) this->template softmax_of_chunk<N>(shares, false);
  }

  template <int N>
  INLINE void votes_and_logits(int64_t s, int c) {
    if constexpr (A == UNIFORM) {
      Nothing<V, N> nothing;
      this->template make_votes<N>(s, c, nothing);
    } else if constexpr (A == DOT) {
      Product<V, N> product;
      for (int m = 0; m < N; m++) product.with[m] = target + (s + m) * size, product.out[m] = shares[m * CHUNK + c];
      this->template make_votes<N>(s, c, product);
    } else {
      Likelihood<V, N> likelihood;
      for (int m = 0; m < N; m++) {
        likelihood.mean[m] = target + (s + m) * size, likelihood.precision[m] = precision + (s + m) * size;
        likelihood.prior[m] = prior + (s + m) * tiles, likelihood.out[m] = shares[m * CHUNK + c];
      }
      this->template make_votes<N>(s, c, likelihood);
    }
  }

  // Joins C children to the totals.
  template <int C>
  INLINE void add(int first, int first_child, V* total) {
    V *center = total, *scatter = center + size, *mass = scatter + size, *benefit = mass + 2 * tiles;
    V* const* own = votes + first;
    for (int64_t t = 0, f = 0; t < tiles; t++) {
      V weight[C], added = {};
      for (int c = 0; c < C; c++) {
        weight[c] = shares[first + c][t];
        added += weight[c];
        if (betas) add_exactly(benefit[t], benefit[tiles + t], betas.row(first_child + c)[t] * weight[c]);
      }
      const V before = mass[t];
      add_exactly(mass[t], mass[tiles + t], added);
      const V share = added / nonzero<T, L>(mass[t]), scale = 1 / nonzero<T, L>(added), between = share * before;
      for (const int64_t end = f + features; f < end; f++) {
        V sum = weight[0] * own[0][f], squares = {};
#pragma GCC unroll 4
        for (int c = 1; c < C; c++) sum += weight[c] * own[c][f];
        const V mean = sum * scale;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const V e = own[c][f] - mean;
          squares += weight[c] * e * e;
        }
        const V step = mean - center[f];
        scatter[f] += squares + step * step * between;
        center[f] += step * share;
      }
    }
  }

  void merge(V* into, const V* from) const {
    const V *from_mass = from + 2 * size, *from_benefit = from_mass + 2 * tiles;
    V *mass = into + 2 * size, *benefit = mass + 2 * tiles;
    for (int64_t t = 0, f = 0; t < tiles; t++) {
      const V before = mass[t], added = from_mass[t] - from_mass[tiles + t];
      add_exactly(mass[t], mass[tiles + t], added);
      add_exactly(benefit[t], benefit[tiles + t], from_benefit[t] - from_benefit[tiles + t]);
      const V share = added / nonzero<T, L>(mass[t]);
      for (const int64_t end = f + features; f < end; f++) {
        const V step = from[f] - into[f];
        into[size + f] += from[size + f] + step * step * (share * before);
        into[f] += step * share;
      }
    }
  }

  void finish(int64_t sample, V* total) const {
    V *center = total, *scatter = center + size, *mass = scatter + size;
    for (int64_t t = 0, f = 0; t < tiles; t++) {
      const V scale = 1 / nonzero<T, L>(mass[t] + T(a.eps));
      for (const int64_t end = f + features; f < end; f++) {
        const V mean = center[f] * mass[t] * scale, pulled = center[f] - mean;  // eps pulls it towards zero
        scatter[f] = (scatter[f] + mass[t] * pulled * pulled) * scale;
        center[f] = mean;
      }
    }
    const int64_t at = sample * a.parents, features_at = at * features;
    unpack<T, L>(mass, a.parents, 1, static_cast<T*>(a.results[0]) + at);
    unpack<T, L>(center, a.parents, features, static_cast<T*>(a.results[1]) + features_at);
    unpack<T, L>(scatter, a.parents, features, static_cast<T*>(a.results[2]) + features_at);
    if (a.betas) unpack<T, L>(mass + 2 * tiles, a.parents, 1, static_cast<T*>(a.results[3]) + at);
  }

  const int64_t total_size;

 private:
  Rows<T, L> betas;
  V *target = nullptr, *precision = nullptr, *prior = nullptr, *uniform = nullptr;
  V* shares[M * CHUNK];
};

// With deviation e = V - mean and share D = gate c, the gradient of the share is constant + sum_k (pull + spread e) e.
// The gradient of the vote is D (pull + 2 spread e), and what comes through its logit is added to it.
template <class T, int L, class S, Agreement A>
class MomentsBackward : public Worker<MomentsBackward<T, L, S, A>, T, L, S> {
 public:
  using Base = Worker<MomentsBackward<T, L, S, A>, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::arena, Base::votes, Base::chunk, Base::of_run, Base::M;

  MomentsBackward(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, size, tiles)),
        betas(arena, a, a.betas, shared.of_shard(3, shard.number), a.betas_groups, a.betas_parents, 1, 1, CHUNK) {}
  // Gradients of target, precision and prior.
  static int64_t size_of_total(const Problem&, int64_t size, int64_t tiles) { return A * size + (A == GAUSSIAN) * tiles; }
  int64_t state_size() const { return (3 + A) * size + 3 * tiles; }

  void make_room() {
    for (V** x : {&target, &precision, &mean, &pull, &spread})
      *x = (x == &target && A == UNIFORM) || (x == &precision && A != GAUSSIAN) ? nullptr
                                                                               : arena.template get<V>(this->block * size);
    for (V** x : {&prior, &constant, &of_benefit}) *x = arena.template get<V>(this->block * tiles);
    for (int i = 0; i < M * CHUNK; i++) {
      shares[i] = arena.template get<V>(tiles);
      benefits[i] = arena.template get<V>(tiles);
      slopes[i] = arena.template get<V>(tiles);
    }
    for (int64_t j = 0; A == UNIFORM && !arena.failed && j < a.parents; j++)
      reinterpret_cast<T*>(prior)[j] = T(1) / a.parents;
  }
  void begin(int64_t s, int64_t sample) {
    const int64_t at = sample * a.parents, features_at = at * features;
    auto read = [&](const void* x, int64_t width, V* packed, T fill) {
      pack<T, L>(static_cast<const T*>(x) + at * width, a.parents, width, fill, packed);
    };
    if (A != UNIFORM) read(a.target, features, target + s * size, 0);
    if (A == GAUSSIAN) read(a.precision, features, precision + s * size, 0);
    if (A == GAUSSIAN) read(a.prior, 1, prior + s * tiles, -INFINITY);
    if (a.betas) read(a.grads[3], 1, of_benefit + s * tiles, 0);
    read(a.results[1], features, mean + s * size, 0);
    read(a.grads[1], features, pull + s * size, 0);
    read(a.grads[2], features, spread + s * size, 0);
    read(a.grads[0], 1, constant + s * tiles, 0);
    const T *mass = static_cast<const T*>(a.results[0]) + at, *variance = static_cast<const T*>(a.results[2]) + features_at;
    for (int64_t t = 0; t < tiles; t++) {
      V scale = splat<T, L>(1), sum = {};
      for (int64_t j = t * L; j < least(a.parents, (t + 1) * L); j++) scale[j - t * L] = mass[j] + T(a.eps);
      scale = 1 / nonzero<T, L>(scale);
      for (int64_t k = 0; k < features; k++) {
        const int64_t f = s * size + t * features + k;
        V own = {};
        for (int64_t j = t * L; j < least(a.parents, (t + 1) * L); j++) own[j - t * L] = variance[j * features + k];
        const V of_variance = spread[f];
        spread[f] = scale * of_variance;
        pull[f] = scale * (pull[f] - T(2 * a.eps) * scale * mean[f] * of_variance);
        sum += spread[f] * own;
      }
      constant[s * tiles + t] -= sum;
    }
  }
  void load_more(int c, int64_t type, int64_t place) { betas.load(c, type, place); }
  void flush() {
    Base::flush();
    betas.flush_all();
  }

  // Gradient of a share, without the terms that do not depend on the vote.
  template <int N>
  struct Benefit : TileSums<V, N> {
    const V *mean[N], *pull[N], *spread[N];
    INLINE void see(int m, int64_t f, V x) {
      const V e = x - mean[m][f];
      this->sum[m] += (pull[m][f] + spread[m][f] * e) * e;
    }
  };

  template <int N>
  INLINE void group(int64_t s) {
    for (int c = 0; c < chunk; c++) votes_logits_and_benefits<N>(s, c);
    of_logits<N>(s);
    for (int m = 0; m < N; m++) {
      if (chunk == CHUNK) {
        of_votes_and_parents<CHUNK>(s + m, m * CHUNK);
      } else {
        for (int c = 0; c < chunk; c++) of_votes_and_parents<1>(s + m, m * CHUNK + c);
      }
    }
    for (int c = 0; c < chunk; c++) this->template add_child_gradients<N>(s, c);
  }

  template <int N>
  INLINE void votes_logits_and_benefits(int64_t s, int c) {
    Benefit<N> benefit;
    for (int m = 0; m < N; m++) {
      const int64_t at = (s + m) * size;
      benefit.mean[m] = mean + at, benefit.pull[m] = pull + at, benefit.spread[m] = spread + at;
      benefit.out[m] = benefits[m * CHUNK + c];
    }
    if constexpr (A == UNIFORM) {
      this->template make_votes<N>(s, c, benefit);
    } else if constexpr (A == DOT) {
      Both<Product<V, N>, Benefit<N>> seen{{}, benefit};
      for (int m = 0; m < N; m++)
        seen.first.with[m] = target + (s + m) * size, seen.first.out[m] = shares[m * CHUNK + c];
      this->template make_votes<N>(s, c, seen);
    } else {
      Both<Likelihood<V, N>, Benefit<N>> seen{{}, benefit};
      for (int m = 0; m < N; m++) {
        seen.first.mean[m] = target + (s + m) * size, seen.first.precision[m] = precision + (s + m) * size;
        seen.first.prior[m] = prior + (s + m) * tiles, seen.first.out[m] = shares[m * CHUNK + c];
      }
      this->template make_votes<N>(s, c, seen);
    }
  }

  template <int N>
  INLINE void of_logits(int64_t s) {
    for (int m = 0; A != GAUSSIAN && m < N; m++)
      for (int c = 0; c < chunk; c++) {
        V* share = shares[m * CHUNK + c];
        const V* base = A == UNIFORM ? prior : this->logit_base(c);
        for (int64_t t = 0; t < tiles; t++) share[t] = A == UNIFORM ? base[t] : share[t] + base[t];
      }
    if (A != UNIFORM) this->template softmax_of_chunk<N>(shares, false);
    V sums[N * CHUNK] = {};
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const int i = m * CHUNK + c;
        V *share = shares[i], *benefit = benefits[i];
        for (int64_t t = 0; t < tiles; t++) {
          benefit[t] += constant[(s + m) * tiles + t];
          if (betas) benefit[t] += betas.row(c)[t] * of_benefit[(s + m) * tiles + t];
          sums[i] += share[t] * benefit[t];
        }
      }
    T along[N * CHUNK];
    join_lanes<Sum, T, L, N * CHUNK>(sums, along);
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const int i = m * CHUNK + c;
        V *share = shares[i], *benefit = benefits[i], *slope = slopes[i];
        const T gate = this->gate(s + m, c);
        if (this->grad_gates) this->grad_gates[this->gate_index(s + m, c)] += along[i];
        V *grad_offset = this->offset.grad(c), *grad_betas = betas.grad(c);
        for (int64_t t = 0; t < tiles; t++) {
          share[t] *= gate;
          slope[t] = share[t] * (benefit[t] - along[i]);
          if (grad_betas) grad_betas[t] += share[t] * of_benefit[(s + m) * tiles + t];
          if (A == DOT && grad_offset) grad_offset[t] += slope[t];
          if (A == GAUSSIAN) of_run[(s + m) * total_size + 2 * size + t] += slope[t];
        }
      }
  }

  template <int C>
  INLINE void of_votes_and_parents(int64_t s, int first) {
    V *const *own = votes + first, *grad_target = of_run + s * total_size, *grad_precision = grad_target + size;
    const V *q = target + s * size, *precise = precision + s * size;
    const V *center = mean + s * size, *pulls = pull + s * size, *spreads = spread + s * size;
    for (int64_t t = 0, f = 0; t < tiles; t++) {
      V share[C], slope[C];
      for (int c = 0; c < C; c++) share[c] = shares[first + c][t], slope[c] = slopes[first + c][t];
      for (const int64_t end = f + features; f < end; f++) {
        const V center_f = center[f], pull_f = pulls[f], spread_f = spreads[f] * T(2);
        V q_f = {}, precise_f = {}, sum = {}, squares = {};
        if (A != UNIFORM) q_f = q[f], sum = grad_target[f];
        if (A == GAUSSIAN) precise_f = precise[f], squares = grad_precision[f];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const V x = own[c][f];
          V grad = share[c] * (pull_f + spread_f * (x - center_f));
          if constexpr (A == DOT) {
            sum += slope[c] * x;
            grad += slope[c] * q_f;
          } else if constexpr (A == GAUSSIAN) {
            const V e = x - q_f, moved = slope[c] * e;
            sum += moved;
            squares += moved * e;
            grad -= moved * precise_f;
          }
          own[c][f] = grad;
        }
        if (A != UNIFORM) grad_target[f] = sum;
        if (A == GAUSSIAN) grad_precision[f] = squares;
      }
    }
  }

  void finish(int64_t sample, V* total) {
    const int64_t at = sample * a.parents, features_at = at * features;
    if (A != UNIFORM) unpack<T, L>(total, a.parents, features, static_cast<T*>(a.grad_target) + features_at);
    if (A != GAUSSIAN) return;
    unpack<T, L>(total + size, a.parents, features, static_cast<T*>(a.grad_precision) + features_at);
    unpack<T, L>(total + 2 * size, a.parents, 1, static_cast<T*>(a.grad_prior) + at);
    T *of_target = static_cast<T*>(a.grad_target) + features_at, *of_precision = static_cast<T*>(a.grad_precision) + features_at;
    const T* own = static_cast<const T*>(a.precision) + features_at;
    for (int64_t i = 0; i < a.parents * features; i++) of_target[i] *= own[i], of_precision[i] *= T(-0.5);
  }

  const int64_t total_size;

 private:
  Rows<T, L> betas;
  V *target, *precision, *mean, *pull, *spread, *prior, *constant, *of_benefit;
  V *shares[M * CHUNK], *benefits[M * CHUNK], *slopes[M * CHUNK];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
