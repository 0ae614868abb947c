"""How a step is lowered: loading models, export, checks, AOTInductor, the engine writer."""
