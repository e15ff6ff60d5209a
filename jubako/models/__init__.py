"""The models, one file a family, and how their weights are read."""
