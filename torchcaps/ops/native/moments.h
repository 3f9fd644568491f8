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

// The common part of Moments and MomentsBackward: logits and coefficients.
template <class Self, class T, int L, Agreement A>
class MomentsLoop : public Worker<Self, T, L> {
 public:
  using Base = Worker<Self, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::arena, Base::chunk;

  MomentsLoop(const Problem& a, const Shard& shard, SharedGradients<T>& shared)
      : Base(a, shard, shared),
        betas(arena, a, at, shard, a.betas, shared.of_shard(3, shard.number), a.betas_groups, a.betas_parents, CHUNK) {}

  void make_room() {
    if (A != UNIFORM) target = this->get(this->block * size);
    if (A == GAUSSIAN) precision = this->get(this->block * size);
    prior = this->get(this->block * blocks);
    this->get_rows(shares);
    for (int64_t b = 0; !arena.failed && b < blocks; b++) uniform(b) = exp_of<L>(this->tail[b]) / T(a.parents);
  }
  void begin(int64_t s, int64_t sample) {
    if (A != UNIFORM) at.pack(a.target, target + s * size, sample);
    if (A != GAUSSIAN) return;
    at.pack(a.precision, precision + s * size, sample);
    at.pack_numbers(a.prior, prior + s * blocks, -INFINITY, sample);
  }
  void load_more(int c, int64_t type, int64_t place) { betas.load(c, type, place); }
  void flush() {
    Base::flush();
    betas.flush_all();
  }
  V& uniform(int64_t b) { return prior[b]; }  // without an agreement there is no prior

  // What a feature of a vote adds to the vote's logit.
  INLINE V logit_of(V vote, int64_t s, int64_t f) const {
    if (A == DOT) return vote * target[s * size + f];
    const V e = vote - target[s * size + f];
    return e * precision[s * size + f] * e;
  }
  // Turns these sums in `shares` into coefficients, for the chunk's children and `count` samples from s on.
  SEPARATE void find_coefficients(int64_t s, int count) {
    for (int i = 0; i < count * chunk; i++) {
      const V *base = this->logit_base(i % chunk), *of_sample = prior + (s + i / chunk) * blocks;
      for (int64_t b = 0; b < blocks; b++) {
        V& x = shares[i][b];
        x = A == UNIFORM ? uniform(b) : A == DOT ? x + base[b] : of_sample[b] - x * T(0.5);
      }
    }
    if (A != UNIFORM) this->softmax(count * chunk, shares, false);
  }

 protected:
  Rows<T, L, Of::NUMBER> betas;
  V *target = nullptr, *precision = nullptr, *prior = nullptr;
  V* shares[Base::GROUP * CHUNK];
};

// Totals of a sample: center and scatter (size each), and mass and benefit, each with its rounding error (blocks each).
// The mean of a chunk is subtracted from its votes before they are squared, and chunks are joined by the parallel
// formula of Chan, Golub and LeVeque (1979). So no digits are lost when the votes agree far from zero.
template <class T, int L, Agreement A>
class Moments : public MomentsLoop<Moments<T, L, A>, T, L, A> {
 public:
  using Base = MomentsLoop<Moments<T, L, A>, T, L, A>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::chunk, Base::of_run, Base::total_size, Base::shares,
      Base::betas;
  using Base::Base;

  static int64_t size_of_total(const Problem&, const Layout<T, L>& at) { return 2 * at.size + 4 * at.blocks; }
  int64_t state_size() const { return A * size + blocks; }

  void group(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) this->make_votes(s, count, c);
    if (A != UNIFORM)
      this->for_chunk([&](auto n, int c) INLINED { compare<decltype(n)::value>(s, count, c); });
    this->find_coefficients(s, count);
    for (int i = 0; this->gates && i < count * chunk; i++) {
      const T gate = this->gate(s + i / chunk, i % chunk);
      for (int64_t b = 0; b < blocks; b++) shares[i][b] *= gate;
    }
    this->for_chunk([&](auto n, int c) INLINED { add<decltype(n)::value>(s, count, c); });
  }
  // Compares the votes of C children, those of the chunk from `first` on, with the parents.
  template <int C>
  SEPARATE void compare(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V* own[C];
      for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
      this->template sum_features<C>({shares + m * chunk + first}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[c] += this->logit_of(own[c][f], s, f);
      });
    }
  }
  // Joins C children to the totals of a sample.
  template <int C>
  SEPARATE void add(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V *own[C], *weight[C];
      V** numbers = shares + m * chunk + first;
      for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c), weight[c] = this->to_tiles(numbers[c], 3 + c);
      V *center = of_run + s * total_size, *scatter = center + size, *mass = scatter + size, *benefit = mass + 2 * blocks;
      for (int64_t b = 0; b < blocks; b++) {
        V added = {};
        for (int c = 0; c < C; c++) {
          added += numbers[c][b];
          if (betas) add_exactly(benefit[b], benefit[blocks + b], betas.row(first + c)[b] * numbers[c][b]);
        }
        join(b, mass, added);
        scales[b] = 1 / nonzero<T, L>(added);
      }
      const V *share = this->to_tiles(joined, 0), *between = this->to_tiles(betweens, 1), *scale = this->to_tiles(scales, 2);
      this->for_tiles([&](int64_t t, int64_t f, int64_t end) INLINED {
        V w[C];
        for (int c = 0; c < C; c++) w[c] = weight[c][t];
        const V scale_t = scale[t], between_t = between[t], share_t = share[t];
        for (; f < end; f++) {
          V sum = w[0] * own[0][f], squares = {};
#pragma GCC unroll 4
          for (int c = 1; c < C; c++) sum += w[c] * own[c][f];
          const V mean = sum * scale_t;
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            const V e = own[c][f] - mean;
            squares += w[c] * e * e;
          }
          const V step = mean - center[f];
          scatter[f] += squares + step * step * between_t;
          center[f] += step * share_t;
        }
      });
    }
  }
  // Adds mass: `joined` is the part of the sum that is new, and `betweens` the factor of the squared distance between
  // the old and the new center.
  INLINE void join(int64_t b, V* mass, V added) {
    const V before = mass[b];
    add_exactly(mass[b], mass[blocks + b], added);
    joined[b] = added / nonzero<T, L>(mass[b]);
    betweens[b] = joined[b] * before;
  }

  void merge(V* into, const V* from) {
    const V *from_mass = from + 2 * size, *from_benefit = from_mass + 2 * blocks;
    V *mass = into + 2 * size, *benefit = mass + 2 * blocks;
    for (int64_t b = 0; b < blocks; b++) {
      join(b, mass, from_mass[b] - from_mass[blocks + b]);
      add_exactly(benefit[b], benefit[blocks + b], from_benefit[b] - from_benefit[blocks + b]);
    }
    const V *share = this->to_tiles(joined, 0), *between = this->to_tiles(betweens, 1);
    this->for_features([&](int64_t t, int64_t f) INLINED {
      const V step = from[f] - into[f];
      into[size + f] += from[size + f] + step * step * between[t];
      into[f] += step * share[t];
    });
  }

  void finish(int64_t sample, V* total) {
    V *center = total, *scatter = center + size, *numbers = scatter + size;
    for (int64_t b = 0; b < blocks; b++) scales[b] = 1 / nonzero<T, L>(numbers[b] + T(a.eps));
    const V *scale = this->to_tiles(scales, 0), *mass = this->to_tiles(numbers, 1);
    this->for_features([&](int64_t t, int64_t f) INLINED {
      const V mean = center[f] * mass[t] * scale[t], pulled = center[f] - mean;  // eps pulls it towards zero
      scatter[f] = (scatter[f] + mass[t] * pulled * pulled) * scale[t];
      center[f] = mean;
    });
    at.unpack_numbers(numbers, a.results[0], sample);
    at.unpack(center, a.results[1], sample);
    at.unpack(scatter, a.results[2], sample);
    if (a.betas) at.unpack_numbers(numbers + 2 * blocks, a.results[3], sample);
  }

 private:
  V *joined = this->get(blocks), *betweens = this->get(blocks), *scales = this->get(blocks);
};

// With deviation e = V - mean and share D = gate c, the gradient of the share is constant + sum_k (pull + spread e) e.
// The gradient of the vote is D (pull + 2 spread e), and what comes through its logit is added to it.
template <class T, int L, Agreement A>
class MomentsBackward : public MomentsLoop<MomentsBackward<T, L, A>, T, L, A> {
 public:
  using Base = MomentsLoop<MomentsBackward<T, L, A>, T, L, A>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::chunk, Base::of_run, Base::total_size, Base::shares,
      Base::betas, Base::target, Base::precision;
  using Base::Base;

  // Gradients of target, precision and prior.
  static int64_t size_of_total(const Problem&, const Layout<T, L>& at) {
    return A * at.size + (A == GAUSSIAN) * at.blocks;
  }
  int64_t state_size() const { return (3 + A) * size + 3 * blocks; }

  void make_room() {
    Base::make_room();
    for (V** x : {&mean, &pull, &spread}) *x = this->get(this->block * size);
    for (V** x : {&constant, &of_benefit}) *x = this->get(this->block * blocks);
    for (V** x : {benefits, slopes}) this->get_rows(x);
    variance = this->get(size);
  }
  void begin(int64_t s, int64_t sample) {
    Base::begin(s, sample);
    if (a.betas) at.pack_numbers(a.grads[3], of_benefit + s * blocks, 0, sample);
    at.pack(a.results[1], mean + s * size, sample);
    at.pack(a.results[2], variance, sample);
    // Empty lanes are not packed, and have what the loop below made of the last sample, which may be NaN.
    for (V* x : {pull, spread}) memset(static_cast<void*>(x + s * size), 0, size * sizeof(V));
    at.pack(a.grads[1], pull + s * size, sample);
    at.pack(a.grads[2], spread + s * size, sample);
    at.pack_numbers(a.grads[0], constant + s * blocks, 0, sample);
    V* scales = shares[0];
    at.pack_numbers(a.results[0], scales, 0, sample);
    for (int64_t b = 0; b < blocks; b++) scales[b] = 1 / nonzero<T, L>(scales[b] + T(a.eps));
    const V* scale = this->to_tiles(scales, 0);
    this->for_features([&](int64_t t, int64_t f) INLINED {
      const V of_variance = spread[s * size + f];
      spread[s * size + f] = scale[t] * of_variance;
      pull[s * size + f] = scale[t] * (pull[s * size + f] - T(2 * a.eps) * scale[t] * mean[s * size + f] * of_variance);
    });
    this->template sum_features<1>({benefits}, [&](V* sums, int64_t f) INLINED {
      sums[0] += spread[s * size + f] * variance[f];
    });
    for (int64_t b = 0; b < blocks; b++) constant[s * blocks + b] -= benefits[0][b];
  }

  void group(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) this->make_votes(s, count, c);
    this->for_chunk([&](auto n, int c) INLINED { compare<decltype(n)::value>(s, count, c); });
    this->find_coefficients(s, count);
    of_logits(s, count);
    this->for_chunk([&](auto n, int c) INLINED { replace<decltype(n)::value>(s, count, c); });
    for (int c = 0; c < chunk; c++) this->add_child_gradients(s, count, c);
  }
  // Computes the logits of C children, those of the chunk from `first` on, and the gradients of their shares without the
  // terms that do not depend on the vote.
  template <int C>
  SEPARATE void compare(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V *own[C], *center = mean + s * size, *pulls = pull + s * size, *spreads = spread + s * size;
      for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
      const int i = m * chunk + first;
      auto benefit = [&](V vote, int64_t f) INLINED {
        const V e = vote - center[f];
        return (pulls[f] + spreads[f] * e) * e;
      };
      if constexpr (A == UNIFORM) {
        this->template sum_features<C>({benefits + i}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sums[c] += benefit(own[c][f], f);
        });
      } else {
        this->template sum_features<C>({benefits + i, shares + i}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++)
            sums[c] += benefit(own[c][f], f), sums[C + c] += this->logit_of(own[c][f], s, f);
        });
      }
    }
  }
  // Turns coefficients into shares, and benefits into the gradients of the logits, `slopes`.
  SEPARATE void of_logits(int64_t s, int count) {
    in_blocks<8>(count * chunk, [&](auto m, int64_t first) INLINED {
      constexpr int N = decltype(m)::value;
      V sums[N] = {};
      for (int64_t i = first; i < first + N; i++) {
        const V *rest = constant + (s + i / chunk) * blocks, *of_betas = of_benefit + (s + i / chunk) * blocks;
        for (int64_t b = 0; b < blocks; b++) {
          benefits[i][b] += rest[b];
          if (betas) benefits[i][b] += betas.row(static_cast<int>(i % chunk))[b] * of_betas[b];
          sums[i - first] += shares[i][b] * benefits[i][b];
        }
      }
      T along[N];
      join_lanes<Sum, T, L, N>(sums, along);
      for (int64_t i = first; i < first + N; i++) {
        const int64_t sample = s + i / chunk;
        const int c = static_cast<int>(i % chunk);
        const T gate = this->gate(sample, c), mean = along[i - first];
        if (this->grad_gates) this->grad_gates[this->gate_index(sample, c)] += mean;
        V *grad_offset = this->offset.grad(c), *grad_betas = betas.grad(c);
        for (int64_t b = 0; b < blocks; b++) {
          shares[i][b] *= gate;
          slopes[i][b] = shares[i][b] * (benefits[i][b] - mean);
          if (grad_betas) grad_betas[b] += shares[i][b] * of_benefit[sample * blocks + b];
          if (A == DOT && grad_offset) grad_offset[b] += slopes[i][b];
          if (A == GAUSSIAN) of_run[sample * total_size + 2 * size + b] += slopes[i][b];
        }
      }
    });
  }
  // Replaces the votes of C children by their gradients, and adds to the gradients of the parents' tensors.
  template <int C>
  SEPARATE void replace(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V *q = target + s * size, *precise = precision + s * size, *shares_of[C], *slopes_of[C];
      const V *center = mean + s * size, *pulls = pull + s * size, *spreads = spread + s * size;
      V *own[C], *grad_target = of_run + s * total_size, *grad_precision = grad_target + size;
      for (int c = 0; c < C; c++) {
        const int i = m * chunk + first + c;
        own[c] = this->vote(m, first + c);
        shares_of[c] = this->to_tiles(shares[i], c), slopes_of[c] = this->to_tiles(slopes[i], C + c);
      }
      this->for_tiles([&](int64_t t, int64_t f, int64_t end) INLINED {
        V share[C], slope[C];
        for (int c = 0; c < C; c++) share[c] = shares_of[c][t], slope[c] = slopes_of[c][t];
        for (; f < end; f++) {
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
      });
    }
  }

  void finish(int64_t sample, V* total) {
    if (A != UNIFORM) at.unpack(total, a.grad_target, sample);
    if (A != GAUSSIAN) return;
    at.unpack(total + size, a.grad_precision, sample);
    at.unpack_numbers(total + 2 * size, a.grad_prior, sample);
    T *of_target = static_cast<T*>(a.grad_target), *of_precision = static_cast<T*>(a.grad_precision);
    const T* own = static_cast<const T*>(a.precision);
    const int64_t features = a.parents * a.rows * a.h;
    for (int64_t f = sample * features, end = f + features; f < end; f++)
      of_target[f] *= own[f], of_precision[f] *= T(-0.5);
  }

 private:
  V *mean, *pull, *spread, *variance, *constant, *of_benefit;
  V *benefits[Base::GROUP * CHUNK], *slopes[Base::GROUP * CHUNK];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
