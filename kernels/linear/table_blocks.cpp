// Products with weights whose four bits number the values of a table.
#include "multiply.h"

namespace specstep {

template void multiply<Iq4Block>(const Layer&, int64_t, const void*, void*);
template void multiply<Iq4XsBlock>(const Layer&, int64_t, const void*, void*);
template void multiply<Mxfp4Block>(const Layer&, int64_t, const void*, void*);
template void multiply<Nvfp4Block>(const Layer&, int64_t, const void*, void*);

}  // namespace specstep
