// Products with weights in GGUF's k-quants: eight groups of 32 with scales of scales.
#include "multiply.h"

namespace specstep {

template void multiply<Q2KBlock>(const Layer&, int64_t, const void*, void*);
template void multiply<Q3KBlock>(const Layer&, int64_t, const void*, void*);
template void multiply<Q4KBlock>(const Layer&, int64_t, const void*, void*);
template void multiply<Q5KBlock>(const Layer&, int64_t, const void*, void*);
template void multiply<Q6KBlock>(const Layer&, int64_t, const void*, void*);

}  // namespace specstep
