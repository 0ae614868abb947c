"""Lower an engine with AOTInductor."""
