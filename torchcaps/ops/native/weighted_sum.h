// Weighted sums of votes with the coefficients of a dot agreement, forward and backward.
#pragma once
#include "worker.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// The common part of WeightedSum and WeightedSumShared: from logits to weights. The totals of a sample are the sums,
// and for a softmax over the children masses and largest logits.
template <class Self, class T, int L>
class Weighing : public Worker<Self, T, L> {
 public:
  using Base = Worker<Self, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::arena;

  Weighing(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, at)) {}
  static int64_t size_of_total(const Problem& a, const Layout<T, L>& at) {
    return at.size + (a.over_children ? 2 * at.blocks : 0);
  }
  int64_t state_size() const { return size; }

  void make_room() {
    query = arena.template get<V>(this->block * size);
    factors = arena.template get<V>(blocks);
  }
  void begin(int64_t s, int64_t sample) {
    at.pack(static_cast<const T*>(a.target) + sample * a.parents * a.rows * a.h, query + s * size);
  }
  void clear(V* total) {
    for (int64_t b = 0; a.over_children && b < blocks; b++) total[size + blocks + b] = splat<T, L>(-INFINITY);
  }

  // Replaces logits by weights, for C children of sample s from `first` on; softmax over the parents.
  template <int C>
  INLINE void weigh_parents(int64_t s, int first, V* const* own) const {
    for (int c = 0; c < C; c++) {
      const V* base = this->logit_base(first + c);
      for (int64_t b = 0; b < blocks; b++) own[c][b] += base[b];
    }
    this->template softmax<C>(own, a.leaky);
    for (int c = 0; this->gates && c < C; c++) {
      const T gate = this->gate(s, first + c);
      for (int64_t b = 0; b < blocks; b++) own[c][b] *= gate;
    }
  }
  // The same for a softmax over the children, for `count` children and the blocks from `from` to `to`. Weights are
  // relative to the largest logit so far. Returns whether sums must be multiplied by `factors`, as it has changed.
  INLINE bool weigh_children(int64_t s, int first, int count, int64_t from, int64_t to, V* const* own, V* mass) {
    V* largest = mass + blocks;
    T gates[CHILDREN];
    bool all = true, changed = false;
    for (int c = 0; this->gates && c < count; c++) {
      gates[c] = this->gate(s, first + c);
      all = all && gates[c] != 0;
    }
    for (int64_t b = from, i = 0; b < to; b++, i++) {
      for (int c = 0; (this->offset || !all) && c < count; c++) {
        if (this->offset) own[c][i] += this->offset.row(first + c)[b];
        if (!all && gates[c] == 0) own[c][i] = splat<T, L>(-INFINITY);  // an absent child
      }
      V higher = largest[b];
      int c = 0;
      for (; c + 4 <= count; c += 4) {  // pairs first: a chain of maxima would have to wait for each
        const V two = larger<T, L>(own[c][i], own[c + 1][i]), more = larger<T, L>(own[c + 2][i], own[c + 3][i]);
        higher = larger<T, L>(higher, larger<T, L>(two, more));
      }
      for (; c < count; c++) higher = larger<T, L>(higher, own[c][i]);
      const V finite = finite_or_zero(higher);
      factors[b] = splat<T, L>(1);
      if (any_larger<T, L>(higher, largest[b])) {
        factors[b] = exp_of<L>(largest[b] - finite);
        mass[b] *= factors[b];
        largest[b] = higher;
        changed = true;
      }
      V added = {};
      for (int c = 0; c < count; c++) {
        own[c][i] = exp_of<L>(own[c][i] - finite);
        if (this->gates) own[c][i] *= gates[c];
        added += own[c][i];
      }
      mass[b] += added;
    }
    return changed;
  }
  INLINE static V finite_or_zero(V x) { return x == -static_cast<T>(INFINITY) ? V{} : x; }

  void merge(V* into, const V* from) {
    if (a.over_children) return merge_children(into, from, from + size);
    for (int64_t f = 0; f < size; f++) into[f] += from[f];
  }
  // For a softmax over the children: joins totals with the sums of other children, and their masses and largest logits.
  void merge_children(V* into, const V* sums, const V* mass) {
    V *own_mass = into + size, *own_largest = own_mass + blocks, *old = this->tiled[0], *added = this->tiled[1];
    const V* largest = mass + blocks;
    for (int64_t b = 0; b < blocks; b++) {
      const V higher = larger<T, L>(own_largest[b], largest[b]), finite = finite_or_zero(higher);
      old[b] = exp_of<L>(own_largest[b] - finite), added[b] = exp_of<L>(largest[b] - finite);
      own_largest[b] = higher;
      own_mass[b] = own_mass[b] * old[b] + mass[b] * added[b];
    }
    const V *of_old = this->to_tiles(old, 2), *of_added = this->to_tiles(added, 3);
    this->for_features([&](int64_t t, int64_t f) INLINED { into[f] = into[f] * of_old[t] + sums[f] * of_added[t]; });
  }

  void finish(int64_t sample, V* total) {
    if (a.over_children) {
      V *mass = total + size, *largest = mass + blocks, *scale = this->tiled[0];
      for (int64_t b = 0; b < blocks; b++) {
        scale[b] = 1 / nonzero<T, L>(mass[b]);
        // Infinity where the mass counts as 0: all coefficients are 0 in the backward pass.
        for (int j = 0; j < L; j++)
          mass[b][j] = mass[b][j] < T(1e-30) ? T(INFINITY) : largest[b][j] + std::log(mass[b][j]);
      }
      const V* of_tiles = this->to_tiles(scale, 1);
      this->for_features([&](int64_t t, int64_t f) INLINED { total[f] *= of_tiles[t]; });
      at.unpack_numbers(mass, static_cast<T*>(a.results[1]) + sample * a.parents);
    }
    at.unpack(total, static_cast<T*>(a.results[0]) + sample * a.parents * a.rows * a.h);
  }

  const int64_t total_size;

 protected:
  V *query, *factors;
};

template <class T, int L>
class WeightedSum : public Weighing<WeightedSum<T, L>, T, L> {
 public:
  using Base = Weighing<WeightedSum<T, L>, T, L>;
  using V = typename Base::V;
  using Base::a, Base::size, Base::blocks, Base::chunk, Base::of_run, Base::query, Base::total_size;
  using Base::Base;

  void make_room() {
    Base::make_room();
    this->get_rows(logits);
    this->get_rows(squares);
  }
  void group(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) this->make_votes(s, count, c);
    for (int m = 0; m < count; m++)
      this->for_chunk([&](auto n, int first) INLINED { sample<decltype(n)::value>(s + m, m, first); });
  }
  // Adds C children to the sums of a sample.
  template <int C>
  INLINE void sample(int64_t s, int m, int first) {
    V *own[C], *sums = of_run + s * total_size;
    const V *q = query + s * size, *weight[C];
    for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
    if (a.unit) {
      this->template sum_features<C>({logits, squares}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * own[c][f];
      });
      for (int c = 0; c < C; c++)
        for (int64_t b = 0; b < blocks; b++) logits[c][b] /= nonzero<T, L>(root<T, L>(squares[c][b]));
    } else {
      this->template sum_features<C>({logits}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f];
      });
    }
    if (!a.over_children) {
      this->template weigh_parents<C>(s, first, logits);
    } else if (this->weigh_children(s, first, C, 0, blocks, logits, sums + size)) {
      const V* factor = this->to_tiles(this->factors, 0);
      this->for_features([&](int64_t t, int64_t f) INLINED { sums[f] *= factor[t]; });
    }
    for (int c = 0; c < C; c++) weight[c] = this->to_tiles(logits[c], c);
    this->for_features([&](int64_t t, int64_t f) INLINED {
      V x = sums[f];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x += weight[c][t] * own[c][f];
      sums[f] = x;
    });
  }

 private:
  V *logits[CHUNK], *squares[CHUNK];
};

// The common part of the backward functions. One pass is enough: a softmax over the parents needs one child at a time;
// for one over the children the mean of the benefits is known: sum_i c_ij (grad_j . V_ij) = grad_j . sum_j.
template <class Self, class T, int L>
class WeighingBackward : public Worker<Self, T, L> {
 public:
  using Base = Worker<Self, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::arena;

  WeighingBackward(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, at)) {}
  static int64_t size_of_total(const Problem&, const Layout<T, L>& at) { return at.size; }
  int64_t state_size() const { return 2 * size + 2 * blocks; }

  void make_room() {
    query = arena.template get<V>(this->block * size);
    grad = arena.template get<V>(this->block * size);
    log_mass = arena.template get<V>(this->block * blocks);
    expected = arena.template get<V>(this->block * blocks);
  }
  void begin(int64_t s, int64_t sample) {
    const int64_t i = sample * a.parents, features = a.rows * a.h;
    const T* of_sums = static_cast<const T*>(a.grads[0]) + i * features;
    at.pack(static_cast<const T*>(a.target) + i * features, query + s * size);
    at.pack(of_sums, grad + s * size);
    if (!a.over_children) return;
    at.pack_numbers(static_cast<const T*>(a.results[1]) + i, log_mass + s * blocks, INFINITY);
    const T* sums = static_cast<const T*>(a.results[0]) + i * features;
    T* out = reinterpret_cast<T*>(expected + s * blocks);
    for (int64_t j = 0; j < a.parents; j++) {
      T& mean = out[at.slot(j)] = 0;
      for (int64_t f = 0; f < features; f++) mean += of_sums[j * features + f] * sums[j * features + f];
    }
  }

  // Replaces logits by their gradients and computes weights, for C children of sample s from `first` on; softmax over
  // the parents. `benefits` are the gradients of the shares. If votes are compared as unit vectors, `of_votes` holds
  // their squared lengths, and afterwards the factor of the vote in its own gradient.
  template <int C>
  INLINE void of_logits_of_parents(int64_t s, int first, V* const* logits, V* const* weights, V* const* benefits,
                                   V* const* of_votes) {
    for (int c = 0; c < C; c++) {
      const V* base = this->logit_base(first + c);
      for (int64_t b = 0; b < blocks; b++) {
        if (a.unit) weights[c][b] = of_units(logits[c][b], of_votes[c][b]);  // kept here until the softmax is done
        logits[c][b] += base[b];
      }
    }
    this->template softmax<C>(logits, a.leaky);
    V sums[C] = {};
    for (int c = 0; c < C; c++)
      for (int64_t b = 0; b < blocks; b++) sums[c] += logits[c][b] * benefits[c][b];
    T along[C];  // mean of the benefits: adding the same to all logits of a child changes nothing
    join_lanes<Sum, T, L, C>(sums, along);
    for (int c = 0; c < C; c++) {
      const T gate = this->gate(s, first + c);
      if (this->grad_gates) this->grad_gates[this->gate_index(s, first + c)] += along[c];
      V* grad_offset = this->offset.grad(first + c);
      for (int64_t b = 0; b < blocks; b++) {
        const V weight = logits[c][b] * gate;
        V slope = weight * (benefits[c][b] - along[c]);
        if (grad_offset) grad_offset[b] += slope;
        if (a.unit) of_units_gradient(slope, weights[c][b], of_votes[c][b]);
        weights[c][b] = weight;
        logits[c][b] = slope;
      }
    }
  }
  // The same for a softmax over the children, for `count` children and the blocks from `from` to `to`.
  INLINE void of_logits_of_children(int64_t s, int first, int count, int64_t from, int64_t to, V* const* logits,
                                    V* const* weights, V* const* benefits, V* const* of_votes) {
    V along[CHILDREN];
    for (int c = 0; this->grad_gates && c < count; c++) along[c] = V{};
    for (int64_t b = from, i = 0; b < to; b++, i++) {
      const V lost = log_mass[s * blocks + b], mean = expected[s * blocks + b];
      for (int c = 0; c < count; c++) {
        V logit = logits[c][i], unit = {};
        if (a.unit) unit = of_units(logit, of_votes[c][i]);
        if (this->offset) logit += this->offset.row(first + c)[b];
        V weight = exp_of<L>(logit - lost);
        const V benefit = benefits[c][i] - mean;
        if (this->gates) {
          const T gate = this->gate(s, first + c);
          if (gate == 0) weight = V{};  // an absent child
          if (this->grad_gates) along[c] += weight * benefit;
          weight *= gate;
        }
        V slope = weight * benefit;
        if (V* grad_offset = this->offset.grad(first + c)) grad_offset[b] += slope;
        if (a.unit) of_units_gradient(slope, unit, of_votes[c][i]);
        weights[c][i] = weight;
        logits[c][i] = slope;
      }
    }
    for (int c = 0; this->grad_gates && c < count; c++)
      this->grad_gates[this->gate_index(s, first + c)] += sum_of_lanes<T, L>(along[c]);
  }
  // Turns products with votes into products with unit votes, and squared lengths into inverse lengths.
  INLINE static V of_units(V& logit, V& square) {
    square = 1 / nonzero<T, L>(root<T, L>(square));
    return logit *= square;
  }
  INLINE static void of_units_gradient(V& slope, V logit, V& inverse) {
    slope *= inverse;
    inverse *= -slope * logit;
  }

  void finish(int64_t sample, V* total) const {
    at.unpack(total, static_cast<T*>(a.grad_target) + sample * a.parents * a.rows * a.h);
  }

  const int64_t total_size;

 protected:
  V *query, *grad, *log_mass, *expected;
};

template <class T, int L>
class WeightedSumBackward : public WeighingBackward<WeightedSumBackward<T, L>, T, L> {
 public:
  using Base = WeighingBackward<WeightedSumBackward<T, L>, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks, Base::chunk, Base::of_run, Base::query, Base::grad,
      Base::total_size;
  using Base::Base;

  void make_room() {
    Base::make_room();
    for (V** x : {logits, weights, benefits, of_votes}) this->get_rows(x);
    for (V** x : {slope, share, back}) this->get_rows(x);
  }
  void group(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) this->make_votes(s, count, c);
    for (int m = 0; m < count; m++)
      this->for_chunk([&](auto n, int first) INLINED { sample<decltype(n)::value>(s + m, m, first); });
    for (int c = 0; c < chunk; c++) this->add_child_gradients(s, count, c);
  }
  // Replaces the votes of C children by their gradients, and adds to the gradient of the query.
  template <int C>
  INLINE void sample(int64_t s, int m, int first) {
    V *own[C], *of_query = of_run + s * total_size;
    const V *q = query + s * size, *g = grad + s * size, *slopes[C], *shares[C], *backs[C];
    for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
    if (a.unit) {
      this->template sum_features<C>({logits, benefits, of_votes}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * g[f];
          sums[2 * C + c] += own[c][f] * own[c][f];
        }
      });
    } else {
      this->template sum_features<C>({logits, benefits}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * g[f];
      });
    }
    if (a.over_children) {
      this->of_logits_of_children(s, first, C, 0, blocks, logits, weights, benefits, of_votes);
    } else {
      this->template of_logits_of_parents<C>(s, first, logits, weights, benefits, of_votes);
    }
    for (int c = 0; c < C; c++) {
      slopes[c] = at.to_tiles(logits[c], slope[c]);
      shares[c] = at.to_tiles(weights[c], share[c]);
      backs[c] = a.unit ? at.to_tiles(of_votes[c], back[c]) : nullptr;
    }
    if (a.unit)
      this->for_features([&](int64_t t, int64_t f) INLINED {
        for (int c = 0; c < C; c++) {
          const V x = own[c][f];
          of_query[f] += slopes[c][t] * x;
          own[c][f] = shares[c][t] * g[f] + slopes[c][t] * q[f] + backs[c][t] * x;
        }
      });
    else
      this->for_features([&](int64_t t, int64_t f) INLINED {
        const V query_f = q[f], grad_f = g[f];
        V sum = of_query[f];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          sum += slopes[c][t] * own[c][f];
          own[c][f] = shares[c][t] * grad_f + slopes[c][t] * query_f;
        }
        of_query[f] = sum;
      });
  }

 private:
  V *logits[CHUNK], *weights[CHUNK], *benefits[CHUNK], *of_votes[CHUNK], *slope[CHUNK], *share[CHUNK], *back[CHUNK];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
