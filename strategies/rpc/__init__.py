"""What strategies over torch.distributed.rpc are made of: its agents, and who waits for whom."""
