"""What models are made of. Layers know the kernels through their registry, and nothing above."""
