// The path for AVX-512 without bf16 dot products: pairs taken apart into floats, sixteen at a time.
#define ANAPHORA_PATH avx512
#define ANAPHORA_WIDTH 16
#include <immintrin.h>

#include "vector.h"

namespace anaphora::avx512 {

// 12 x 2 accumulators, two tiles taken apart and what is broadcast fit the 32 registers.
constexpr int MAX_ROWS = 12, TILES_AT_ONCE = 2;
constexpr bool UNPACKS_BF16 = false;  // a weight is taken apart seldom enough, 12 rows at a time
typedef float Operand;

static INLINE Ints widen(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
static INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

#include "pairs_as_floats.h"

}  // namespace anaphora::avx512

#include "forward.h"

const anaphora::Path anaphora::avx512_path = {"avx512", sizeof(anaphora::avx512::Operand), anaphora::avx512::forward};
