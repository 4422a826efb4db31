"""What each experiment does."""
