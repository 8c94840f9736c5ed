// The path for any processor: pairs taken apart into floats; four floats at a time, which every compiler knows.
#define ANAPHORA_PATH portable
#define ANAPHORA_WIDTH 4
#include "vector.h"

namespace anaphora::portable {

constexpr int MAX_ROWS = 2, TILES_AT_ONCE = 1;
typedef float Operand;

static INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }

#include "pairs_as_floats.h"

}  // namespace anaphora::portable

#include "forward.h"

const anaphora::Path anaphora::portable_path = {"portable", sizeof(anaphora::portable::Operand), anaphora::portable::forward};
