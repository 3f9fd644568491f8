// Weighted sums of votes with the coefficients of a dot agreement, forward and backward.
#pragma once
#include "worker.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// Adds the weighted votes of C children to the sums. C is 1 for the children of a chunk that is not full.
template <int C, class V>
INLINE void accumulate(int64_t tiles, int64_t features, V* const* votes, V* const* weights, V* sums) {
  for (int64_t t = 0, f = 0; t < tiles; t++) {
    V w[C];
    for (int c = 0; c < C; c++) w[c] = weights[c][t];
    for (const int64_t end = f + features; f < end; f++) {
      V x = sums[f];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x += w[c] * votes[c][f];
      sums[f] = x;
    }
  }
}

// The common part of WeightedSum and WeightedSumShared: from logits to weights. The totals of a sample are the sums,
// and for a softmax over the children masses and largest logits.
template <class Self, class T, int L, class S>
class Weighing : public Worker<Self, T, L, S> {
 public:
  using Base = Worker<Self, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::arena, Base::chunk, Base::M;

  Weighing(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, size, tiles)) {}
  static int64_t size_of_total(const Problem& a, int64_t size, int64_t tiles) {
    return size + (a.over_children ? 2 * tiles : 0);
  }
  int64_t state_size() const { return size; }

  void make_room() {
    query = arena.template get<V>(this->block * size);
    for (int i = 0; i < M * CHUNK; i++) logits[i] = arena.template get<V>(tiles);
    for (int i = 0; i < M * CHUNK; i++) squares[i] = a.unit ? arena.template get<V>(tiles) : nullptr;
  }
  void begin(int64_t s, int64_t sample) {
    pack<T, L>(static_cast<const T*>(a.target) + sample * a.parents * features, a.parents, features, 0,
               query + s * size);
  }
  void clear(V* total) {
    for (int64_t t = 0; a.over_children && t < tiles; t++) total[size + tiles + t] = splat<T, L>(-INFINITY);
  }

  // Replaces logits by weights, for the chunk's children and N samples. For a softmax over the children the weights are
  // relative to the largest logit so far, and the sums of the sample are rescaled to it.
  template <int N>
  INLINE void weigh(int64_t s, V* const* own, V* const* sums) {
    if (!a.over_children) return weigh_parents<N>(s, 0, own);
    for (int m = 0; m < N; m++)
      weigh_children(s + m, chunk, 0, tiles, own + m * CHUNK, sums[m], features, sums[m] + size);
  }
  // The same for a softmax over the parents. The chunk's children are those from `first` on.
  template <int N>
  INLINE void weigh_parents(int64_t s, int first, V* const* own) {
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const V* base = this->logit_base(first + c);
        for (int64_t t = 0; t < tiles; t++) own[m * CHUNK + c][t] += base[t];
      }
    this->template softmax_of_chunk<N>(own, a.leaky);
    for (int m = 0; this->gates && m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const T gate = this->gate(s + m, first + c);
        for (int64_t t = 0; t < tiles; t++) own[m * CHUNK + c][t] *= gate;
      }
  }
  // The same for a softmax over the children, for `count` children. Their rows of logits begin with the first tile; the
  // sums have `width` vectors for each tile.
  INLINE void weigh_children(int64_t s, int count, int64_t first_tile, int64_t last_tile, V* const* own, V* sums,
                             int64_t width, V* mass) {
    V* largest = mass + tiles;
    T gates[CHILDREN];
    bool all = true;
    for (int c = 0; this->gates && c < count; c++) {
      gates[c] = this->gate(s, c);
      all = all && gates[c] != 0;
    }
    for (int64_t t = first_tile, i = 0; t < last_tile; t++, i++) {
      for (int c = 0; (this->offset || !all) && c < count; c++) {
        if (this->offset) own[c][i] += this->offset.row(c)[t];
        if (!all && gates[c] == 0) own[c][i] = splat<T, L>(-INFINITY);  // an absent child
      }
      V higher = largest[t];
      int c = 0;
      for (; c + CHUNK <= count; c += CHUNK) {  // pairs first: a chain of maxima would have to wait for each
        const V two = larger<T, L>(own[c][i], own[c + 1][i]), more = larger<T, L>(own[c + 2][i], own[c + 3][i]);
        higher = larger<T, L>(higher, larger<T, L>(two, more));
      }
      for (; c < count; c++) higher = larger<T, L>(higher, own[c][i]);
      const V finite = finite_or_zero(higher);
      if (any_larger<T, L>(higher, largest[t])) {
        const V factor = exp_of<L>(largest[t] - finite);
        mass[t] *= factor;
        for (int64_t f = t * width; f < (t + 1) * width; f++) sums[f] *= factor;
        largest[t] = higher;
      }
      V added = {};
      for (int c = 0; c < count; c++) {
        own[c][i] = exp_of<L>(own[c][i] - finite);
        if (this->gates) own[c][i] *= gates[c];
        added += own[c][i];
      }
      mass[t] += added;
    }
  }
  INLINE static V finite_or_zero(V x) { return x == -static_cast<T>(INFINITY) ? V{} : x; }

  void merge(V* into, const V* from) const {
    for (int64_t f = 0; !a.over_children && f < size; f++) into[f] += from[f];
    for (int64_t t = 0; a.over_children && t < tiles; t++)
      merge_tile(t, into, from + t * features, from[size + t], from[size + tiles + t]);
  }
  // For a softmax over the children: joins the sums of a tile with their mass and largest logit.
  INLINE void merge_tile(int64_t t, V* into, const V* sums, V mass, V largest) const {
    V &own_mass = into[size + t], &own_largest = into[size + tiles + t];
    const V higher = larger<T, L>(own_largest, largest), finite = finite_or_zero(higher);
    const V old = exp_of<L>(own_largest - finite), added = exp_of<L>(largest - finite);
    own_largest = higher;
    own_mass = own_mass * old + mass * added;
    into += t * features;
    for (int64_t f = 0; f < features; f++) into[f] = into[f] * old + sums[f] * added;
  }

  void finish(int64_t sample, V* total) const {
    if (a.over_children) {
      V *mass = total + size, *largest = mass + tiles;
      for (int64_t t = 0; t < tiles; t++) {
        const V scale = 1 / nonzero<T, L>(mass[t]);
        for (int64_t f = t * features; f < (t + 1) * features; f++) total[f] *= scale;
        // Infinity where the mass counts as 0: all coefficients are 0 in the backward pass.
        for (int j = 0; j < L; j++)
          mass[t][j] = mass[t][j] < T(1e-30) ? T(INFINITY) : largest[t][j] + std::log(mass[t][j]);
      }
      unpack<T, L>(mass, a.parents, 1, static_cast<T*>(a.results[1]) + sample * a.parents);
    }
    unpack<T, L>(total, a.parents, features, static_cast<T*>(a.results[0]) + sample * a.parents * features);
  }

  const int64_t total_size;

 protected:
  V *query, *logits[M * CHUNK], *squares[M * CHUNK];
};

template <class T, int L, class S>
class WeightedSum : public Weighing<WeightedSum<T, L, S>, T, L, S> {
 public:
  using Base = Weighing<WeightedSum<T, L, S>, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::votes, Base::chunk, Base::of_run, Base::query,
      Base::logits, Base::squares, Base::total_size;
  using Base::Base;

  template <int N>
  INLINE void group(int64_t s) {
    for (int c = 0; c < chunk; c++) {
      Product<V, N> product;
      for (int m = 0; m < N; m++) product.with[m] = query + (s + m) * size, product.out[m] = logits[m * CHUNK + c];
      if (!a.unit) {
        this->template make_votes<N>(s, c, product);
        continue;
      }
      Both<Product<V, N>, Square<V, N>> both{product, {}};
      for (int m = 0; m < N; m++) both.second.out[m] = squares[m * CHUNK + c];
      this->template make_votes<N>(s, c, both);
      for (int m = 0; m < N; m++) {
        V *own = logits[m * CHUNK + c], *square = squares[m * CHUNK + c];
        for (int64_t t = 0; t < tiles; t++) own[t] /= nonzero<T, L>(root<T, L>(square[t]));
      }
    }
    V* sums[N];
    for (int m = 0; m < N; m++) sums[m] = of_run + (s + m) * total_size;
    this->template weigh<N>(s, logits, sums);
    for (int m = 0; m < N; m++) {
      V *total = sums[m], *const *own = votes + m * CHUNK, *const *weights = logits + m * CHUNK;
      if (chunk == CHUNK) {
        accumulate<CHUNK>(tiles, features, own, weights, total);
      } else {
        for (int c = 0; c < chunk; c++) accumulate<1>(tiles, features, own + c, weights + c, total);
      }
    }
  }
};

// The common part of the backward functions. One pass is enough: a softmax over the parents needs one child at a time;
// for one over the children the mean of the benefits is known: sum_i c_ij (grad_j . V_ij) = grad_j . sum_j.
template <class Self, class T, int L, class S>
class WeighingBackward : public Worker<Self, T, L, S> {
 public:
  using Base = Worker<Self, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::arena, Base::chunk, Base::M;

  WeighingBackward(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), total_size(size_of_total(a, size, tiles)) {}
  static int64_t size_of_total(const Problem&, int64_t size, int64_t) { return size; }
  int64_t state_size() const { return 2 * size + 2 * tiles; }

  void make_room() {
    query = arena.template get<V>(this->block * size);
    grad = arena.template get<V>(this->block * size);
    log_mass = arena.template get<V>(this->block * tiles);
    expected = arena.template get<V>(this->block * tiles);
    for (int i = 0; i < M * CHUNK; i++) {
      logits[i] = arena.template get<V>(tiles);
      weights[i] = arena.template get<V>(tiles);
      of_votes[i] = arena.template get<V>(tiles);
      benefits[i] = arena.template get<V>(tiles);
    }
  }
  void begin(int64_t s, int64_t sample) {
    const int64_t at = sample * a.parents, features_at = at * features;
    pack<T, L>(static_cast<const T*>(a.target) + features_at, a.parents, features, 0, query + s * size);
    const T* of_sums = static_cast<const T*>(a.grads[0]) + features_at;
    pack<T, L>(of_sums, a.parents, features, 0, grad + s * size);
    if (!a.over_children) return;
    pack<T, L>(static_cast<const T*>(a.results[1]) + at, a.parents, 1, INFINITY, log_mass + s * tiles);
    const T* sums = static_cast<const T*>(a.results[0]) + features_at;
    T* out = reinterpret_cast<T*>(expected + s * tiles);
    for (int64_t j = 0; j < a.parents; j++) {
      out[j] = 0;
      for (int64_t f = 0; f < features; f++) out[j] += of_sums[j * features + f] * sums[j * features + f];
    }
  }

  // Replaces logits by their gradients and computes weights, for the chunk's children and N samples. `benefits` are the
  // gradients of the shares. If votes are compared as unit vectors, `of_votes` holds their squared lengths, and
  // afterwards the factor of the vote in its own gradient.
  template <int N>
  INLINE void of_logits(int64_t s) {
    for (int m = 0; a.over_children && m < N; m++) {
      const int i = m * CHUNK;
      of_logits_of_children(s + m, chunk, 0, tiles, logits + i, weights + i, benefits + i, of_votes + i);
    }
    if (!a.over_children) of_logits_of_parents<N>(s, 0);
  }
  // The same for a softmax over the parents. The chunk's children are those from `first` on.
  template <int N>
  INLINE void of_logits_of_parents(int64_t s, int first) {
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const int i = m * CHUNK + c;
        const V* base = this->logit_base(first + c);
        for (int64_t t = 0; t < tiles; t++) {
          if (a.unit) weights[i][t] = of_units(logits[i][t], of_votes[i][t]);  // kept here until the softmax is done
          logits[i][t] += base[t];
        }
      }
    this->template softmax_of_chunk<N>(logits, a.leaky);
    V sums[N * CHUNK] = {};
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const int i = m * CHUNK + c;
        for (int64_t t = 0; t < tiles; t++) sums[i] += logits[i][t] * benefits[i][t];
      }
    T along[N * CHUNK];  // mean of the benefits: adding the same to all logits of a child changes nothing
    join_lanes<Sum, T, L, N * CHUNK>(sums, along);
    for (int m = 0; m < N; m++)
      for (int c = 0; c < chunk; c++) {
        const int i = m * CHUNK + c;
        const T gate = this->gate(s + m, first + c);
        if (this->grad_gates) this->grad_gates[this->gate_index(s + m, first + c)] += along[i];
        V* grad_offset = this->offset.grad(first + c);
        for (int64_t t = 0; t < tiles; t++) {
          const V weight = logits[i][t] * gate;
          V slope = weight * (benefits[i][t] - along[i]);
          if (grad_offset) grad_offset[t] += slope;
          if (a.unit) of_units_gradient(slope, weights[i][t], of_votes[i][t]);
          weights[i][t] = weight;
          logits[i][t] = slope;
        }
      }
  }
  // The same for a softmax over the children, for `count` children whose rows begin with the first tile.
  INLINE void of_logits_of_children(int64_t s, int count, int64_t first_tile, int64_t last_tile, V* const* logits,
                                    V* const* weights, V* const* benefits, V* const* of_votes) {
    V along[CHILDREN];
    for (int c = 0; this->grad_gates && c < count; c++) along[c] = V{};
    for (int64_t t = first_tile, i = 0; t < last_tile; t++, i++) {
      const V lost = log_mass[s * tiles + t], mean = expected[s * tiles + t];
      for (int c = 0; c < count; c++) {
        V logit = logits[c][i], unit = {};
        if (a.unit) unit = of_units(logit, of_votes[c][i]);
        if (this->offset) logit += this->offset.row(c)[t];
        V weight = exp_of<L>(logit - lost);
        const V benefit = benefits[c][i] - mean;
        if (this->gates) {
          const T gate = this->gate(s, c);
          if (gate == 0) weight = V{};  // an absent child
          if (this->grad_gates) along[c] += weight * benefit;
          weight *= gate;
        }
        V slope = weight * benefit;
        if (V* grad_offset = this->offset.grad(c)) grad_offset[t] += slope;
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

  void finish(int64_t sample, V* total) const {
    unpack<T, L>(total, a.parents, features, static_cast<T*>(a.grad_target) + sample * a.parents * features);
  }

  const int64_t total_size;

 protected:
  V *query, *grad, *log_mass, *expected;
  V *logits[M * CHUNK], *weights[M * CHUNK], *benefits[M * CHUNK], *of_votes[M * CHUNK];
};

template <class T, int L, class S>
class WeightedSumBackward : public WeighingBackward<WeightedSumBackward<T, L, S>, T, L, S> {
 public:
  using Base = WeighingBackward<WeightedSumBackward<T, L, S>, T, L, S>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::votes, Base::chunk, Base::of_run, Base::query,
      Base::grad, Base::logits, Base::weights, Base::benefits, Base::of_votes, Base::total_size;
  using Base::Base;

  template <int N>
  INLINE void group(int64_t s) {
    for (int c = 0; c < chunk; c++) {
      using Products = Both<Product<V, N>, Product<V, N>>;
      Products seen;
      for (int m = 0; m < N; m++) {
        seen.first.with[m] = query + (s + m) * size, seen.first.out[m] = logits[m * CHUNK + c];
        seen.second.with[m] = grad + (s + m) * size, seen.second.out[m] = benefits[m * CHUNK + c];
      }
      if (a.unit) {
        Both<Products, Square<V, N>> all{seen, {}};
        for (int m = 0; m < N; m++) all.second.out[m] = of_votes[m * CHUNK + c];
        this->template make_votes<N>(s, c, all);
      } else {
        this->template make_votes<N>(s, c, seen);
      }
    }
    this->template of_logits<N>(s);
    for (int m = 0; m < N; m++) {
      if (chunk == CHUNK) {
        of_votes_and_query<CHUNK>(s + m, m * CHUNK);
      } else {
        for (int c = 0; c < chunk; c++) of_votes_and_query<1>(s + m, m * CHUNK + c);
      }
    }
    for (int c = 0; c < chunk; c++) this->template add_child_gradients<N>(s, c);
  }

  // Replaces the votes of C children by their gradients, and adds to the gradient of the query.
  template <int C>
  INLINE void of_votes_and_query(int64_t s, int first) {
    V *const *own = votes + first, *grad_query = of_run + s * total_size;
    const V *q = query + s * size, *g = grad + s * size;
    for (int64_t t = 0, f = 0; t < tiles; t++) {
      V slope[C], weight[C], back[C];
      for (int c = 0; c < C; c++) {
        slope[c] = logits[first + c][t], weight[c] = weights[first + c][t];
        back[c] = a.unit ? of_votes[first + c][t] : V{};
      }
      for (const int64_t end = f + features; f < end; f++) {
        V sum = grad_query[f];
        const V query_f = q[f], grad_f = g[f];
        if (a.unit) {
          for (int c = 0; c < C; c++) {
            const V x = own[c][f];
            sum += slope[c] * x;
            own[c][f] = weight[c] * grad_f + slope[c] * query_f + back[c] * x;
          }
        } else {
#pragma GCC unroll 4
          for (int c = 0; c < C; c++) {
            sum += slope[c] * own[c][f];
            own[c][f] = weight[c] * grad_f + slope[c] * query_f;
          }
        }
        grad_query[f] = sum;
      }
    }
  }
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
