"""Things that every room may use and that know nothing of models: paths, the machine, logging."""
