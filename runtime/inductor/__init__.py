"""Run engines that AOTInductor compiled, and plain torch modules."""
