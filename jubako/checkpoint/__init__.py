"""What does a model on disk say about itself? Formats, configuration, tokeniser files; no torch."""
