// Products with weights in groups of 32.
#include "multiply.h"

namespace specstep {

template void multiply<Int8Block>(const Layer&, int64_t, const void*, void*);
template void multiply<Int4Block>(const Layer&, int64_t, const void*, void*);
template void multiply<LeastInt4Block>(const Layer&, int64_t, const void*, void*);
template void multiply<Int5Block>(const Layer&, int64_t, const void*, void*);
template void multiply<LeastInt5Block>(const Layer&, int64_t, const void*, void*);

}  // namespace specstep
