"""The leaf that every room may import: keyed randomness, command line, run folders, results and tables."""
