"""What embeddings add to training: nets whose outputs are vectors, judged by who is near whom."""
