// Sixteen floats at a time, on any processor: one, two or four hardware vectors (GCC's and Clang's vector extension).
//
// Included by each path's file after ANAPHORA_PATH (a namespace) and ANAPHORA_WIDTH (floats of a hardware vector).
// Contraction into fused operations is off (-ffp-contract=off), so an operation is what is written here, in the
// vectorised body of a loop and in its remainder alike.
#include <cstring>
#include <type_traits>

#include "layout.h"

#define INLINE inline __attribute__((always_inline))

namespace anaphora::ANAPHORA_PATH {

constexpr int WIDTH = ANAPHORA_WIDTH, PARTS = LANES / WIDTH;
typedef float Floats __attribute__((vector_size(4 * ANAPHORA_WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * ANAPHORA_WIDTH)));

struct F32 {
  Floats part[PARTS];
};

#define EACH_PART for (int i = 0; i < PARTS; ++i)

// Part by part: compilers keep a copied whole in memory.
INLINE F32 load(const float* from) {
  F32 v;
  EACH_PART std::memcpy(&v.part[i], from + i * WIDTH, sizeof v.part[i]);
  return v;
}
INLINE void store(float* to, F32 v) { EACH_PART std::memcpy(to + i * WIDTH, &v.part[i], sizeof v.part[i]); }
INLINE Floats broadcast(float x) { return x - Floats{}; }  // minus 0 leaves even -0, so compilers drop it; plus 0 not
INLINE F32 splat(float x) {
  F32 v;
  EACH_PART v.part[i] = broadcast(x);
  return v;
}
INLINE F32 operator+(F32 a, F32 b) {
  EACH_PART a.part[i] += b.part[i];
  return a;
}
INLINE F32 operator-(F32 a, F32 b) {
  EACH_PART a.part[i] -= b.part[i];
  return a;
}
INLINE F32 operator*(F32 a, F32 b) {
  EACH_PART a.part[i] *= b.part[i];
  return a;
}
INLINE F32 operator/(F32 a, F32 b) {
  EACH_PART a.part[i] /= b.part[i];
  return a;
}
// The larger one; what is not a number in b is passed over.
INLINE F32 larger(F32 a, F32 b) {
  EACH_PART a.part[i] = b.part[i] > a.part[i] ? b.part[i] : a.part[i];
  return a;
}

// Sum and maximum of the lanes: halves onto each other, so in an order of their own.
INLINE float sum(F32 v) {
  float lane[LANES];
  store(lane, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
INLINE float largest(F32 v) {
  float lane[LANES];
  store(lane, v);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i + width] > lane[i] ? lane[i + width] : lane[i];
  return lane[0];
}

// A path's own: a * b + c; WIDTH bytes, each 0 to 255, as integers (compilers convert such vectors byte by byte).
static INLINE Floats multiply_add(Floats a, Floats b, Floats c);
static INLINE Ints widen(const uint8_t* from);

// 2 to the power of x: 0 below -126, 2^126 above 126 (2^n is made as an exponent's bits). Relative error 2e-7.
INLINE F32 exp2(F32 x) {
  F32 result;
  EACH_PART {
    const Floats zero{};
    const Ints is_tiny = x.part[i] < zero - 126.0f;
    Floats a = is_tiny ? zero : x.part[i];
    a = a > zero + 126.0f ? zero + 126.0f : a;
    // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits.
    const Floats shifted = a + 12582912.0f;
    const Floats f = a - (shifted - 12582912.0f);
    Floats p = zero + 1.535336188319500e-4f;
    p = multiply_add(p, f, zero + 1.339887440266574e-3f);
    p = multiply_add(p, f, zero + 9.618437357674640e-3f);
    p = multiply_add(p, f, zero + 5.550332471162809e-2f);
    p = multiply_add(p, f, zero + 2.402264791363012e-1f);
    p = multiply_add(p, f, zero + 6.931472028550421e-1f);
    p = multiply_add(p, f, zero + 1.0f);
    const Floats scale = (Floats)(((Ints)shifted << 23) + (127 << 23));
    result.part[i] = is_tiny ? zero : p * scale;
  }
  return result;
}
INLINE float exp2(float x) { return exp2(splat(x)).part[0][0]; }

// The nearest bf16, ties to even; what is not a number stays so.
static INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}
static INLINE float from_bf16(uint32_t x) {
  x <<= 16;
  float result;
  std::memcpy(&result, &x, 4);
  return result;
}

}  // namespace anaphora::ANAPHORA_PATH
