"""Compute kernels: one interface, several implementations behind `registry`."""
