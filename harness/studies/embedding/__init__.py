"""What a comparison of nets that embed adds: a teacher without its classifier, and what neighbours tell."""
