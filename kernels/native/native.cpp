// The C interface that transom.kernels.native binds: plain pointers and sizes, one call an op.
//
// `half` says that activations are bf16 instead of fp32, `packed_half` the same of the weight panels; `kv` counts
// what K and V are: fp32, bf16, fp8 rows.
// Pointers are valid for the call; calls of one process never overlap, except those that say so.

#include "attention.h"
#include "linear.h"
#include "moe.h"
#include "rope.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Call f(activation, weight) with null pointers of the two types.
template <typename F>
static inline void with_types(int half, int packed_half, F&& f) {
  if (half) {
    if (packed_half) return f((bf16*)nullptr, (bf16*)nullptr);
    return f((bf16*)nullptr, (float*)nullptr);
  }
  if (packed_half) return f((float*)nullptr, (bf16*)nullptr);
  return f((float*)nullptr, (float*)nullptr);
}

// Call f(activation, kv) with null pointers of the two types.
template <typename F>
static inline void with_kv(int half, int kv, F&& f) {
  with_types(half, 0, [&](auto t, auto) {
    if (kv == 2) return f(t, (fp8*)nullptr);
    if (kv == 1) return f(t, (bf16*)nullptr);
    return f(t, (float*)nullptr);
  });
}

EXPORT int transom_lanes() { return LANES; }

EXPORT void transom_set_threads(int threads) { pool().resize(threads); }

EXPORT void transom_linear(int half, int packed_half, const void* x, int64_t x_row, int64_t rows, int64_t depth,
                           const float* norm, float eps, const void* panels, int64_t columns, const void* residual,
                           int64_t residual_row, void* y, int64_t y_row) {
  with_types(half, packed_half, [&](auto t, auto w) {
    using T = decltype(t);
    linear((const std::remove_pointer_t<T>*)x, x_row, rows, depth, norm, eps, (decltype(w))panels, columns,
           (const std::remove_pointer_t<T>*)residual, residual_row, (T)y, y_row);
  });
}

EXPORT void transom_gated_mlp(int half, int packed_half, const void* x, int64_t rows, int64_t depth, const float* norm,
                              float eps, int activation, const void* gate_up, int64_t width, const void* down,
                              const void* residual, void* y) {
  with_types(half, packed_half, [&](auto t, auto w) {
    using T = decltype(t);
    gated_mlp((T)x, rows, depth, norm, eps, activation, (decltype(w))gate_up, width, (decltype(w))down, (T)residual,
              (T)y);
  });
}

EXPORT void transom_moe(int half, int packed_half, const void* x, int64_t rows, int64_t depth, const float* norm,
                        float eps, const float* router, const float* bias, int64_t experts, int64_t top_k,
                        int normalise, float scale, const void* gate_up, const void* down, int64_t width,
                        const void* residual, void* y) {
  Routing routing{experts, top_k, router, bias, normalise, scale};
  with_types(half, packed_half, [&](auto t, auto w) {
    using T = decltype(t);
    moe((T)x, rows, depth, norm, eps, routing, (decltype(w))gate_up, (decltype(w))down, width, (T)residual, (T)y);
  });
}

EXPORT void transom_rope_and_store(int half, int kv, void* qkv, int64_t row, int64_t heads, int64_t kv_heads,
                                   int64_t head_dim, int64_t v_head_dim, const float* cos, const float* sin,
                                   int64_t half_dim, const float* q_norm, const float* k_norm, float eps, float value_scale, void* k,
                                   void* v, int64_t slots, const int64_t* spans, int64_t span_count,
                                   const int64_t* pages, const int64_t* map, int64_t page_size) {
  Tables tables{(const Span*)spans, span_count, pages, map, page_size};
  with_kv(half, kv, [&](auto t, auto p) {
    using T = decltype(t);
    using K = decltype(p);
    Heads<std::remove_pointer_t<T>, std::remove_pointer_t<K>> h{
        (T)qkv, row,    heads,  kv_heads, head_dim,    v_head_dim, cos,  sin,   half_dim,
        q_norm, k_norm, eps, value_scale, (K)k, (K)v, slots, tables};
    rope_and_store(h);
  });
}

EXPORT void transom_attention(int half, int kv, const void* q, int64_t q_row, const void* k, const void* v, int64_t slots,
                              const int64_t* spans, int64_t span_count, const int64_t* pages, const int64_t* map,
                              int64_t page_size, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t v_head_dim,
                              int64_t window, float scale, const float* sink, void* out) {
  Tables tables{(const Span*)spans, span_count, pages, map, page_size};
  with_kv(half, kv, [&](auto t, auto p) {
    using T = decltype(t);
    using K = decltype(p);
    Paged<std::remove_pointer_t<K>> paged{(K)k,     (K)v,       slots,  tables, heads, kv_heads,
                                          head_dim, v_head_dim, window, scale,  sink};
    attention(paged, (T)q, q_row, (T)out);
  });
}

EXPORT void transom_rms_norm(int half, const void* x, int64_t rows, int64_t size, const float* weight, float eps,
                             const void* residual, void* y) {
  with_types(half, 0, [&](auto t, auto) {
    using T = decltype(t);
    rms_norm((T)x, rows, size, weight, eps, (T)residual, (T)y);
  });
}

// 0 if this code computes what it should here: run once, in a process that may die, before others trust it.
EXPORT int transom_self_test() {
  float x[3 * 5], panels[5 * NR] = {}, y[3 * 2];
  for (int i = 0; i < 15; i++) x[i] = float(i - 7);
  for (int k = 0; k < 5; k++) {
    panels[k * NR] = 1.f;
    panels[k * NR + 1] = float(k);
  }
  linear<float, float>(x, 5, 3, 5, nullptr, 0.f, panels, 2, nullptr, 0, y, 2);
  for (int row = 0; row < 3; row++) {
    float all = 0, weighted = 0;
    for (int k = 0; k < 5; k++) {
      all += x[row * 5 + k];
      weighted += x[row * 5 + k] * float(k);
    }
    if (y[row * 2] != all || y[row * 2 + 1] != weighted) return 1;
  }
  vf one = exp(splat(1.f));
  return one[0] > 2.71827f && one[0] < 2.71829f && exp(splat(-1000.f))[0] == 0.f ? 0 : 2;
}
