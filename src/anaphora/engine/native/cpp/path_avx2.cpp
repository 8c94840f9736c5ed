// The path for AVX2 and FMA: pairs taken apart into floats, eight at a time.
#define ANAPHORA_PATH avx2
#define ANAPHORA_WIDTH 8
#include <immintrin.h>

#include "vector.h"

namespace anaphora::avx2 {

constexpr int MAX_ROWS = 4, TILES_AT_ONCE = 1;
constexpr bool UNPACKS_BF16 = true;  // for many rows: few registers, so a weight would be taken apart often
typedef float Operand;

static INLINE Ints widen(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
static INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

#include "pairs_as_floats.h"

}  // namespace anaphora::avx2

#include "forward.h"

const anaphora::Path anaphora::avx2_path = {"avx2", sizeof(anaphora::avx2::Operand), anaphora::avx2::forward};
