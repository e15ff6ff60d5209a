"""The kernels as native code for CPUs, equal to the reference within rounding."""
