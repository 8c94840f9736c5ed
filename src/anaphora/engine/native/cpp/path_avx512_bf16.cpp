// The path for AVX-512 with bf16 dot products (VDPBF16PS: Intel from Cooper Lake, AMD from Zen 4).
#define ANAPHORA_PATH avx512_bf16
#define ANAPHORA_WIDTH 16
#include <immintrin.h>

#include "vector.h"

namespace anaphora::avx512_bf16 {

// 12 x 2 accumulators, two tiles and what is broadcast fit the 32 registers.
constexpr int MAX_ROWS = 12, TILES_AT_ONCE = 2;
constexpr bool UNPACKS_BF16 = false;  // it is ready as it is
typedef uint16_t Operand;

static INLINE Ints widen(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
static INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

typedef __m512bh Pairs;

static INLINE Pairs load_pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Rounded to the nearest, ties to even; weights are finite.
static INLINE Pairs make_pairs(F32 even, F32 odd) {
  Ints low = (Ints)even.part[0], high = (Ints)odd.part[0];
  low += 0x7fff + (low >> 16 & 1);
  high += 0x7fff + (high >> 16 & 1);
  return (__m512bh)(__m512i)((low >> 16 & 0xffff) | (high & (int32_t)0xffff0000));
}

static INLINE F32 dot(F32 acc, const Pairs& pairs, const Operand* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  acc.part[0] = (Floats)_mm512_dpbf16_ps((__m512)acc.part[0], pairs, (__m512bh)_mm512_set1_epi32(pair));
  return acc;
}

static INLINE void store_operands(Operand* to, F32 v) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v.part[0]);
  std::memcpy(to, &rounded, sizeof rounded);
}

}  // namespace anaphora::avx512_bf16

#include "forward.h"

const anaphora::Path anaphora::avx512_bf16_path = {"avx512-bf16", sizeof(anaphora::avx512_bf16::Operand), anaphora::avx512_bf16::forward};
