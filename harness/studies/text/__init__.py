"""What texts add to the studies."""
