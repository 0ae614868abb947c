// Products with weights of floating-point numbers.
#include "multiply.h"

namespace specstep {

template void multiply<Float32Block>(const Layer&, int64_t, const void*, void*);
template void multiply<Bfloat16Block>(const Layer&, int64_t, const void*, void*);

}  // namespace specstep
