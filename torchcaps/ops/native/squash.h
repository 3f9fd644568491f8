// The squash of Sabour et al. (2017) and its gradient. PyTorch's operators would take longer: to start for few vectors,
// to read memory for many.
#pragma once
#include "shards.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// Writes f x with f = l / (1 + l^2) for the length l of a vector. With the gradient g of the result it writes that of x,
// f g + f' / l (g . x) x. In this order no factor overflows.
template <class T>
struct Squash {
  const SquashProblem& a;
  const int64_t inner = a.sizes[2], size = a.sizes[3], step = a.strides[2], entry = a.strides[3];

  static void part(void* context, int number) {
    const Squash& own = *static_cast<Squash*>(context);
    const int64_t count = own.a.sizes[0] * own.a.sizes[1] * own.inner;
    int64_t v = count * number / own.a.threads;
    for (const int64_t to = count * (number + 1) / own.a.threads; v < to;) {
      const int64_t outer = v / own.inner, i = v % own.inner, run = least(own.inner - i, to - v);
      const int64_t first = outer / own.a.sizes[1] * own.a.strides[0] + outer % own.a.sizes[1] * own.a.strides[1];
      in_blocks<VECTOR_BYTES / sizeof(double)>(run, [&](auto n, int64_t k) INLINED {
        constexpr int N = decltype(n)::value;
        const int64_t at = first + (i + k) * own.step, row = (v + k) * own.size;
        if (own.entry == 1) {
          own.a.grad ? own.template vectors<N, true, true>(at, row) : own.template vectors<N, true, false>(at, row);
        } else {
          own.a.grad ? own.template vectors<N, false, true>(at, row) : own.template vectors<N, false, false>(at, row);
        }
      });
      v += run;
    }
  }
  // Squashes N vectors, or goes BACK. The first is at `at` in x, and at `row` in the results and their gradient. Their
  // ENTRIES follow one another in x, or else the vectors' first entries do.
  template <int N, bool ENTRIES, bool BACK>
  SEPARATE void vectors(int64_t at, int64_t row) const {
    using V = Vec<double, N>;
    const T *x = static_cast<const T*>(a.x) + at, *grad = BACK ? static_cast<const T*>(a.grad) + row : nullptr;
    T* out = static_cast<T*>(a.out) + (BACK ? at : row);
    V square = {}, along = {};
    for (int i = 0; ENTRIES && i < N; i++) {
      square[i] = product(x + i * step, x + i * step);
      if (BACK) along[i] = product(x + i * step, grad + i * size);
    }
    for (int64_t k = 0; !ENTRIES && k < size; k++)
      for (int i = 0; i < N; i++) {
        const double number = x[k * entry + i];
        square[i] += number * number;
        if (BACK) along[i] += grad[i * size + k] * number;
      }
    const V more = 1 + square, length = root<double, N>(larger<double, N>(square, splat<double, N>(1e-30)));
    const V scale = square / more / length;
    if (BACK) along = along / length * ((1 - square) / more) / more;
    const auto write = [&](int i, int64_t of_x, int64_t of_row) INLINED {
      if (BACK) {
        out[of_x] = static_cast<T>(scale[i] * grad[of_row] + along[i] * x[of_x]);
      } else {
        out[of_row] = static_cast<T>(scale[i] * x[of_x]);
      }
    };
    for (int i = 0; ENTRIES && i < N; i++)
      for (int64_t k = 0; k < size; k++) write(i, i * step + k, i * size + k);
    for (int64_t k = 0; !ENTRIES && k < size; k++)
      for (int i = 0; i < N; i++) write(i, k * entry + i, i * size + k);
  }
  // The scalar product of two vectors whose entries follow one another.
  INLINE double product(const T* x, const T* y) const {
    constexpr int LANES = VECTOR_BYTES / sizeof(double);
    using V = Vec<double, LANES>;
    V sums = {};
    double rest = 0;
    in_blocks<LANES>(size, [&](auto n, int64_t k) INLINED {
      if constexpr (decltype(n)::value == LANES) {
        sums += __builtin_convertvector(read<T, LANES>(x + k), V) * __builtin_convertvector(read<T, LANES>(y + k), V);
      } else {
        for (int64_t i = k; i < k + decltype(n)::value; i++) rest += double(x[i]) * y[i];
      }
    });
    return rest + sum_of_lanes<double, LANES>(sums);
  }
};

}  // namespace

void squash(int64_t bytes, const SquashProblem& a) {
  auto run = [&](auto number) {
    Squash<decltype(number)> own{a};
    in_parallel(static_cast<int>(a.threads), own.part, &own);
  };
  bytes == 8 ? run(double()) : run(float());
}

}  // namespace INSTRUCTIONS
}  // namespace torchcaps
