"""What the experiments share: the command line, the life of a run, reports, studies."""
