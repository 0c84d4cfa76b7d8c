// Vectors of fp32, as wide as the target has them, with bf16 and fp8 loads and stores. GCC and Clang extensions only:
// the same source gives AVX2, AVX-512 or NEON code.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#define TRANSOM_LANES 16
#elif defined(__AVX__)
#define TRANSOM_LANES 8
#else
#define TRANSOM_LANES 4
#endif

constexpr int LANES = TRANSOM_LANES;
typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint8_t vb __attribute__((vector_size(LANES)));

struct bf16 {
  uint16_t bits;
};

struct fp8 {
  uint8_t bits;  // e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; what is not finite is never stored
};

static inline vf splat(float x) { return x - vf{}; }  // x + 0 would be an addition: it changes -0

static inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

static inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}

static inline vf load(const fp8* p) {
  vb b;
  std::memcpy(&b, p, sizeof b);
  vu u = __builtin_convertvector(b, vu);
  // Exponent and mantissa in the place of fp32's; the biases differ by 120, for subnormals too.
  vf v = (vf)((u & 0x7fu) << 20) * 0x1p120f;
  return (vf)((vu)v | (u & 0x80u) << 24);
}

static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

static inline void store(bf16* p, vf v) {
  vu u = (vu)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;  // nearest, ties to even
  u = (v != v) ? vu{} + 0x7fc0u : u;         // rounding could turn a NaN into a number
  vh h = __builtin_convertvector(u, vh);
  std::memcpy(p, &h, sizeof h);
}

static inline void store(fp8* p, vf v) {
  vu u = (vu)v, sign = u >> 24 & 0x80u;
  vf a = (vf)(u & 0x7fffffffu);
  a = a < 448.f ? a : splat(448.f);
  u = (vu)a;
  u = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - (120u << 3);  // nearest, ties to even
  // Below the least normal number steps are 2^-9: adding 1.5 * 2^14 rounds to them.
  const vf magic = splat(24576.f);
  vu small = (vu)(a + magic) - (vu)magic;
  u = (a < 0x1p-6f ? small : u) | sign;
  vb b = __builtin_convertvector(u, vb);
  std::memcpy(p, &b, sizeof b);
}

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

static inline void put(float* p, float x) { *p = x; }

static inline void put(bf16* p, float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Loads and stores of the first `count` lanes; the others read as zero and stay untouched.
template <typename T>
static inline vf load_some(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  T some[LANES] = {};
  std::memcpy(some, p, count > 0 ? count * sizeof(T) : 0);
  return load(some);
}

template <typename T>
static inline void store_some(T* p, vf v, int64_t count) {
  if (count >= LANES) return store(p, v);
  T some[LANES];
  store(some, v);
  if (count > 0) std::memcpy(p, some, count * sizeof(T));
}

static inline vf max(vf a, vf b) { return a > b ? a : b; }

// Lanes are added pairwise: the order, and so the rounding, is the same for every caller.
static inline float sum(vf v) {
  float lanes[LANES];
  store(lanes, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

static inline float largest(vf v) {
  float lanes[LANES];
  store(lanes, v);
  float most = lanes[0];
  for (int i = 1; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

// exp with an error of about one unit in the last place; 0 below -87, infinity above 88.7, NaN stays NaN.
static inline vf exp(vf x) {
  const vf low = splat(-87.3f), high = splat(88.72f);
  vf y = x < low ? low : x;
  y = y > high ? high : y;
  const vf magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to a whole number
  vf n = (y * 1.44269504088896341f + magic) - magic;
  vf r = y - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  // Two steps, because 2^128 has no fp32 of its own.
  vi whole = __builtin_convertvector(n, vi), half = whole >> 1;
  p = p * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
  p = x < low ? vf{} : p;
  p = x > high ? splat(__builtin_inff()) : p;
  return x != x ? x : p;
}

static inline vf silu(vf x) { return x / (1.f + exp(-x)); }
