// What stands between the qkv projection and attention: q and k norm, rotation, value scale, writing K and V.
#pragma once

#include "gemm.h"
#include "kv_rows.h"
#include "pages.h"

template <typename T, typename K>
struct Heads {
  T* qkv;  // (tokens, all q heads | all k heads | all v heads); q is changed in place
  int64_t row, heads, kv_heads, head_dim, v_head_dim;
  const float *cos, *sin;  // (positions, half)
  int64_t half;
  const float *q_norm, *k_norm;  // (head_dim) or null
  float eps, value_scale;
  K *k, *v;  // (kv_heads, slots, dim + EXTRA)
  int64_t slots;
  Tables tables;
};

// Norm and rotate one head, half-split over its first 2 * half dims; `to` may be `x`.
template <typename T, typename O>
static inline void rotate(const T* x, int64_t size, const float* norm, float eps, const float* cos, const float* sin,
                          int64_t half, O* to) {
  float values[size];
  float factor = norm ? inverse_rms(x, size, eps) : 1.f;
  for (int64_t d = 0; d < size; d++) values[d] = norm ? to_float(x[d]) * factor * norm[d] : to_float(x[d]);
  for (int64_t d = 0; d < half; d++) {
    put(to + d, values[d] * cos[d] - values[half + d] * sin[d]);
    put(to + half + d, values[half + d] * cos[d] + values[d] * sin[d]);
  }
  for (int64_t d = 2 * half; d < size; d++) put(to + d, values[d]);
}

// Let `write` fill a row of the pool: in place, or for fp8 as floats, whose scale is known only at the end.
template <typename K, typename F>
static inline void through_floats(K* to, int64_t size, F&& write) {
  if constexpr (EXTRA<K> > 0) {
    float row[size];
    write(row);
    put_kv(to, row, size);
  } else {
    write(to);
  }
}

template <typename T, typename K>
static void rope_and_store(const Heads<T, K>& h) {
  constexpr int64_t CHUNK = 32;
  struct Task {
    const Span* span;
    int64_t begin;
  };
  std::vector<Task> tasks;
  for (const Span* span = h.tables.spans; span < h.tables.spans + h.tables.count; span++)
    for (int64_t begin = 0; begin < span->count; begin += CHUNK) tasks.push_back({span, begin});
  parallel(int64_t(tasks.size()), [&](int64_t task) {
    const Span& span = *tasks[task].span;
    int64_t begin = tasks[task].begin, end = begin + CHUNK < span.count ? begin + CHUNK : span.count;
    for (int64_t t = begin; t < end; t++) {
      int64_t position = span.position + t;
      const float *cos = h.cos + position * h.half, *sin = h.sin + position * h.half;
      T* q = h.qkv + (span.row + t) * h.row;
      for (int64_t i = 0; i < h.heads; i++, q += h.head_dim)
        rotate(q, h.head_dim, h.q_norm, h.eps, cos, sin, h.half, q);
      if (h.kv_heads == 0) continue;
      int64_t slot = h.tables.slot(span, position);
      T* k = q;
      for (int64_t i = 0; i < h.kv_heads; i++, k += h.head_dim) {
        K* to = h.k + (i * h.slots + slot) * (h.head_dim + EXTRA<K>);
        through_floats(to, h.head_dim,
                       [&](auto* row) { rotate(k, h.head_dim, h.k_norm, h.eps, cos, sin, h.half, row); });
      }
      T* v = k;
      for (int64_t i = 0; i < h.kv_heads; i++, v += h.v_head_dim) {
        K* to = h.v + (i * h.slots + slot) * (h.v_head_dim + EXTRA<K>);
        through_floats(to, h.v_head_dim, [&](auto* row) {
          for (int64_t d = 0; d < h.v_head_dim; d++) put(row + d, to_float(v[d]) * h.value_scale);
        });
      }
    }
  });
}
