"""What texts add to training: losses in chunks of tokens, texts that nets write, a teacher's stored outputs."""
