"""Players that follow a script: the built-in opponents. Kernels."""
