"""The device kernels' test bench: layouts, random cases, an independent model, the host build."""
