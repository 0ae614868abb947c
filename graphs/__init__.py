"""What is computed: pure, traceable modules and functions (target, drafters, tree, acceptance, step, prefill)."""
