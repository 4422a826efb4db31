"""Parts of the strategies over torch.distributed.rpc: agents with queues of remote calls, and workers."""
