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
  using Base::a, Base::at, Base::size, Base::blocks;

  using Base::Base;
  static int64_t size_of_total(const Problem& a, const Layout<T, L>& at) {
    return at.size + (a.over_children ? 2 * at.blocks : 0);
  }
  int64_t state_size() const { return size; }

  void make_room() {
    query = this->get(this->block * size);
    factors = this->get(blocks);
  }
  void begin(int64_t s, int64_t sample) { at.pack(a.target, query + s * size, sample); }
  void clear(V* total) {
    for (int64_t b = 0; a.over_children && b < blocks; b++) total[size + blocks + b] = splat<T, L>(-INFINITY);
  }

  // Replaces n rows of logits by weights; softmax over the parents. `per` rows belong to sample s, the next ones to the
  // next sample.
  SEPARATE void weigh_parents(int64_t s, int per, int n, V* const* own) const {
    for (int i = 0, c = 0; i < n; i++, c = c + 1 < per ? c + 1 : 0) {
      const V* base = this->logit_base(c);
      for (int64_t b = 0; b < blocks; b++) own[i][b] += base[b];
    }
    this->softmax(n, own, a.leaky);
    for (int i = 0; this->gates && i < n; i++) {
      const T gate = this->gate(s + i / per, i % per);
      for (int64_t b = 0; b < blocks; b++) own[i][b] *= gate;
    }
  }
  // The same for a softmax over the children: `count` children of sample s, and the blocks from `from` to `to`. Weights
  // are relative to the largest logit so far. Returns whether sums must be multiplied by `factors`, as it has changed.
  SEPARATE bool weigh_children(int64_t s, int count, int64_t from, int64_t to, V* const* own, V* mass) {
    V* largest = mass + blocks;
    T gates[CHILDREN] = {};
    bool all = true, changed = false;
    for (int c = 0; this->gates && c < count; c++) {
      gates[c] = this->gate(s, c);
      all = all && gates[c] != 0;
    }
    for (int64_t b = from, i = 0; b < to; b++, i++) {
      for (int c = 0; (this->offset || !all) && c < count; c++) {
        if (this->offset) own[c][i] += this->offset.row(c)[b];
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
    a.over_children ? merge_children(into, from, from + size) : Base::merge(into, from);
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
      at.unpack_numbers(mass, a.results[1], sample);
    }
    at.unpack(total, a.results[0], sample);
  }

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
    this->for_chunk([&](auto n, int c) INLINED { compare<decltype(n)::value>(s, count, c); });
    if (!a.over_children) this->weigh_parents(s, chunk, count * chunk, logits);
    for (int m = 0; a.over_children && m < count; m++) {
      V* sums = of_run + (s + m) * total_size;
      if (!this->weigh_children(s + m, chunk, 0, blocks, logits + m * chunk, sums + size)) continue;
      const V* factor = this->to_tiles(this->factors, 0);
      this->for_features([&](int64_t t, int64_t f) INLINED { sums[f] *= factor[t]; });
    }
    this->for_chunk([&](auto n, int c) INLINED { add<decltype(n)::value>(s, count, c); });
  }
  // Compares the votes of C children, those of the chunk from `first` on, with the query.
  template <int C>
  SEPARATE void compare(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V *q = query + s * size, *own[C];
      for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
      V **logit = logits + m * chunk + first, **square = squares + m * chunk + first;
      if (!a.unit) {
        this->template sum_features<C>({logit}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f];
        });
        continue;
      }
      this->template sum_features<C>({logit, square}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * own[c][f];
      });
      for (int c = 0; c < C; c++)
        for (int64_t b = 0; b < blocks; b++) logit[c][b] /= nonzero<T, L>(root<T, L>(square[c][b]));
    }
  }
  // Adds the weighted votes of C children to the sums.
  template <int C>
  SEPARATE void add(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      V* sums = of_run + s * total_size;
      const V *own[C], *weight[C];
      for (int c = 0; c < C; c++) {
        own[c] = this->vote(m, first + c);
        weight[c] = this->to_tiles(logits[m * chunk + first + c], c);
      }
      this->for_tiles([&](int64_t t, int64_t f, int64_t end) INLINED {
        V w[C];
        for (int c = 0; c < C; c++) w[c] = weight[c][t];
        for (; f < end; f++) {
          V x = sums[f];
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) x += w[c] * own[c][f];
          sums[f] = x;
        }
      });
    }
  }

 private:
  V *logits[Base::GROUP * CHUNK], *squares[Base::GROUP * CHUNK];
};

// The common part of the backward functions. One pass is enough: a softmax over the parents needs one child at a time;
// for one over the children the mean of the benefits is known: sum_i c_ij (grad_j . V_ij) = grad_j . sum_j.
template <class Self, class T, int L>
class WeighingBackward : public Worker<Self, T, L> {
 public:
  using Base = Worker<Self, T, L>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::size, Base::blocks;

  using Base::Base;
  static int64_t size_of_total(const Problem&, const Layout<T, L>& at) { return at.size; }
  int64_t state_size() const { return 2 * size + 2 * blocks; }

  void make_room() {
    query = this->get(this->block * size);
    grad = this->get(this->block * size);
    log_mass = this->get(this->block * blocks);
    expected = this->get(this->block * blocks);
    sums = this->get(size);
  }
  void begin(int64_t s, int64_t sample) {
    at.pack(a.target, query + s * size, sample);
    at.pack(a.grads[0], grad + s * size, sample);
    if (!a.over_children) return;
    at.pack_numbers(a.results[1], log_mass + s * blocks, INFINITY, sample);
    // Added in the same order as the benefits, so that the difference is exactly 0 where one child has all the weight.
    V *g = grad + s * size, *mean = expected + s * blocks;
    at.pack(a.results[0], sums, sample);
    this->template sum_features<1>({&mean}, [&](V* total, int64_t f) INLINED { total[0] += sums[f] * g[f]; });
  }

  // Replaces n rows of logits by their gradients and computes weights; softmax over the parents. `per` rows belong to
  // sample s, the next ones to the next sample. `benefits` are the gradients of the shares. If votes are compared as unit
  // vectors, `of_votes` holds their squared lengths, and afterwards the factor of the vote in its own gradient.
  SEPARATE void of_logits_of_parents(int64_t s, int per, int n, V* const* logits, V* const* weights, V* const* benefits,
                                   V* const* of_votes) {
    for (int i = 0, c = 0; i < n; i++, c = c + 1 < per ? c + 1 : 0) {
      const V* base = this->logit_base(c);
      for (int64_t b = 0; b < blocks; b++) {
        if (a.unit) weights[i][b] = of_units(logits[i][b], of_votes[i][b]);  // kept here until the softmax is done
        logits[i][b] += base[b];
      }
    }
    this->softmax(n, logits, a.leaky);
    in_blocks<8>(n, [&](auto m, int64_t first) INLINED {
      constexpr int N = decltype(m)::value;
      V sums[N] = {};
      for (int i = 0; i < N; i++)
        for (int64_t b = 0; b < blocks; b++) sums[i] += logits[first + i][b] * benefits[first + i][b];
      T along[N];  // means of the benefits: adding the same to all logits of a child changes nothing
      join_lanes<Sum, T, L, N>(sums, along);
      for (int64_t i = first; i < first + N; i++) {
        const int64_t sample = s + i / per;
        const int c = static_cast<int>(i % per);
        const T gate = this->gate(sample, c), mean = along[i - first];
        if (this->grad_gates) this->grad_gates[this->gate_index(sample, c)] += mean;
        V* grad_offset = this->offset.grad(c);
        for (int64_t b = 0; b < blocks; b++) {
          const V weight = logits[i][b] * gate;
          V slope = weight * (benefits[i][b] - mean);
          if (grad_offset) grad_offset[b] += slope;
          if (a.unit) of_units_gradient(slope, weights[i][b], of_votes[i][b]);
          weights[i][b] = weight;
          logits[i][b] = slope;
        }
      }
    });
  }
  // The same for a softmax over the children: `count` children of sample s, and the blocks from `from` to `to`.
  SEPARATE void of_logits_of_children(int64_t s, int count, int64_t from, int64_t to, V* const* logits,
                                    V* const* weights, V* const* benefits, V* const* of_votes) {
    V along[CHILDREN];
    for (int c = 0; this->grad_gates && c < count; c++) along[c] = V{};
    for (int64_t b = from, i = 0; b < to; b++, i++) {
      const V lost = log_mass[s * blocks + b], mean = expected[s * blocks + b];
      for (int c = 0; c < count; c++) {
        V logit = logits[c][i], unit = {};
        if (a.unit) unit = of_units(logit, of_votes[c][i]);
        if (this->offset) logit += this->offset.row(c)[b];
        V weight = exp_of<L>(logit - lost);
        const V benefit = benefits[c][i] - mean;
        if (this->gates) {
          const T gate = this->gate(s, c);
          if (gate == 0) weight = V{};  // an absent child
          if (this->grad_gates) along[c] += weight * benefit;
          weight *= gate;
        }
        V slope = weight * benefit;
        if (V* grad_offset = this->offset.grad(c)) grad_offset[b] += slope;
        if (a.unit) of_units_gradient(slope, unit, of_votes[c][i]);
        weights[c][i] = weight;
        logits[c][i] = slope;
      }
    }
    for (int c = 0; this->grad_gates && c < count; c++)
      this->grad_gates[this->gate_index(s, c)] += sum_of_lanes<T, L>(along[c]);
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

  void finish(int64_t sample, V* total) const { at.unpack(total, a.grad_target, sample); }

 protected:
  V *query, *grad, *log_mass, *expected, *sums;
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
  }
  void group(int64_t s, int count) {
    for (int c = 0; c < chunk; c++) this->make_votes(s, count, c);
    this->for_chunk([&](auto n, int c) INLINED { compare<decltype(n)::value>(s, count, c); });
    if (!a.over_children) this->of_logits_of_parents(s, chunk, count * chunk, logits, weights, benefits, of_votes);
    for (int m = 0, i = 0; a.over_children && m < count; m++, i += chunk)
      this->of_logits_of_children(s + m, chunk, 0, blocks, logits + i, weights + i, benefits + i, of_votes + i);
    this->for_chunk([&](auto n, int c) INLINED { replace<decltype(n)::value>(s, count, c); });
    for (int c = 0; c < chunk; c++) this->add_child_gradients(s, count, c);
  }
  // Compares the votes of C children, those of the chunk from `first` on, with the query and the gradient of the sums.
  template <int C>
  SEPARATE void compare(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      const V *q = query + s * size, *g = grad + s * size, *own[C];
      for (int c = 0; c < C; c++) own[c] = this->vote(m, first + c);
      const int i = m * chunk + first;
      if (a.unit) {
        this->template sum_features<C>({logits + i, benefits + i, of_votes + i}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * g[f];
            sums[2 * C + c] += own[c][f] * own[c][f];
          }
        });
      } else {
        this->template sum_features<C>({logits + i, benefits + i}, [&](V* sums, int64_t f) INLINED {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) sums[c] += own[c][f] * q[f], sums[C + c] += own[c][f] * g[f];
        });
      }
    }
  }
  // Replaces the votes of C children by their gradients, and adds to the gradient of the query.
  template <int C>
  SEPARATE void replace(int64_t s, int count, int first) {
    for (int m = 0; m < count; m++, s++) {
      V *own[C], *of_query = of_run + s * total_size;
      const V *q = query + s * size, *g = grad + s * size, *slopes[C], *shares[C], *backs[C];
      for (int c = 0; c < C; c++) {
        const int i = m * chunk + first + c;
        own[c] = this->vote(m, first + c);
        slopes[c] = this->to_tiles(logits[i], c), shares[c] = this->to_tiles(weights[i], C + c);
        backs[c] = a.unit ? this->to_tiles(of_votes[i], 2 * C + c) : nullptr;
      }
      if (a.unit) {
        this->for_features([&](int64_t t, int64_t f) INLINED {
          for (int c = 0; c < C; c++) {
            const V x = own[c][f];
            of_query[f] += slopes[c][t] * x;
            own[c][f] = shares[c][t] * g[f] + slopes[c][t] * q[f] + backs[c][t] * x;
          }
        });
        continue;
      }
      this->for_tiles([&](int64_t t, int64_t f, int64_t end) INLINED {
        V slope[C], share[C];
        for (int c = 0; c < C; c++) slope[c] = slopes[c][t], share[c] = shares[c][t];
        for (; f < end; f++) {
          const V query_f = q[f], grad_f = g[f];
          V sum = of_query[f];
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            sum += slope[c] * own[c][f];
            own[c][f] = share[c] * grad_f + slope[c] * query_f;
          }
          of_query[f] = sum;
        }
      });
    }
  }

 private:
  static constexpr int ROWS = Base::GROUP * CHUNK;
  V *logits[ROWS], *weights[ROWS], *benefits[ROWS], *of_votes[ROWS];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
