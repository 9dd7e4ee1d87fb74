"""From operands and JAX's dimension numbers to a config."""
