// Weighted sums where children share weights, without a vote: (pose W) . q = pose . (W q), and W q is needed once for all
// children of a group. Weighted sums of poses go through W to the parents.
#pragma once
#include "sums.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

constexpr int PULLED = 1024;  // children whose poses are summed up before they are pushed through the weights

// The loop that both directions share: samples inside of groups. `Base` knows what to do with logits.
template <class Self, class Base>
class Pulled : public Base {
 public:
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::features, Base::shape, Base::pose_size, Base::arena, Base::kernel, Base::shard,
      Base::chunk, Base::total_size, Base::totals;
  using Base::Base;

  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    const int64_t per_group = a.types / a.groups;
    for (int64_t type = shard.first_type; type < shard.last_type;) {
      const int64_t end = least(least(shard.last_type, (type / per_group + 1) * per_group), type + PULLED);
      for (int64_t place = 0; place < kernel; place++) {
        this->weight.load(0, type, place);
        for (int64_t s = 0; s < count; s++) {
          if (watch.stopped()) return false;
          self.begin_group(s);
          for (int64_t first = type; first < end; first += chunk) {
            chunk = static_cast<int>(least(CHUNK, end - first));
            for (int c = 0; c < chunk; c++) {
              this->index[c] = (first + c) * kernel + place;
              this->child_places[c] = this->places.of_child(first + c, place);
              this->offset.load(c, first + c, place);
            }
            self.chunk_of(s);
          }
          self.end_group(s);
        }
      }
      type = end;
    }
    Base::flush();
    return true;
  }
  template <int N>
  void group(int64_t) {}

  // (tiles, rows, d) of what is (tiles, rows, h) about the parents.
  void pull(const V* x, V* pulled) const {
    const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
    const V* w = this->weight.row(0);
    for (int64_t t = 0; t < tiles; t++, w += H * D, x += features, pulled += pose_size) {
      if constexpr (Base::KNOWN_POSE > 0) {
        V sums[Base::KNOWN_POSE] = {};
        for (int64_t h = 0; h < H; h++)
#pragma GCC unroll 16
          for (int i = 0; i < Base::KNOWN_POSE; i++) sums[i] += w[h * D + i % D] * x[i / D * H + h];
#pragma GCC unroll 16
        for (int i = 0; i < Base::KNOWN_POSE; i++) pulled[i] = sums[i];
      } else {
        for (int64_t r = 0; r < R; r++)
          for (int64_t d = 0; d < D; d++) {
            V sum = {};
            for (int64_t h = 0; h < H; h++) sum += w[h * D + d] * x[r * H + h];
            pulled[r * D + d] = sum;
          }
      }
    }
  }
  void add_pushed(const V* pulled, V* sums) const {
    const int64_t R = shape.rows(), D = shape.d(), H = shape.h();
    const V* w = this->weight.row(0);
    for (int64_t t = 0; t < tiles; t++, w += H * D, sums += features, pulled += pose_size)
      for (int64_t r = 0; r < R; r++)
        for (int64_t h = 0; h < H; h++) {
          V sum = sums[r * H + h];
          for (int64_t d = 0; d < D; d++) sum += w[h * D + d] * pulled[r * D + d];
          sums[r * H + h] = sum;
        }
  }
  // Products of the poses of C children with vectors of the parents.
  template <int C>
  INLINE void products(int64_t s, int first, const V* pulled, V* const* out) const {
    const typename Base::Number* p[C];
    for (int c = 0; c < C; c++) p[c] = this->pose(s, first + c);
    const int64_t width = shape.pose();
    for (int64_t t = 0; t < tiles; t++, pulled += width) {
      V sum[C] = {};
#pragma GCC unroll 16
      for (int64_t n = 0; n < width; n++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[c] += p[c][n] * pulled[n];
      for (int c = 0; c < C; c++) out[first + c][t] = sum[c];
    }
  }
  // Sums of the poses of C children.
  template <int C>
  INLINE void add_poses(int64_t s, int first, V* const* weights, V* sums) const {
    const typename Base::Number* p[C];
    for (int c = 0; c < C; c++) p[c] = this->pose(s, first + c);
    const int64_t width = shape.pose();
    for (int64_t t = 0; t < tiles; t++, sums += width) {
      V w[C];
      for (int c = 0; c < C; c++) w[c] = weights[first + c][t];
#pragma GCC unroll 16
      for (int64_t n = 0; n < width; n++) {
        V x = sums[n];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) x += p[c][n] * w[c];
        sums[n] = x;
      }
    }
  }
  void all_products(int64_t s, const V* pulled, V* const* out) const {
    if (chunk == CHUNK) return products<CHUNK>(s, 0, pulled, out);
    for (int c = 0; c < chunk; c++) products<1>(s, c, pulled, out);
  }
  void add_all_poses(int64_t s, V* const* weights, V* sums) const {
    if (chunk == CHUNK) return add_poses<CHUNK>(s, 0, weights, sums);
    for (int c = 0; c < chunk; c++) add_poses<1>(s, c, weights, sums);
  }
};

template <class T, int L, class S>
class PulledSum : public Pulled<PulledSum<T, L, S>, Sums<PulledSum<T, L, S>, T, L, S>> {
 public:
  using Base = Pulled<PulledSum<T, L, S>, Sums<PulledSum<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::Base;

  void make_room() {
    Base::make_room();
    pulled = this->arena.template get<V>(this->tiles * this->pose_size);
    summed = this->arena.template get<V>(this->tiles * (this->pose_size + 2));  // poses, masses, largest logits
    own = this->arena.template get<V>(this->total_size);
  }
  void begin_group(int64_t s) {
    const int64_t n = this->tiles * this->pose_size;
    this->pull(this->query + s * this->size, pulled);
    memset(static_cast<void*>(summed), 0, (n + this->tiles) * sizeof(V));
    for (int64_t t = 0; t < this->tiles; t++) summed[n + this->tiles + t] = splat<T, L>(-INFINITY);
  }
  void chunk_of(int64_t s) {
    this->all_products(s, pulled, this->logits);
    this->template weigh<1>(s, this->logits, &summed, this->pose_size);
    this->add_all_poses(s, this->logits, summed);
  }
  void end_group(int64_t s) {
    V* total = this->totals + s * this->total_size;
    if (!this->a.over_children) return this->add_pushed(summed, total);
    const V* masses = summed + this->tiles * this->pose_size;
    memset(static_cast<void*>(own), 0, this->size * sizeof(V));
    memcpy(static_cast<void*>(own + this->size), masses, 2 * this->tiles * sizeof(V));
    this->add_pushed(summed, own);
    this->merge(total, own);
  }

 private:
  V *pulled, *summed, *own;
};

template <class T, int L, class S>
class PulledSumBackward : public Pulled<PulledSumBackward<T, L, S>, SumsBackward<PulledSumBackward<T, L, S>, T, L, S>> {
 public:
  using Base = Pulled<PulledSumBackward<T, L, S>, SumsBackward<PulledSumBackward<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::tiles, Base::pose_size, Base::size, Base::features, Base::chunk, Base::logits, Base::weights;
  using Base::Base;

  void make_room() {
    Base::make_room();
    for (V** x : {&query_pulled, &grad_pulled, &sloped, &weighted})
      *x = this->arena.template get<V>(tiles * pose_size);
  }
  void begin_group(int64_t s) {
    this->pull(this->query + s * size, query_pulled);
    this->pull(this->grad + s * size, grad_pulled);
    for (V* x : {sloped, weighted}) memset(static_cast<void*>(x), 0, tiles * pose_size * sizeof(V));
  }
  void chunk_of(int64_t s) {
    this->all_products(s, query_pulled, logits);
    this->all_products(s, grad_pulled, this->benefits);
    this->template of_logits<1>(s);
    this->add_all_poses(s, logits, sloped);  // whose place the gradients of the logits have taken
    this->add_all_poses(s, weights, weighted);
    if (!this->grad_poses) return;
    int64_t n = 0;
    for (; chunk == CHUNK && n + 4 <= pose_size; n += 4) of_poses<CHUNK, 4>(s, 0, n);
    for (; n < pose_size; n++)
      for (int c = 0; c < chunk; c++) of_poses<1, 1>(s, c, n);
  }
  // N numbers of the poses of C children, from the n-th.
  template <int C, int N>
  INLINE void of_poses(int64_t s, int first, int64_t n) {
    V sums[C * N] = {};
    for (int64_t t = 0; t < tiles; t++) {
      const V *q = query_pulled + t * pose_size + n, *g = grad_pulled + t * pose_size + n;
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const V slope = logits[first + c][t], weight = weights[first + c][t];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) sums[c * N + i] += slope * q[i] + weight * g[i];
      }
    }
    T out[C * N];
    join_lanes<Sum, T, L, C * N>(sums, out);
    for (int c = 0; c < C; c++) {
      T* grad = this->grad_poses + (this->pose(s, first + c) - this->poses) + n;
      for (int i = 0; i < N; i++) grad[i] += out[c * N + i];
    }
  }
  void end_group(int64_t s) {
    this->add_pushed(sloped, this->totals + s * size);
    V* out = this->weight.grad(0);
    if (!out) return;
    const int64_t R = this->shape.rows(), D = this->shape.d(), H = this->shape.h();
    for (int64_t t = 0; t < tiles; t++) {
      const V *q = this->query + s * size + t * features, *g = this->grad + s * size + t * features;
      const V *slope = sloped + t * pose_size, *weight = weighted + t * pose_size;
      for (int64_t h = 0; h < H; h++)
        for (int64_t d = 0; d < D; d++, out++) {
          V sum = *out;
          for (int64_t r = 0; r < R; r++) sum += slope[r * D + d] * q[r * H + h] + weight[r * D + d] * g[r * H + h];
          *out = sum;
        }
    }
  }

 private:
  V *query_pulled, *grad_pulled, *sloped, *weighted;
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
