// What a program of AOTInductor says of itself, as tables. Its constructor, in interface.cpp, reads them.
#include <memory>

namespace torch::aot_inductor {

struct ConstantRow {
  const char* name;
  const char* original_fqn;
  int32_t (*dtype)();
  int32_t (*device_type)();
  int32_t (*layout)();
  int64_t offset;
  size_t data_size;
  bool from_folded;
  int32_t type;
  size_t dimensions; // numbers of its shape, and then of its strides, in `sizes`
};

struct Description {
  size_t inputs_count, outputs_count, constants_count;
  const char* const* inputs;
  const char* const* outputs;
  const ConstantRow* constants;
  const int64_t* sizes;
  const char* in_spec;
  const char* out_spec;
  std::unique_ptr<AOTInductorModelKernelsBase> (*make_kernels)();
};

extern __attribute__((visibility("hidden"))) const Description description;

} // namespace torch::aot_inductor
