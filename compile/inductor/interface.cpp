// The constructor of any program: what AOTInductor writes as statements for each constant, it reads from tables.
namespace torch::aot_inductor {

AOTInductorModel::AOTInductorModel(
    std::shared_ptr<ConstantMap> constants_map,
    std::shared_ptr<std::vector<ConstantHandle>> constants_array,
    const std::string& device_str,
    std::optional<std::string> cubin_dir)
    : AOTInductorModelBase(
          description.inputs_count,
          description.outputs_count,
          description.constants_count,
          device_str,
          std::move(cubin_dir),
          false) {
  for (size_t i = 0; i < description.inputs_count; ++i) inputs_info_[i].name = description.inputs[i];
  for (size_t i = 0; i < description.outputs_count; ++i) outputs_info_[i].name = description.outputs[i];
  const int64_t* sizes = description.sizes;
  for (size_t i = 0; i < description.constants_count; ++i) {
    const ConstantRow& row = description.constants[i];
    auto& info = constants_info_[i];
    info.name = row.name;
    info.original_fqn = row.original_fqn;
    info.dtype = row.dtype();
    info.device_type = row.device_type();
    info.layout = row.layout();
    info.offset = row.offset;
    info.data_size = row.data_size;
    info.from_folded = row.from_folded;
    info.type = row.type;
    info.shape.assign(sizes, sizes + row.dimensions);
    sizes += row.dimensions;
    info.stride.assign(sizes, sizes + row.dimensions);
    sizes += row.dimensions;
  }
  update_constants_map(std::move(constants_map));
  update_constants_array(std::move(constants_array));
  in_spec_ = description.in_spec;
  out_spec_ = description.out_spec;
  kernels_ = description.make_kernels();
}

} // namespace torch::aot_inductor
