"""The kernels: Triton's (`portable`), Gluon's for sm_90 (`hopper_*`), and the scan of the group sizes in CUDA or HIP C++ (`scan`)."""
